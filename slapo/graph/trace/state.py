"""A module tree is the same after a trace as before."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from slapo.errors import TraceError

#: Where a module holds what is registered with it.
SLOTS = ("_parameters", "_buffers", "_modules")
CONTAINERS = (list, dict, set)
_VALUES = (bool, int, float, complex, str, type(None))
_MISSING = object()


@contextmanager
def no_results_kept() -> Iterator[None]:
    """Within the block methods of Transformers that keep their results compute them anew.

    They are kept for all models of the process, and a run without data would leave tensors without
    data there for every later run. While it is compiled, Transformers keeps none.
    """
    home = sys.modules.get("transformers.pytorch_utils")
    if home is None:
        yield
        return
    with mock.patch.object(home, "is_torchdynamo_compiling", _yes, create=True):
        yield


@contextmanager
def caches_off(root: nn.Module) -> Iterator[None]:
    """Within the block models of Transformers make a key/value cache only if their call says so.

    Their configs ask for one, which a graph cannot hold and training has no use for.
    """
    asking = [c for c in _configs(root) if vars(c).get("use_cache") is True]
    for config in asking:
        vars(config)["use_cache"] = False
    try:
        yield
    finally:
        for config in asking:
            vars(config)["use_cache"] = True


def _yes() -> bool:
    return True


class ModuleState:
    """The attributes of all modules under `root`, to be put back.

    A forward may store things on its module; run with proxies it would leave proxies there. The
    same goes for its ``config``: heads of Transformers note there what their labels look like.
    """

    def __init__(self, root: nn.Module) -> None:
        self._saved = [
            (path, module, dict(vars(module)), {s: dict(vars(module)[s]) for s in SLOTS})
            for path, module in root.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)  # its state lies in C++
        ]
        held = {
            id(value): value
            for _, _, attributes, _ in self._saved
            for name, value in attributes.items()
            if isinstance(value, CONTAINERS) and name not in SLOTS
        }
        # Most are dicts of hooks, and empty.
        self._held = [(value, value.copy() if value else ()) for value in held.values()]
        self._configs = [(config, dict(vars(config))) for config in _configs(root)]

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
                refill(value, before)

    def check_unchanged(self) -> None:
        """Refuse a forward that changes an attribute of a module in any way.

        Raises
        ------
        TraceError
            Naming the attribute.
        """
        for path, name in self.changes():
            where = f"{path}.{name}" if path else name
            raise TraceError(
                f"the forward changes attribute {where!r}, which a graph cannot do; "
                f"make {path or 'the module'} a leaf"
            )

    def changes(self) -> Iterator[tuple[str, str]]:
        """Path and name of the attributes that are not what they were."""
        before_of = {id(value): content for value, content in self._held}
        for path, module, attributes, slots in self._saved:
            if isinstance(module, fx.GraphModule):
                continue  # its graph changes no attribute; it notes when it compiles
            before = {**attributes, **slots["_parameters"], **slots["_buffers"]}
            now = {**vars(module), **module._parameters, **module._buffers}
            for name in [n for n in (*now, *before.keys() - now.keys()) if n not in SLOTS]:
                value, old = now.get(name, _MISSING), before.get(name, _MISSING)
                if value is not old:
                    equal = type(value) is type(old) and type(value) in _VALUES and value == old
                    if not equal and not _is_computed_once(module, name, value):
                        yield path, name
                elif isinstance(value, CONTAINERS) and not _same_items(value, before_of[id(value)]):
                    yield path, name


def _configs(root: nn.Module) -> list[Any]:
    """What the modules have for their ``config``, each once."""
    held = (vars(module).get("config") for module in root.modules())
    return list({id(each): each for each in held if hasattr(each, "__dict__")}.values())


def refill(container: Any, content: Any) -> None:
    """Give a list, dict or set these contents, and no others."""
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def _same_items(now: Any, before: Any) -> bool:
    """Whether two lists, dicts or sets hold the same objects."""
    if not now or len(now) != len(before):
        return len(now) == len(before)
    if isinstance(now, dict):
        return all(k in before and before[k] is v for k, v in now.items())
    pairs = zip(now, before, strict=True)
    return now == before if isinstance(now, set) else all(a is b for a, b in pairs)


def _is_computed_once(module: nn.Module, name: str, value: Any) -> bool:
    """A ``functools.cached_property`` without tensors: the next call would compute the same."""
    found = inspect.getattr_static(type(module), name, None)
    return isinstance(found, functools.cached_property) and isinstance(value, _VALUES)
