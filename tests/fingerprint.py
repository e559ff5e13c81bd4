"""Everything about a schedule and its model that a failed primitive must leave alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from slapo.schedule import Schedule
from slapo.sharding.state import Sharding

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
_TABLES = ("_parameters", "_buffers", "_modules")
# What a graph module works out from its graph when it is asked to.
_DERIVED = {"_graph", "_code", "_stale", "_kinds", "_lineno_map", "_prologue_start"}


def fingerprint(sch: Schedule) -> dict[str, Any]:
    """State by a readable name; two of them compare equal when nothing changed in between."""
    top = sch.get_top_schedule()
    state: dict[str, Any] = {}
    _add_module(state, "model", top.mod)
    for path, node in top.named_schedules():
        state[f"node {path}"] = (id(node), node.name, node.path, id(node.mod), list(node.child))
        metadata = node.metadata
        primitives = {k: repr(v) for k, v in metadata.primitives.items() if v}
        state[f"notes {path}"] = (repr(metadata.param_tags), primitives)
    shared = top.state
    state["history"] = [str(record) for record in shared.history]
    state["ties"] = (shared.ties.as_dict(), top.metadata.tie_weights, sorted(shared.followed))
    state["nodes"] = {k: [n.path for n in nodes] for k, nodes in shared.nodes_of.items() if nodes}
    state["depth"] = shared.depth
    state["loader"] = id(shared.loader)
    return state


@contextmanager
def refused(sch: Schedule, error: Any, message: str) -> Iterator[None]:
    """A call that raises the error, and leaves the schedule and its model as they were."""
    before = fingerprint(sch)
    with pytest.raises(error, match=message):
        yield
    assert fingerprint(sch) == before


def _add_module(state: dict[str, Any], path: str, module: nn.Module) -> None:
    state[path] = (id(module), type(module).__qualname__, module.training)
    for table in _TABLES[:2]:
        for name, tensor in getattr(module, table).items():
            state[f"{path} {table} {name}"] = _tensor(tensor)
    state[f"{path} hooks"] = {
        slot: [(key, id(hook)) for key, hook in module.__dict__.get(slot, {}).items()]
        for slot in _HOOKS
    }
    state[f"{path} attributes"] = {
        key: _plain(value)
        for key, value in module.__dict__.items()
        if key not in (*_HOOKS, *_TABLES, *_DERIVED)
    }
    if isinstance(module, fx.GraphModule):
        state[f"{path} graph"] = str(module.graph)
    inner = module.__dict__.get("mod")
    if isinstance(inner, nn.Module):
        _add_module(state, f"{path}<mod>", inner)
    for name, child in module._modules.items():
        if child is None:
            state[f"{path}.{name}"] = None
        elif f"{path}.{name}" not in state:
            _add_module(state, f"{path}.{name}", child)


def _tensor(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    if is_lazy(tensor):
        return (id(tensor), "lazy")
    values = None if tensor.is_meta else tensor.detach().tolist()
    attributes = {k: _plain(v) for k, v in tensor.__dict__.items()}
    hooks = len(tensor._backward_hooks or {})
    return (id(tensor), tuple(tensor.shape), tensor.requires_grad, values, attributes, hooks)


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None), type)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, set):
        return sorted(map(str, value))
    if isinstance(value, Sharding):
        return repr(value)
    return id(value)
