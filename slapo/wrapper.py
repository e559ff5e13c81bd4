"""Module wrappers that keep all names unchanged."""

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
    """Metaclass of classes derived at run time, which no module has by name.

    Pickles rebuild such a class from its ``_slapo_made``: a function and its arguments.
    """

    @property
    def _slapo_made(cls) -> tuple[Any, ...]:
        kind: Any = cls
        return _class_for, (kind._slapo_kind, kind._slapo_origin)


copyreg.pickle(MadeClass, lambda cls: cls._slapo_made)


class ModuleWrapper(nn.Module):
    """Runs another module in some context; its parameters and children appear as the wrapper's own.

    The wrapper shares the dictionaries of parameters, buffers and children with the module in
    ``.mod``, which is not a child itself. So ``state_dict()``, ``named_parameters()`` and
    ``named_modules()`` have the same names with and without it, and ``.to()``, ``.train()`` or
    loading weights act on the original. The wrapper is also an instance of the original's class, so
    policies that check the class find it.
    """

    #: A graph of the forward would lose the context that it runs in.
    traceable = False
    _slapo_origin: type[nn.Module] = nn.Module

    #: the wrapped module, which may itself be a wrapper
    mod: nn.Module

    def __init__(self, mod: nn.Module) -> None:
        super().__init__()
        self.set_mod(mod)

    def set_mod(self, mod: nn.Module) -> None:
        """Wrap `mod` from now on."""
        if not isinstance(mod, nn.Module):
            raise TypeError(f"{type(self).__name__} wraps an nn.Module, got {type(mod).__name__}")
        self.__dict__["mod"] = mod
        for slot in _SHARED:
            self.__dict__[slot] = mod.__dict__[slot]
        self.__dict__["_version"] = mod._version  # version of its state_dict entries
        self.training = mod.training
        kind = getattr(type(self), "_slapo_kind", type(self))
        if type(self) in (
            kind,
            _CLASSES.get((kind, type(self)._slapo_origin)),
        ):  # not a class that FSDP2 derived
            self.__class__ = _class_for(kind, _class_of(innermost(mod)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call as ``nn.Module``; the original's ``__call__`` runs when the original is called."""
        return nn.Module.__call__(self, *args, **kwargs)  # looked up at the call: tracers patch it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.mod(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.mod._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        for hook in self._load_state_dict_pre_hooks.values():  # moved here from the wrapped module
            hook(*args, **kwargs)
        self.mod._load_from_state_dict(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes, such as sizes, on the wrapped module; the training mode on both."""
        inner = self.__dict__.get("mod")
        if name == "training" and inner is not None:
            # Code that sets the flag of all modules() does not reach the wrapped one.
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
        """Copy the wrapper and the wrapped module, bypassing the original class's protocol."""
        new = memo[id(self)] = _empty(*self.__reduce_ex__(2)[1])
        new.__setstate__(copy.deepcopy(self.__dict__, memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the state and a recipe for the class, which no module has by name."""
        kind = getattr(type(self), "_slapo_kind", type(self))
        return _empty, (kind, type(self)._slapo_origin), self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Protocols such as __deepcopy__ concern the wrapper, not the wrapped module.
            if "mod" not in self.__dict__ or name.startswith("__"):
                raise
            return getattr(self.mod, name)


class _Delegated:
    """Class attribute of a wrapper's class that returns the wrapped module's own attribute.

    The attribute of the original's class would have the shared value of its instances.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Any, owner: type[ModuleWrapper]) -> Any:
        return getattr(owner._slapo_origin if wrapper is None else wrapper.mod, self.name)


#: (declared class, class of the original) -> class of its wrappers, weakly referenced
_CLASSES: WeakValueDictionary[tuple[type, type], type[ModuleWrapper]] = WeakValueDictionary()


def _class_for(kind: type[W], origin: type[nn.Module]) -> type[W]:
    """Return the class of wrappers of one kind around instances of `origin`.

    The original's class is added to the bases afterwards, so that its ``__init_subclass__`` does
    not run. Overrides of ``nn.Module`` methods run on the wrapper, other methods on the wrapped
    module.
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
    except TypeError:  # incompatible layouts, for example by __slots__
        return kind
    _CLASSES[kind, origin] = made
    return made


def _signed(kind: type[ModuleWrapper], origin: type[nn.Module]) -> Callable[..., Any]:
    """Return a wrapper's forward with the original's signature, which trainers inspect."""
    code = kind.forward
    signed = FunctionType(
        code.__code__, code.__globals__, code.__name__, code.__defaults__, code.__closure__
    )
    signed.__doc__ = origin.forward.__doc__
    with suppress(TypeError, ValueError):  # a forward that is not written in Python
        signed.__signature__ = inspect.signature(origin.forward)  # type: ignore[attr-defined]
    return signed


def _class_of(module: nn.Module) -> type[nn.Module]:
    """Extra base class of a wrapper around `module`; of a traced one, its original class."""
    if isinstance(module, fx.GraphModule):
        trace = vars(module).get("_trace")
        origin: type[nn.Module] = nn.Module if trace is None else trace.origin
        return origin
    return nn.Module if isinstance(module, torch.jit.ScriptModule) else type(module)


def _empty(kind: type[W], origin: type[nn.Module]) -> W:
    """Create a wrapper without state."""
    return object.__new__(_class_for(kind, origin))


def innermost(module: nn.Module) -> nn.Module:
    """Return the module under all wrappers."""
    while isinstance(module, ModuleWrapper):
        module = module.mod
    return module


def with_wrapped(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all that it wraps, which ``modules()`` does not name."""
    yield module
    while isinstance(module, ModuleWrapper):
        module = module.mod
        yield module


def is_adapted(module: nn.Module) -> bool:
    """Return True for a layer with low-rank adapters around it."""
    # By names, without importing PEFT.
    return all(name in module._modules for name in ("base_layer", "lora_A", "lora_B"))


def replace_innermost(module: nn.Module, new: nn.Module) -> nn.Module:
    """Put `new` under the wrappers of `module`; return the outermost module."""
    if not isinstance(module, ModuleWrapper):
        return new
    chain = [module]
    while isinstance(chain[-1].mod, ModuleWrapper):
        chain.append(chain[-1].mod)
    for wrapper in reversed(chain):
        # Each wrapper shares the tables of what it wraps, so all of them are set again, from the
        # inside.
        wrapper.set_mod(new)
        new = wrapper
    return module


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put the model in train or eval mode; every module's own flag is restored at the end."""
    flags = [(m, m.training) for outer in model.modules() for m in with_wrapped(outer)]
    model.train(training)
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
