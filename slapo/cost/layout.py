"""Layout of a job over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slapo.errors import require_count

TARGETS = ("torch", "deepspeed", "megatron")
SCHEDULES = ("1f1b", "gpipe")
DATA_PARALLEL = ("ddp", "fsdp")


@dataclass(frozen=True)
class Layout:
    """Ranks of a job, and the engine that runs on them.

    Parameters
    ----------
    pp, dp, tp
        Numbers of stages, of replicas and of tensor-parallel ranks. Tensor-parallel ranks are
        adjacent, as in :func:`slapo.init_mesh`.
    batch
        Samples of a replica in a step.
    length
        Tokens of a sample.
    micro_batches
        Number of micro-batches in a step.
    schedule
        Pipeline schedule: ``"1f1b"`` or ``"gpipe"``.
    target
        Engine: ``"torch"``, ``"deepspeed"`` or ``"megatron"``.
    data_parallel
        Data parallelism of the torch engine: ``"ddp"`` or ``"fsdp"``.
    zero
        ZeRO stage of DeepSpeed. For Megatron 1 is its distributed optimizer.
    bucket
        Elements of DeepSpeed's gradient buffer, its ``reduce_bucket_size``.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    batch: int = 1
    length: int = 1024
    micro_batches: int = 1
    schedule: str = "1f1b"
    target: str = "torch"
    data_parallel: str = "ddp"
    zero: int = 0
    bucket: int = 500_000_000

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "tp", "batch", "length", "micro_batches", "bucket"):
            value = getattr(self, name)
            # name of the callers' argument
            require_count("seq_len" if name == "length" else name, value)
        if self.batch % self.micro_batches:
            raise ValueError(
                f"batch={self.batch} samples cannot form {self.micro_batches} equal "
                "micro-batches; pass a multiple of micro_batches"
            )
        choices = {"schedule": SCHEDULES, "target": TARGETS, "data_parallel": DATA_PARALLEL}
        for name, known in {**choices, "zero": (0, 1, 2, 3)}.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; the dry run supports {list(known)}"
                )
        if self.target == "torch" and self.schedule == "1f1b" and self.micro_batches < self.pp:
            raise ValueError(
                "target 'torch' runs 1F1B with at least as many micro-batches as stages, but "
                f"micro_batches={self.micro_batches} < pp={self.pp}; raise it, or pass "
                "schedule='gpipe'"
            )
        if self.zero > {"deepspeed": 3, "megatron": 1, "torch": 0}[self.target]:
            raise ValueError(
                f"zero={self.zero} does not work with target={self.target!r}; ZeRO 1 to 3 need "
                "DeepSpeed, zero=1 is also Megatron's distributed optimizer"
            )
        if self.data_parallel == "fsdp" and self.target != "torch":
            raise ValueError("data_parallel='fsdp' needs target='torch'; change one of them")
        if self.zero > 1 and self.pp > 1:
            raise ValueError(f"DeepSpeed's pipelines lack ZeRO {self.zero}; pass zero=1 or pp=1")

    @property
    def ranks(self) -> int:
        """Number of ranks of the job."""
        return self.pp * self.dp * self.tp

    @property
    def micro(self) -> int:
        """Number of samples of a micro-batch."""
        return self.batch // self.micro_batches


def sizes_of(mesh: Any) -> dict[str, int]:
    """Return pp, dp and tp from a mapping, or from a mesh of :func:`slapo.init_mesh`."""
    mesh = {} if mesh is None else mesh
    if not isinstance(mesh, Mapping) and hasattr(mesh, "mesh_dim_names"):
        mesh = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    if not isinstance(mesh, Mapping) or set(mesh) - {"pp", "dp", "tp"}:
        raise ValueError(f"mesh is {mesh!r}; pass sizes, such as {{'pp': 2, 'dp': 4, 'tp': 8}}")
    return {name: mesh.get(name, 1) for name in ("pp", "dp", "tp")}
