"""What a graph module's children are used for, and which names are free, in constant time."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterable

import torch.fx as fx
from torch import nn

_NUMBERED = re.compile(r"(.+)_(\d+)")


class _Notes:
    """What is known of one graph module.

    `calls` counts the ``call_module`` nodes per target. `below` counts the ``call_module`` and
    ``get_attr`` nodes per path at or under which their target lies.
    """

    def __init__(self) -> None:
        self.graph: weakref.ref[fx.Graph] | None = None
        self.size = 0
        self.calls: Counter[str] = Counter()
        self.below: Counter[str] = Counter()
        self.next_free: dict[str, int] = {}
        self.children = 0

    def count(self, node: fx.Node, change: int) -> None:
        """Take a node that comes (1) or goes (-1) into account."""
        self.size += change
        if node.op == "call_module":
            self.calls[str(node.target)] += change
        if node.op in ("call_module", "get_attr"):
            for path in _paths_to(str(node.target)):
                self.below[path] += change


# Kept beside the modules, not on them: it must not be copied or saved with a module.
_NOTES: weakref.WeakKeyDictionary[nn.Module, _Notes] = weakref.WeakKeyDictionary()


def first_free_name(module: nn.Module, name: str) -> str:
    """Choose the name of a new submodule: ``<name>_<k>`` with the first free k from 0.

    Parameters
    ----------
    module : torch.nn.Module
        The parent.
    name : str
        Stem of the name.

    Returns
    -------
    str
        A name that no child, parameter, buffer or attribute of `module` has.

    Raises
    ------
    ValueError
        If `name` cannot be part of an attribute's name.

    Examples
    --------
    >>> first_free_name(nn.Module(), "FusedModule")
    'FusedModule_0'
    """
    if not name.isidentifier():
        raise ValueError(
            f"name={name!r} cannot name a submodule; use letters, digits and underscores"
        )
    notes = _notes_of(module)
    if len(module._modules) < notes.children:  # somebody removed children: any name may be free
        notes.next_free.clear()
    notes.children = len(module._modules)
    k = notes.next_free.get(name, 0)
    while hasattr(module, f"{name}_{k}"):
        k += 1
    notes.next_free[name] = k
    return f"{name}_{k}"


def drop_unused(gm: fx.GraphModule, targets: Iterable[str]) -> list[str]:
    """Remove submodules that the graph does not need any more.

    A submodule stays if a node calls it, calls a module that it is part of, or calls or reads
    something in it. The module object and its parameters live on wherever else they are held.

    Parameters
    ----------
    gm : torch.fx.GraphModule
        The owner of graph and submodules.
    targets : iterable of str
        Paths of the submodules in question.

    Returns
    -------
    list of str
        The paths that were removed.

    Examples
    --------
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> drop_unused(gm, ["0", "1"])
    []
    """
    notes = _count_uses(gm)
    removed = []
    for target in dict.fromkeys(targets):
        *owners, _ = _paths_to(target)
        if notes.below[target] or any(notes.calls[owner] for owner in owners):
            continue
        if gm.delete_submodule(target):
            removed.append(target)
            _note_free(notes, target)
    return removed


def watch(gm: fx.GraphModule) -> None:
    """Start to count the uses of submodules; to be called before nodes are created or erased."""
    _count_uses(gm)


def _notes_of(module: nn.Module) -> _Notes:
    """Return what is known of a module."""
    notes = _NOTES.get(module)
    if notes is None:
        notes = _NOTES[module] = _Notes()
    return notes


def _count_uses(gm: fx.GraphModule) -> _Notes:
    """Bring the counts up to date: from scratch once for each graph, then by hooks."""
    notes = _notes_of(gm)
    same_graph = notes.graph is not None and notes.graph() is gm.graph
    if same_graph and notes.size == len(gm.graph.nodes):
        return notes
    notes.graph = weakref.ref(gm.graph)
    notes.size = 0
    notes.calls.clear()
    notes.below.clear()
    for node in gm.graph.nodes:
        notes.count(node, 1)
    if _on_create not in gm._create_node_hooks:
        gm._register_create_node_hook(_on_create)
        gm._register_erase_node_hook(_on_erase)
    return notes


def _on_create(node: fx.Node) -> None:
    _on_change(node, 1)


def _on_erase(node: fx.Node) -> None:
    _on_change(node, -1)


def _on_change(node: fx.Node, change: int) -> None:
    """Count a node of a watched graph; copies of a module have the hooks but no notes yet."""
    owner = node.graph.owning_module
    notes = _NOTES.get(owner) if owner is not None else None
    if notes is not None and notes.graph is not None and notes.graph() is node.graph:
        notes.count(node, change)


def _note_free(notes: _Notes, target: str) -> None:
    """Remember that a name of the form ``<name>_<k>`` can be given again."""
    if "." in target:
        return
    notes.children -= 1
    numbered = _NUMBERED.fullmatch(target)
    if numbered:
        name, k = numbered[1], int(numbered[2])
        notes.next_free[name] = min(k, notes.next_free.get(name, k))


def _paths_to(target: str) -> list[str]:
    """List the paths on the way to a target, itself last: ``a``, ``a.b``, ``a.b.c``."""
    atoms = target.split(".")
    return [".".join(atoms[: i + 1]) for i in range(len(atoms))]
