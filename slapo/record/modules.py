"""Modules as their class and constructor arguments."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from slapo.history import describe
from slapo.node import Node
from slapo.record.parts import PLAIN, Named, Part, Unnamed, decode, encode, import_path, revive
from slapo.weights.meta import init_empty_weights
from slapo.weights.provenance import own_values

_OF_TORCH = frozenset(vars(nn.Module()))
#: Tables of hooks; those named ``..._with_kwargs`` only refine the others.
_HOOKS = tuple(sorted(name for name in _OF_TORCH if "hook" in name and "_with_kwargs" not in name))
_BY_A_FUNCTION = (
    "create it in a top-level function of a module: select(path).replace(make) or "
    "replace_all(cls, make)"
)

Keep = Callable[[Any], Any]
_DEFAULTS: WeakKeyDictionary[type[nn.Module], Mapping[str, Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class ModuleSpec(Part):
    """A module as its class and constructor arguments.

    Parameters
    ----------
    cls
        Import path of the class.
    args, kwargs
        Arguments of the constructor.
    empty
        True if its parameters have no values of their own, and are rebuilt on ``meta``.
    state
        Fingerprint of the original module, for comparison; empty in a record from a file.
    """

    tag = "module"
    cls: Named
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    empty: bool
    state: str = ""

    @property
    def text(self) -> str:
        return self.cls.text

    def inner(self) -> Iterable[Any]:
        return (self.args, self.kwargs)

    def encode(self) -> Any:
        made: dict[str, Any] = {"class": self.cls.encode()}
        if self.args:
            made["args"] = [encode(arg) for arg in self.args]
        if self.kwargs:
            made["kwargs"] = {name: encode(value) for name, value in self.kwargs.items()}
        return {**made, "empty": True} if self.empty else made

    @classmethod
    def decode(cls, data: Any) -> ModuleSpec:
        args = tuple(map(decode, data.get("args", ())))
        kwargs = {name: decode(value) for name, value in data.get("kwargs", {}).items()}
        return cls(Named.decode(data["class"]), args, kwargs, data.get("empty", False))

    def revive(self, node: Node | None = None) -> nn.Module:
        args: Any = revive(self.args, node)  # type: ignore[arg-type]  # no part of these asks
        kwargs: Any = revive(self.kwargs, node)  # type: ignore[arg-type]
        with init_empty_weights(self.empty):
            made: nn.Module = self.cls.revive()(*args, **kwargs)
        return made

    def problem(self) -> str:
        """Rebuild the module, and compare it with the original."""
        if not self.state:
            return ""
        try:
            # A constructor may draw values; saving a record must not change what training draws
            # next.
            with torch.random.fork_rng(devices=[]):
                state = _state_of(self.revive())
        except Exception as error:  # the constructor may raise anything
            raised = f"{type(error).__name__}: {error}"
            return f"its constructor does not rebuild it ({raised}); {_BY_A_FUNCTION}"
        if state == self.state:
            return ""
        given = ", ".join(f"{name}={describe(value)}" for name, value in self.kwargs.items())
        return (
            f"a {self.text} that was changed after it was created, or stores an argument under "
            f"another name: {self.text}({given}) is not the same; {_BY_A_FUNCTION}"
        )


class _OpaqueError(Exception):
    """Raised for module state that a rebuilt module might lack."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}{_BY_A_FUNCTION}")


def keep_module(module: nn.Module, keep: Keep, node: Node) -> Part:
    """Encode a module that is an argument of a primitive of `node`."""
    try:
        empty = _is_empty(module, node)
        made = _recipe(module, keep)
        return ModuleSpec(*made, empty, _state_of(module))
    except _OpaqueError as error:
        return Unnamed(describe(module), str(error))
    # from the module's own code, which its primitive has not checked yet
    except Exception as error:
        return Unnamed(describe(module), f"{type(error).__name__}: {error}; {_BY_A_FUNCTION}")


def _is_empty(module: nn.Module, node: Node) -> bool:
    """Return whether a module has parameters, none of which has a value that would be lost."""
    for path, part in module.named_modules():
        # A wrapper around the model's own module, for example.
        if id(part) in node.state.nodes_of:
            what = f"its {path!r} is" if path else "it is"
            raise _OpaqueError(f"{what} in the model already, and a new one would not be the same")
    named = dict(module.named_parameters())
    if not named:
        return False
    model = {id(param) for param in node.mod.parameters()}
    shared = [name for name, param in named.items() if id(param) in model]
    if shared:
        raise _OpaqueError(f"it holds the model's own {shared[0]!r}")
    own = own_values(module)
    if own:
        raise _OpaqueError(
            f"its own values of {own[:3]} are not part of the record",
            "create it under slapo.init_empty_weights(), define weight_sources(), or ",
        )
    return True


