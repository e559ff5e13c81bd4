"""What `pip install` makes of the project."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
