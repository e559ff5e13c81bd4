"""Kernels of ``dropout_add_norm`` compiled ahead of time, for cards that need not be here.

    python -m tests.op.residual_figures

writes ``tests/op/residual_figures.csv``: registers for a thread, bytes that spill out of them,
shared memory of a program, and the widest load, as the assembler of Triton's package reports them.
"""

from __future__ import annotations

import csv
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slapo.op import residual_triton as kernels

TABLE = Path(__file__).with_suffix(".csv")
#: Bytes of shared memory that a program may have without asking for more.
SHARED = 48 * 1024
REGISTERS = 65536
WARP = 32

_TYPES = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}
ARCHITECTURES = {70: ("fp32", "fp16"), 80: tuple(_TYPES), 90: tuple(_TYPES)}
HIDDEN = (256, 768, 1024, 4096, 8192)


@dataclass(frozen=True)
class Case:
    """One kernel, for one card."""

    kernel: str
    kind: str
    dtype: str
    hidden: int
    arch: int


@dataclass(frozen=True)
class Figures:
    """What the assembler says of it."""

    warps: int
    registers: int
    spilled: int
    shared: int
    widest_load: int

    @property
    def resident(self) -> int:
        """Warps that a multiprocessor has registers for."""
        per_program = self.warps * WARP * -(-self.registers // 8) * 8
        return min(REGISTERS // per_program * self.warps, 64)


def cases(kinds: tuple[str, ...] = ("layer", "rms")) -> Iterator[Case]:
    """All of the table."""
    for kernel in ("forward", "backward"):
        for kind in kinds:
            for arch, dtypes in ARCHITECTURES.items():
                for dtype in dtypes:
                    for hidden in HIDDEN:
                        yield Case(kernel, kind, dtype, hidden, arch)


def compiled(case: Case, absent: Sequence[str] = ()) -> Any:
    """By Triton alone: no card is asked, nor its driver.

    Parameters
    ----------
    absent
        Pointers of what is not wanted.
    """
    kernel = getattr(kernels, f"{case.kernel}_kernel")
    block, warps = kernels.block_of(case.hidden)
    constants: dict[str, Any] = {
        "SUM_TYPE": _TYPES[case.dtype],
        "IS_RMS": case.kind == "rms",
        "BLOCK": block,
    }
    if case.kind == "rms":
        absent = [n for n in kernel.arg_names if n.startswith(("mean_", "norm_bias_"))]
    constants.update(dict.fromkeys(absent))
    signature = {n: _type(n, case.dtype) for n in kernel.arg_names if n not in constants}
    signature.update(dict.fromkeys(constants, "constexpr"))
    # As for tensors that torch has allocated, of sizes that 16 divides.
    divisible = [n for n in signature if n.endswith(("_ptr", "_stride"))]
    divisible += [] if case.hidden % 16 else ["size"]
    places = {n: (number,) for number, n in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={places[n]: value for n, value in constants.items()},
        attrs={places[n]: [["tt.divisibility", 16]] for n in divisible if n not in constants},
    )
    options = {"num_warps": warps, **kernels.OPTIONS}
    if case.kernel == "backward":
        options["maxnreg"] = kernels.residents_of(warps)[1]
    return triton.compile(source, target=GPUTarget("cuda", case.arch, WARP), options=options)


def _type(name: str, dtype: str) -> str:
    if name == "seed_ptr":
        return "*i64"
    if name in ("mean_ptr", "scale_ptr") or name.endswith("_parts_ptr"):
        return "*fp32"
    if name.endswith("_ptr"):
        return f"*{dtype}"
    return "fp32" if name in ("eps", "dropout_scale") else "i32"


def figures(case: Case) -> Figures:
    """Compile, and read what came out."""
    made = compiled(case)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
        command = [str(tool), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    loads = re.findall(r"ld\.global(?:\.\w+::\w+(?:::\w+)*)*(?:\.v(\d))?\.\w(\d+)", made.asm["ptx"])
    return Figures(
        warps=made.metadata.num_warps,
        registers=usage["REG"],
        spilled=usage["STACK"] + usage["LOCAL"],
        shared=made.metadata.shared,
        widest_load=max(int(count or 1) * int(bits) // 8 for count, bits in loads),
    )


def write(rows: list[dict[str, Any]]) -> None:
    """The table."""
    names = [field.name for kind in (Case, Figures) for field in fields(kind)]
    with TABLE.open("w", newline="") as file:
        file.write(f"# triton {triton.__version__}: python -m tests.op.residual_figures\n")
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    write([{**asdict(case), **asdict(figures(case))} for case in cases()])
