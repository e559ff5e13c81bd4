"""Inputs to record a module with: given, made up from a config, or taken from a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from slapo.errors import TraceError
from slapo.graph.trace.call import BoundCall
from slapo.graph.trace.capture import capture
from slapo.graph.trace.examples import example_inputs, inputs_of_part
from slapo.graph.trace.run import Inputs, capture_inputs
from slapo.node import Node
from slapo.utils.calls import as_call, refuse_batch
from slapo.wrapper import innermost


class RecordingInputs:
    """Where the arguments of a recorded forward come from.

    Parameters
    ----------
    sch
        The node to trace.
    concrete_args
        Forward parameter -> constant.
    config
        Model config to make tensors from.
    given
        The user's inputs: a tensor, a tuple of positional arguments or a dict of keyword ones.
    """

    def __init__(
        self, sch: Node, concrete_args: Mapping[str, Any] | None, config: Any, given: Any
    ) -> None:
        self.sch = sch
        self.concrete = dict(concrete_args or {})
        self.config = config
        self.given = given

    def find(self, every_mask: bool = False) -> Inputs:
        """The positional and keyword arguments; `every_mask`: see :func:`.example_inputs`.

        Raises
        ------
        TraceError
            If none can be had without the user.
        """
        if self.given is not None:
            return self._from_user()
        module = innermost(self.sch.mod)
        if hasattr(module, "main_input_name") and (self.config or hasattr(module, "config")):
            named = example_inputs(module, self.concrete or None, self.config, every_mask)
            return (), {**named, **self.concrete}
        if self.sch.parent is None:
            return (), {**inputs_of_part(module, self.concrete, self.config), **self.concrete}
        call = BoundCall.of(module, *self._from_model(module))
        args, kwargs = call.with_arguments({**call.arguments, **self.concrete})
        positional = list(call.signature.parameters)[: len(args)]
        return args, {**kwargs, **{k: v for k, v in self.concrete.items() if k not in positional}}

    def _from_user(self) -> Inputs:
        args, kwargs = as_call(self.given)
        refuse_batch(innermost(self.sch.mod), args)
        return args, {**kwargs, **self.concrete}

    def _from_model(self, module: nn.Module) -> Inputs:
        """Run the whole model on fake tensors until it calls the module; siblings share the run."""
        cache = self.sch.state.captured
        key = _signature(module)
        if key not in cache:
            top = self.sch.get_top_schedule()
            root_inputs = RecordingInputs(top, None, None, None).find(every_mask=True)
            cache[key] = _inputs_within(innermost(top.mod), root_inputs, self.sch.mod)
        args, kwargs = cache[key]
        return args, dict(kwargs)


def _inputs_within(root: nn.Module, inputs: Inputs, module: nn.Module) -> Inputs:
    """What `root` calls `module` with.

    A plain run on fake tensors asks least of the model. Where that fails, on experts that pick
    their tokens, a recording may pass, which guesses the outputs of such modules.
    """
    try:
        return capture_inputs(root, inputs, module)
    except TraceError:
        path = next(path for path, part in root.named_modules() if part is module)
        above = {path[:end] for end, letter in enumerate(path) if letter == "."}
        try:
            captured = capture(root, *inputs, is_leaf=lambda _, other: other not in above)
            found = captured.child_inputs.get(path)
        except TraceError:
            found = None
        if found is None:
            raise
        return found


def _signature(module: nn.Module) -> Any:
    """Modules of one class with parameters of the same shapes are called alike."""
    shapes = tuple((n, tuple(p.shape), p.dtype) for n, p in module.named_parameters())
    return (type(module), module.training, shapes)
