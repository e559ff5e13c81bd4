"""Arrows between modules point one way, and `import slapo` needs torch alone."""

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: From the bottom up; a room may import from lower floors, and from none on its own.
FLOORS = [
    ["errors"],
    ["late"],
    ["example_inputs"],
    ["agreement", "history", "hooks", "logger", "optimizers", "random", "scripting", "wrapper"],
    ["utils", "sharding", "graph"],
    ["mesh", "weights", "pattern", "tracer"],
    ["env", "initialization", "node", "op"],
    ["pipeline", "printing", "record", "saving", "snapshot"],
    ["framework_dialect", "primitives"],
    ["clip", "selection"],
    ["schedule"],
    ["verify"],
    ["derive", "pretrained", "training"],
    ["_build", "_replay"],
    ["autotune", "model_schedule"],
    ["cost"],
    ["train"],
    ["command"],
    ["__init__", "__main__"],
]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def imports(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports, those for type checkers included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slapo"):
            for alias in node.names:
                inner = ROOT / f"{node.module}.{alias.name}".replace(".", "/")
                is_module = inner.is_dir() or inner.with_suffix(".py").exists()
                yield f"{node.module}.{alias.name}" if is_module else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("slapo"))


def graph() -> dict[str, set[str]]:
    """Module -> modules that Python runs for its imports.

    To import a module of a package runs the ``__init__`` of the package, and of those around it,
    before: an arrow that no import statement shows.
    """
    found = {}
    for path in sorted((ROOT / "slapo").rglob("*.py")):
        name = module_name(path)
        around = {name, *parents(name)}
        targets = {up for target in imports(path) for up in (target, *parents(target))}
        found[name] = targets - around
    return found


def parents(module: str) -> list[str]:
    """Packages around a module, but for the library itself: all modules are in that."""
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(2, len(parts))]


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_room_has_its_floor() -> None:
    listed = {name for floor in FLOORS for name in floor}
    assert {room(module) for module in graph()} == listed


def test_arrows_point_down() -> None:
    floor_of = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    wrong = [
        f"{source} -> {target}"
        for source, targets in graph().items()
        for target in targets
        if room(target) != room(source) and floor_of[room(target)] >= floor_of[room(source)]
    ]
    assert wrong == []


def test_there_are_no_circles() -> None:
    arrows = graph()
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for target in arrows.get(module, ()):
                visit(target, (*trail, module))
            done.add(module)

    for module in arrows:
        visit(module, ())


def test_any_module_may_be_the_first() -> None:
    """Whatever the order of imports in ``slapo/__init__``, which is left out here."""
    script = """
import importlib, sys, types
names = {names!r}
for name in names:
    for loaded in [m for m in sys.modules if m.split(".")[0] == "slapo"]:
        del sys.modules[loaded]
    package = types.ModuleType("slapo")
    package.__path__ = [{path!r}]
    sys.modules["slapo"] = package
    importlib.import_module(name)
"""
    names = sorted({f"slapo.{room(module)}" for module in graph()} - {"slapo.__init__"})
    text = script.format(names=names, path=str(ROOT / "slapo"))
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(graph()))
def test_every_module_can_be_imported(name: str) -> None:
    """Doctests leave out what cannot, so that an optional package may be absent."""
    if name.endswith("_triton"):
        pytest.importorskip("triton")
    importlib.import_module(name.removesuffix(".__init__"))


def test_public_methods_are_documented() -> None:
    """By a docstring of their own, or by that of the class that declares them."""
    silent = [
        f"{name}.{kind.__name__}.{method}"
        for name in sorted(graph())
        for kind in vars(importlib.import_module(name)).values()
        if inspect.isclass(kind) and kind.__module__ == name and not kind.__name__.startswith("_")
        for method, value in inspect.getmembers(kind, inspect.isfunction)
        if value.__qualname__ == f"{kind.__qualname__}.{method}"  # made here, in the class's body
        and not (method.startswith("_") or inspect.getdoc(value))
    ]
    assert not silent


def test_relative_imports_are_not_used() -> None:
    for path in (ROOT / "slapo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), path
