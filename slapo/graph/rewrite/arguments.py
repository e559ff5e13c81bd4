"""Mapping of a subgraph's inputs to the arguments of its replacement."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from slapo.graph.match.dataflow import is_size
from slapo.graph.match.values import same_constant
from slapo.graph.trace.nodes import nodes_in

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Callee:
    """The parameters of a callable without the callable, which a rewrite keeps."""

    #: name in messages, such as "module GELU"
    label: str
    #: without ``self``; None if there is no readable signature
    parameters: tuple[Parameter, ...] | None
    #: True if the signature states that one tensor is returned
    returns_tensor: bool = False

    @classmethod
    def of(cls, new: Callable[..., Any]) -> Callee:
        """Read the signature of a module's forward, or of a function."""
        if isinstance(new, nn.Module):
            label = f"module {type(new).__name__}"
        else:
            bare = new.func if isinstance(new, functools.partial) else new
            label = f"function {getattr(bare, '__name__', repr(bare))}"
        found = _signature_of(new)
        if found is None:
            return cls(label, None)
        parameters = (p.replace(annotation=Parameter.empty) for p in found.parameters.values())
        returns = found.return_annotation
        return cls(label, tuple(parameters), returns in (torch.Tensor, "Tensor", "torch.Tensor"))

    @property
    def names(self) -> list[str]:
        """The parameters that can be passed by name."""
        return [p.name for p in self.parameters or () if p.kind not in _REST]

    def takes(self, kind: Any) -> bool:
        """Return whether there is a parameter of a kind."""
        return any(p.kind is kind for p in self.parameters or ())

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Format a call with the names of the parameters."""
        names = [p.name for p in self.parameters or () if p.kind in _POSITIONAL]
        shown = [f"{name}={value}" for name, value in zip(names, args, strict=False)]
        shown += map(str, args[len(names) :])
        shown += [f"{name}={value}" for name, value in kwargs.items()]
        return f"{self.label.split()[-1]}({', '.join(shown)})"


def _signature_of(new: Callable[..., Any]) -> inspect.Signature | None:
    target: Any = new.forward if isinstance(new, nn.Module) else new
    original = getattr(new, "_orig_mod", None)  # module wrapped by torch.compile
    if isinstance(original, nn.Module):
        return _signature_of(original)
    schema = getattr(target, "schema", None)
    if isinstance(schema, torch.FunctionSchema):
        skipped = 1 if isinstance(new, nn.Module) else 0
        returns = ", ".join(str(value.type) for value in schema.returns)
        return inspect.Signature(_schema_parameters(schema)[skipped:], return_annotation=returns)
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


def _schema_parameters(schema: torch.FunctionSchema) -> list[Parameter]:
    return [
        Parameter(
            argument.name,
            Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value() else Parameter.empty,
        )
        for argument in schema.arguments
    ]


def _defaults_of(old: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a callable; torch operators have them in their schemas."""
    signature = _signature_of(old)
    if signature is None:
        # A builtin function shows no signature; the operator of its name has the defaults.
        packet = getattr(torch.ops.aten, getattr(old, "__name__", ""), None)
        overloads = [] if packet is None else [getattr(packet, o) for o in packet.overloads()]
        parameters = [p for o in overloads for p in _schema_parameters(o._schema)]
    else:
        parameters = list(signature.parameters.values())
    return {p.name: p.default for p in parameters if p.default is not Parameter.empty}


def plan_call(
    callee: Callee,
    inputs: Sequence[Any],
    concrete_args: Mapping[str, Any],
    bindings: Mapping[str, Any],
) -> Arguments:
    """Assign the inputs of a subgraph to the parameters of a callable.

    Parameters in `concrete_args` get the value there, and those named like a pattern's argument the
    value in `bindings`. Other values fill the remaining required parameters, first in the pattern's
    order, then in order of first use. Constants and sizes are passed only if parameters are left
    for them.
    """
    names = callee.names
    bound = {name: value for name, value in bindings.items() if name in names}
    unnamed = [value for name, value in bindings.items() if name not in names]
    taken, of_pattern = set(nodes_in(bound)), dict.fromkeys(nodes_in(list(bindings.values())))
    others = [value for value in inputs if value not in of_pattern]
    rest = [v for v in (*of_pattern, *others) if v in inputs and v not in taken]
    if callee.parameters is None:
        return tuple(rest), dict(concrete_args)
    values = {**bound, **concrete_args}
    _check_names(callee, concrete_args, values)
    wanted = [p for p in callee.parameters if _is_required(p) and p.name not in values]
    if callee.takes(Parameter.VAR_POSITIONAL):
        choices = [rest] if len(rest) >= len(wanted) else []
    else:
        choices = []
        # Four choices in this order: nodes alone, or constants of the pattern as well; each with
        # sizes and without. The first with as many values as there are required parameters counts.
        for values_left in (rest, [*unnamed, *others]):
            choices += [values_left, [value for value in values_left if not is_size(value)]]
        choices = [given for given in choices if len(given) == len(wanted)]
    if not choices:
        fixed = [f"{k}={v}" for k, v in bound.items() if k not in concrete_args]
        besides = f" besides {', '.join(fixed)}, bound by name" if fixed else ""
        raise ValueError(
            f"{callee.label} takes {len(wanted)} required arguments "
            f"({', '.join(p.name for p in wanted)}){besides}, but the subgraph has {len(rest)} "
            f"inputs ({', '.join(map(str, rest))}); fix more parameters with concrete_args, "
            "give them defaults, or also match the operations between these inputs"
        )
    return _distribute(callee.parameters, choices[0], values, concrete_args)


