"""Proxies that notice what Python asks of them, and cannot be answered while tracing.

A proxy stands for whatever the module is called with: a tensor, a tuple, an output with
attributes. ``isinstance``, ``hasattr`` and ``try: x.name`` would be settled by what the proxy
itself is, and the graph would hold one branch in silence.
"""

from __future__ import annotations

import dis
import functools
import operator
import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx

from slapo.errors import TraceError
from slapo.graph.trace.absent_parts import Part, Parts, may_have_none

_REFUSED = (
    "the forward asks {} ({}:{}), which this tracer cannot answer for every call; "
    'use tracer="huggingface", or name the module that does so in leaf_modules'
)
#: Code that knows proxies: torch, whose functions ask for ``__torch_function__`` first, and ours.
_MACHINERY = tuple(
    str(home) + os.sep for home in (Path(torch.__file__).parent, Path(__file__).parents[2])
)
#: They ask in the name of their caller.
_ASK_FOR_CALLER = frozenset({"__instancecheck__", "__subclasscheck__", "is_tensor"})
_CHECKERS = ("<frozen abc>", "abc.py", "typing.py")
_PLAIN_ACCESS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_CATCHES = frozenset({"AttributeError", "Exception", "BaseException"})
#: Where a trace starts: what calls it has no part in the forward.
_TRACER = str(Path(__file__).with_name("symbolic.py"))


class RefusingTracer(fx.Tracer):
    """``fx.Tracer`` whose proxies refuse questions.

    Attributes
    ----------
    refusal : TraceError or None
        The first question that was refused, should the forward have caught the error.
    """

    def __init__(self, absent: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.refusal: TraceError | None = None
        self.parts = Parts(absent)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A proxy that notices questions."""
        return _AskedProxy(node, self)

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any
    ) -> Any:
        """A proxy, or None for an item that is absent in this run."""
        part = None
        if target is operator.getitem and isinstance(args[0], fx.Proxy):
            part = self.part_of(args[0], args[1])
            if part is not None and part.is_absent:
                return None
        proxy = super().create_proxy(kind, target, args, kwargs, *more, **named)
        if part is not None:
            part.proxy = proxy
        return proxy

    def part_of(self, owner: fx.Proxy, key: Any) -> Part | None:
        """Note that a part of a value is taken, if it may be None."""
        if not may_have_none(owner.node, key):
            return None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_MACHINERY):
            frame = frame.f_back
        return None if frame is None else self.parts.take(key, frame)

    def refuse(self, question: str, frame: FrameType) -> None:
        """Refuse a question that is asked in this frame."""
        place = (frame.f_code.co_filename, frame.f_lineno)
        error = TraceError(_REFUSED.format(question, *place))
        self.refusal = self.refusal or error
        raise error


def _kind(proxy: Any) -> Any:
    """What ``isinstance`` and ``match`` look up when the type of the proxy does not fit."""
    frame = _asker(sys._getframe(1))
    if frame is not None and _asks_kind(frame):
        proxy.tracer.refuse("what kind of object a value is", frame)
    return type(proxy)


def _attribute(proxy: Any, name: str) -> Any:
    """Look up what a proxy does not have itself; the graph will ask the value for it."""
    frame = _asker(sys._getframe(1))
    if frame is not None and _asks_for_attribute(frame, name):
        proxy.tracer.refuse(f"whether a value has the attribute {name!r}", frame)
    tracer = proxy.tracer
    whole = frame is not None and not isinstance(proxy, fx.proxy.Attribute)
    part = tracer.part_of(proxy, name) if whole else None
    attribute = None if part is not None and part.is_absent else _AskedAttribute(proxy, name)
    if part is not None:
        part.proxy = attribute
    return attribute


def _word(proxy: Any) -> str:
    """A size as a word would be the name of its proxy."""
    frame = _asker(sys._getframe(1))
    if frame is not None:
        proxy.tracer.refuse("for a value as a word", frame)
    return fx.Proxy.__repr__(proxy)


def _key(proxy: Any) -> int:
    """In a dict or set a proxy is found by what it is itself: never."""
    frame = _asker(sys._getframe(1))
    if frame is not None:
        proxy.tracer.refuse("for a value as a key of a dict or set", frame)
    return id(proxy)


class _AskedProxy(fx.Proxy):
    __class__ = property(_kind)
    __getattr__ = _attribute
    __repr__ = _word
    __hash__ = _key


class _AskedAttribute(fx.proxy.Attribute):
    __class__ = property(_kind)
    __getattr__ = _attribute
    __repr__ = _word
    __hash__ = _key


# --- who asks ------------------------------------------------------------------------------------
def _asker(frame: FrameType | None) -> FrameType | None:
    """The frame of a forward that asks; None where torch or this library does for itself."""
    while frame is not None:
        name, filename = frame.f_code.co_name, frame.f_code.co_filename
        if filename.startswith(_MACHINERY):
            if name not in _ASK_FOR_CALLER:
                return None
        elif name != "__instancecheck__" and not filename.endswith(_CHECKERS):
            return frame
        frame = frame.f_back
    return None


def _asks_kind(frame: FrameType) -> bool:
    """Whether the frame is at such a question.

    Functions of torch in C look at their arguments too, from the frame that calls them.
    """
    operation = _operation(frame)
    if operation in _PLAIN_ACCESS or operation == "MATCH_CLASS":
        return True
    return "CALL" in operation and _calls(frame, "isinstance", "is_tensor")


def _asks_for_attribute(frame: FrameType, name: str) -> bool:
    """Whether the graph, with another value, could have to go on in another way."""
    operation = _operation(frame)
    known = hasattr(Tensor, name)
    if "CALL" in operation:
        return _calls(frame, "hasattr") or (not known and _calls(frame, "getattr"))
    # A plain access fails in the graph as it would in the forward, unless the forward catches it.
    return operation in _PLAIN_ACCESS and not known and _may_catch(frame)


def _operation(frame: FrameType) -> str:
    code, offset = frame.f_code.co_code, frame.f_lasti
    while dis.opname[code[offset]] == "CACHE":  # where Python code is called
        offset -= 2
    return dis.opname[code[offset]]


def _calls(frame: FrameType, *names: str) -> bool:
    """Whether the call that the frame is at is one of these functions, as ``f`` or ``m.f``."""
    if sys.version_info < (3, 11):  # without columns: whether it may be
        return not frozenset(names).isdisjoint(frame.f_code.co_names)
    return not _called(frame.f_code, frame.f_lasti).isdisjoint(names)


@functools.lru_cache(maxsize=4096)
def _called(code: CodeType, offset: int) -> frozenset[str]:
    """The names that the expression of a call starts with: it and its callee start alike."""
    places = [(place[0], place[2]) for place in code.co_positions()]
    start = places[offset // 2]
    loads = dis.get_instructions(code)
    alike = (i for i in loads if i.offset < offset and places[i.offset // 2] == start)
    return frozenset(str(i.argval) for i in alike if i.opname.startswith("LOAD_"))


def _may_catch(frame: FrameType | None) -> bool:
    """Whether a function on the way to `frame` names an error that a lack of attributes is."""
    while frame is not None and frame.f_code.co_filename != _TRACER:
        code = frame.f_code
        if not code.co_filename.startswith(_MACHINERY) and not _CATCHES.isdisjoint(code.co_names):
            return True
        frame = frame.f_back
    return False
