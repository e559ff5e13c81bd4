"""Wrappers around a module that leave all its names as they are."""

from __future__ import annotations

from typing import Any

from torch import nn

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class ModuleWrapper(nn.Module):
    """Runs another module in some context; its parameters and children appear as the wrapper's.

    The wrapper shares the dictionaries of parameters, buffers and children with the module it
    holds as ``.mod``, which is not a child itself. So ``state_dict()``, ``named_parameters()``
    and ``named_modules()`` show the same names with and without it, and ``.to()``, ``.train()``
    or loading weights act on the original.

    Parameters
    ----------
    mod
        The module to wrap; it may be a wrapper itself.
    """

    #: A graph of the forward would lose the context it runs in.
    traceable = False

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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        return self.mod(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.mod._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
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

    def extra_repr(self) -> str:
        """Name what is wrapped."""
        return type(self.mod).__name__

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Protocols such as __deepcopy__ are about the wrapper, not about what it wraps.
            if "mod" not in self.__dict__ or name.startswith("__"):
                raise
            return getattr(self.mod, name)


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
