"""Snapshots that restore a schedule and its model if one of several steps fails."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from slapo.graph.match.subgraph_view import SubgraphView
from slapo.graph.trace.module import Traced, trace_of
from slapo.node import Node
from slapo.sharding.state import Sharding
from slapo.wrapper import with_wrapped

_CONTAINERS = (dict, set, list)


class _ModuleState:
    """State of one module: attributes, class, graphs, and attributes of its tensors.

    Tensors and children are kept by reference.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.cls = module, type(module)
        self.attributes = {k: _shallow(v) for k, v in module.__dict__.items()}
        self.containers = {k: v for k, v in module.__dict__.items() if isinstance(v, _CONTAINERS)}
        self.trace = trace_of(module).saved() if isinstance(module, Traced) else None
        self.view = copy.deepcopy(module.graph) if isinstance(module, SubgraphView) else None
        self.tensors = [
            _TensorState(t)
            for t in (*module._parameters.values(), *module._buffers.values())
            if t is not None and not is_lazy(t)
        ]

    def restore(self) -> None:
        module: Any = self.module
        module.__class__ = self.cls
        module.__dict__.clear()
        for key, value in self.attributes.items():
            module.__dict__[key] = self._refilled(key, value)
        for tensor in self.tensors:
            tensor.restore()
        if self.trace is not None:
            trace_of(module).restore(self.trace)
        if self.view is not None and str(module.graph) != str(self.view):
            module.graph = self.view

    def _refilled(self, key: str, value: Any) -> Any:
        """Refill the original container: wrappers and hook handles refer to it."""
        original = self.containers.get(key)
        if original is None:
            return value
        if _is_as_before(original, value):  # the frozen dicts of diffusers refuse updates
            return original
        original.clear()
        if isinstance(original, list):
            original.extend(value)
        else:
            original.update(value)
        return original


def _is_as_before(original: Any, kept: Any) -> bool:
    if isinstance(kept, dict):
        original, kept = ([*each, *each.values()] for each in (original, kept))
    # By identity: tensors have no equality that is one truth value.
    return len(original) == len(kept) and all(map(operator.is_, original, kept))


class _TensorState:
    """Attributes of a tensor; its values are kept by reference."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.attributes, self.data = tensor, dict(tensor.__dict__), tensor.data
        self.needs_gradient = tensor.requires_grad
        self.hooks = [set(table) for table in _hooks_of(tensor)]

    def restore(self) -> None:
        tensor = self.tensor
        tensor.__dict__.clear()
        tensor.__dict__.update(self.attributes)
        if tensor.is_leaf:
            tensor.requires_grad_(self.needs_gradient)
        for table, before in zip(_hooks_of(tensor), self.hooks, strict=True):
            for key in table.keys() - before:
                del table[key]
        # A shard replaces the values of the same tensor object, and so does a cast, which rounds
        # them.
        if tensor.shape != self.data.shape or tensor.dtype != self.data.dtype:
            tensor.grad, tensor.data = None, self.data


def _hooks_of(tensor: Tensor) -> list[dict[int, Any]]:
    """Return the tensor's tables of gradient hooks."""
    return [tensor._backward_hooks or {}, tensor._post_accumulate_grad_hooks or {}]


def _shallow(value: Any) -> Any:
    if isinstance(value, Sharding):
        return value.snapshot()
    # The content suffices to refill the original. copy.copy() takes ten times as long for the
    # ordered dicts of hooks.
    return next((kind(value) for kind in _CONTAINERS if isinstance(value, kind)), value)


class Snapshot:
    """State of a schedule node, its descendants and its ancestors; tensors are not copied."""

    def __init__(self, node: Node) -> None:
        self.top = node.get_top_schedule()
        self.modules = [_ModuleState(m) for m in (*_above(self.top, node), *_below(node.mod))]
        self.nodes = [
            (n, n.mod, dict(n.child), n.metadata.copy())
            for n in (*node.ancestors(), *(below for _, below in node.named_schedules()))
        ]
        self.state = self.top.state.copy()

    def restore(self) -> None:
        """Restore the state at construction."""
        for module in self.modules:
            module.restore()
        for node, mod, child, metadata in self.nodes:
            node._mod = mod
            node.child.clear()
            node.child.update(child)
            node.metadata = metadata
        self.top.state.restore(self.state)


def _above(top: Node, node: Node) -> Iterator[nn.Module]:
    """Yield the modules on the path from the root to a node, including lists."""
    parts = node.model_path.split(".") if node.model_path else []
    for length in range(len(parts)):
        yield from with_wrapped(top.mod.get_submodule(".".join(parts[:length])))


def _below(root: nn.Module) -> Iterator[nn.Module]:
    for module in root.modules():
        yield from with_wrapped(module)


@contextmanager
def restored_on_error(node: Node) -> Iterator[None]:
    """Undo the block's changes to schedule and model at `node` and below if it raises."""
    snapshot = Snapshot(node)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise
