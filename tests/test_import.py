"""`import slapo` costs little and brings no optional package."""

import subprocess
import sys

import pytest

# Optional packages, and the parts of torch that take long and only recordings need.
HEAVY = [
    "transformers",
    "deepspeed",
    "xformers",
    "triton",
    "liger_kernel",
    "megatron",
    "matplotlib",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
]


@pytest.fixture(scope="module")
def new_modules() -> set[str]:
    """Names of the modules that `import slapo` adds to those of `import torch`."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import slapo\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("package", HEAVY)
def test_import_leaves_out(package: str, new_modules: set[str]) -> None:
    found = {name for name in new_modules if name == package or name.startswith(f"{package}.")}
    assert not found


def test_import_adds_little_but_its_own_modules(new_modules: set[str]) -> None:
    others = {name for name in new_modules if name.split(".")[0] != "slapo"}
    assert len(others) <= 20, sorted(others)
