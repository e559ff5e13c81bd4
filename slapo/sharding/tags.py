"""Tags on parameters that follow them when the tensor is replaced."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from slapo.sharding.collectives import reduce_from_group, sum_shared
from slapo.sharding.groups import GroupHandle, handle_of

#: Sum the parameter's gradient over the tensor-parallel group: each rank has a part of it, as where
#: it saw other tokens, or other heads. The second is the older name.
PARTIAL_GRAD = ("partial_grad", "sequence_parallel")

#: Of a slice that several ranks hold: handle of these, over which its gradient is summed.
SHARERS = "sharers"

_SUMMED = "_slapo_gradient_summed"


def apply_tags(param: Tensor, tags: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Set `tags` as attributes of `param`, and do what known tags mean.

    The tag ``partial_grad`` (true) sums the gradient over the group, ``sharers`` over those ranks.
    """
    for key, value in tags.items():
        setattr(param, key, value)
    over = summed_over(param, group)
    if over is not None and not hasattr(param, _SUMMED):
        setattr(param, _SUMMED, _sum_gradient(param, over))


def is_tensor_parallel(param: Tensor) -> bool:
    """Return whether each tensor-parallel rank holds another slice of the parameter."""
    return getattr(param, "orig_shape", None) is not None


def is_summed(param: Tensor | None) -> bool:
    """Return whether its gradient is summed over ranks of the schedule, or those that share it."""
    return has_partial_grad(param) or hasattr(param, SHARERS)


def summed_over(param: Tensor | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks over which a parameter's gradient is summed, of a schedule over `group`."""
    sharers = getattr(param, SHARERS, None)
    if isinstance(sharers, GroupHandle):
        return sharers.group
    return group if has_partial_grad(param) else None


def has_partial_grad(param: Tensor | None) -> bool:
    """Return whether a tag says that the parameter's gradient is a part of the true one."""
    return any(getattr(param, key, False) for key in PARTIAL_GRAD)


def _sum_gradient(param: Tensor, group: dist.ProcessGroup | None) -> object:
    """Register the hook; it acts while the parameter carries the tag and the returned mark."""
    mark, param_ref, handle = object(), weakref.ref(param), handle_of(group)

    def hook(grad: Tensor) -> Tensor:
        owner = param_ref()
        is_wanted = is_summed(owner) and getattr(owner, _SUMMED, None) is mark
        if not is_wanted:
            return grad
        add_up = sum_shared if hasattr(owner, SHARERS) else reduce_from_group
        return add_up(grad, handle.group)

    # A frozen one takes no hook, and may be unfrozen later.
    needs_gradient = param.requires_grad
    param.requires_grad_(True).register_hook(hook)
    param.requires_grad_(needs_gradient)
    return mark


def forget_hook(param: Tensor) -> None:
    """Register the hook of an unpickled parameter, which has its mark only.

    Or of one whose gradient somebody else sums, as engines do for all of them at the end of a step.
    """
    param.__dict__.pop(_SUMMED, None)


def tags_of(param: Tensor) -> dict[str, Any]:
    """Python attributes that `param` carries, this library's private ones left out."""
    return {key: value for key, value in param.__dict__.items() if not key.startswith("_")}


def new_parameter(data: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter of `data` that needs a gradient, and carries attributes, as `like` does."""
    param = nn.Parameter(data, requires_grad=like.requires_grad)
    param.__dict__.update(tags_of(like))
    return param
