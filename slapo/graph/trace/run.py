"""The arguments that a model calls one of its modules with, found without computing anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo.errors import TraceError
from slapo.graph.trace.call import BoundCall
from slapo.graph.trace.example_tensors import ExampleCall
from slapo.graph.trace.failures import told_once
from slapo.graph.trace.generators import generators_kept
from slapo.graph.trace.on_meta import one_device
from slapo.graph.trace.state import caches_off, no_results_kept
from slapo.graph.trace.trees import map_leaves

#: Positional and keyword arguments of a call.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class _Reached(Exception):
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("the module was called")
        self.inputs = (args, kwargs)


def capture_inputs(root: nn.Module, inputs: Inputs, module: nn.Module) -> Inputs:
    """Run `root` on fake tensors until it calls `module`.

    Parameters
    ----------
    root
        The whole model; nothing of it changes.
    inputs
        Example arguments of `root`.
    module
        A module within it.

    Returns
    -------
    tuple
        Positional and keyword arguments of the first call, with fake tensors.

    Raises
    ------
    TraceError
        If the run fails, or never calls the module.
    """
    call = BoundCall.of(root, *inputs).without_cache()
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(args, kwargs)

    handle = module.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        with (
            generators_kept(),
            no_results_kept(),
            caches_off(root),
            told_once(),
            one_device(root),
            torch.no_grad(),
        ):
            example = ExampleCall.of(root, call)
            arguments = example.arguments.items()
            fake = {k: map_leaves(v, lambda leaf: _faked(mode, leaf)) for k, v in arguments}
            args, kwargs = call.with_arguments(fake)
            with mode:
                root(*args, **kwargs)
    except _Reached as reached:
        return reached.inputs
    except Exception as error:
        raise TraceError(
            f"a run of the whole model on fake tensors, to see how {type(module).__name__} is "
            f"called, failed with {type(error).__name__}: {error}; pass example_inputs"
        ) from error
    finally:
        handle.remove()
    raise TraceError(
        f"the model never calls this {type(module).__name__} on example inputs; pass example_inputs"
    )


def _faked(mode: FakeTensorMode, value: Any) -> Any:
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
