"""Run a primitive on a schedule node: bind, apply, record; primitives as typed methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from slapo.errors import SlapoError
from slapo.history import Record, caller_location, describe
from slapo.primitives.base import Primitive, is_builtin
from slapo.snapshot import restored_on_error

if TYPE_CHECKING:
    from slapo.schedule import Schedule
    from slapo.selection import Selection

P = ParamSpec("P")
R = TypeVar("R")


def run(node: Schedule, primitive: type[Primitive], /, *args: Any, **kwargs: Any) -> Any:
    """Apply `primitive` to `node` and note it in the history.

    Errors get the call in front of their message. What users' own primitives changed before they
    failed is undone; this library's own check before they change anything.
    """
    record = _record(node, primitive, args, kwargs)
    if not node.is_current:
        raise SlapoError(
            f"{record.call()}: this node left the schedule when a module above it was replaced; "
            "look it up again by its path"
        )
    state = node.state
    guard = nullcontext() if is_builtin(primitive) else restored_on_error(node.get_top_schedule())
    state.depth += 1
    try:
        with guard:
            result = primitive.apply(node, *args, **kwargs)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        _put_in_front(error, record)
        raise
    finally:
        state.depth -= 1
    if state.depth == 0 and result is not False:  # False: it could not, and changed nothing
        state.history.append(record)
    return node if result is None else result


def _record(
    node: Schedule, primitive: type[Primitive], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Record:
    signature = inspect.signature(primitive.apply)
    try:
        bound = signature.bind(node, *args, **kwargs)
    except TypeError as error:
        takes = f"({', '.join(str(p) for p in list(signature.parameters.values())[1:])})"
        raise TypeError(f"{primitive.name()}: {error}; it takes {takes}") from None
    arguments: dict[str, str] = {}
    for name, value in list(bound.arguments.items())[1:]:
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update({key: describe(item) for key, item in value.items()})
        else:
            arguments[name] = describe(value)
    return Record(node.path, primitive.name(), arguments, caller_location())


def _put_in_front(error: Exception, record: Record) -> None:
    """``sch["fc"].shard(...): `` before the message, once."""
    message = str(error.args[0]) if error.args else ""
    if not message.startswith(("sch[", "sch.")):
        error.args = (f"{record.call()}: {message}", *error.args[1:])


def as_method(
    primitive: type[Primitive], apply: Callable[Concatenate[Schedule, P], R]
) -> Callable[Concatenate[Schedule, P], R]:
    """`primitive` as a method of ``Schedule``, with its signature and manual."""

    @functools.wraps(apply)
    def method(self: Schedule, *args: P.args, **kwargs: P.kwargs) -> R:
        return run(self, primitive, *args, **kwargs)

    return _document(method, primitive)


def as_broadcast(
    primitive: type[Primitive], apply: Callable[Concatenate[Schedule, P], R]
) -> Callable[Concatenate[Selection, P], Selection]:
    """`primitive` as a method of ``Selection``: applied to each of its nodes, or to none."""

    @functools.wraps(apply)
    def method(self: Selection, *args: P.args, **kwargs: P.kwargs) -> Selection:
        return self.apply(primitive, *args, **kwargs)

    return _document(method, primitive)


def _document(method: Any, primitive: type[Primitive]) -> Any:
    method.__name__ = primitive.name()
    method.__qualname__ = f"Schedule.{primitive.name()}"
    method.__doc__ = primitive.__doc__
    parameters = list(inspect.signature(primitive.apply).parameters.values())
    parameters[0] = parameters[0].replace(name="self")
    method.__signature__ = inspect.Signature(parameters)
    return method
