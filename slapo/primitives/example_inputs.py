"""Inputs for capturing a module: given, made from a config, or recorded in a run of the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from slapo.errors import TraceError
from slapo.example_inputs import example_inputs, inputs_of_layer
from slapo.graph.trace.capture import capture
from slapo.graph.trace.examples import Inputs, inputs_within
from slapo.node import Node
from slapo.utils.calls import as_call, refuse_batch
from slapo.wrapper import innermost


def find_inputs(
    sch: Node, constants: Mapping[str, Any], config: Any = None, given: Any = None
) -> Inputs:
    """Return arguments for capturing the module at a node; `given` are the user's."""
    module = innermost(sch.mod)
    if given is not None:
        args, kwargs = as_call(given)
        refuse_batch(module, args)
        # torch refuses operations on a mix of real and meta tensors.
        if any(tensor.is_meta for tensor in module.parameters()):
            args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        return args, {**kwargs, **constants}
    if hasattr(module, "main_input_name") and (config or hasattr(module, "config")):
        return (), {**example_inputs(module, constants, config), **constants}
    if sch.parent is None:
        return (), {**inputs_of_layer(module, constants, config), **constants}
    args, kwargs = _from_model(sch, module)
    names = list(inspect.signature(module.forward).parameters)[: len(args)]
    # zip_longest: a forward with *args has fewer names than arguments.
    args = tuple(constants.get(name, value) for name, value in zip_longest(names, args))
    return args, {**kwargs, **{n: v for n, v in constants.items() if n not in names}}


def _from_model(sch: Node, module: nn.Module) -> Inputs:
    """Run the model on fake tensors until it calls the module; equal siblings share the run."""
    # Modules of one class and mode with equal parameter shapes receive the same inputs.
    shapes = tuple((n, tuple(p.shape), p.dtype) for n, p in module.named_parameters())
    cache, key = sch.state.captured, (type(module), module.training, shapes)
    if key not in cache:
        top = innermost(sch.get_top_schedule().mod)
        # Masks too: a layer may get None without them, and its graph would have no mask to take.
        inputs = (), example_inputs(top, every_mask=True)
        try:
            cache[key] = inputs_within(top, inputs, sch.mod)
        except TraceError:
            # A plain run demands least of the model. It fails on experts that select their tokens;
            # a capture may still succeed, because it assumes the results of such modules.
            found = _by_capture(top, inputs, sch.mod)
            if found is None:
                raise
            cache[key] = found
    args, kwargs = cache[key]
    return args, dict(kwargs)


def _by_capture(root: nn.Module, inputs: Inputs, module: nn.Module) -> Inputs | None:
    path = next(path for path, part in root.named_modules() if part is module)
    # Only ancestors are entered; the module stays one call, whose inputs the capture notes.
    above = {path[:end] for end, letter in enumerate(path) if letter == "."}
    try:
        return capture(root, *inputs, lambda _, other: other not in above).inputs.get(path)
    except TraceError:
        return None
