"""Example inputs of a submodule, taken from a run of the full model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from slapo.errors import TraceError
from slapo.graph.trace.hf import caches_off, no_results_kept
from slapo.graph.trace.leaves import attributes_kept, generators_kept
from slapo.graph.trace.nests import map_leaves
from slapo.graph.trace.surroundings import one_device, quiet_fake_kernels
from slapo.graph.trace.torch_private import FakeTensorMode

#: Positional and keyword arguments of a call.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class _ReachedError(Exception):
    def __init__(self, inputs: Inputs) -> None:
        super().__init__("the module was called")
        self.inputs = inputs


def inputs_within(root: nn.Module, inputs: Inputs, module: nn.Module) -> Inputs:
    """Run `root` on fake tensors until it calls `module`; return the arguments of that call."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _ReachedError((args, kwargs))

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    handle = module.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        with (
            generators_kept(),
            no_results_kept(),
            caches_off(root),
            quiet_fake_kernels(),
            one_device(root),
            attributes_kept(root),
        ):
            args = tuple(map_leaves(value, fake) for value in inputs[0])
            kwargs = {name: map_leaves(value, fake) for name, value in inputs[1].items()}
            with mode:
                root(*args, **kwargs)
    except _ReachedError as reached:
        return reached.inputs
    except Exception as error:
        raise TraceError(
            f"running the whole model on fake tensors, to see how {type(module).__name__} is "
            f"called, failed with {type(error).__name__}: {error}; pass example_inputs"
        ) from error
    finally:
        handle.remove()
    raise TraceError(
        f"the model never calls this {type(module).__name__} on example inputs; pass example_inputs"
    )
