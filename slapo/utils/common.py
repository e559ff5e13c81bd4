"""Helpers for users; see :mod:`slapo.hooks`."""

from __future__ import annotations

from typing import Any

from torch import nn

from slapo.hooks import get_hooks, move_hooks

__all__ = ["get_hooks", "is_lambda_function", "transfer_hooks"]


def transfer_hooks(old_mod: nn.Module, new_mod: nn.Module) -> None:
    """Move every hook of a module to another one, in front of its existing hooks.

    Examples
    --------
    >>> old, new = nn.ReLU(), nn.GELU()
    >>> handle = old.register_forward_hook(lambda module, inputs, output: output)
    >>> transfer_hooks(old, new)
    >>> len(get_hooks(old)["fwd_post"]), len(get_hooks(new)["fwd_post"])
    (0, 1)
    """
    move_hooks(old_mod, new_mod)


def is_lambda_function(value: Any) -> bool:
    """Return whether a value is a lambda function.

    Examples
    --------
    >>> is_lambda_function(lambda x: x), is_lambda_function(len)
    (True, False)
    """
    return callable(value) and getattr(value, "__name__", "") == "<lambda>"
