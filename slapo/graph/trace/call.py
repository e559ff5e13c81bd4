"""The arguments of a recording, bound to the parameters of ``forward``."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from slapo.errors import TraceError
from slapo.graph.trace.contract import constants_in
from slapo.graph.trace.trees import has_tensor

CACHE_REFUSED = "a key/value cache cannot be part of a graph; pass use_cache=False"
_STARS: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
_PLAIN = (str, int, float, bool, complex, torch.dtype, torch.device, enum.Enum, type(None))


@dataclass
class BoundCall:
    """A call of ``forward``, as the caller split it into positional and keyword arguments.

    Decorated forwards look at that split, so it is kept.
    """

    signature: inspect.Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall:
        """Check that the arguments fit the signature.

        Raises
        ------
        TypeError
            If they do not.
        """
        signature = inspect.signature(module.forward)
        call = cls(signature, tuple(args), dict(kwargs))
        try:
            signature.bind(*call.args, **call.kwargs)
        except TypeError as error:
            raise TypeError(
                f"the example inputs do not fit {type(module).__name__}.forward: {error}; its "
                f"parameters are {', '.join(signature.parameters)}"
            ) from error
        return call

    def without_cache(self) -> BoundCall:
        """The same call with ``use_cache=False`` where the caller has left it open.

        A key/value cache cannot be part of a graph, and training has no use for one.

        Raises
        ------
        TraceError
            If the caller asks for a cache.
        """
        if "use_cache" not in self.signature.parameters:
            if self.kwargs.get("use_cache"):  # among **kwargs
                raise TraceError(CACHE_REFUSED)
            return self
        given = self.signature.bind(*self.args, **self.kwargs).arguments
        value = given.get("use_cache", self.signature.parameters["use_cache"].default)
        if value is None:
            given["use_cache"] = False
        elif value is not False:
            raise TraceError(CACHE_REFUSED)
        bound = inspect.BoundArguments(self.signature, given)
        names = list(self.signature.parameters)
        if names.index("use_cache") < len(self.args):
            return BoundCall(self.signature, bound.args[: len(self.args)], self.kwargs)
        return BoundCall(self.signature, self.args, {**self.kwargs, "use_cache": False})

    @property
    def arguments(self) -> dict[str, Any]:
        """Parameter -> value, defaults filled in."""
        bound = self.signature.bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def with_arguments(self, new: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the same split, with values from `new`."""
        parameters = self.signature.parameters.values()
        positional = [new[p.name] for p in parameters if _positional(p)]
        for parameter in parameters:
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional += new[parameter.name]
        extra: dict[str, Any] = next(
            (new[p.name] for p in parameters if p.kind is p.VAR_KEYWORD), {}
        )
        kwargs = {name: extra[name] if name in extra else new[name] for name in self.kwargs}
        return tuple(positional[: len(self.args)]), kwargs

    def concrete(self) -> dict[str, Any]:
        """Parameters without a tensor, and their values: what the graph has built in.

        ``use_cache`` is not among them: the graph never makes a cache, asked or not by default.
        """
        found = {k: v for k, v in self.arguments.items() if not has_tensor(v) and k != "use_cache"}
        for name, value in found.items():
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                found[name] = constants_in(value)
        return found


def _positional(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def add_placeholder(graph: fx.Graph, parameter: inspect.Parameter) -> fx.Node:
    """The placeholder of a parameter: same name, same default.

    Raises
    ------
    TraceError
        If the default cannot be written in generated code.
    """
    star = _STARS.get(parameter.kind, "")
    default: tuple[Any, ...] = ()
    if not star and parameter.default is not parameter.empty:
        if not _is_plain(parameter.default):
            raise TraceError(
                f"the default of parameter {parameter.name!r}, {parameter.default!r}, cannot be "
                "written in a graph; make the module a leaf"
            )
        default = (parameter.default,)
    return graph.create_node("placeholder", star + parameter.name, default, name=parameter.name)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def named_constants(module: nn.Module, concrete_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Constants for parameters of a forward, as scripts write them.

    Entries for ``*args`` and ``**kwargs``, and those without a value, as an inspection of the
    signature gives them, are dropped.

    Examples
    --------
    >>> import inspect
    >>> class Loose(nn.Module):
    ...     def forward(self, x, scale=2, **kwargs):
    ...         return x * scale
    >>> parameters = inspect.signature(Loose().forward).parameters.values()
    >>> named_constants(Loose(), {p.name: p.default for p in parameters})
    {'scale': 2}
    """
    parameters = inspect.signature(module.forward).parameters
    return {
        name: value
        for name, value in (concrete_args or {}).items()
        if value is not inspect.Parameter.empty
        and (name not in parameters or parameters[name].kind not in _STARS)
    }
