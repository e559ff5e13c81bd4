"""How the inputs of a subgraph become the arguments of what takes its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

import torch.fx as fx

from slapo.graph.match.dataflow import is_size, tells_mode
from slapo.graph.match.values import same_constant
from slapo.graph.rewrite.signatures import POSITIONAL, REST, defaults_of, label, parameters_of
from slapo.graph.trace.nodes import nodes_in

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def plan_call(
    new: Callable[..., Any],
    inputs: Sequence[Any],
    concrete_args: Mapping[str, Any],
    bindings: Mapping[str, Any] | None = None,
) -> Arguments:
    """Distribute the inputs of a subgraph over the parameters of a callable.

    Parameters
    ----------
    new : torch.nn.Module or callable
        What will be called.
    inputs : sequence
        The values that the subgraph takes, in order of first use.
    concrete_args : mapping
        Values for parameters by name, whatever else there is for them.
    bindings : mapping, optional
        Parameter of the pattern -> value that it stands for: an input, or a constant. A parameter
        of `new` with such a name gets that value; the other inputs go, in order, to the parameters
        without default that are left.

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
    >>> a, b, *_ = fx.symbolic_trace(lambda a, b: a + b).graph.nodes
    >>> plan_call(lambda k, q, s=2.0: q, [a, b], {}, {"q": a, "s": 3.0})
    ((b, a), {'s': 3.0})
    """
    parameters = parameters_of(new)
    if parameters is None:
        return tuple(inputs), dict(concrete_args)
    _check_names(new, parameters, concrete_args)
    names = {p.name for p in parameters if p.kind not in REST}
    bound = {name: v for name, v in (bindings or {}).items() if name in names}
    taken = set(nodes_in(bound))
    rest = [value for value in inputs if value not in taken]
    bound = {name: value for name, value in bound.items() if name not in concrete_args}
    _check_keyword_only(new, parameters, {**bound, **concrete_args})
    wanted = [
        p
        for p in parameters
        if _is_required(p) and p.name not in bound and p.name not in concrete_args
    ]
    if any(p.kind is Parameter.VAR_POSITIONAL for p in parameters):
        given = rest if len(rest) >= len(wanted) else None
    else:
        given = _as_many_as(len(wanted), rest)
    if given is None:
        raise ValueError(_misfit(new, wanted, rest, bound))
    return _distribute(parameters, given, bound, concrete_args)


def common_bindings(
    new: Callable[..., Any],
    bindings: Sequence[Mapping[str, Any]],
    concrete_args: Mapping[str, Any],
) -> dict[str, Any]:
    """Find what the parameters of a pattern stand for in all of several matches.

    Parameters
    ----------
    new : torch.nn.Module or callable
        What will be called, once for all matches.
    bindings : sequence of mappings
        Parameter of the pattern -> value, for each match.
    concrete_args : mapping
        Values for parameters of `new` by name.

    Returns
    -------
    dict
        Parameter -> value, where all matches agree.

    Raises
    ------
    ValueError
        If a parameter of `new` stands for different constants.

    Examples
    --------
    >>> common_bindings(lambda x, s: x, [{"x": "a", "s": 1}, {"x": "a", "s": 1}], {})
    {'x': 'a', 's': 1}
    """
    first = dict(bindings[0]) if bindings else {}
    for name in list(first):
        values = [other.get(name) for other in bindings]
        if all(same_constant(value, first[name]) for value in values):
            continue
        del first[name]
        parameters = parameters_of(new) or ()
        wanted = any(p.name == name for p in parameters) and name not in concrete_args
        if wanted and not nodes_in(values):
            raise ValueError(
                f"{label(new)} takes {name!r}, which is {values} in the matches, and is called "
                "once for all; pass concrete_args, or replace them one by one"
            )
    return first


def plan_same_call(
    node: fx.Node,
    old: Callable[..., Any],
    new: Callable[..., Any],
    concrete_args: Mapping[str, Any],
) -> Arguments:
    """Give a callable the arguments of a node.

    Parameters
    ----------
    node : torch.fx.Node
        A call.
    old, new : callable
        What it calls, and what will be called in its place. A keyword argument that `new` lacks is
        left out if it equals the default of `old`: traces spell defaults out.
    concrete_args : mapping
        Constants to pass in addition, or in place of the node's keyword arguments.

    Returns
    -------
    tuple of (tuple, dict)
        Positional and keyword arguments.

    Raises
    ------
    ValueError
        If `new` does not take them.

    Examples
    --------
    >>> import torch.nn.functional as F
    >>> graph = fx.symbolic_trace(lambda x: F.softmax(x, dim=1)).graph
    >>> node = next(iter(graph.find_nodes(op="call_function", target=F.softmax)))
    >>> dict(node.kwargs)
    {'dim': 1, '_stacklevel': 3, 'dtype': None}
    >>> plan_same_call(node, F.softmax, lambda x, dim: x, {})
    ((x,), {'dim': 1})
    """
    parameters = parameters_of(new)
    kwargs = dict(node.kwargs)
    if parameters is not None:
        if not any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
            defaults = defaults_of(old)
            for name in kwargs.keys() - {p.name for p in parameters}:
                if name in defaults and same_constant(defaults[name], kwargs[name]):
                    del kwargs[name]
        _check_binds(new, parameters, node.args, {**kwargs, **concrete_args})
    return tuple(node.args), {**kwargs, **concrete_args}


def _is_required(parameter: Parameter) -> bool:
    """Tell whether a parameter must be given by position."""
    return parameter.kind in POSITIONAL and parameter.default is Parameter.empty


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
            f"{label(new)} has no parameter {', '.join(map(repr, unknown))}; "
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
                f"{label(new)} needs the keyword argument {parameter.name!r}; "
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
            f"{label(new)} does not take the arguments of the node, ({', '.join(shown)}): "
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
    parameters: Sequence[Parameter],
    inputs: Sequence[Any],
    bound: Mapping[str, Any],
    concrete_args: Mapping[str, Any],
) -> Arguments:
    """Give values by position up to the first that is fixed or left out, then by name."""
    values = {**bound, **concrete_args}
    rest = list(inputs)
    for parameter in parameters:
        if _is_required(parameter) and parameter.name not in values and rest:
            values[parameter.name] = rest.pop(0)
    args: list[Any] = []
    for parameter in parameters:
        is_input = _is_required(parameter) and parameter.name not in concrete_args
        # What goes into *args can only be reached if all before it stands by position too.
        by_position = is_input or parameter.kind is Parameter.POSITIONAL_ONLY or bool(rest)
        if parameter.kind not in POSITIONAL or parameter.name not in values or not by_position:
            break
        args.append(values.pop(parameter.name))
    return (*args, *rest), values


def _misfit(
    new: Callable[..., Any],
    wanted: Sequence[Parameter],
    inputs: Sequence[Any],
    bound: Mapping[str, Any],
) -> str:
    """Say that the numbers of parameters and inputs differ."""
    names = ", ".join(p.name for p in wanted)
    values = ", ".join(str(value) for value in inputs)
    besides = ", ".join(f"{name}={value}" for name, value in bound.items())
    besides = f" besides {besides}, bound by name" if besides else ""
    return (
        f"{label(new)} takes {len(wanted)} required arguments ({names}){besides}, but the "
        f"subgraph has {len(inputs)} inputs ({values}); fix further parameters by concrete_args, "
        "give them defaults, or match the operations between these inputs too"
    )
