"""Checks for sharded modules whose outputs or gradients differ from those of the full module.

Primitives check what a single call shows. These checks run once all primitives are applied.
"""

from __future__ import annotations

from torch import nn

from slapo.errors import SlapoError
from slapo.sharding.layout import Layout
from slapo.sharding.partial import has_bias, is_deferring
from slapo.sharding.state import Sharding, sharding_of
from slapo.sharding.sync import REDUCTIONS
from slapo.sharding.tags import has_partial_grad, is_tensor_parallel
from slapo.sharding.vocab import is_masked
from slapo.wrapper import innermost


def check_modules(model: nn.Module) -> None:
    """Raise for the first invalid module of a sharded model."""
    for path, outer in model.named_modules():
        module = innermost(outer)
        state = sharding_of(module)
        if state is not None:
            _check_bias(path, module, state)
            _check_unknown(path, module, state)
            _check_sums(path, module, state)
            _check_gathered_input(path, module, state)
            _check_vocabulary(path, outer, state)


def _check_bias(path: str, module: nn.Module, state: Sharding) -> None:
    """Raise unless the weight and the bias of a sharded output are sharded together."""
    specs, output = state.specs, state.layout.output
    if "bias" in specs and "weight" in module._parameters and "weight" not in specs:
        raise SlapoError(
            f"{path!r}: its bias is sharded and its weight is whole; shard the weight along "
            f'its output axis too: sch["{path}"].shard("weight", axis=...)'
        )
    splits_output = output is not None and output.kind == "shard"
    if "weight" in specs and splits_output and has_bias(module) and "bias" not in specs:
        raise SlapoError(
            f"{path!r}: its weight is sharded along axis {specs['weight'].axis}, which splits "
            f'the output, and its bias is whole; add sch["{path}"].shard("bias", axis=0)'
        )


def _check_unknown(path: str, module: nn.Module, state: Sharding) -> None:
    """Raise if an unknown class could add a replicated parameter once per rank."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    wholes = [n for n, p in own.items() if not (is_tensor_parallel(p) or has_partial_grad(p))]
    known = state.layout != Layout() or is_deferring(module)
    if known or not _reduces(state) or not wholes or not any(map(is_tensor_parallel, own.values())):
        return
    raise SlapoError(
        f"{path!r}: no shard rule covers {type(module).__name__}, whose output is reduced and "
        f"whose {wholes} {'is' if len(wholes) == 1 else 'are'} whole: a bias would be added once "
        "per rank. Describe the class with slapo.sharding.register_shard_rule, or add the bias "
        "after the reduction, as slapo.op.LinearWithSyncFunc does. Other parameters get a partial "
        f'gradient on each rank: sch["{path}"].annotate({wholes[0]!r}, "partial_grad", True)'
    )


def _check_sums(path: str, module: nn.Module, state: Sharding) -> None:
    """Raise for a sum of a replicated output or of its gradient."""
    params = list(module.parameters())
    if not params or state.used or any(map(is_tensor_parallel, params)):
        return
    if _reduces(state) and not state.specs:
        raise SlapoError(
            f"{path!r}: fwd_post sums its output over the ranks, but no parameter in it is "
            "sharded: the full output would be counted once per rank; leave the sync out, or "
            "shard its parameters"
        )
    sums = any(sync.mode == "bwd_post" and sync.op for sync in state.syncs)
    if sums and not all(has_partial_grad(p) for p in params if p.requires_grad):
        raise SlapoError(
            f"{path!r}: bwd_post sums the gradient of its inputs over the ranks, but no parameter "
            "in it is sharded: the full gradient would be counted once per rank; leave the sync "
            "out, or put it on the modules that are sharded"
        )


def _check_gathered_input(path: str, module: nn.Module, state: Sharding) -> None:
    """Raise for a column-sharded layer whose input gather only slices the partial gradient."""
    output = state.layout.output
    if output is None or output.kind != "shard" or state.layout.input is None:
        return
    gathers = [
        sync
        for sync in state.syncs
        if sync.mode == "fwd_pre" and sync.op and not sync.completes_gradient
        if sync.op == "all_gather" or sync.op.endswith("->RR")
    ]
    sums = any(sync.mode == "bwd_post" for sync in state.syncs)
    if gathers and state.layout.input.kind == "replicate" and not sums:
        raise SlapoError(
            f"{path!r}: {gathers[0].op!r} gathers its input, but only slices the gradient, which "
            "is partial on each rank; write "
            f'sync("fwd_pre", "all_gather", axis=...), which sums it, or add sch["{path}"]'
            '.sync("bwd_post", "all_reduce") after it'
        )


def _check_vocabulary(path: str, outer: nn.Module, state: Sharding) -> None:
    """Raise for a sharded embedding without a mask: each rank can only look up its own rows."""
    # A user's own pair of hooks: one before that masks the tokens, one after that zeroes their
    # rows.
    by_hand = outer._forward_pre_hooks and outer._forward_hooks
    if state.layout.vocabulary and not (is_masked(innermost(outer)) or by_hand):
        raise SlapoError(
            f"{path!r}: its rows are sharded, but nothing masks the tokens of other ranks; "
            f'add sch["{path}"].sync("fwd_post", "all_reduce")'
        )


def _reduces(state: Sharding) -> bool:
    return any(sync.mode == "fwd_post" and sync.op in REDUCTIONS for sync in state.syncs)
