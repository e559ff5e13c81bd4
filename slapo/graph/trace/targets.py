"""Functions that a captured graph may call, and those that it may not, by name."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils.checkpoint import CheckpointFunction

from slapo.errors import TraceError
from slapo.graph.trace.function_calls import FunctionApply
from slapo.graph.trace.generators import check_target

CHECKPOINT_REFUSED = (
    "activation checkpointing inside a traced forward would be lost; switch it off in the model "
    "and use .checkpoint() of the schedule, or make the module a leaf"
)
COLLECTIVE_REFUSED = (
    "the forward calls the collective {}; make the module a leaf, use .sync() of the schedule, or "
    "wrap the collective in an autograd.Function, which a graph can hold"
)
#: Methods that leave no trace in a graph.
TRACELESS_METHODS = {
    "register_hook": "registers a hook on a tensor",
    "register_post_accumulate_grad_hook": "registers a hook on a tensor",
    "backward": "runs a backward pass",
    "share_memory_": "moves a tensor to shared memory",
}


def checked(target: Any) -> Any:
    """A function as the graph is to call it.

    Raises
    ------
    TraceError
        If a graph cannot hold the call.
    """
    origin = getattr(target, "_origin", None)
    if getattr(origin, "__name__", "") == "produce_trampoline_autograd_apply":
        function = target.__closure__[0].cell_contents
        if issubclass(function, CheckpointFunction):
            raise TraceError(CHECKPOINT_REFUSED)
        return FunctionApply(function)
    name = getattr(target, "__name__", str(target))
    if name in TRACELESS_METHODS:
        refuse_traceless(name)
    if isinstance(target, torch._ops.HigherOrderOperator):
        if "checkpoint" in name:
            raise TraceError(CHECKPOINT_REFUSED)
        raise TraceError(f"the forward uses {name}, which a graph cannot hold; make it a leaf")
    home = getattr(target, "__module__", None) or ""
    if home.startswith("torch.distributed") or "c10d" in str(target):
        raise TraceError(COLLECTIVE_REFUSED.format(name))
    check_target(target)
    return target


def refuse_traceless(name: str) -> NoReturn:
    """Refuse a method that leaves no trace in a graph."""
    what = TRACELESS_METHODS[name]
    raise TraceError(f"the forward {what}, which a graph cannot hold; make it a leaf")
