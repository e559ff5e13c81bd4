"""Activation checkpointing that also restores the tracker's random states.

Technique: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from slapo.errors import SlapoError
from slapo.random import get_rng_tracker
from slapo.wrapper import ModuleWrapper

#: Selects the positional arguments of a checkpointed module.
OrderArgs = Callable[..., tuple[Any, ...]]


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any
) -> Any:
    """Call `function` and recompute its activations in the backward pass instead of storing them.

    ``torch.utils.checkpoint`` restores the default random states. Here the recomputation also uses
    the same states of the random tracker, so dropout under ``fork_rng`` draws the same mask.

    Parameters
    ----------
    function
        Any callable, such as a module.
    *args, **kwargs
        Arguments of `function`.
    use_reentrant
        As in ``torch.utils.checkpoint.checkpoint``.

    Returns
    -------
    Any
        Result of `function`.

    Raises
    ------
    SlapoError
        If `function` is a module that would not train, because `use_reentrant` is True and no input
        needs a gradient.

    Examples
    --------
    >>> import torch
    >>> linear = torch.nn.Linear(2, 2)
    >>> out = checkpoint(linear, torch.ones(1, 2))
    >>> out.sum().backward()
    >>> linear.weight.grad
    tensor([[1., 1.],
            [1., 1.]])
    """
    modules = list(function.modules()) if isinstance(function, nn.Module) else []
    if use_reentrant and isinstance(function, nn.Module):
        _check_reentrant(function, args)
    # Read before the forward pass, which advances them.
    states = get_rng_tracker().get_states()
    # Norms whose running statistics count each batch.
    kept: list[nn.Module] = [
        module
        for module in modules
        if isinstance(module, _NormBase) and module.training and module.track_running_stats
    ]
    if states or kept:
        function = _Replayed(function, states, kept)
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        function = _unprofiled(function)
        # Early stop ends a recomputation by an exception, which scripts do not propagate.
        kwargs["early_stop"] = False
    return torch_checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


def _check_reentrant(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Raise if no input needs a gradient: torch would treat the module as a constant."""
    if not torch.is_grad_enabled() or any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in args
    ):
        return
    trained = [name for name, param in module.named_parameters() if param.requires_grad]
    if trained:
        raise SlapoError(
            f"checkpoint(use_reentrant=True) of {type(module).__name__}: no input needs a "
            f"gradient, so {trained[:3]} would get none; pass use_reentrant=False"
        )


class _Replayed:
    """A function whose later calls reuse the tracker's states of the first call.

    Later calls do not change running statistics of norms; the first call counted the batch.
    """

    def __init__(self, function: Callable[..., Any], states: Any, kept: list[nn.Module]) -> None:
        self.function = function
        self.states, self.kept = states, kept
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Later calls are recomputations. There are several if the graph is retained or nested in
        # another checkpoint.
        self.calls += 1
        if self.calls == 1:
            return self.function(*args, **kwargs)
        tracker = get_rng_tracker()
        present = tracker.get_states()
        buffers = [(module, dict(module._buffers)) for module in self.kept]
        for module, held in buffers:
            # Running statistics are updated in place. The recomputation updates copies, which are
            # dropped.
            module._buffers.update({n: b.clone() for n, b in held.items() if b is not None})
        tracker.set_states(self.states)
        try:
            return self.function(*args, **kwargs)
        finally:
            tracker.set_states(present)
            for module, held in buffers:
                module._buffers.update(held)


def _unprofiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # In its profiling runs, TorchScript saves other tensors than in later runs. A recomputation
    # would not find the tensors of the first run.
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.jit.optimized_execution(False):
            return function(*args, **kwargs)

    return run


def _without_cache(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Drop key-value caches from the arguments, because the recomputation would append again."""
    if not any(map(_is_cache, (*args, *kwargs.values()))):
        return args, kwargs
    positional = tuple(None if _is_cache(value) else value for value in args)
    named = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
    if named.get("use_cache"):
        named["use_cache"] = False
    warnings.warn(
        "a checkpointed module was called with a key-value cache, which its recomputation would "
        "fill twice; dropping the cache. Call the model with use_cache=False",
        UserWarning,
        stacklevel=2,
    )
    return positional, named


def _is_cache(value: Any) -> bool:
    # By name, so that neither Transformers is imported nor caches of remote code are missed.
    return type(value).__name__.endswith("Cache")


class CheckPointWrapper(ModuleWrapper):
    """A module whose activations are recomputed in the backward pass.

    Parameters
    ----------
    mod
        The module to run.
    order_args_fn
        Function from the call's arguments to the tuple of positional arguments for `mod`; None
        passes all arguments on.
    use_reentrant
        As in ``torch.utils.checkpoint.checkpoint``.

    Examples
    --------
    >>> import torch
    >>> wrapper = CheckPointWrapper(torch.nn.Linear(2, 2))
    >>> list(wrapper.state_dict())
    ['weight', 'bias']
    """

    def __init__(
        self, mod: nn.Module, order_args_fn: OrderArgs | None = None, use_reentrant: bool = False
    ) -> None:
        super().__init__(mod)
        # Set as attributes, they would end up on a wrapped module with attributes of the same name.
        self.__dict__.update(order_args_fn=order_args_fn, use_reentrant=use_reentrant)

    @classmethod
    def around_view(
        cls, view: nn.Module, order_args_fn: OrderArgs | None, use_reentrant: bool
    ) -> CheckPointWrapper:
        """Checkpoint operations of another module; its state keeps the names of that module."""
        # An empty module holds no state. The view is no child, else its tensors would have two
        # names.
        wrapper = cls(nn.Module(), order_args_fn, use_reentrant)
        wrapper.__dict__["mod"] = view
        return wrapper

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module under :func:`checkpoint`."""
        if self.order_args_fn is not None:
            args, kwargs = tuple(self.order_args_fn(*args, **kwargs)), {}
        if not torch.is_grad_enabled():
            return self.mod(*args, **kwargs)  # no backward pass, so no recomputation
        args, kwargs = _without_cache(args, kwargs)
        return checkpoint(self.mod, *args, use_reentrant=self.use_reentrant, **kwargs)


class ForkRNGWrapper(ModuleWrapper):
    """A module whose forward draws from the tensor-parallel random state."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module under the tracker's random state."""
        with get_rng_tracker().fork():
            return self.mod(*args, **kwargs)
