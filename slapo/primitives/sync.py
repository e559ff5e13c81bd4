"""``.sync(mode, sync_op_or_fn, **kwargs)``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from torch import nn

from slapo.history import describe
from slapo.node import Node
from slapo.primitives.base import Primitive
from slapo.primitives.wrapping import check_called, check_runs, reduces_within, with_adapters
from slapo.sharding.groups import handle_of
from slapo.sharding.layout import KnownSync, Placement
from slapo.sharding.partial import add_reducer, can_reduce
from slapo.sharding.state import layout_of, make_sharding, syncs_of
from slapo.sharding.sync import REDUCTIONS, SyncOp, check_sync, make_sync_op
from slapo.sharding.sync_hooks import (
    GradientHook,
    InputHook,
    OutputHook,
    input_names,
)
from slapo.sharding.vocab import check_maskable, mask_vocabulary, masks_itself
from slapo.utils.calls import check_takes
from slapo.wrapper import innermost

#: Arguments of a hook by mode, and by whether the hook takes keyword arguments of the call.
_HOOK_ARGUMENTS = {
    ("fwd_pre", False): ("module", "args"),
    ("fwd_pre", True): ("module", "args", "kwargs"),
    ("fwd_post", False): ("module", "args", "output"),
    ("fwd_post", True): ("module", "args", "kwargs", "output"),
    ("bwd_post", False): ("module", "grad_input", "grad_output"),
}


class SyncPrimitive(Primitive, name="sync"):
    """Add a collective, or a hook of your own, before or after a module.

    ``mod(x) --> op(mod(x))`` for ``fwd_post``, ``mod(op(x))`` for ``fwd_pre``; ``bwd_post`` acts on
    the gradient of ``x``.

    ===================== ===================== ========================= =======================
    op                    modes                 forward                   backward
    ===================== ===================== ========================= =======================
    ``all_reduce``        fwd_post              sum over the group        identity
    ``all_reduce``        bwd_post              identity                  sum of the gradient
    ``all_reduce_grad``   fwd_post              identity                  sum of the gradient
    ``all_gather``        fwd_pre, fwd_post     concatenate along `axis`  reduce-scatter
    ``reduce_scatter``    fwd_post              sum, keep own slice       all-gather
    ``scatter``           fwd_post              keep own slice            all-gather
    ``"XY->ZW"``          fwd_pre, fwd_post     reshard                   the reverse, no sums
    ===================== ===================== ========================= =======================

    Parameters
    ----------
    mode
        ``"fwd_pre"``, ``"fwd_post"`` or ``"bwd_post"``.
    sync_op_or_fn
        An op of the table, or a callable. In ``"XY->ZW"`` the letters R (replicated) and S
        (sharded) stand for the last two dimensions. A callable becomes the module hook of the mode:
        a pre-forward hook, a forward hook or a full backward hook. A hook ``(module, args,
        kwargs)`` or ``(module, args, kwargs, output)`` also receives keyword arguments, like
        torch's hooks with ``with_kwargs=True``.
    **kwargs
        Options of the op:

        ``axis``: axis of the activation.

        ``tensor_parallel_output_grad`` of ``all_gather``: False if every rank uses the gathered
        tensor in the same way; the gradient is then only scattered.

        ``total`` of ``all_gather``: full size along `axis` if the slices are uneven. It is known
        after ``shard(uneven=True)``; pass it for other modules.

        ``argument`` of ``bwd_post``: names of the inputs whose gradients are summed; the default is
        all inputs that require a gradient. ``argument`` of ``fwd_pre``: names of the inputs to
        gather; the default is the first tensor.

    Raises
    ------
    ValueError
        For an unknown mode or op, an op that the mode does not support, or a missing axis. Also for
        a sync that contradicts the known layout of a sharded module: gathering a partial sum,
        reducing a sharded or replicated tensor, gathering along another axis or from a packed
        tensor, summing a gradient twice.
    TypeError
        For arguments that the op does not take.

    Examples
    --------
    >>> import torch, slapo
    >>> sch = slapo.create_schedule(torch.nn.Linear(4, 6))
    >>> sch.shard("weight", axis=1).sync("fwd_post", "all_reduce").mod(torch.ones(2, 4)).shape
    torch.Size([2, 6])
    """

    @staticmethod
    def init_metadata() -> Any:
        """Descriptions of a node's syncs, in order."""
        return []

    @staticmethod
    def apply(
        sch: Node,
        /,
        mode: Literal["fwd_pre", "fwd_post", "bwd_post"],
        sync_op_or_fn: Annotated[
            str | Callable[..., Any], "the name of an op such as 'all_reduce', or a hook"
        ],
        **kwargs: Any,
    ) -> Node:
        check_runs(sch)
        if mode == "fwd_post" and sync_op_or_fn in REDUCTIONS and reduces_within(sch):
            return with_adapters(sch, lambda base: base.sync(mode, sync_op_or_fn, **kwargs))
        check_called(sch)
        _check_takes_hooks(sch)
        if isinstance(sync_op_or_fn, str):
            op = make_sync_op(mode, sync_op_or_fn, handle_of(sch.group), kwargs)
            _add_op(sch, mode, op)
        else:
            _add_callable(sch, mode, sync_op_or_fn, kwargs)
        text = sync_op_or_fn if isinstance(sync_op_or_fn, str) else describe(sync_op_or_fn)
        sch.metadata.primitives["sync"].append(f"{mode} {text}")
        return sch


