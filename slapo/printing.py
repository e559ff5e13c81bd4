"""A schedule as text: the module tree with what was applied where."""

from __future__ import annotations

import html as html_escape
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from slapo.node import Node
from slapo.wrapper import innermost

_MAX_WIDTH = 60
_MAX_NOTE = 100
#: More notes of one kind on a module are counted.
_MAX_NOTES = 4


@dataclass
class _Item:
    """A module as it is printed: its name in what is around it, a text, and what lies below."""

    name: str
    text: str
    below: list[_Item]

    def number(self) -> int | None:
        found = re.search(r"\d+$", self.name)
        return int(found.group()) if found else None

    def follows(self, other: _Item) -> bool:
        """The next of a stack: nothing but the number at the end of the name is another."""
        number, previous = self.number(), other.number()
        return (
            number is not None
            and previous is not None
            and number == previous + 1
            and self.name == other.name.removesuffix(str(previous)) + str(number)
            and (self.text, self.below) == (other.text, other.below)
        )


def tree(root: Node) -> str:
    """The tree below `root`; equal neighbours, such as the layers of a stack, take one line."""
    return "\n".join([_label(root), *_branches(_below(root), "")])


def html(root: Node) -> str:
    """The same for a notebook; long lines scroll, as broken ones would break the tree."""
    style = "white-space: pre; overflow-x: auto"
    return f'<pre style="{style}">{html_escape.escape(tree(root))}</pre>'


def _below(node: Node) -> list[_Item]:
    node.rebuild_children()  # the user may have put other modules there
    return _items(node.child, depth=2)


def _items(nodes: Mapping[str, Node], depth: int) -> list[_Item]:
    """Nodes by name; lists within lists, whose items the schedule names in one, as a level."""
    items = []
    for head, group in groupby(nodes, lambda name: ".".join(name.split(".")[:depth])):
        names = list(group)
        if names == [head]:
            items.append(_Item(head, _label(nodes[head]), _below(nodes[head])))
        else:
            inner = {name.removeprefix(f"{head}."): nodes[name] for name in names}
            items.append(_Item(head, "ModuleList", _items(inner, depth=1)))
    return items


def _branches(items: list[_Item], indent: str) -> list[str]:
    lines: list[str] = []
    runs = _runs(items)
    for index, run in enumerate(runs):
        last = index == len(runs) - 1
        lines.append(f"{indent}{'`' if last else '|'}-- {_range(run)}: {run[0].text}")
        lines.extend(_branches(run[0].below, indent + ("    " if last else "|   ")))
    return lines


def _runs(items: list[_Item]) -> list[list[_Item]]:
    """Neighbours that differ in nothing but their number, together."""
    runs: list[list[_Item]] = []
    for item in items:
        if runs and item.follows(runs[-1][-1]):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _range(run: list[_Item]) -> str:
    first, last = run[0], run[-1]
    return first.name if first is last else f"{first.name}..{last.number()} ({len(run)}x)"


def _label(node: Node) -> str:
    notes = [record.as_written() for record in node.metadata.applied]
    text = _describe(node)
    return f"{text}  <- {'; '.join(_counted(notes))}" if notes else text


def _counted(notes: list[str]) -> list[str]:
    """Many primitives of one kind on one module, such as a fusion for each layer, as a number."""
    counts = Counter(note.partition("(")[0] for note in notes)
    shown: list[str] = []
    for note in notes:
        kind = note.partition("(")[0]
        total = f"{kind}(...) {counts[kind]}x"
        if counts[kind] <= _MAX_NOTES:
            shown.append(_cut(note, _MAX_NOTE))  # an argument may be a whole config
        elif total not in shown:
            shown.append(total)
    return shown


def _describe(node: Node) -> str:
    module = innermost(node.mod)
    kind = type(module).__name__
    if node.child:
        return kind
    # Some, such as Transformers' Conv1D, give their sizes in a __repr__ of their own.
    own = re.fullmatch(rf"{kind}\((.*)\)", repr(module))
    return f"{kind}({_cut(own[1] if own else module.extra_repr(), _MAX_WIDTH)})"


def _cut(text: str, width: int) -> str:
    """The text in one line of at most so many characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."
