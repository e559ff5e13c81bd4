"""What callables say of their parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

import torch
from torch import nn

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def parameters_of(new: Callable[..., Any]) -> list[Parameter] | None:
    """Read the parameters of a callable, without ``self``; None if it does not tell them."""
    target: Any = new.forward if isinstance(new, nn.Module) else new
    original = getattr(new, "_orig_mod", None)  # of a module that torch.compile has wrapped
    if isinstance(original, nn.Module):
        return parameters_of(original)
    schema = getattr(target, "schema", None)
    if isinstance(schema, torch.FunctionSchema):
        skipped = 1 if isinstance(new, nn.Module) else 0
        return [_schema_parameter(argument) for argument in schema.arguments[skipped:]]
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return None


def defaults_of(old: Callable[..., Any]) -> dict[str, Any]:
    """Read the defaults of a callable; torch tells those of its operators in their schemas."""
    parameters = parameters_of(old)
    if parameters is None:
        packet = getattr(torch.ops.aten, getattr(old, "__name__", ""), None)
        overloads = [] if packet is None else [getattr(packet, o) for o in packet.overloads()]
        parameters = [_schema_parameter(a) for o in overloads for a in o._schema.arguments]
    return {p.name: p.default for p in parameters if p.default is not Parameter.empty}


def describe_call(new: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Write a call down with the names of the parameters.

    Parameters
    ----------
    new : torch.nn.Module or callable
        What is called.
    args, kwargs
        Its arguments.

    Returns
    -------
    str
        Such as ``"new(x=fc1, s=3.0)"``.

    Examples
    --------
    >>> def new(x, s): ...
    >>> describe_call(new, ["a"], {"s": 3.0})
    'new(x=a, s=3.0)'
    """
    names = [p.name for p in parameters_of(new) or () if p.kind in POSITIONAL]
    shown = [f"{name}={value}" for name, value in zip(names, args, strict=False)]
    shown += map(str, args[len(names) :])
    shown += [f"{name}={value}" for name, value in kwargs.items()]
    return f"{label(new).split()[-1]}({', '.join(shown)})"


def parameter_names(new: Callable[..., Any]) -> list[str]:
    """List the parameters of a callable that can be given by name, as far as it tells them."""
    return [p.name for p in parameters_of(new) or () if p.kind not in REST]


def label(new: Callable[..., Any]) -> str:
    """Name a callable in a message."""
    if isinstance(new, nn.Module):
        return f"module {type(new).__name__}"
    bare = new.func if isinstance(new, functools.partial) else new
    return f"function {getattr(bare, '__name__', repr(bare))}"


def _schema_parameter(argument: Any) -> Parameter:
    """Describe an argument of a scripted function as Python would."""
    default = argument.default_value if argument.has_default_value() else Parameter.empty
    return Parameter(argument.name, Parameter.POSITIONAL_OR_KEYWORD, default=default)
