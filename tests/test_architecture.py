"""Arrows between modules point one way, and `import slapo` needs torch alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: From the bottom up; a module may import from its own floor and from lower ones.
FLOORS = [
    ["errors", "history", "hooks", "logger", "random", "utils", "wrapper"],
    ["sharding", "weights", "op", "graph"],
    ["node", "pattern", "tracer", "initialization"],
    ["pipeline"],
    ["framework_dialect", "mesh"],
    ["snapshot", "printing"],
    ["primitives"],
    ["selection"],
    ["schedule"],
    ["build", "verify"],
    ["__init__"],
]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def imports(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports, those for type checkers included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slapo"):
            for alias in node.names:
                inner = ROOT / (f"{node.module}.{alias.name}".replace(".", "/") + ".py")
                yield f"{node.module}.{alias.name}" if inner.exists() else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("slapo"))


def graph() -> dict[str, set[str]]:
    """Module -> modules that it imports."""
    found = {}
    for path in sorted((ROOT / "slapo").rglob("*.py")):
        name = module_name(path)
        found[name] = {target for target in imports(path) if target not in (name, "slapo")}
    return found


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_room_has_its_floor() -> None:
    listed = {name for floor in FLOORS for name in floor}
    assert {room(module) for module in graph()} == listed


def test_arrows_point_down() -> None:
    floor_of = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    upward = [
        f"{source} -> {target}"
        for source, targets in graph().items()
        for target in targets
        if floor_of[room(target)] > floor_of[room(source)]
    ]
    assert upward == []


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


def test_relative_imports_are_not_used() -> None:
    for path in (ROOT / "slapo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), path
