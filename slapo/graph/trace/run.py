"""The arguments that a model calls one of its modules with, found without computing anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher

from slapo.errors import TraceError
from slapo.graph.trace.recorder.fake_inputs import FakeInputs, module_device, new_fake_mode
from slapo.graph.trace.recorder.signature import BoundCall

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
    mode = new_fake_mode()
    maker = FakeInputs(mode, module_device(root))
    arguments = {name: maker.make(value, (name,)) for name, value in call.arguments.items()}
    args, kwargs = call.with_arguments(arguments)

    def stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(args, kwargs)

    handle = module.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        with mode, enable_python_dispatcher(), torch.no_grad():
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
