"""A module tree is the same after a trace as before."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo.errors import TraceError

_SLOTS = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set)
_VALUES = (bool, int, float, complex, str, type(None))
_MISSING = object()


class ModuleState:
    """The attributes of all modules under `root`, to be put back.

    A forward may store things on its module; run on fake tensors it would leave fakes there. The
    same goes for its ``config``: heads of Transformers note there what their labels look like.
    """

    def __init__(self, root: nn.Module) -> None:
        self._fakes: dict[int, torch.Tensor] = {}
        self._saved = [
            (path, module, dict(vars(module)), {s: dict(vars(module)[s]) for s in _SLOTS})
            for path, module in root.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)  # its state lies in C++
        ]
        held = {
            id(value): value
            for _, _, attributes, _ in self._saved
            for name, value in attributes.items()
            if isinstance(value, _CONTAINERS) and name not in _SLOTS
        }
        self._held = [(value, value.copy()) for value in held.values()]
        configs = {
            id(c): c for m in root.modules() if hasattr(c := vars(m).get("config"), "__dict__")
        }
        self._configs = [(config, dict(vars(config))) for config in configs.values()]

    def conceal_buffers(self) -> None:
        """Put copies in the place of all buffers, so that a real run does not change them."""
        copies: dict[int, torch.Tensor] = {}
        for _, module, _, slots in self._saved:
            for name, buffer in slots["_buffers"].items():
                if buffer is None:
                    continue
                if id(buffer) not in copies:
                    copy = buffer.detach().clone().requires_grad_(buffer.requires_grad)
                    copies[id(buffer)] = copy
                self._conceal(module, None, name, copies[id(buffer)])

    def conceal_values(self, fake_mode: FakeTensorMode) -> None:
        """Make tensors of one element fake; the others become so when they are first used.

        Of these, fake tensors remember the real one: ``if self.flag:`` would see it, and
        ``self.count.add_(1)`` would change it.
        """
        for _, module, attributes, slots in self._saved:
            for slot in (attributes, slots["_parameters"], slots["_buffers"]):
                here = vars(module) if slot is attributes else None
                for name, value in slot.items():
                    if isinstance(value, torch.Tensor) and value.numel() <= 1:
                        self._conceal(module, here, name, fake_mode.from_tensor(value))

    def _conceal(
        self, module: nn.Module, attributes: dict[str, Any] | None, name: str, fake: torch.Tensor
    ) -> None:
        self._fakes[id(fake)] = fake
        if attributes is None:
            slot = "_parameters" if name in module._parameters else "_buffers"
            attributes = vars(module)[slot]
        attributes[name] = fake

    def restore(self) -> None:
        """Put back every attribute as it was."""
        for config, values in self._configs:
            vars(config).clear()
            vars(config).update(values)
        for _, module, attributes, slots in self._saved:
            state = vars(module)
            if state.keys() != attributes.keys() or any(
                state[k] is not attributes[k] for k in state
            ):
                state.clear()
                state.update(attributes)
            for slot, content in slots.items():
                now = state[slot]
                if now.keys() != content.keys() or any(now[k] is not content[k] for k in now):
                    now.clear()
                    now.update(content)
        for value, before in self._held:
            if not _same_items(value, before):
                _refill(value, before)

    def check_unchanged(self) -> None:
        """Refuse a forward that changes an attribute of a module in any way.

        Raises
        ------
        TraceError
            Naming the attribute.
        """
        before_of = {id(value): content for value, content in self._held}
        for path, module, attributes, slots in self._saved:
            if isinstance(module, fx.GraphModule):
                continue  # its graph changes no attribute; it notes when it compiles
            before = {**attributes, **slots["_parameters"], **slots["_buffers"]}
            for name, value in self._changed(module, before):
                if value is before.get(name) and _same_items(value, before_of[id(value)]):
                    continue
                where = f"{path}.{name}" if path else name
                raise TraceError(
                    f"the forward changes attribute {where!r}, which a graph cannot do; "
                    f"make {path or 'the module'} a leaf"
                )

    def _changed(self, module: nn.Module, before: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Attributes that are not what they were, or may have got other contents."""
        now = {**vars(module), **module._parameters, **module._buffers}
        for name in [n for n in (*now, *before.keys() - now.keys()) if n not in _SLOTS]:
            value, old = now.get(name, _MISSING), before.get(name, _MISSING)
            if isinstance(value, _CONTAINERS) and value is old:
                yield name, value
            elif value is not old and id(value) not in self._fakes:
                equal = type(value) is type(old) and type(value) in _VALUES and value == old
                if not equal and not _is_computed_once(module, name, value):
                    yield name, value

    def check(self, entered: Collection[str]) -> None:
        """Refuse a recording whose forward stores tensors on its modules.

        Raises
        ------
        TraceError
            Naming the attribute. Only modules whose forward went into the graph count; the
            others do this themselves when the graph calls them.
        """
        for path, module, attributes, slots in self._saved:
            if path not in entered:
                continue
            for name, value in _tensors_of(vars(module)):
                before = attributes.get(name, slots["_buffers"].get(name))
                before = slots["_parameters"].get(name) if before is None else before
                if value is not before and id(value) not in self._fakes:
                    where = f"{path}.{name}" if path else name
                    raise TraceError(
                        f"the forward stores a tensor in attribute {where!r}, which a graph cannot "
                        f"do; make {path or 'the module'} a leaf"
                    )


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def _same_items(now: Any, before: Any) -> bool:
    """Whether two lists, dicts or sets hold the same objects."""
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(k in before and before[k] is v for k, v in now.items())
    pairs = zip(now, before, strict=True)
    return now == before if isinstance(now, set) else all(a is b for a, b in pairs)


def _is_computed_once(module: nn.Module, name: str, value: Any) -> bool:
    """A ``functools.cached_property`` without tensors: the next call would compute the same."""
    found = inspect.getattr_static(type(module), name, None)
    return isinstance(found, functools.cached_property) and isinstance(value, _VALUES)


def _tensors_of(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    own = [(k, v) for k, v in state.items() if isinstance(v, torch.Tensor)]
    slots = [item for slot in ("_parameters", "_buffers") for item in state[slot].items()]
    return own + [(k, v) for k, v in slots if v is not None]
