"""``.sync(mode, sync_op_or_fn, **kwargs)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from slapo.history import describe
from slapo.hooks import MODE_ATTRIBUTE
from slapo.node import Node
from slapo.primitives.base import Primitive
from slapo.primitives.wrapping import check_called
from slapo.sharding.layout import KnownSync, check_sync, layout_of, note_sync
from slapo.sharding.partial import add_reducer, can_reduce
from slapo.sharding.shards import REDUCTIONS
from slapo.sharding.sync import (
    SyncOp,
    check_mode,
    gradient_hook,
    make_sync_op,
    post_hook,
    pre_hook,
)
from slapo.sharding.vocab import check_maskable, mask_vocabulary
from slapo.wrapper import innermost


class SyncPrimitive(Primitive):
    """Put a collective, or a hook of your own, before or after a module.

    ``mod(x) --> op(mod(x))`` for ``fwd_post``, ``mod(op(x))`` for ``fwd_pre``; ``bwd_post`` acts on
    the gradient of ``x``.

    ===================== ===================== ========================= =======================
    op                    modes                 forward                   backward
    ===================== ===================== ========================= =======================
    ``all_reduce``        fwd_post              sum over the group        identity
    ``all_reduce``        bwd_post              identity                  sum of the gradient
    ``all_gather``        fwd_pre, fwd_post     concatenate along `axis`  reduce-scatter
    ``reduce_scatter``    fwd_post              sum, keep own slice       all-gather
    ``scatter``           fwd_post              keep own slice            all-gather
    ``"XY->ZW"``          fwd_pre, fwd_post     reshard                   the reverse
    ===================== ===================== ========================= =======================

    Parameters
    ----------
    mode
        ``"fwd_pre"``, ``"fwd_post"`` or ``"bwd_post"``.
    sync_op_or_fn
        An op of the table; in ``"XY->ZW"`` the letters R (replicated) and S (sharded) stand for
        the last two dimensions. Or a callable, which becomes the module hook of that mode: a
        pre-forward hook, a forward hook or a full backward hook.
    **kwargs
        ``axis`` of the activation, and ``tensor_parallel_output_grad`` of ``all_gather``: False
        when every rank uses the gathered tensor in the same way, so that the gradient is only
        split.

    Raises
    ------
    ValueError
        For an unknown mode or op, a mode the op does not work in, a missing axis, or a sync that
        contradicts the known layout of a sharded module: gathering a partial sum, reducing a
        slice, gathering along another axis.
    TypeError
        For arguments the op does not take.

    Examples
    --------
    >>> import torch, slapo
    >>> sch = slapo.create_schedule(torch.nn.Linear(4, 6))
    >>> sch.shard("weight", axis=1).sync("fwd_post", "all_reduce").mod(torch.ones(2, 4)).shape
    torch.Size([2, 6])
    """

    @staticmethod
    def name() -> str:
        """Return ``"sync"``."""
        return "sync"

    @staticmethod
    def init_metadata() -> Any:
        """Texts of the syncs of a node, in order."""
        return []

    @staticmethod
    def apply(
        sch: Node, /, mode: str, sync_op_or_fn: str | Callable[..., Any], **kwargs: Any
    ) -> Node:
        """Check the sync against what is known, then register it."""
        check_mode(mode)
        check_called(sch)
        if isinstance(sync_op_or_fn, str):
            op = make_sync_op(mode, sync_op_or_fn, sch.group, kwargs)
            _add_op(sch, mode, op)
        else:
            _add_callable(sch, mode, sync_op_or_fn, kwargs)
        text = sync_op_or_fn if isinstance(sync_op_or_fn, str) else describe(sync_op_or_fn)
        sch.metadata.primitives["sync"].append(f"{mode} {text}")
        return sch


def _add_callable(
    sch: Node, mode: str, function: Callable[..., Any], kwargs: dict[str, Any]
) -> None:
    if not callable(function):
        raise TypeError(
            f"sync_op_or_fn must be the name of an op or a hook function, got {function!r}"
        )
    if kwargs:
        raise TypeError(f"a hook function takes no further arguments, got {sorted(kwargs)}")
    if mode == "fwd_pre":
        sch.mod.register_forward_pre_hook(function)
    elif mode == "fwd_post":
        sch.mod.register_forward_hook(function)
    else:
        sch.mod.register_full_backward_hook(function)
    note_sync(innermost(sch.mod), KnownSync(mode, ""))


def _add_op(sch: Node, mode: str, op: SyncOp) -> None:
    module = innermost(sch.mod)
    layout = layout_of(module)
    check_sync(layout, mode, op.name, op.axis)
    if mode == "fwd_post" and _needs_mask(sch, op):
        check_maskable(module)
    if mode == "bwd_post":
        sch.mod.register_forward_pre_hook(gradient_hook(op.group), with_kwargs=True)
    elif mode == "fwd_pre":
        sch.mod.register_forward_pre_hook(pre_hook(op, mode), with_kwargs=True)
    else:
        known = layout.output.axis if layout.output is not None else None
        _add_output_op(sch, module, replace(op, known_axis=_to_check(op, known)))
    completes = op.name == "all_gather" and op.tensor_parallel_output_grad
    note_sync(module, KnownSync(mode, op.name, op.axis, op.output(), completes))


def _to_check(op: SyncOp, known: int | None) -> int | None:
    return known if op.name == "all_gather" else None


def _add_output_op(sch: Node, module: nn.Module, op: SyncOp) -> None:
    reduces = op.name in REDUCTIONS
    if _needs_mask(sch, op):
        rows: Any = module.num_embeddings
        mask_vocabulary(module, sch.rank * rows, rows)
    if reduces and sch.mod is module and can_reduce(module):
        add_reducer(module, post_hook(op), op.axis, op.group)
    else:
        sch.mod.register_forward_hook(post_hook(op))


def _needs_mask(sch: Node, op: SyncOp) -> bool:
    """Whether a table spread by rows gets its mask together with its reduction."""
    spread = layout_of(innermost(sch.mod)).vocabulary
    return op.name in REDUCTIONS and spread and not _masks_itself(sch.mod)


def _masks_itself(module: nn.Module) -> bool:
    """True when the user's own pre-forward hook is there to map tokens to local rows."""
    hooks = module._forward_pre_hooks.values()
    return any(not hasattr(hook, MODE_ATTRIBUTE) for hook in hooks)
