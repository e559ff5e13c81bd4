"""The base class of primitives, their registry, and the checks of their declared arguments."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from torch import nn

from slapo.errors import with_nearest
from slapo.history import describe

T = TypeVar("T")


class Primitive:
    """A verb of the schedule language; subclass it to add your own.

    Examples
    --------
    >>> import torch.nn as nn
    >>> import slapo
    >>> @slapo.register_primitive()
    ... class FreezeWeightsPrimitive(slapo.Primitive):
    ...     '''Stops training of a module's parameters.'''
    ...
    ...     @staticmethod
    ...     def name():
    ...         return "freeze_weights"
    ...
    ...     @staticmethod
    ...     def apply(sch):
    ...         sch.mod.requires_grad_(False)
    >>> sch = slapo.create_schedule(nn.Linear(2, 2))
    >>> sch.freeze_weights().mod.weight.requires_grad
    False
    """

    #: false for a primitive that only records a decision; captures of the model stay valid then
    changes_model = True

    def __init_subclass__(cls, /, name: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name:
            cls.name = staticmethod(lambda: name)  # type: ignore[method-assign]

    @staticmethod
    def name() -> str:
        """Name of the method on every schedule; ``class X(Primitive, name=...)`` sets it too."""
        raise NotImplementedError("a Primitive needs a static name() that returns a string")

    @staticmethod
    def apply(sch: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Act on a schedule node; a result of None stands for the node itself."""
        raise NotImplementedError("a Primitive needs a static apply(sch, ...)")

    @staticmethod
    def init_metadata() -> Any:
        """Initial value of ``sch.metadata.primitives[name]`` on a node."""
        return {}

    @staticmethod
    def is_verifiable() -> bool:
        """Return False if :class:`slapo.Verify` cannot run a model after this primitive."""
        return True


_REGISTRY: dict[str, type[Primitive]] = {}
_BUILTIN: set[str] = set()
_RESERVED: set[str] = set()


def register_primitive() -> Callable[[type[T]], type[T]]:
    """Add a :class:`Primitive` to every schedule as a method; used as a class decorator.

    Raises
    ------
    TypeError
        If the class is not a ``Primitive``.
    ValueError
        If the name is taken.
    """

    def register(cls: type[T]) -> type[T]:
        given: Any = cls
        if not (isinstance(given, type) and issubclass(given, Primitive)):
            shown = getattr(cls, "__name__", repr(cls))
            raise TypeError(
                f"register_primitive: got {shown}, which is not a class derived from "
                "slapo.Primitive; derive it from that"
            )
        name = given.name()
        if name in _REGISTRY or name in _RESERVED:
            taken = _REGISTRY.get(name)
            by = f"by {taken.__name__}" if taken else "by an attribute of Schedule"
            raise ValueError(f"register_primitive: {name!r} is taken {by}; choose another name")
        _REGISTRY[name] = given
        return cls

    return register


def register_builtin(*primitives: type[Primitive]) -> None:
    """Register the library's own primitives."""
    for primitive in primitives:
        _REGISTRY[primitive.name()] = primitive
        _BUILTIN.add(primitive.name())


def reserve_names(names: set[str]) -> None:
    """Reserve names that no primitive may take."""
    # Names of primitives are attributes of Schedule too; messages name their primitive instead.
    _RESERVED.update(names - set(_REGISTRY))


def find_primitive(name: str) -> type[Primitive] | None:
    """Return the primitive called `name`, or None."""
    return _REGISTRY.get(name)


def is_builtin(primitive: type[Primitive]) -> bool:
    """Return True for the library's own primitives, which check before they change anything."""
    return _REGISTRY.get(primitive.name()) is primitive and primitive.name() in _BUILTIN


def list_primitives(name_only: bool = True) -> list[str] | dict[str, type[Primitive]]:
    """List all primitives, including those registered by users.

    Parameters
    ----------
    name_only
        Return names; otherwise a dict of name -> class, whose ``help()`` is the manual.

    Examples
    --------
    >>> "shard" in list_primitives()
    True
    """
    return sorted(_REGISTRY) if name_only else dict(sorted(_REGISTRY.items()))


# --- arguments -----------------------------------------------------------------------------------
# The annotations of `apply` declare the arguments. ``Annotated[int, "an axis of the tensor"]`` adds
# a hint to the error message.
_WORDS = {
    int: "an integer",
    bool: "True or False",
    str: "a string",
    type: "a class",
    collections.abc.Callable: "a function",
    collections.abc.Mapping: "a dict",
    collections.abc.Sequence: "a sequence",
    collections.abc.Collection: "a sequence",
    nn.Module: "a module",
}


#: Classes whose instances also pass for other classes: a bool is an int, a string a sequence, a
#: module a function. Their instances are accepted only where the class itself is declared.
_NAMED = (bool, str, nn.Module)


def check_arguments(apply: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` or ``ValueError`` for an argument that `apply` does not accept."""
    for name, (classes, choices, hint) in _declared(apply).items():
        if name not in given:
            continue
        value = given[name]
        unnamed = any(isinstance(value, one) and one not in classes for one in _NAMED)
        if isinstance(value, classes) and not unnamed:
            continue
        if choices and not (isinstance(value, str) and value in choices):
            shown = [*choices, *([None] if type(None) in classes else [])]
            known = with_nearest(str(value), choices, f"known are {shown}")
            raise ValueError(f"unknown {name} {value!r}; {known}")
        if not choices:
            wanted = " or ".join(_WORDS[one] for one in classes if one in _WORDS)
            further = f", {hint}" if hint else ""
            raise TypeError(f"{name} is {describe(value)}; pass {wanted}{further}")


@functools.cache
def _declared(
    apply: Callable[..., Any],
) -> dict[str, tuple[tuple[type, ...], tuple[str, ...], str]]:
    """Map each parameter name to its accepted classes, its accepted strings, and a hint."""
    found = {}
    # eval_str, as annotations are strings under ``from __future__ import annotations``.
    hints: dict[str, Any] = inspect.get_annotations(apply, eval_str=True)
    for name, hint in hints.items():
        note = ""
        if get_origin(hint) is Annotated:
            hint, note = get_args(hint)
        is_union = get_origin(hint) in (Union, types.UnionType)
        kinds = get_args(hint) if is_union else (hint,)
        choices = [c for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)]
        classes = [get_origin(kind) or kind for kind in kinds if get_origin(kind) is not Literal]
        if name != "return" and Any not in kinds:
            found[name] = tuple(classes), tuple(choices), note
    return found