def _is_required(parameter: Parameter) -> bool:
    return parameter.kind in _POSITIONAL and parameter.default is Parameter.empty


def _check_names(
    callee: Callee, concrete_args: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Refuse constants for unknown parameters, and keyword-only parameters without a value."""
    unknown = [name for name in concrete_args if name not in callee.names]
    if unknown and not callee.takes(Parameter.VAR_KEYWORD):
        raise ValueError(
            f"{callee.label} has no parameter {', '.join(map(repr, unknown))}; "
            f"concrete_args may name {', '.join(callee.names) or 'none'}"
        )
    for parameter in callee.parameters or ():
        lacks = parameter.default is Parameter.empty and parameter.name not in given
        if parameter.kind is Parameter.KEYWORD_ONLY and lacks:
            raise ValueError(
                f"{callee.label} needs the keyword argument {parameter.name!r}; "
                f"pass concrete_args={{{parameter.name!r}: ...}}"
            )


def _distribute(
    parameters: Sequence[Parameter],
    inputs: Sequence[Any],
    values: dict[str, Any],
    concrete_args: Mapping[str, Any],
) -> Arguments:
    """Pass values by position up to the first fixed or omitted one, then by name."""
    rest = list(inputs)
    for parameter in parameters:
        if _is_required(parameter) and parameter.name not in values and rest:
            values[parameter.name] = rest.pop(0)
    args: list[Any] = []
    for parameter in parameters:
        is_input = _is_required(parameter) and parameter.name not in concrete_args
        # *args can only be filled if all parameters before it are positional too.
        by_position = is_input or parameter.kind is Parameter.POSITIONAL_ONLY or bool(rest)
        if parameter.kind not in _POSITIONAL or parameter.name not in values or not by_position:
            break
        args.append(values.pop(parameter.name))
    return (*args, *rest), values


def common_bindings(
    callee: Callee, bindings: Sequence[Mapping[str, Any]], concrete_args: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the bindings of a pattern's arguments that are equal in all matches."""
    first = dict(bindings[0]) if bindings else {}
    for name in list(first):
        values = [other.get(name) for other in bindings]
        if all(same_constant(value, first[name]) for value in values):
            continue
        del first[name]
        if name in callee.names and name not in concrete_args and not nodes_in(values):
            raise ValueError(
                f"{callee.label} is called once for all matches, but takes {name!r}, which is "
                f"{values} in them; pass concrete_args, or replace the matches one by one"
            )
    return first


def plan_same_call(
    node: fx.Node, old: Callable[..., Any], callee: Callee, concrete_args: Mapping[str, Any]
) -> Arguments:
    """Pass the arguments of a node to a callable.

    A keyword argument that it lacks is dropped if it equals the default of the called `old`, as
    traces state defaults.
    """
    args, kwargs = tuple(node.args), dict(node.kwargs)
    if callee.parameters is None:
        return args, {**kwargs, **concrete_args}
    if not callee.takes(Parameter.VAR_KEYWORD):
        defaults = _defaults_of(old)
        for name in kwargs.keys() - {p.name for p in callee.parameters}:
            if name in defaults and same_constant(defaults[name], kwargs[name]):
                del kwargs[name]
    kwargs.update(concrete_args)
    try:
        inspect.Signature(callee.parameters).bind(*args, **kwargs)
    except TypeError as error:
        shown = [*map(str, args), *(f"{name}={value}" for name, value in kwargs.items())]
        raise ValueError(
            f"{callee.label} does not take the arguments of the node, ({', '.join(shown)}): "
            f"{error}; give it the same parameters, or pass concrete_args"
        ) from error
    return args, kwargs
