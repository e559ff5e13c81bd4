"""How the inputs of a subgraph become the arguments of what takes its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from slapo.graph.match.dataflow import is_size, tells_mode

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def plan_call(
    new: Callable[..., Any],
    inputs: Sequence[Any],
    concrete_args: Mapping[str, Any],
    exact: bool = True,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Distribute inputs over the parameters of a callable.

    Parameters
    ----------
    new : torch.nn.Module or callable
        What will be called.
    inputs : sequence
        Values for the parameters without default, in order.
    concrete_args : mapping
        Values for parameters by name.
    exact : bool, default True
        The number of inputs must equal that of the parameters without default. Else the inputs
        and `concrete_args` only need to be arguments that `new` takes.

    Returns
    -------
    tuple of (tuple, dict)
        Positional and keyword arguments.

    Raises
    ------
    ValueError
        If they do not fit; the message names numbers, parameters and inputs.

    Examples
    --------
    >>> plan_call(lambda x, scale, y: x, ["a", "b"], {"scale": 2})
    (('a',), {'scale': 2, 'y': 'b'})
    """
    parameters = _parameters(new)
    if parameters is None:
        return tuple(inputs), dict(concrete_args)
    if not exact:
        _check_binds(new, parameters, inputs, concrete_args)
        return tuple(inputs), dict(concrete_args)
    _check_names(new, parameters, concrete_args)
    _check_keyword_only(new, parameters, concrete_args)
    wanted = [p for p in parameters if _is_required(p) and p.name not in concrete_args]
    if any(p.kind is Parameter.VAR_POSITIONAL for p in parameters):
        given = list(inputs) if len(inputs) >= len(wanted) else None
    else:
        given = _as_many_as(len(wanted), inputs)
    if given is None:
        raise ValueError(_misfit(new, wanted, inputs))
    return _distribute(parameters, given, concrete_args)


def _parameters(new: Callable[..., Any]) -> list[Parameter] | None:
    """Read the parameters of a callable, without ``self``; None if it does not tell them."""
    target: Any = new.forward if isinstance(new, nn.Module) else new
    original = getattr(new, "_orig_mod", None)  # of a module that torch.compile has wrapped
    if isinstance(original, nn.Module):
        return _parameters(original)
    schema = getattr(target, "schema", None)
    if isinstance(schema, torch.FunctionSchema):
        skipped = 1 if isinstance(new, nn.Module) else 0
        return [_schema_parameter(argument) for argument in schema.arguments[skipped:]]
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return None


def _schema_parameter(argument: Any) -> Parameter:
    """Describe an argument of a scripted function as Python would."""
    default = argument.default_value if argument.has_default_value() else Parameter.empty
    return Parameter(argument.name, Parameter.POSITIONAL_OR_KEYWORD, default=default)


def _is_required(parameter: Parameter) -> bool:
    """Tell whether a parameter must be given by position."""
    return parameter.kind in _POSITIONAL and parameter.default is Parameter.empty


def _check_names(
    new: Callable[..., Any], parameters: Sequence[Parameter], concrete_args: Mapping[str, Any]
) -> None:
    """Refuse constants for parameters that do not exist."""
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters if p.kind is not Parameter.VAR_POSITIONAL]
    unknown = [name for name in concrete_args if name not in names]
    if unknown:
        raise ValueError(
            f"{_label(new)} has no parameter {', '.join(map(repr, unknown))}; "
            f"concrete_args may name {', '.join(names) or 'none'}"
        )


def _check_keyword_only(
    new: Callable[..., Any], parameters: Sequence[Parameter], concrete_args: Mapping[str, Any]
) -> None:
    """Refuse keyword-only parameters that nobody gives."""
    for parameter in parameters:
        lacks = parameter.default is Parameter.empty and parameter.name not in concrete_args
        if parameter.kind is Parameter.KEYWORD_ONLY and lacks:
            raise ValueError(
                f"{_label(new)} needs the keyword argument {parameter.name!r}; "
                f"pass concrete_args={{{parameter.name!r}: ...}}"
            )


def _check_binds(
    new: Callable[..., Any],
    parameters: Sequence[Parameter],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Refuse arguments that the callable would refuse when called."""
    try:
        inspect.Signature(parameters).bind(*args, **kwargs)
    except TypeError as error:
        shown = [str(value) for value in args] + [f"{k}={v}" for k, v in kwargs.items()]
        raise ValueError(
            f"{_label(new)} does not take the arguments of the node, ({', '.join(shown)}): "
            f"{error}; give it the same parameters, or pass concrete_args"
        ) from error


def is_optional(value: Any) -> bool:
    """Tell whether a replacement may do without an input: a size or a training flag.

    Parameters
    ----------
    value : Any
        An input of a subgraph.

    Returns
    -------
    bool
        True for what follows from the shapes of tensors, or from the mode of the module.
    """
    return isinstance(value, fx.Node) and (is_size(value) or tells_mode(value))


def _as_many_as(wanted: int, inputs: Sequence[Any]) -> list[Any] | None:
    """Leave out sizes, training flags or both if the callable takes that many fewer inputs."""
    modes = [value for value in inputs if isinstance(value, fx.Node) and tells_mode(value)]
    optional = [value for value in inputs if is_optional(value)]
    sizes = [value for value in optional if value not in modes]
    for left_out in ([], modes, sizes, optional):
        rest = [value for value in inputs if value not in left_out]
        if len(rest) == wanted:
            return rest
    return None


def _distribute(
    parameters: Sequence[Parameter], inputs: Sequence[Any], concrete_args: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give inputs by position as far as the constants before them allow, then by name."""
    args: list[Any] = []
    kwargs = dict(concrete_args)
    rest = list(inputs)
    by_name = False
    for parameter in parameters:
        name = parameter.name
        if parameter.kind is Parameter.POSITIONAL_ONLY and name in concrete_args:
            args.append(kwargs.pop(name))
        elif parameter.kind in _POSITIONAL and name in concrete_args:
            by_name = True
        elif parameter.kind is Parameter.VAR_POSITIONAL:
            args.extend(rest)
            rest = []
        elif _is_required(parameter) and rest:
            if by_name:
                kwargs[name] = rest.pop(0)
            else:
                args.append(rest.pop(0))
    return tuple(args), kwargs


def _misfit(new: Callable[..., Any], wanted: Sequence[Parameter], inputs: Sequence[Any]) -> str:
    """Say that the numbers of parameters and inputs differ."""
    names = ", ".join(p.name for p in wanted)
    values = ", ".join(str(value) for value in inputs)
    return (
        f"{_label(new)} takes {len(wanted)} required arguments ({names}), but the subgraph has "
        f"{len(inputs)} inputs ({values}); fix further parameters by concrete_args, give them "
        "defaults, or match the operations between these inputs too"
    )


def _label(new: Callable[..., Any]) -> str:
    """Name a callable in a message."""
    if isinstance(new, nn.Module):
        return f"module {type(new).__name__}"
    return f"function {getattr(new, '__name__', repr(new))}"
