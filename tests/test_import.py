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


def test_import_loads_what_schedules_need(new_modules: set[str]) -> None:
    assert len({name for name in new_modules if name.split(".")[0] == "slapo"}) < 100
    assert not {name for name in new_modules if name.startswith(("slapo.verify", "slapo.cost"))}


def test_import_changes_no_logging() -> None:
    code = (
        "import logging, slapo\n"
        "names = ['slapo', *logging.root.manager.loggerDict]\n"
        "print(sum(len(logging.getLogger(n).handlers) for n in names if n.startswith('slapo')))\n"
        "slapo.get_logger().info('hello')\n"
        "print(len(logging.getLogger('slapo').handlers))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]
    assert done.stderr.endswith("hello\n")


def test_names_are_what_they_are_called() -> None:
    """Whatever was imported before: Python binds submodules instead of functions."""
    code = (
        "import importlib, pkgutil, slapo, slapo.op\n"
        "for module in pkgutil.walk_packages(slapo.__path__, 'slapo.'):\n"
        "    if not module.name.endswith(('_triton', '__main__')):\n"
        "        importlib.import_module(module.name)\n"
        "for package in (slapo, slapo.op):\n"
        "    for name in package.__all__:\n"
        "        value = getattr(package, name)\n"
        "        if name in ('build', 'check', 'replay', 'checkpoint', 'attend', 'bisect'):\n"
        "            assert type(value).__name__ == 'function', (name, value)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