def _check_takes_hooks(sch: Node) -> None:
    module = innermost(sch.mod)
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"{type(module).__name__} is compiled by TorchScript, whose modules take no hooks; "
            "put the sync on the module around it, or before the module is compiled"
        )


def _add_callable(
    sch: Node, mode: str, function: Callable[..., Any], kwargs: dict[str, Any]
) -> None:
    if kwargs:
        raise TypeError(
            f"a hook function takes no further arguments, got {sorted(kwargs)}; bind them with "
            "functools.partial"
        )
    # torch calls a hook with (module, args, output), which all_reduce() would take for other
    # arguments.
    if str(getattr(function, "__module__", "")).startswith("torch.distributed"):
        raise TypeError(
            f"{describe(function)} of torch.distributed is not a module hook; pass the name of "
            "an op, such as 'all_reduce'"
        )
    keywords = _takes_keywords(function, mode)
    check_takes(function, f"a {mode} hook", _HOOK_ARGUMENTS[mode, keywords])
    if mode == "fwd_pre":
        sch.mod.register_forward_pre_hook(function, with_kwargs=keywords)
    elif mode == "fwd_post":
        sch.mod.register_forward_hook(function, with_kwargs=keywords)
    else:
        # Full backward hooks run before the gradient passes a pre-forward hook, where the sum is.
        if _sums_gradients(innermost(sch.mod)):
            raise ValueError(
                "a function after sync('bwd_post', 'all_reduce') would see the gradient before it "
                "is summed; add the function first if you want that, or pass one function instead "
                "of both that calls slapo.sharding.reduce_from_group(grad, sch.group)"
            )
        sch.mod.register_full_backward_hook(function)
    # An empty name stands for a hook of the user, whose effect is unknown.
    _note(sch, KnownSync(mode, ""))


def _takes_keywords(function: Callable[..., Any], mode: str) -> bool:
    """Return True if a hook requires the call's keyword arguments too."""
    if mode == "bwd_post":
        return False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # Parameters with defaults are not counted: a hook may have options of its own.
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(needed) == len(_HOOK_ARGUMENTS[mode, True])


def _note(sch: Node, sync: KnownSync) -> None:
    state = make_sharding(innermost(sch.mod), sch.group)
    state.syncs = (*state.syncs, sync)


