"""Wrappers around a module that leave all its names as they are."""

from __future__ import annotations

import copy
import copyreg
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import fx, nn

W = TypeVar("W", bound="ModuleWrapper")

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class MadeClass(type):
    """A class that was made for another one: pickles make it again, as no module has its name.

    Each says by ``_slapo_made`` how: a function and its arguments.
    """

    @property
    def _slapo_made(cls) -> tuple[Any, ...]:
        kind: Any = cls
        return _class_for, (kind._slapo_kind, kind._slapo_origin)


copyreg.pickle(MadeClass, lambda cls: cls._slapo_made)


class ModuleWrapper(nn.Module):
    """Runs another module in some context; its parameters and children appear as the wrapper's.

    The wrapper shares the dictionaries of parameters, buffers and children with the module it
    holds as ``.mod``, which is not a child itself. So ``state_dict()``, ``named_parameters()``
    and ``named_modules()`` show the same names with and without it, and ``.to()``, ``.train()``
    or loading weights act on the original. The wrapper is an object of the original's class, too:
    ``isinstance`` holds for both, so policies that go by the class find it.
    """

    #: A graph of the forward would lose the context it runs in.
    traceable = False
    _slapo_origin: type[nn.Module] = nn.Module

    #: the module to wrap; it may be a wrapper itself
    mod: nn.Module

    def __init__(self, mod: nn.Module) -> None:
        super().__init__()
        self.set_mod(mod)

    def set_mod(self, mod: nn.Module) -> None:
        """Hold `mod` from now on."""
        if not isinstance(mod, nn.Module):
            raise TypeError(f"{type(self).__name__} wraps an nn.Module, got {type(mod).__name__}")
        self.__dict__["mod"] = mod
        for slot in _SHARED:
            self.__dict__[slot] = mod.__dict__[slot]
        self.__dict__["_version"] = mod._version  # of its entries in a state_dict
        self.training = mod.training
        kind = getattr(type(self), "_slapo_kind", type(self))
        if type(self) in (
            kind,
            _CLASSES.get((kind, type(self)._slapo_origin)),
        ):  # no other's, of FSDP2
            self.__class__ = _class_for(kind, _class_of(innermost(mod)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As any module's; what the original's class does there is done when that is called."""
        return nn.Module.__call__(self, *args, **kwargs)  # at the call: tracers patch it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.mod(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.mod._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        for hook in self._load_state_dict_pre_hooks.values():  # which moved here from the wrapped
            hook(*args, **kwargs)
        self.mod._load_from_state_dict(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes are those of the wrapped module, its sizes for one; its mode is of both."""
        inner = self.__dict__.get("mod")
        if name == "training" and inner is not None:
            # Who sets the flags of all modules() does not meet the wrapped one.
            inner.training = value
        own = name in self.__dict__ or hasattr(nn.Module, name)
        if inner is None or own:
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.mod, name)

    def extra_repr(self) -> str:
        mod = self.mod
        return mod._get_name() if isinstance(mod, ModuleWrapper) else type(mod).__name__

    def _get_name(self) -> str:
        name: str = getattr(type(self), "_slapo_kind", type(self)).__name__
        return name

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleWrapper:
        """A copy of the wrapper and of what it wraps, whatever the original's class says."""
        new = memo[id(self)] = _empty(*self.__reduce_ex__(2)[1])
        new.__setstate__(copy.deepcopy(self.__dict__, memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """State, and how to find the class: no module has it under its name."""
        kind = getattr(type(self), "_slapo_kind", type(self))
        return _empty, (kind, type(self)._slapo_origin), self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Protocols such as __deepcopy__ are about the wrapper, not about what it wraps.
            if "mod" not in self.__dict__ or name.startswith("__"):
                raise
            return getattr(self.mod, name)


class _Delegated:
    """Class attribute of a wrapper's class: what the wrapped module has under that name.

    The original's class would answer by what its objects share, where the wrapped one has its own.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Any, owner: type[ModuleWrapper]) -> Any:
        return getattr(owner._slapo_origin if wrapper is None else wrapper.mod, self.name)


#: (class as written, class of the original) -> class of its wrappers, while there are any.
_CLASSES: WeakValueDictionary[tuple[type, type], type[ModuleWrapper]] = WeakValueDictionary()


def _class_for(kind: type[W], origin: type[nn.Module]) -> type[W]:
    """The class of wrappers of one kind around objects of `origin`.

    The original's class gets among its bases afterwards, so that no hook of it that waits for
    subclasses is run. What overrides methods of ``nn.Module`` runs on the wrapper, the rest on the
    wrapped module.
    """
    known: Any = _CLASSES.get((kind, origin))
    if known is not None or issubclass(kind, origin):
        return known or kind
    ours = {name for base in kind.__mro__ for name in vars(base)}
    theirs = {name for base in origin.__mro__ for name in vars(base)} - ours
    delegated = {name: _Delegated(name) for name in theirs if not name.startswith("__")}
    body = {"forward": _signed(kind, origin), "_slapo_kind": kind, "_slapo_origin": origin}
    made: Any = MadeClass(origin.__name__, (kind,), {**delegated, **body})
    try:
        made.__bases__ = (kind, origin)
    except TypeError:  # a layout that does not go with another's, by __slots__ for one
        return kind
    _CLASSES[kind, origin] = made
    return made


def _signed(kind: type[ModuleWrapper], origin: type[nn.Module]) -> Callable[..., Any]:
    """The forward of a kind of wrapper, under the original's signature.

    Trainers choose the columns of a batch by it.
    """
    code = kind.forward
    signed = FunctionType(
        code.__code__, code.__globals__, code.__name__, code.__defaults__, code.__closure__
    )
    signed.__doc__ = origin.forward.__doc__
    with suppress(TypeError, ValueError):  # of a forward that is not written in Python
        signed.__signature__ = inspect.signature(origin.forward)  # type: ignore[attr-defined]
    return signed


def _class_of(module: nn.Module) -> type[nn.Module]:
    """The extra base class of a wrapper around `module`; of a traced one, its original class."""
    if isinstance(module, fx.GraphModule):
        trace = vars(module).get("_trace")
        origin: type[nn.Module] = nn.Module if trace is None else trace.origin
        return origin
    return nn.Module if isinstance(module, torch.jit.ScriptModule) else type(module)


def _empty(kind: type[W], origin: type[nn.Module]) -> W:
    """A wrapper without state."""
    return object.__new__(_class_for(kind, origin))


def innermost(module: nn.Module) -> nn.Module:
    """The module under all wrappers."""
    while isinstance(module, ModuleWrapper):
        module = module.mod
    return module


def replace_innermost(module: nn.Module, new: nn.Module) -> nn.Module:
    """`new` under the wrappers of `module`; returns the outermost module."""
    if not isinstance(module, ModuleWrapper):
        return new
    chain = [module]
    while isinstance(chain[-1].mod, ModuleWrapper):
        chain.append(chain[-1].mod)
    for wrapper in reversed(chain):
        wrapper.set_mod(new)
        new = wrapper
    return module


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in train or eval mode; every module's own flag is put back."""
    modules = [m for outer in model.modules() for m in (outer, innermost(outer))]
    flags = [(m, m.training) for m in modules]
    model.train(training)
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
