"""Tags on parameters, which survive the replacement of a tensor."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from slapo.sharding.collectives import reduce_from_group, sum_shared
from slapo.sharding.groups import GroupHandle, handle_of

#: Sums the parameter's gradient over the tensor-parallel group, because each rank computes a part
#: of it: from other tokens, or other heads. The second is the older name.
PARTIAL_GRAD = ("partial_grad", "sequence_parallel")

#: For a slice that several ranks hold: handle of these ranks, over which its gradient is summed.
SHARERS = "sharers"

_SUMMED = "_slapo_gradient_summed"


def apply_tags(param: Tensor, tags: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Set `tags` as attributes of `param`, and register the hook that they require.

    ``partial_grad`` (True) sums the gradient over the group, ``sharers`` over the given ranks.
    """
    for key, value in tags.items():
        setattr(param, key, value)
    over = summed_over(param, group)
    if over is not None and not hasattr(param, _SUMMED):
        setattr(param, _SUMMED, _sum_gradient(param, over))


def is_tensor_parallel(param: Tensor) -> bool:
    """Return True if each tensor-parallel rank holds a different slice of the parameter."""
    return getattr(param, "orig_shape", None) is not None


def is_summed(param: Tensor | None) -> bool:
    """Return True if the gradient is summed over all ranks or those that share a slice."""
    return has_partial_grad(param) or hasattr(param, SHARERS)


def summed_over(param: Tensor | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the ranks over which a parameter's gradient is summed; `group` is the schedule's."""
    sharers = getattr(param, SHARERS, None)
    if isinstance(sharers, GroupHandle):
        return sharers.group
    return group if has_partial_grad(param) else None


def has_partial_grad(param: Tensor | None) -> bool:
    """Return True if a tag marks the parameter's gradient as partial."""
    return any(getattr(param, key, False) for key in PARTIAL_GRAD)


def _sum_gradient(param: Tensor, group: dist.ProcessGroup | None) -> object:
    """Register the hook; it acts while the parameter has the tag and the returned mark."""
    # The parameter owns its hook, which must not own the parameter.
    mark, param_ref, handle = object(), weakref.ref(param), handle_of(group)

    def hook(grad: Tensor) -> Tensor:
        owner = param_ref()
        is_wanted = is_summed(owner) and getattr(owner, _SUMMED, None) is mark
        if not is_wanted:
            return grad
        add_up = sum_shared if hasattr(owner, SHARERS) else reduce_from_group
        return add_up(grad, handle.group)

    # Torch rejects hooks on a frozen parameter, but the user may unfreeze it later.
    needs_gradient = param.requires_grad
    param.requires_grad_(True).register_hook(hook)
    param.requires_grad_(needs_gradient)
    return mark


def forget_hook(param: Tensor) -> None:
    """Drop the mark of a gradient hook.

    An unpickled parameter has the mark but no hook. An engine that sums all gradients itself at the
    end of a step disables the hook this way.
    """
    param.__dict__.pop(_SUMMED, None)


def tags_of(param: Tensor) -> dict[str, Any]:
    """Python attributes of `param`, without the library's private ones."""
    # A copied mark would claim a hook that the other tensor lacks.
    return {key: value for key, value in param.__dict__.items() if not key.startswith("_")}


def new_parameter(data: Tensor, like: Tensor) -> nn.Parameter:
    """Parameter of `data` with the attributes and ``requires_grad`` of `like`."""
    param = nn.Parameter(data, requires_grad=like.requires_grad)
    param.__dict__.update(tags_of(like))
    return param
