"""Transformers collects hidden states, router logits and attentions through hooks on its modules.

It installs them when a model is first asked for such outputs, under a lock, which dynamo does not
follow; so they are there before a capture begins, and taken away again. The hooks of a leaf run
after its call, as part of the captured code; what hooks within a leaf would collect is out of
reach of the graph, and asking for it is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from slapo.errors import TraceError

_HOME = "transformers.utils.output_capturing"
_FLAG = "_output_capturing_hooks_installed"


def is_capturing(hook: Any) -> bool:
    """True for a hook that collects outputs for Transformers."""
    return getattr(hook, "__module__", "") == _HOME


def capturing_hooks(module: nn.Module) -> tuple[Any, ...]:
    """The hooks on `module` that collect what it returns."""
    return tuple(hook for hook in module._forward_hooks.values() if is_capturing(hook))


def inner_keys(module: nn.Module) -> frozenset[str]:
    """What hooks on the modules within `module` collect: names such as ``"router_logits"``."""
    inner = (child for child in module.modules() if child is not module)
    hooks = (hook for child in inner for hook in capturing_hooks(child))
    return frozenset(_key_of(hook) for hook in hooks)


def _key_of(hook: Any) -> str:
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
    return str(cells["key"].cell_contents) if "key" in cells else ""


@torch._dynamo.assume_constant_result
def refuse_inner(path: str, key: str) -> None:
    """Refuse a capture in which somebody collects what modules within a leaf return."""
    raise TraceError(
        f"{key} is asked for, and comes from within {path!r}, which stays a call; leave it out, "
        "or trace with flatten=True"
    )


class _Collector:
    """In place of a ``ContextVar``, which dynamo does not follow."""

    value: Any = None

    def get(self) -> Any:
        return self.value

    def set(self, value: Any) -> None:
        self.value = value

    def reset(self, token: Any) -> None:
        self.value = None


#: What is collected in the capture that is under way; empty or None where nothing is.
COLLECTOR = _Collector()


@contextmanager
def hooks_installed(root: nn.Module) -> Iterator[None]:
    """Within the block every model of Transformers at or below `root` has its hooks."""
    capturing = sys.modules.get(_HOME)
    if capturing is None:
        yield
        return
    before = [(m, dict(m._forward_hooks), vars(m).get(_FLAG)) for m in root.modules()]
    collector = mock.patch.object(capturing, "_active_collector", COLLECTOR)
    collector.start()
    try:
        for module in root.modules():
            if hasattr(module, "config") and _is_pretrained(module):
                capturing.maybe_install_capturing_hooks(module)
        yield
    finally:
        collector.stop()
        COLLECTOR.value = None
        for module, hooks, flag in before:
            if list(module._forward_hooks) != list(hooks):
                module._forward_hooks.clear()
                module._forward_hooks.update(hooks)
            if flag is None:
                vars(module).pop(_FLAG, None)


def _is_pretrained(module: nn.Module) -> bool:
    names = {f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__}
    return "transformers.modeling_utils.PreTrainedModel" in names
