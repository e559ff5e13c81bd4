"""What a leaf leaves behind in Python objects, which a run with proxies, not running it, misses.

It may set an attribute that the forward above reads, or fill a list that it is given. So the
forward is run again with a marker in all such places. If it does the same then, it reads none.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from torch import nn

from slapo.graph.trace.attributes import kind_of_module
from slapo.graph.trace.leaves import is_torch_leaf
from slapo.graph.trace.reads import codes_of

_CONTAINERS = (list, dict, set)


class _Marker:
    """Fails whatever is done with it."""

    def __bool__(self) -> bool:
        raise TypeError("it is there to be refused")


class Leavings:
    """Puts markers where the leaves of one run may leave something."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def leave(self, leaf: nn.Module, arguments: Any) -> None:
        """Do as a call of a leaf might."""
        for module, name in _attributes_set(leaf):
            self._mark_attribute(module, name)
        for container in _containers_in(arguments):
            self._fill(container)

    def undo(self) -> None:
        """Take all markers away again."""
        while self._undo:
            self._undo.pop()()

    def _mark_attribute(self, module: nn.Module, name: str) -> None:
        state = vars(module)
        if name in state:
            value = state[name]
            self._undo.append(lambda: state.__setitem__(name, value))
        else:
            self._undo.append(lambda: state.pop(name, None) and None)
        state[name] = _Marker()

    def _fill(self, container: Any) -> None:
        before = container.copy()

        def refill() -> None:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(before)

        self._undo.append(refill)
        if isinstance(container, dict):
            container.update({**dict.fromkeys(before, _Marker()), _Marker(): _Marker()})
        elif isinstance(container, list):
            container.append(_Marker())
        else:
            container.add(_Marker())


def may_leave(leaf: nn.Module, arguments: Any) -> bool:
    """Whether there is anything that a leaf may leave something in."""
    found = (*_attributes_set(leaf), *_containers_in(arguments))
    return bool(found)


def _attributes_set(leaf: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules at or below a leaf, and the attributes that their code sets when it is called.

    A list of theirs that it names may be appended to.
    """
    if is_torch_leaf(leaf):
        return
    for module in leaf.modules():
        if not is_torch_leaf(module):
            kind: Any = kind_of_module(module)
            stored, named = _names(kind)
            filled = {n for n, v in vars(module).items() if isinstance(v, _CONTAINERS)}
            names = (stored | (named & filled)) - vars(nn.Module()).keys()
            yield from ((module, name) for name in sorted(names))


def _containers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, _CONTAINERS):
        yield value
    inner = value.values() if isinstance(value, dict) else value
    if isinstance(value, (tuple, *_CONTAINERS)):
        for each in list(inner):
            yield from _containers_in(each)


@lru_cache(maxsize=1024)
def _names(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """The attributes that the methods of a class set, and those that they name."""
    steps = [step for code in codes_of(kind) for step in dis.get_instructions(code)]
    stored = frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")
    loaded = {"LOAD_ATTR", "LOAD_METHOD"}
    return stored, frozenset(step.argval for step in steps if step.opname in loaded)
