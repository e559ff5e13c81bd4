"""What a leaf leaves behind in Python objects, which a run with proxies, not running it, misses.

It may set an attribute that the forward above reads, or fill a list that it is given. So the
forward is run again with a marker in all such places. If it does the same then, it reads none.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from torch import nn

from slapo.graph.trace.attributes import OF_EVERY_MODULE, kind_of_module
from slapo.graph.trace.leaves import is_torch_leaf
from slapo.graph.trace.reads import codes_of
from slapo.graph.trace.state import CONTAINERS, refill


class _Marker:
    """Fails whatever is done with it."""

    def __bool__(self) -> bool:
        raise TypeError("it is there to be refused")


class Leavings:
    """Puts markers where the leaves of one run may leave something.

    Those in attributes are put back with the state of the module that is traced.
    """

    def __init__(self) -> None:
        self._filled: list[tuple[Any, Any]] = []

    def leave(self, leaf: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Do as a call of a leaf might."""
        for place in _places(leaf, args, kwargs):
            if isinstance(place, tuple):
                module, name = place
                module.__dict__[name] = _Marker()
                continue
            self._filled.append((place, place.copy()))
            if isinstance(place, dict):
                place.update({**dict.fromkeys(place, _Marker()), _Marker(): _Marker()})
            elif isinstance(place, list):
                place.append(_Marker())
            else:
                place.add(_Marker())

    def undo(self) -> None:
        """Empty the containers of markers."""
        for container, before in reversed(self._filled):
            refill(container, before)


def may_leave(leaf: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether there is anything that a call of a leaf may leave something in."""
    return next(_places(leaf, args, kwargs), None) is not None


def _places(leaf: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Modules at or below a leaf with an attribute that their code sets, containers it is given.

    A list of theirs that their code names may be appended to.
    """
    if is_torch_leaf(leaf):
        return
    for module in leaf.modules():
        if not is_torch_leaf(module):
            kind: Any = kind_of_module(module)
            stored, named = _names(kind)
            filled = {n for n, v in vars(module).items() if isinstance(v, CONTAINERS)}
            names = (stored | (named & filled)) - OF_EVERY_MODULE
            yield from ((module, name) for name in sorted(names))
    for value in (*args, *kwargs.values()):
        yield from _containers_in(value)


def _containers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, CONTAINERS):
        yield value
    if isinstance(value, (tuple, *CONTAINERS)):
        for each in list(value.values() if isinstance(value, dict) else value):
            yield from _containers_in(each)


@lru_cache(maxsize=1024)
def _names(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """The attributes that the methods of a class set, and those that they name."""
    steps = [step for code in codes_of(kind) for step in dis.get_instructions(code)]
    stored = frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")
    loaded = {"LOAD_ATTR", "LOAD_METHOD"}
    return stored, frozenset(step.argval for step in steps if step.opname in loaded)
