"""Inputs to capture a module with: given, made from a config, or taken from a run of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from slapo.errors import TraceError
from slapo.graph.trace.capture import capture
from slapo.graph.trace.examples import (
    Inputs,
    example_inputs,
    inputs_of_part,
    inputs_within,
    with_constants,
)
from slapo.node import Node
from slapo.utils.calls import as_call, refuse_batch
from slapo.wrapper import innermost


def find_inputs(
    sch: Node, constants: Mapping[str, Any], config: Any = None, given: Any = None
) -> Inputs:
    """Arguments to capture the module at a node with.

    Parameters
    ----------
    sch
        The node.
    constants
        Forward parameter -> constant.
    config
        Model config to make tensors from.
    given
        The user's inputs: a tensor, a tuple of positional arguments or a dict of keyword ones.

    Raises
    ------
    TraceError
        If none can be had without the user.
    """
    module = innermost(sch.mod)
    if given is not None:
        args, kwargs = as_call(given)
        refuse_batch(module, args)
        if any(tensor.is_meta for tensor in module.parameters()):
            args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        return args, {**kwargs, **constants}
    if hasattr(module, "main_input_name") and (config or hasattr(module, "config")):
        named = example_inputs(module, dict(constants) or None, config)
        return (), {**named, **constants}
    if sch.parent is None:
        return (), {**inputs_of_part(module, constants, config), **constants}
    return with_constants(module, _from_model(sch, module), constants)


def _from_model(sch: Node, module: nn.Module) -> Inputs:
    """Run the whole model on fake tensors until it calls the module; siblings share the run."""
    cache, key = sch.state.captured, _signature(module)
    if key not in cache:
        top = innermost(sch.get_top_schedule().mod)
        inputs = (), example_inputs(top, None, None, every_mask=True)
        cache[key] = _inputs_within(top, inputs, sch.mod)
    args, kwargs = cache[key]
    return args, dict(kwargs)


def _inputs_within(root: nn.Module, inputs: Inputs, module: nn.Module) -> Inputs:
    """The arguments with which `root` calls `module`.

    A plain run on fake tensors asks least of the model. Where that fails, on experts that pick
    their tokens, a capture may pass, which assumes the results of such modules.
    """
    try:
        return inputs_within(root, inputs, module)
    except TraceError:
        path = next(path for path, part in root.named_modules() if part is module)
        above = {path[:end] for end, letter in enumerate(path) if letter == "."}
        try:
            found = capture(root, *inputs, lambda _, other: other not in above).inputs.get(path)
        except TraceError:
            found = None
        if found is None:
            raise
        return found


def _signature(module: nn.Module) -> Any:
    """Modules of one class with parameters of the same shapes are called alike."""
    shapes = tuple((n, tuple(p.shape), p.dtype) for n, p in module.named_parameters())
    return (type(module), module.training, shapes)
