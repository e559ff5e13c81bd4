"""The class of traced modules: ours and the original's at once."""

from __future__ import annotations

from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

from torch import fx, nn

from slapo.errors import TraceError
from slapo.graph.trace.state import SLOTS

M = TypeVar("M", bound=fx.GraphModule)

#: What a traced module keeps in attributes of its own.
_OWN_STATE = frozenset(
    {
        "contract",
        "origin",
        "_graph",
        "_code",
        "_forward",
        "_signature",
        "_stale",
        "_kinds",
        "_together",
        "_variants",
        "_shown",
        "_held",
        "_passed",
    }
)
#: Methods of ours that hand on to the original's, or that have no say in what a call computes.
_SHARED_METHODS = frozenset(
    {
        *vars(object),
        *("__dict__", "__weakref__", "__module__", "__annotations__", "__parameters__"),
        *("__firstlineno__", "__static_attributes__", "__annotate__", "__annotations_cache__"),
        *("__copy__", "__deepcopy__", "__reduce_package__", "forward"),
    }
)


class _Eagerly:
    """Class attribute of a traced module's class: a method that runs on the original's forward.

    It gets an object of the original class that shares the state, so its children are those of the
    schedule.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            return self
        stand_in = object.__new__(module.origin)
        object.__setattr__(stand_in, "__dict__", module.__dict__)
        return getattr(stand_in, self.name)


#: (class as written, class of the original) -> class of its traced modules, while there are any.
_CLASSES: WeakValueDictionary[tuple[type, type], type[fx.GraphModule]] = WeakValueDictionary()


def class_for(kind: type[M], origin: type[nn.Module]) -> type[M]:
    """The class of traced modules that stand in for objects of `origin`: one for all of them.

    The original's class gets among its bases afterwards: behind ours, before ``nn.Module``. So
    ``super()`` works in its methods, and no hook of it that waits for subclasses is run.
    """
    known = _CLASSES.get((kind, origin))
    if known is not None:
        return cast("type[M]", known)
    made = type(origin.__name__, (kind,), {"_kind": kind})
    if not issubclass(made, origin):
        try:
            made.__bases__ = (kind, origin)
        except TypeError as error:
            raise TraceError(
                f"a graph cannot stand in for an object of {origin.__name__}: {error}; make the "
                "module a leaf"
            ) from error
    # Hugging Face's calls the model with caches, which no graph holds.
    generate = getattr(origin, "generate", None)
    if str(getattr(generate, "__module__", "")).startswith("transformers."):
        made.generate = _Eagerly("generate")  # type: ignore[attr-defined]
    _CLASSES[kind, origin] = made
    return made


def check_names(kind: type[fx.GraphModule], root: nn.Module) -> None:
    """Refuse a module that uses names of its own which a traced module has to itself.

    Raises
    ------
    TraceError
        Naming one.
    """
    reserved = _names_of(kind, fx.GraphModule) - _SHARED_METHODS
    methods = _names_of(type(root), nn.Module) & reserved
    if _only_checkpoints(root):
        methods -= {"__call__"}
    state = set(vars(root)).union(*(vars(root)[slot] for slot in SLOTS))
    for name in sorted(methods | (state & (reserved | _OWN_STATE))):
        what = "has a method or attribute" if name != "__call__" else "defines"
        raise TraceError(
            f"{type(root).__name__} {what} {name!r}, which a traced module uses otherwise: it "
            "would be lost; rename it or make the module a leaf"
        )


def _only_checkpoints(root: nn.Module) -> bool:
    """True where a layer's own ``__call__`` is that of Transformers, and calls the forward.

    Before 5.23 it checkpoints a layer there. Its code is among what a forward may reach, so whether
    it does is an attribute that cannot be set afterwards.
    """
    home = getattr(type(root).__call__, "__qualname__", "")
    checkpoints = getattr(root, "gradient_checkpointing", True)
    return home == "GradientCheckpointingLayer.__call__" and not checkpoints


def _names_of(kind: type, top: type) -> set[str]:
    """What a class and its bases define, from `top` on what they inherit aside."""
    mro = kind.__mro__
    end = mro.index(top) + (top is fx.GraphModule)
    return {name for base in mro[:end] for name in vars(base)}
