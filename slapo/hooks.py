"""Module hooks: list them, and move them from a module to its replacement."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

#: Attribute on a hook of ours: the sync mode that it implements.
MODE_ATTRIBUTE = "_slapo_mode"
#: Attribute of a module that holds its sharding state: see :mod:`slapo.sharding.state`.
SHARDING = "_slapo_sharding"

_PRE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_POST = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
_STATE = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def get_hooks(module: nn.Module) -> dict[str, list[Callable[..., Any]]]:
    """Return the hooks of `module`, keyed by the mode names of :meth:`Schedule.sync`.

    Examples
    --------
    >>> import torch.nn as nn
    >>> linear = nn.Linear(2, 2)
    >>> handle = linear.register_forward_hook(lambda module, inputs, output: output)
    >>> {mode: len(hooks) for mode, hooks in get_hooks(linear).items()}
    {'fwd_pre': 0, 'fwd_post': 1, 'bwd_post': 0}
    """
    pre = _listed(module._forward_pre_hooks.values())
    return {
        "fwd_pre": [h for h in pre if getattr(h, MODE_ATTRIBUTE, "fwd_pre") == "fwd_pre"],
        "fwd_post": [*reducers_of(module), *_listed(module._forward_hooks.values())],
        "bwd_post": [h for h in pre if getattr(h, MODE_ATTRIBUTE, "") == "bwd_post"]
        + _listed(module._backward_hooks.values()),
    }


def reducers_of(module: nn.Module) -> tuple[Callable[..., Any], ...]:
    """Hooks that `module`, or the module it wraps, calls before it adds its bias."""
    inner: Any = module
    while inner is not None:
        state = inner.__dict__.get(SHARDING)
        found: tuple[Callable[..., Any], ...] = () if state is None else state.reducers
        if found:
            return found
        inner = inner.__dict__.get("mod")
    return ()


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether calling `module` does more than its forward."""
    return bool(module._forward_pre_hooks or module._forward_hooks or has_backward_hooks(module))


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether autograd calls hooks of `module`."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def move_hooks(source: nn.Module, target: nn.Module) -> None:
    """Move every hook of `source` to `target`, before the hooks that `target` already has."""
    _move(source, target, _PRE + _POST + _BACKWARD + _STATE)


def move_reducers(source: nn.Module, target: nn.Module) -> None:
    """Turn the reductions inside `source` into the first forward hooks of `target`."""
    state = source.__dict__.get(SHARDING)
    if state is not None:
        # Each is put in front of the one before, which keeps their order.
        for hook in reversed(state.reducers):
            target.register_forward_hook(hook, prepend=True)
        state.reducers = ()


def move_input_hooks(source: nn.Module, target: nn.Module) -> None:
    """Move the hooks of `source` on its inputs, or on their gradients, to `target`."""
    _move(source, target, (*_PRE, "_backward_hooks"))


def move_output_hooks(source: nn.Module, target: nn.Module) -> None:
    """Move the hooks of `source` on its output, or on its gradient, to `target`."""
    _move(source, target, (*_POST, "_backward_pre_hooks"))


def remove_pre_hooks(module: nn.Module, is_wanted: Callable[[Any], bool]) -> None:
    """Remove the forward pre-hooks of `module` for which `is_wanted` is true."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if is_wanted(hook):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _move(source: nn.Module, target: nn.Module, slots: tuple[str, ...]) -> None:
    """Move the dictionaries themselves, since the handles of the moved hooks refer to them.

    Handles of the target's own hooks refer to its former dictionaries, which keep these hooks.
    """
    if source is target:
        return
    # torch keeps full and older backward hooks in one table, and this flag says which kind it
    # holds.
    if "_backward_hooks" in slots and source._is_full_backward_hook is not None:
        target._is_full_backward_hook = source._is_full_backward_hook
    for slot in slots:
        old, new = source.__dict__.get(slot), target.__dict__.get(slot)
        if not old or new is None:
            continue
        for hook in old.values():
            if getattr(hook, "with_module", False):  # torch's wrapper around a load hook
                hook.module = weakref.ref(target)
        target.__dict__[slot], source.__dict__[slot] = old, type(new)()
        marks = slot.endswith(("_with_kwargs", "_always_called"))
        old.update(new if marks else {key: _Held(new, key) for key in new})


class _Held:
    """A hook called from one dictionary and kept in another, from which its handle removes it."""

    def __init__(self, hooks: dict[int, Callable[..., Any]], key: int) -> None:
        self.hooks, self.key = hooks, key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hook = self.hooks.get(self.key)
        return None if hook is None else hook(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("hooks", "key") or name.startswith("__"):  # a copy under construction
            raise AttributeError(name)
        return getattr(self.hooks.get(self.key), name)


def _listed(hooks: Iterable[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """List hooks in order of registration, without those that were removed."""
    found = [hook.hooks.get(hook.key) if isinstance(hook, _Held) else hook for hook in hooks]
    return [hook for hook in found if hook is not None]