def _add_op(sch: Node, mode: str, op: SyncOp) -> None:
    module = innermost(sch.mod)
    layout = layout_of(module)
    check_sync(layout, mode, op.name, op.axis)
    if mode == "fwd_post" and _needs_mask(module, op):
        check_maskable(module, sch.mod)
    _check_names(module, mode, op)
    if mode == "bwd_post":
        _check_gradients(module, op)
        # It sums the gradient of the module's own input, so it must run before hooks that change
        # inputs.
        first = any(sync.mode == "fwd_pre" and not sync.op for sync in syncs_of(module))
        sch.mod.register_forward_pre_hook(GradientHook(op), with_kwargs=True, prepend=first)
    elif mode == "fwd_pre":
        _check_before_gradients(module, op)
        sch.mod.register_forward_pre_hook(InputHook(op, mode), with_kwargs=True)
    else:
        _check_output_gradient(module, op)
        if op.name == "all_gather" and layout.output is not None:
            op = _with_known(op, layout.output)
        _add_output_op(sch, module, op)
    completes = op.sums_gradient()
    output = op.output() if mode == "fwd_post" else None
    _note(sch, KnownSync(mode, op.name, op.axis, output, completes, op.argument))


def _with_known(op: SyncOp, output: Placement) -> SyncOp:
    """Complete a gather with the known layout of its slices."""
    if op.total not in (None, output.total) and output.kind == "shard":
        raise ValueError(
            f"fwd_post all_gather: the module's output is {output}, not of total={op.total}; leave "
            "total out, it is known"
        )
    return replace(op, known_axis=output.axis, total=output.total)


def _sums_gradients(module: nn.Module) -> bool:
    """Return True if the module has a ``bwd_post`` op."""
    return any(sync.mode == "bwd_post" and sync.op for sync in syncs_of(module))


def _check_names(module: nn.Module, mode: str, op: SyncOp) -> None:
    positional, keywords = input_names(module)
    known = (*positional, *keywords)
    unknown = [name for name in op.argument or () if name not in known]
    if unknown:
        raise ValueError(
            f"{mode} {op.name}: argument has {unknown}, and {type(module).__name__}.forward "
            f"takes {list(known)}; pass some of these"
        )


def _check_gradients(module: nn.Module, op: SyncOp) -> None:
    """Raise if the gradient of the inputs is summed already."""
    if _sums_gradients(module):
        raise ValueError(
            f"bwd_post {op.name}: the gradient of the module's inputs is summed over the ranks "
            "already; leave one of the two out, or name the inputs of both in one argument="
        )


def _check_before_gradients(module: nn.Module, op: SyncOp) -> None:
    """Raise if an earlier ``bwd_post`` op sums the gradient of an input that `op` changes."""
    before = [sync.argument for sync in syncs_of(module) if sync.mode == "bwd_post" and sync.op]
    if any(not names or not op.argument or {*names} & {*op.argument} for names in before):
        raise ValueError(
            f"fwd_pre {op.name}: the bwd_post before it would sum the gradients of the ranks' own "
            "inputs, which are different slices; call fwd_pre first, and bwd_post after it if the "
            "gradient is then partial on each rank"
        )


def _check_output_gradient(module: nn.Module, op: SyncOp) -> None:
    """Raise if the gradient of the output is summed already."""
    before = [s.op for s in syncs_of(module) if s.mode == "fwd_post" and s.completes_gradient]
    if before and op.sums_gradient():
        raise ValueError(
            f"fwd_post {op.name}: {before[0]!r} sums the gradient of the module's output over the "
            "ranks already; leave one of the two out"
        )


def _add_output_op(sch: Node, module: nn.Module, op: SyncOp) -> None:
    reduces = op.name in REDUCTIONS
    if _needs_mask(module, op):
        mask_vocabulary(module)
    # The layer itself reduces before it adds its bias. A hook would get the sum with the bias of
    # every rank.
    if reduces and sch.mod is module and can_reduce(module):
        bias = "" if op.axis is None else f"{sch.model_path}.bias".lstrip(".")
        add_reducer(module, OutputHook(op), op.axis, op.group, bool(sch.state.ties.partners(bias)))
    else:
        sch.mod.register_forward_hook(OutputHook(op))


def _needs_mask(module: nn.Module, op: SyncOp) -> bool:
    """Return True if the vocabulary shard needs a mask along with its reduction."""
    return op.name in REDUCTIONS and layout_of(module).vocabulary and not masks_itself(module)
