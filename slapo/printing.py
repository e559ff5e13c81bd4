"""A schedule as text: the module tree with what was applied where."""

from __future__ import annotations

import html as html_escape
import re
from collections import Counter

from slapo.node import Node
from slapo.wrapper import innermost

_MAX_WIDTH = 60
#: More notes of one kind on a module are counted.
_MAX_NOTES = 4


def tree(root: Node) -> str:
    """The tree below `root`; equal neighbours, such as the layers of a stack, take one line."""
    notes = _notes(root)
    lines = [_label(root, "", notes)]
    lines.extend(_branches(root, "", notes))
    return "\n".join(lines)


def html(root: Node) -> str:
    """The same for a notebook."""
    return f"<pre>{html_escape.escape(tree(root))}</pre>"


def _notes(root: Node) -> dict[str, list[str]]:
    """Path -> what was applied there, shortly."""
    notes: dict[str, list[str]] = {}
    for record in root.history:
        notes.setdefault(record.path, []).append(record.as_written())
    return notes


def _branches(node: Node, indent: str, notes: dict[str, list[str]]) -> list[str]:
    lines: list[str] = []
    groups = _runs(list(node.child.values()), notes)
    for index, group in enumerate(groups):
        last = index == len(groups) - 1
        name = group[0].name if len(group) == 1 else _range(group)
        lines.append(f"{indent}{'`' if last else '|'}-- {_label(group[0], name, notes)}")
        lines.extend(_branches(group[0], indent + ("    " if last else "|   "), notes))
    return lines


def _runs(nodes: list[Node], notes: dict[str, list[str]]) -> list[list[Node]]:
    """Neighbours that differ in nothing but their number, together."""
    groups: list[list[Node]] = []
    previous = None
    for node in nodes:
        shape = _shape(node, notes)
        if groups and shape == previous and _number(node) is not None:
            groups[-1].append(node)
        else:
            groups.append([node])
        previous = shape
    return groups


def _shape(node: Node, notes: dict[str, list[str]]) -> tuple[str, ...]:
    """What the printed text of a subtree depends on, its own number left out."""
    stem = re.sub(r"\d+$", "#", node.name)
    below = [
        f"{path}|{_describe(sub)}|{notes.get(sub.path)}" for path, sub in node.named_schedules()
    ]
    return (stem, *below)


def _number(node: Node) -> str | None:
    found = re.search(r"\d+$", node.name)
    return found.group() if found else None


def _range(group: list[Node]) -> str:
    return f"{group[0].name}..{_number(group[-1])} ({len(group)}x)"


def _label(node: Node, name: str, notes: dict[str, list[str]]) -> str:
    text = f"{name}: {_describe(node)}" if name else _describe(node)
    applied = notes.get(node.path)
    return f"{text}  <- {'; '.join(_counted(applied))}" if applied else text


def _counted(notes: list[str]) -> list[str]:
    """Many primitives of one kind on one module, such as a fusion for each layer, as a number."""
    counts = Counter(note.partition("(")[0] for note in notes)
    shown: list[str] = []
    for note in notes:
        kind = note.partition("(")[0]
        total = f"{kind}(...) {counts[kind]}x"
        if counts[kind] <= _MAX_NOTES:
            shown.append(note)
        elif total not in shown:
            shown.append(total)
    return shown


def _describe(node: Node) -> str:
    module = innermost(node.mod)
    detail = "" if node.child else module.extra_repr().replace("\n", " ")
    if len(detail) > _MAX_WIDTH:
        detail = detail[: _MAX_WIDTH - 3] + "..."
    shown = f"({detail})" if not node.child else ""
    return f"{type(module).__name__}{shown}"
