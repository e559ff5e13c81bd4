"""Leaves: modules below a traced one that stay calls, and state to restore after they run."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from slapo.graph.trace.hf import collects
from slapo.hooks import MODE_ATTRIBUTE
from slapo.random import tracker_kept
from slapo.scripting import compiled_kept
from slapo.wrapper import with_wrapped

#: ``is_leaf(module, path)``: True for modules that become one call.
IsLeaf = Callable[[nn.Module, str], bool]

#: Torch's modules that call their parts after branches on their inputs.
TRANSFORMERS = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)
_HOLDERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, *TRANSFORMERS)


def is_torch_leaf(module: nn.Module) -> bool:
    """Return True for compiled modules, and layers of ``torch.nn`` that do not call their parts."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    if type(module) is nn.Module:
        return False  # a bare Module only contains others
    home = type(module).__module__
    return home.startswith(("torch.nn.", "torch.ao.nn.")) and not isinstance(module, _HOLDERS)


def is_sealed(module: nn.Module) -> bool:
    """Return True for modules that never become graphs: torch's own and ``traceable = False``."""
    return is_torch_leaf(module) or not getattr(module, "traceable", True)


def is_opaque(module: nn.Module) -> bool:
    """Return True for modules that stay one call: sealed, or with hooks that a graph would omit.

    Slapo's syncs become operations of the graph, and Transformers' collecting hooks have no effect.
    """
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    foreign = any(not hasattr(hook, MODE_ATTRIBUTE) and not collects(hook) for hook in hooks)
    backward = module._backward_hooks or module._backward_pre_hooks
    return is_sealed(module) or foreign or bool(backward)


@dataclass(frozen=True)
class Depth:
    """How far a trace enters the modules below: the ``is_leaf`` of a capture.

    With `flatten` it enters every module that is not opaque, else only those whose
    ``inline_in_trace`` is true. Classes and paths in `leaf_modules` always stay calls.
    """

    flatten: bool = False
    leaf_modules: frozenset[str] = frozenset()

    def __call__(self, module: nn.Module, path: str) -> bool:
        """Return whether the module at `path` stays one call."""
        if path in self.leaf_modules or type(module).__name__ in self.leaf_modules:
            return True
        if is_opaque(module) or "forward" in vars(module):
            return True
        trace = vars(module).get("_trace")
        if trace is not None and trace.is_rewritten:
            return True  # if entered, its own forward would replace its rewritten graph
        return not (self.flatten or getattr(module, "inline_in_trace", False))


def tensor_slots(root: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return (table, name, tensor) of each parameter and buffer at or below `root`."""
    modules = [m for m in root.modules() if not isinstance(m, torch.jit.ScriptModule)]
    tables: list[dict[str, Any]] = [t for m in modules for t in (m._parameters, m._buffers)]
    return [(table, k, t) for table in tables for k, t in table.items() if t is not None]


@contextmanager
def syncs_replaced(root: nn.Module, stand_in: Callable[[Any], Any]) -> Iterator[None]:
    """Replace each sync's collective below `root` by ``stand_in(collective)`` within the block."""
    # The root's own hooks run around its graph, and not in it.
    below = (module for module in root.modules() if module is not root)
    hooks: dict[int, Any] = {
        id(hook): hook
        for module in below
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if hasattr(hook, MODE_ATTRIBUTE)
    }
    carries = [(hook, hook._slapo_carry) for hook in hooks.values()]
    try:
        for hook, carry in carries:
            hook._slapo_carry = stand_in(carry)
        yield
    finally:
        for hook, carry in carries:
            hook._slapo_carry = carry


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore all random generators after the block."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    generators = [torch._C.default_generator, *cuda]
    states = [(generator, generator.get_state()) for generator in generators]
    python = random.getstate()
    # Dynamo also saves the CUDA state, which would start CUDA; then the process cannot fork.
    unasked: Any = contextlib.nullcontext()
    if torch.cuda.is_available() and not torch.cuda.is_initialized():
        unasked = mock.patch.object(torch.cuda, "get_rng_state", _no_state)
    try:
        with unasked, tracker_kept():
            yield
    finally:
        random.setstate(python)
        for generator, state in states:
            generator.set_state(state)


def _no_state(device: Any = "cuda") -> None:
    return None


@contextmanager
def attributes_kept(root: nn.Module) -> Iterator[list[tuple[Any, str]]]:
    """Restore what modules at and below `root`, and their configs, hold, after the block.

    A run on fake tensors would leave fake ones there. Yields the (owner, name) list of changed
    attributes, complete when the block ends.
    """
    every = (each for module in root.modules() for each in with_wrapped(module))
    owners = [m for m in every if not isinstance(m, torch.jit.ScriptModule)]
    configs = (vars(m).get("config") for m in owners)
    objects = {id(o): o for o in (*owners, *configs) if hasattr(o, "__dict__")}.values()
    before = [(o, vars(o), dict(vars(o))) for o in objects]
    tables = [
        (o, name, table, table.copy())
        for o, _, state in before
        for name, table in state.items()
        if isinstance(table, (dict, list, set))
    ]
    # Compared by identity below: ``==`` of tensors would run operations.
    changed: list[tuple[Any, str]] = []
    try:
        with compiled_kept(root):
            yield changed
    finally:
        for owner, state, was in before:
            if len(state) != len(was) or any(state.get(k) is not v for k, v in was.items()):
                names = {*state, *was}
                changed += [(owner, k) for k in names if state.get(k) is not was.get(k)]
                state.clear()
                state.update(was)
        for owner, name, table, content in tables:
            if not _same_items(table, content):
                changed.append((owner, name))
                table.clear()
                table.extend(content) if isinstance(table, list) else table.update(content)


def _same_items(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(before.get(key) is value for key, value in now.items())
    if isinstance(now, set):
        return bool(now == before)
    return all(a is b for a, b in zip(now, before, strict=True))
