"""Graphs during a rewrite, and the children that rewrites add and remove."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx, nn

from slapo.graph.trace.leaves import tensor_slots
from slapo.graph.trace.nodes import HeldModule
from slapo.wrapper import innermost


@dataclass
class View:
    """One graph of a traced module, for matching and rewriting."""

    module: nn.Module
    graph: fx.Graph
    #: True for the graph that the schedule sees
    is_shown: bool = True

    @property
    def training(self) -> bool:
        """Training mode of the module."""
        return self.module.training

    def get_submodule(self, path: str) -> nn.Module:
        """Return the module that a node calls, even if a rewrite has removed it."""
        trace = vars(self.module).get("_trace")
        if trace is not None and path in trace.parked:
            return trace.parked[path].module
        if trace is not None and path in trace.dropped and path not in self.module._modules:
            return trace.dropped[path]
        return self.module.get_submodule(path)

    def add(self, stem: str, child: nn.Module) -> str | HeldModule:
        """Register `child` as ``<stem>_<k>``, with the first free k; return the target of calls.

        For a hidden graph the child is not registered, so names and state do not change.
        """
        if not self.is_shown:
            return HeldModule(child)
        k = 0
        while f"{stem}_{k}" in self.module._modules or hasattr(self.module, f"{stem}_{k}"):
            k += 1
        self.module.add_module(f"{stem}_{k}", child)
        if "_trace" in vars(self.module):
            vars(self.module)["_trace"].added.append(f"{stem}_{k}")
        return f"{stem}_{k}"


class Rewrite(Protocol):
    """A repeatable change of graphs."""

    def apply(self, view: View) -> None:
        """Change the graph; if that is impossible, leave it unchanged and raise TraceError."""


class Stub(NamedTuple):
    """A child that the shown graph no longer calls; later captures see its shapes."""

    module: nn.Module
    #: its position among the children, which some forwards loop over
    place: int


def park_unused(module: fx.GraphModule, targets: Iterable[str]) -> list[str]:
    """Remove children that the shown graph neither calls nor reads; return their paths.

    Later captures see stubs with the shapes but without the memory.
    """
    if "_trace" not in vars(module):  # a user's graph module
        used = targets_of(module.graph)
        unused = [target for target in dict.fromkeys(targets) if not is_used(used, target)]
        return [target for target in unused if module.delete_submodule(target)]
    trace, removed = vars(module)["_trace"], []
    used = targets_of(trace.shown)
    for target in dict.fromkeys(targets):
        if target in trace.parked or is_used(used, target):
            continue
        holder, _, name = target.rpartition(".")
        owner = module.get_submodule(holder)
        child = owner._modules.get(name)
        if child is None:
            continue
        if target in trace.added:
            trace.added.remove(target)
            trace.dropped[target] = _without_tensors(child)
        else:
            trace.parked[target] = Stub(_without_tensors(child), list(owner._modules).index(name))
        del owner._modules[name]
        removed.append(target)
    if removed:  # guards of captures may check these
        trace.forget()
    return removed


def targets_of(graph: fx.Graph) -> list[str]:
    """Return the sorted paths that a graph calls and reads, for :func:`is_used`."""
    kinds = ("call_module", "get_attr")
    nodes = [node for op in kinds for node in graph.find_nodes(op=op, sort=False)]
    return sorted({str(node.target) for node in nodes})


def is_used(targets: Sequence[str], path: str) -> bool:
    """Return whether a module, an enclosing one or one inside it is among sorted targets."""
    # Binary searches, since N rewrites ask about N modules.
    names, inside = path.split("."), f"{path}."
    around = (".".join(names[:length]) for length in range(1, len(names) + 1))
    place = bisect_left(targets, inside)
    if place < len(targets) and targets[place].startswith(inside):
        return True
    places = ((each, bisect_left(targets, each)) for each in around)
    return any(at < len(targets) and targets[at] == each for each, at in places)


def _without_tensors(module: nn.Module) -> nn.Module:
    if isinstance(module, torch.jit.ScriptModule):
        return module
    trace = vars(module).get("_trace")
    new: nn.Module = object.__new__(type(module) if trace is None else trace.origin)
    state = {k: v.copy() if isinstance(v, dict) else v for k, v in vars(module).items()}
    state.pop("_trace", None)
    for name in (name for name in state if name.endswith("_hooks")):  # hooks see real calls only
        state[name] = type(state[name])()
    state["traceable"] = False  # it was a call, and stays one
    new.__dict__.update(state)
    for name, child in new._modules.items():
        new._modules[name] = None if child is None else _without_tensors(child)
    for table, name, tensor in tensor_slots(new):
        table[name] = _blank(tensor, tensor.dtype, tensor.device)
    return new


def _blank(like: Tensor, dtype: torch.dtype, device: torch.device) -> Any:
    """Return zeros of a tensor's shape; a parameter takes no memory, as no forward writes to it."""
    if not isinstance(like, nn.Parameter):
        return torch.zeros(like.shape, dtype=dtype, device=device)
    zero = torch.zeros((), dtype=dtype, device=device)
    return nn.Parameter(zero.expand(like.shape), like.requires_grad)


@contextmanager
def as_before(module: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """Restore the classes and children from before rewrites within the block.

    Stubs of children are on `device`, by default that of the module's first parameter.
    """
    traced = [m for m in map(innermost, module.modules()) if "_trace" in vars(m)]
    classes = [(m, type(m), vars(m).pop("forward", None)) for m in traced]
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for each in traced:
            trace = vars(each)["_trace"]
            tables.append((each._modules, dict(each._modules)))
            for name in trace.added:
                each._modules.pop(name, None)
            # The last removed first: each place counts the children that were there at its removal.
            for path, stub in reversed(trace.parked.items()):
                holder, _, name = path.rpartition(".")
                table = each.get_submodule(holder)._modules
                tables.append((table, dict(table)))
                _renew(stub.module, module, device)
                # A dict has no insert, so the children behind the stub are taken out and put back.
                behind = list(table.items())[stub.place :]
                for key, _ in behind:
                    del table[key]
                table.update([(name, stub.module), *behind])
            each.__class__ = trace.origin
        yield
    finally:
        for each, kind, forward in classes:
            each.__class__ = kind
            if forward is not None:
                vars(each)["forward"] = forward
        for table, before in reversed(tables):
            table.clear()
            table.update(before)


def _renew(stub: nn.Module, owner: nn.Module, device: torch.device | None) -> None:
    """Update a stub to its owner's mode, and its tensors to the current device and dtype."""
    stub.train(owner.training)
    held = [*owner.parameters(), *owner.buffers()]
    device = held[0].device if device is None and held else device
    floating = next((t.dtype for t in held if t.is_floating_point()), None)
    for table, name, tensor in tensor_slots(stub):
        dtype = (floating or tensor.dtype) if tensor.is_floating_point() else tensor.dtype
        if (tensor.dtype, tensor.device) != (dtype, device or tensor.device):
            table[name] = _blank(tensor, dtype, device or tensor.device)
