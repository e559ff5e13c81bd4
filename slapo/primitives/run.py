"""Run a primitive on a schedule node: bind, apply, record. Expose primitives as typed methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Concatenate, ParamSpec, TypeVar

from slapo.errors import SlapoError
from slapo.graph.trace.module import forget_captures
from slapo.history import Record, caller_location, identify, spelled
from slapo.logger import get_logger
from slapo.node import Node
from slapo.primitives.base import Primitive, check_arguments, is_builtin
from slapo.record.keep import keep
from slapo.record.parts import PLAIN
from slapo.snapshot import restored_on_error

logger = get_logger()

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Node)


def run(node: Node, primitive: type[Primitive], /, *args: Any, **kwargs: Any) -> Any:
    """Apply `primitive` to `node` and record it in the history.

    Error messages start with the call. If a user's primitive fails, its changes at the node and
    below are undone. Built-in primitives check before they change anything.
    """
    return perform(node, primitive, args, kwargs, record_of(node, primitive, args, kwargs))


def perform(
    node: Node,
    primitive: type[Primitive],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    record: Record,
) -> Any:
    """Apply `primitive` to `node` and record it as `record`."""
    if not node.is_current:
        raise SlapoError(
            f"{record.call()}: this node left the schedule when a module above it was replaced; "
            "look it up again by its path"
        )
    node.check_live()
    state = node.state
    if state.built_for and state.depth == 0:
        raise SlapoError(
            f"{record.call()}: the model was built for target={state.built_for!r}, whose engine "
            "already holds its parameters; apply primitives before slapo.build, or rebuild the "
            "model and the schedule"
        )
    if state.built_for is not None and state.depth == 0:
        logger.warning(
            "%s after slapo.build: it was not checked together with the rest; call "
            "slapo.build(sch) again",
            record.call(),
        )
    if state.admits is not None and state.depth == 0 and not state.admits(record, args, kwargs):
        return node
    # A snapshot visits all modules below; primitives that check first do without.
    guard = nullcontext() if is_builtin(primitive) else restored_on_error(node)
    # Primitives that call primitives are one entry of the history, the outermost.
    state.depth += 1
    try:
        with guard:
            result = primitive.apply(node, *args, **kwargs)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        _put_in_front(error, record)
        raise
    finally:
        state.depth -= 1
    if state.depth == 0 and result is not False:  # False: the primitive failed and changed nothing
        node.note(record)
        if primitive.changes_model:
            forget_captures(node.mod, *(above.mod for above in node.ancestors()))
    return node if result is None else result


def record_of(
    node: Node, primitive: type[Primitive], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Record:
    """Record a call before it runs, because it may change its arguments."""
    given = _named(primitive.apply, args, kwargs)
    if given is None:
        given = _bound(node, primitive, args, kwargs)
    kept = {k: v if type(v) in PLAIN else keep(v, node) for k, v in given.items()}
    identity = identify((*args, *kwargs.values()))
    place = caller_location()
    record = Record(node.path, primitive.name(), kept, place, len(args), identity)
    if is_builtin(primitive):
        try:
            check_arguments(primitive.apply, given)
        except (TypeError, ValueError) as error:
            _put_in_front(error, record)
            raise
    return record


def _named(
    apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Map arguments to names in a fifth of the time of ``Signature.bind``.

    None if only ``bind`` can decide: for other kinds of signatures, and for invalid calls.
    """
    names, required, takes_more = _plain_parameters(apply)
    if names is None or len(args) > len(names):
        return None
    given = dict(zip(names, args, strict=False))
    given.update({name: kwargs[name] for name in names[len(args) :] if name in kwargs})
    if len(given) < len(args) + len(kwargs):
        if not takes_more or not given.keys().isdisjoint(kwargs.keys() & names[: len(args)]):
            return None
        given.update(kwargs)
    return given if given.keys() >= required else None


@functools.cache
def _plain_parameters(
    apply: Callable[..., Any],
) -> tuple[tuple[str, ...] | None, frozenset[str], bool]:
    """Names after the node, names without a default, and whether ``**kwargs`` are accepted."""
    parameters = list(_signature(apply).parameters.values())[1:]
    takes_more = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    plain = parameters[:-1] if takes_more else parameters
    if any(p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for p in plain):
        return None, frozenset(), False
    required = frozenset(p.name for p in plain if p.default is inspect.Parameter.empty)
    return tuple(p.name for p in plain), required, takes_more


def _bound(
    node: Node, primitive: type[Primitive], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    signature = _signature(primitive.apply)
    try:
        bound = signature.bind(node, *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{spelled(node.path)}.{primitive.name()}: {error}; {_taken(signature, kwargs)}"
        ) from None
    given: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        is_more = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        given.update(value if is_more else {name: value})
    return given


def _taken(signature: inspect.Signature, given: Iterable[str]) -> str:
    """Error text that lists the accepted arguments and the unknown keywords."""
    parameters = list(signature.parameters.values())[1:]
    shown = [str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters]
    unknown = [name for name in given if name not in signature.parameters]
    not_taken = f", not {unknown}" if unknown else ""
    return f"it takes ({', '.join(shown)}){not_taken}"


@functools.cache
def _signature(apply: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(apply)


def _put_in_front(error: Exception, record: Record) -> None:
    """Prefix the message with ``sch["fc"].shard(...): ``, once."""
    message = str(error.args[0]) if error.args else ""
    # Errors of nested primitives have the inner call in front already.
    if not message.startswith(("sch[", "sch.")):
        error.args = (f"{record.call()}: {message}", *error.args[1:])


def as_method(
    primitive: type[Primitive], apply: Callable[Concatenate[Any, P], Any]
) -> Callable[Concatenate[S, P], S]:
    """Wrap `primitive` as a method of ``Schedule`` that returns the node, so that calls chain."""
    return _method(primitive, apply)


def as_question(
    primitive: type[Primitive], apply: Callable[Concatenate[Any, P], R]
) -> Callable[Concatenate[S, P], R]:
    """Wrap `primitive` as a method of ``Schedule`` that returns the primitive's own result."""
    return _method(primitive, apply)


def _method(primitive: type[Primitive], apply: Callable[..., Any]) -> Any:
    @functools.wraps(apply)
    def method(self: Node, /, *args: Any, **kwargs: Any) -> Any:
        return run(self, primitive, *args, **kwargs)

    return document(method, primitive)


def document(method: Any, primitive: type[Primitive]) -> Any:
    """Give a method the name, signature and docstring of a primitive."""
    method.__name__ = primitive.name()
    method.__qualname__ = f"Schedule.{primitive.name()}"
    method.__doc__ = primitive.__doc__
    parameters = list(inspect.signature(primitive.apply).parameters.values())
    parameters[0] = parameters[0].replace(name="self")
    # help() and editors show the primitive's parameters instead of (*args, **kwargs).
    method.__signature__ = inspect.Signature(parameters)
    return method
