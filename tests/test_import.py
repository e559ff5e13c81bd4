"""`import slapo` costs little and brings no optional package; what `pip install` makes of it."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

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


# --- what pip install makes ----------------------------------------------------------------------
ROOT = Path(__file__).parent.parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project's settings, and a package of that name with next to nothing in it."""
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "slapo").mkdir()
    for name in ("slapo/__init__.py", "slapo/py.typed", "tests/__init__.py"):
        (tmp_path / name).touch()
    return tmp_path


def built(project: Path, hook: str) -> dict[str, str]:
    """File of the wheel -> its text."""
    script = f"from setuptools import build_meta; build_meta.{hook}('dist')"
    subprocess.run(
        [sys.executable, "-c", script], cwd=project, check=True, capture_output=True, text=True
    )
    (wheel,) = (project / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        return {name: files.read(name).decode() for name in files.namelist()}


def test_type_checkers_find_an_editable_install(project: Path) -> None:
    """They read the directories of ``.pth`` files, and do not run the code that may be in these."""
    files = built(project, "build_editable")
    (paths,) = [text for name, text in files.items() if name.endswith(".pth")]
    assert paths.split() == [str(project)]
    assert not [name for name in files if name.endswith("finder.py")]


def test_a_wheel_has_the_package_alone(project: Path) -> None:
    files = built(project, "build_wheel")
    assert {name for name in files if ".dist-info/" not in name} == {
        "slapo/__init__.py",
        "slapo/py.typed",
    }