def _recipe(module: nn.Module, keep: Keep) -> tuple[Named, tuple[Any, ...], dict[str, Any]]:
    cls = import_path(type(module))
    if cls is None:
        raise _OpaqueError(f"its class {type(module).__qualname__} cannot be imported by name")
    # Its constructor takes children, which have no attribute of an argument's name.
    if type(module) is nn.Sequential:
        return cls, tuple(keep(child) for child in module), {}
    kwargs: dict[str, Any] = {}
    for name, default in _parameters(type(module)).items():
        found, value = _attribute(module, name, default)
        kept = keep(value) if found else None
        if found and not isinstance(kept, Unnamed):
            kwargs[name] = kept
    return cls, (), kwargs


def _parameters(cls: type[nn.Module]) -> Mapping[str, Any]:
    """Return the named constructor arguments with defaults; cached, as the lookup is slow."""
    known = _DEFAULTS.get(cls)
    if known is None:
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = inspect.signature(cls).parameters.items()
        known = {name: each.default for name, each in parameters if each.kind in by_name}
        _DEFAULTS[cls] = known
    return known


def _attribute(module: nn.Module, name: str, default: Any) -> tuple[bool, Any]:
    """Find a module's attribute for a constructor argument; ``bias=True`` is a parameter."""
    if name in module._parameters:
        # nn.Linear(bias=True) keeps a parameter of that name, whose presence is the argument.
        return isinstance(default, bool), module._parameters[name] is not None
    if name in module._modules or name in _OF_TORCH:
        return False, None
    return name in vars(module), vars(module).get(name)


def _state_of(module: nn.Module) -> str:
    """Return a fingerprint of all classes and attributes that determine a module's behavior."""
    digest = hashlib.sha256()
    numbers: dict[int, int] = {}  # objects that are registered twice share a number
    for path, part in module.named_modules():
        digest.update(f"\n{path}: {type(part).__module__}.{type(part).__qualname__}".encode())
        hooks = [name for name in _HOOKS if part.__dict__.get(name)]
        if hooks:
            raise _OpaqueError(f"hooks were registered on it ({hooks[0].strip('_')})")
        for name, value in sorted(_attributes(part, numbers), key=itemgetter(0)):
            digest.update(f"\n{name}={_comparable(name, value)}".encode())
    return digest.hexdigest()


def _attributes(module: nn.Module, numbers: dict[int, int]) -> Iterator[tuple[str, Any]]:
    yield from ((k, v) for k, v in vars(module).items() if k not in _OF_TORCH)
    for name, param in module._parameters.items():
        yield name, None if param is None else _facts(param, numbers)
    for name, child in module._modules.items():
        yield name, numbers.setdefault(id(child), len(numbers))
    yield from module._buffers.items()


def _facts(param: nn.Parameter, numbers: dict[int, int]) -> tuple[Any, ...]:
    """Describe a parameter without its values."""
    number = numbers.setdefault(id(param), len(numbers))
    return number, tuple(param.shape), param.dtype, param.requires_grad, dict(vars(param))


def _comparable(name: str, value: Any) -> str:
    """Return a text that is equal for equal values only."""
    if type(value) in PLAIN:
        return repr(value)
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype} {_bytes_of(value)}"
    if isinstance(value, Mapping):
        return str({repr(k): _comparable(name, v) for k, v in value.items()})
    if isinstance(value, (tuple, list)):
        # With the type's name, as (1,) and [1] may act differently.
        return f"{type(value).__name__}{[_comparable(name, item) for item in value]}"
    if isinstance(value, (set, frozenset)):
        # Sets of strings have another order in each process.
        return str(sorted(_comparable(name, item) for item in value))
    named = import_path(value) if callable(value) else None
    if named is None:
        kind = type(value).__qualname__
        raise _OpaqueError(f"it holds an object of {kind} as {name!r}, which cannot be compared")
    return named.encode()


def _bytes_of(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "meta"
    # As bytes, since numpy has no bfloat16.
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
