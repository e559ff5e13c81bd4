"""Conversion and checks of call arguments that users pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from slapo.history import describe

#: Maximum number of elements of a tensor that is kept with its values.
_SMALL = 100_000


def check_takes(
    function: Callable[..., Any], what: str, names: Sequence[str], **kwargs: Any
) -> None:
    """Refuse a user's function that does not accept the given arguments.

    `what` names the function in messages; `names` are its positional arguments and `kwargs` its
    keyword arguments. Callables without a signature are accepted. Raises TypeError with the
    function's signature.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*names, **kwargs)
    except TypeError:
        given = ", ".join((*names, *(f"{name}=" for name in kwargs)))
        raise TypeError(
            f"{what} is called with ({given}), but {describe(function)} takes {signature}; pass a "
            "function that takes these"
        ) from None


def refuse_batch(module: Any, args: Sequence[Any]) -> None:
    """Refuse a batch of inputs and targets instead of the inputs of a Transformers model."""
    if args and isinstance(args[0], Mapping) and hasattr(module, "main_input_name"):
        raise TypeError(
            f"example_inputs begins with a {type(args[0]).__name__} of {list(args[0])}, but "
            f"{type(module).__name__} takes {module.main_input_name}; pass the inputs alone, "
            "batch[0] of a batch (inputs, targets)"
        )


def outline(inputs: Any) -> Any:
    """Copy example inputs: small tensors to the CPU, larger ones to meta."""

    def kept(tensor: Tensor) -> Tensor:
        small = tensor.numel() <= _SMALL and not tensor.is_meta
        copy = tensor.detach().to("cpu", copy=True) if small else tensor.detach().to("meta")
        return copy.requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, kept, inputs)


def as_call(inputs: Any, name: str = "example_inputs") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as positional and keyword arguments."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise TypeError(
        f"{name} is {describe(inputs)}; pass a tensor, a tuple of positional arguments or a dict "
        "of keyword arguments"
    )
