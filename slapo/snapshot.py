"""Take a schedule and its model back to an earlier state, when several steps fail half way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from slapo.graph.traced_module import TracedModule
from slapo.node import Node

_CONTAINERS = (dict, set, list)


class _ModuleState:
    """One module's attributes; tensors and children are kept by reference."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.cls = type(module)
        self.attributes = {k: _shallow(v) for k, v in module.__dict__.items()}
        self.containers = {k: v for k, v in module.__dict__.items() if isinstance(v, _CONTAINERS)}
        self.graph = copy.deepcopy(module.graph) if isinstance(module, TracedModule) else None
        self.tensors = [
            (t, dict(t.__dict__))
            for t in (*module._parameters.values(), *module._buffers.values())
            if t is not None
        ]

    def restore(self) -> None:
        module = self.module
        module.__class__ = self.cls
        module.__dict__.clear()
        for key, value in self.attributes.items():
            module.__dict__[key] = self._refilled(key, value)
        for tensor, attributes in self.tensors:
            tensor.__dict__.clear()
            tensor.__dict__.update(attributes)
        changed = self.graph is not None and str(module.graph) != str(self.graph)
        if isinstance(module, TracedModule) and self.graph is not None and changed:
            module.graph = self.graph

    def _refilled(self, key: str, value: Any) -> Any:
        """Containers keep their identity: wrappers and hook handles point at them."""
        original = self.containers.get(key)
        if original is None:
            return value
        original.clear()
        if isinstance(original, list):
            original.extend(value)
        else:
            original.update(value)
        return original


def _shallow(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


class Snapshot:
    """State of a schedule tree and of its model, cheap because tensors are not copied."""

    def __init__(self, top: Node) -> None:
        self.top = top
        self.modules = [_ModuleState(m) for m in _all_modules(top.mod)]
        self.nodes = [
            (node, node.mod, dict(node.child), node.metadata.copy())
            for _, node in top.named_schedules()
        ]
        self.state = top.state.copy()

    def restore(self) -> None:
        """Go back to the state at construction."""
        for module in self.modules:
            module.restore()
        for node, mod, child, metadata in self.nodes:
            node.mod = mod
            node.child.clear()
            node.child.update(child)
            node.metadata = metadata
        self.top.state.restore(self.state)


def _all_modules(root: nn.Module) -> Iterator[nn.Module]:
    """Every module, those held by wrappers included."""
    for module in root.modules():
        while True:
            yield module
            inner = module.__dict__.get("mod")
            if not isinstance(inner, nn.Module):
                break
            module = inner


@contextmanager
def restored_on_error(top: Node) -> Iterator[None]:
    """Undo what the block did to schedule and model when it raises."""
    snapshot = Snapshot(top)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise
