"""Text and HTML of a schedule: the module tree with the primitives applied."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape as _escape
from itertools import groupby

from torch import nn

from slapo.node import Node
from slapo.wrapper import innermost

_MAX_WIDTH = 60
_MAX_NOTE = 100
#: Notes of one kind on a module are listed up to this number, and counted above it.
_MAX_NOTES = 4
_CUT = "cut_pipeline_stage"
#: Color name in a drawing -> primitives.
_COLORED = {
    "shard": {"shard"},
    "sync": {"sync"},
    "recompute": {"checkpoint"},
    "replace": {"replace", "replace_all", "fuse", "decompose", "compile"},
    "stage": {_CUT},
}
#: Color name -> background.
_COLORS = {
    "shard": "#cfe3ff",
    "sync": "#ffdfb8",
    "recompute": "#cdeccd",
    "replace": "#e6d6ff",
    "stage": "#ffd0d0",
    "other": "#e4e4e4",
}
_STYLE = """
.slapo{font:13px/1.7 ui-monospace,monospace;overflow-x:auto;white-space:nowrap}
.slapo p{margin:0}
.slapo .leaf{padding-left:1.1em}
.slapo details>*:not(summary){margin-left:1.6em}
.slapo summary{cursor:pointer;margin-left:-1.1em}
.slapo details{padding-left:1.1em}
.slapo i{font-style:normal;color:#111;border-radius:4px;padding:0 5px;margin-left:6px}
.slapo s{display:inline-block;width:60px;height:9px;margin-right:8px;background:#8883}
.slapo s u{display:block;height:9px;background:#4a7bd0}
.slapo hr{border:0;border-top:2px dashed #d33;margin:2px 0}
""" + "".join(f".slapo .{kind}{{background:{color}}}" for kind, color in _COLORS.items())


@dataclass
class _Item:
    """A line of the tree: a module's name in its parent, its text, and its children."""

    name: str
    text: str
    below: list[_Item]
    node: Node | None = field(default=None, compare=False)

    def has_notes(self) -> bool:
        """Return whether anything was applied here or below."""
        here = self.node is not None and bool(self.node.metadata.applied)
        return here or any(item.has_notes() for item in self.below)

    def number(self) -> int | None:
        found = re.search(r"\d+$", self.name)
        return int(found.group()) if found else None

    def follows(self, other: _Item) -> bool:
        """Return whether this is the next layer of a stack: equal but for the index in the name."""
        number, previous = self.number(), other.number()
        return (
            number is not None
            and previous is not None
            and number == previous + 1
            and self.name == other.name.removesuffix(str(previous)) + str(number)
            and (self.text, self.below) == (other.text, other.below)
        )


def tree(root: Node) -> str:
    """Return the tree below `root`; equal neighbors, such as layers of a stack, share a line."""
    return "\n".join([_label(root), *_branches(_below(root), "")])


def html(root: Node) -> str:
    """Return the tree as a colored, collapsible outline, for a notebook or for :func:`page`."""
    whole = _size(root.mod) or 1
    size = f"{whole:,} parameters on rank {root.rank} of {root.world_size}"
    notes = "".join(f"<i class={kind}>{kind}</i>" for kind in _COLORS)
    head = f"<p><b>{_escape(_describe(root))}</b> {size}{_chips(root)}</p><p>{notes}</p>"
    below = "".join(_rows(_below(root), whole))
    return f"<style>{_STYLE}</style><div class=slapo>{head}{below}</div>"


def page(root: Node) -> str:
    """Return a self-contained HTML page of the tree."""
    title = f"Schedule of {_escape(type(innermost(root.mod)).__name__)}"
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = f"<head>{head}<title>{title}</title></head>"
    return f"<!doctype html><html lang=en>{head}<body>{html(root)}</body></html>"


def _rows(items: list[_Item], whole: int) -> Iterator[str]:
    opened: set[str] = set()  # of layers that differ slightly, only the first is opened
    for run in _runs(items):
        first, nodes = run[0], [item.node for item in run if item.node is not None]
        share = sum(_size(node.mod) for node in nodes) / whole
        bar = f'<s title="{share:.2%} of the parameters"><u style="width:{share:.1%}"></u></s>'
        text = _escape(_describe(first.node) if first.node else first.text)
        row = f"{bar}<b>{_escape(_range(run))}</b> {text}{_chips(first.node)}"
        if first.below:
            kind = _describe(first.node) if first.node is not None else ""
            is_open = " open" if first.has_notes() and kind not in opened else ""
            if is_open:
                opened.add(kind)
            inner = "".join(_rows(first.below, whole))
            yield f"<details{is_open}><summary>{row}</summary>{inner}</details>"
        else:
            yield f"<p class=leaf>{row}</p>"
        if first.node is not None and any(r.primitive == _CUT for r in first.node.metadata.applied):
            yield "<hr>"


def _chips(node: Node | None) -> str:
    """Colored labels of the primitives applied to a module, with source lines as titles."""
    chips = []
    for record in node.metadata.applied if node is not None else ():
        kind = next(
            (kind for kind, names in _COLORED.items() if record.primitive in names), "other"
        )
        values = [text.strip("'") for text in record.arguments.values()]
        said = record.as_written()
        if kind in ("shard", "sync") and len(values) > 1:
            said = f"{values[0]}: " + (f"Shard({values[1]})" if kind == "shard" else values[1])
        said = _escape(_cut(said, _MAX_WIDTH))
        chips.append(f'<i class={kind} title="{_escape(str(record))}">{said}</i>')
    return "".join(chips)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _below(node: Node) -> list[_Item]:
    node.rebuild_children()  # the user may have replaced modules
    # The schedule joins the names of a list and its item, as in "layer.3".
    return _items(node.child, depth=2)


def _items(nodes: Mapping[str, Node], depth: int) -> list[_Item]:
    """Convert nodes to items; nested lists, whose names the schedule joins, become a level."""
    items = []
    for head, group in groupby(nodes, lambda name: ".".join(name.split(".")[:depth])):
        names = list(group)
        if names == [head]:
            items.append(_Item(head, _label(nodes[head]), _below(nodes[head]), nodes[head]))
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
    """Group neighbors that differ only in their index."""
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
    """Replace many primitives of one kind on a module, such as one fusion per layer, by a count."""
    counts = Counter(note.partition("(")[0] for note in notes)
    shown: list[str] = []
    for note in notes:
        kind = note.partition("(")[0]
        total = f"{kind}(...) {counts[kind]}x"
        if counts[kind] <= _MAX_NOTES:
            shown.append(_cut(note, _MAX_NOTE))  # an argument may be an entire config
        elif total not in shown:
            shown.append(total)
    return shown


def _describe(node: Node) -> str:
    module = innermost(node.mod)
    kind = type(module).__name__
    if node.child:
        return kind
    # Some modules, such as Transformers' Conv1D, show their sizes in a __repr__ of their own.
    own = re.fullmatch(rf"{kind}\((.*)\)", repr(module))
    return f"{kind}({_cut(own[1] if own else module.extra_repr(), _MAX_WIDTH)})"


def _cut(text: str, width: int) -> str:
    """The text on one line of at most `width` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."
