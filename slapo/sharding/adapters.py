"""Low-rank adapters of PEFT around sharded layers.

PEFT adds two matrices to a layer: ``y = W x`` becomes ``W x + s B A x`` (Hu et al., "LoRA: Low-Rank
Adaptation of Large Language Models", 2021). If ``W`` is sharded by columns, a rank computes with
the same part of ``A``; the small output is reduced like that of ``W``, and the full ``B`` acts on
the sum. If ``W`` is sharded by rows, a rank computes with a part of ``B``.

Every rank holds both matrices in full, and sums the gradients that are partial. So values, files
and further adapters are those of PEFT.

Adapters come before the shards or after them. For the latter, a hook of torch's sees each module
that becomes an attribute of another one.
"""

from __future__ import annotations

import functools
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from slapo.errors import SlapoError
from slapo.hooks import SHARDING, move_input_hooks, move_output_hooks
from slapo.random import get_rng_tracker
from slapo.sharding.groups import group_size
from slapo.sharding.layout import PARTIAL, KnownSync
from slapo.sharding.partial import own_part
from slapo.sharding.state import Sharding, make_sharding, sharding_of
from slapo.sharding.sync import REDUCTIONS
from slapo.sharding.sync_hooks import OutputHook
from slapo.sharding.tags import PARTIAL_GRAD, has_partial_grad
from slapo.wrapper import innermost, is_adapted

#: On a layer while PEFT reads its full sizes: those of this rank.
_OWN_SIZES = "_slapo_own_sizes"
#: On a table of matrices: the layer that they are adapters of.
_LAYER = "_slapo_adapted_layer"


class _UsesParts:
    """A matrix that each rank holds in full, and computes with its part of."""

    traceable = False

    def forward(self: Any, x: Tensor) -> Any:
        """Compute with this rank's part of the tensors."""
        state, product = self.__dict__[SHARDING], getattr(self, "_conv_forward", F.linear)
        parts = {n: own_part(getattr(self, n), spec, state.group) for n, spec in state.used.items()}
        return product(x, parts["weight"], parts.get("bias"))


class _Linear(_UsesParts, nn.Linear): ...


class _Conv1d(_UsesParts, nn.Conv1d): ...


class _Conv2d(_UsesParts, nn.Conv2d): ...


class _Conv3d(_UsesParts, nn.Conv3d): ...


# By the class of torch, the third in each MRO: _Linear, _UsesParts, nn.Linear.
_CLASSES: dict[type, type] = {cls.__mro__[2]: cls for cls in (_Linear, _Conv1d, _Conv2d, _Conv3d)}


class _Dropout(nn.Dropout):
    """Draws another mask on every rank, as its input is a slice."""

    traceable = False

    def forward(self, input: Tensor) -> Tensor:
        """Draw from the tensor-parallel random state."""
        with get_rng_tracker().fork() if self.training else nullcontext():
            return super().forward(input)


class _PartOfDelta:
    """``get_delta_weight`` of a sharded layer, by which PEFT merges adapters."""

    def __init__(self, adapted: nn.Module) -> None:
        self.adapted = adapted

    def __call__(self, adapter: str) -> Tensor:
        layer: Any = self.adapted
        base: Any = innermost(layer.base_layer)
        full: Tensor = type(layer).get_delta_weight(layer, adapter)
        state = _sharding_over_ranks(base)
        if state is None or "weight" not in state.specs:
            return full
        bias: Any = innermost(layer.lora_B[adapter]).bias
        if bias is not None and bias.shape != base.bias.shape:
            raise SlapoError(
                f"the bias of the adapter {adapter!r} has {len(bias)} elements, and this rank's "
                f"part of its layer's bias {len(base.bias)}, so PEFT cannot merge them; save the "
                "adapters, and merge them into the full model"
            )
        return state.specs["weight"].slice(full)


def check_adapters(module: nn.Module, path: str = "") -> None:
    """Raise ``ValueError`` for adapters that are not two matrices."""
    kinds = {type(matrix) for matrix in _matrices(module)}
    if (
        not kinds
        or kinds - {*_CLASSES, *_CLASSES.values()}
        or getattr(module, "lora_variant", None)
    ):
        raise ValueError(
            f"{repr(path) if path else 'a sharded layer'} has adapters of {type(module).__name__} "
            "that are not two matrices of LoRA, and only these can follow a sharded layer; use "
            "one rank for tensor parallelism, and more for data parallelism"
        )


def follow_layer(adapted: nn.Module) -> None:
    """Make the adapters of a layer, present and future, follow its shards and reductions."""
    adapted.__dict__["get_delta_weight"] = _PartOfDelta(adapted)
    for table in _tables(adapted):
        table.__dict__[_LAYER] = adapted
        for matrix in table._modules.values():
            _follow(adapted, table, innermost(matrix))


def _tables(adapted: nn.Module) -> list[Any]:
    """The first and the second matrices by adapter; empty for other kinds of adapters."""
    names = ("lora_A", "lora_B") if is_adapted(adapted) else ()
    return [innermost(getattr(adapted, name)) for name in names]


def _matrices(adapted: nn.Module) -> list[nn.Module]:
    return [innermost(m) for table in _tables(adapted) for m in table._modules.values()]


def _follow(adapted: Any, table: nn.Module, matrix: nn.Module) -> None:
    """Make a matrix follow its layer; another call adds what is new."""
    base, is_first = innermost(adapted.base_layer), table is _tables(adapted)[0]
    state = _sharding_over_ranks(base)
    if state is None:
        return
    own, spec = make_sharding(matrix, state.group.group), state.specs.get("weight")
    tensors = {name: t for name, t in matrix._parameters.items() if t is not None}
    is_row = state.layout.output == PARTIAL
    ops = [hook.op for hook in (*state.reducers, *_reductions(base).values()) if is_row]
    # If the layer's output is a partial sum, the first matrix is used in part, along its inputs; if
    # it is a slice, the second, along its outputs. A gradient is partial if the matrix or what
    # follows it is used in part.
    if spec is None:
        is_partial = has_partial_grad(base._parameters.get("weight"))
    elif is_partial := is_first == is_row:
        axis = int(is_row)
        own.used = {n: replace(spec, axis=axis, full_shape=t.shape) for n, t in tensors.items()}
        matrix.__class__ = _CLASSES.get(type(matrix), type(matrix))
    else:  # after a reduce_scatter, the second matrix gets a part of the tokens
        is_partial = is_first or any(op.name == "reduce_scatter" for op in ops)
    for dropout in adapted.lora_dropout.values() if spec is not None and is_row else ():
        if type(dropout) is nn.Dropout:
            dropout.__class__ = _Dropout
    for op in ops if is_first and not own.syncs else ():
        matrix.register_forward_hook(OutputHook(op))
        own.syncs = (*own.syncs, KnownSync("fwd_post", op.name, op.axis, op.output()))
    for name in tensors if is_partial else ():
        own.tag(matrix, name, PARTIAL_GRAD[0], True)


# --- adapters that come after the shards ---------------------------------------------------------
@functools.cache
def follow_adapters() -> None:
    """From now on, make adapters that are put around sharded layers follow them."""
    register_module_module_registration_hook(_registered)


def _registered(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Hook of torch's, called before `module` becomes ``parent.name``."""
    if "peft" not in sys.modules:
        return
    old: Any = parent._modules.get(name)
    layer = parent.__dict__.get(_LAYER)
    if layer is not None and module is not None:
        _add(layer, parent, module)
    # The first act of PEFT's constructor, which then reads the layer's sizes for its matrices.
    elif name == "base_layer" and _is_of_peft(parent) and not is_adapted(parent):
        _show_full_sizes(module)
    # The complete adapters take the layer's place in the model.
    elif _is_of_peft(module):
        _take_over(module)
    elif _is_of_peft(old) and old.base_layer is module:
        _give_back(old, module)


def _is_of_peft(module: Any) -> bool:
    return any(cls.__name__ == "BaseTunerLayer" for cls in type(module).__mro__)


def _sharding_over_ranks(module: nn.Module) -> Sharding | None:
    state = sharding_of(module)
    return None if state is None or group_size(state.group.group) == 1 else state


def _show_full_sizes(base: Any) -> None:
    """Set what PEFT reads to the sizes of the full layer."""
    state = _sharding_over_ranks(base)
    if state is not None and "weight" in state.specs:
        base.__dict__.setdefault(_OWN_SIZES, {name: getattr(base, name) for name in state.sizes})
        base.__dict__.update(state.sizes)
        base.weight.ds_shape = state.specs["weight"].full_shape  # for Transformers' Conv1D


def _hide_full_sizes(base: Any) -> tuple[int, ...]:
    """Restore this rank's sizes; return the full shape of the weight, or () without one."""
    base.__dict__.update(base.__dict__.pop(_OWN_SIZES, {}))
    weight = base._parameters.get("weight")
    return () if weight is None else weight.__dict__.pop("ds_shape", tuple(weight.shape))


def _take_over(adapted: Any) -> None:
    """Make new adapters follow their layer, and run the layer's hooks around both."""
    base = adapted.base_layer
    state = _sharding_over_ranks(base)
    if state is None or any(sharding_of(m) for m in adapted.modules() if m is not base):
        return  # none of it is sharded, or all of it is
    full = _hide_full_sizes(base)
    if not (state.specs or is_adapted(adapted)):
        return  # another kind of adapters, around a full layer
    check_adapters(adapted)
    _check_sizes(adapted, full)
    # Gathers and input syncs apply to the sum of layer and adapters. A reduction stays at the
    # layer, and the first matrix has one of its own.
    _move_hooks(base, adapted, base, stay=state.layout.output == PARTIAL)
    follow_layer(adapted)
    for matrix in _matrices(adapted):
        _share_values(matrix, state)


def _share_values(matrix: nn.Module, state: Sharding) -> None:
    """Give every rank the first rank's values, as each has drawn its own."""
    for parameter in matrix.parameters():
        if not parameter.is_meta:
            dist.broadcast(parameter.detach(), group=state.group.group, group_src=0)


def _add(adapted: Any, table: nn.Module, matrix: nn.Module) -> None:
    """Make a matrix of a further adapter follow the layer; PEFT enters it again with values."""
    check_adapters(adapted)
    _follow(adapted, table, innermost(matrix))
    state = _sharding_over_ranks(innermost(adapted.base_layer))
    if state is not None:
        _share_values(matrix, state)


def _check_sizes(adapted: nn.Module, full: tuple[int, ...]) -> None:
    first, second = (table._modules for table in _tables(adapted))
    for name in first:
        outputs, inputs = second[name].weight.shape[0], first[name].weight.shape[1]
        if sorted([outputs, inputs]) != sorted(full[:2]):
            raise SlapoError(
                f"the adapters of {type(adapted).__name__} have {inputs} inputs and {outputs} "
                f"outputs, but the weight of their layer is {tuple(full)}: they were made from "
                "this rank's slice of it; pass init_lora_weights=True or 'gaussian', which do not "
                "read it, or add the adapters before slapo.create_schedule"
            )


def _give_back(adapted: nn.Module, base: Any) -> None:
    """Move the hooks back to a layer whose adapters go, as by ``merge_and_unload``."""
    if sharding_of(adapted) is not None:
        _move_hooks(adapted, base, base, stay=True)


def _move_hooks(source: nn.Module, target: nn.Module, base: nn.Module, stay: bool) -> None:
    """Move hooks and syncs; with `stay`, reductions stay at `base`, where they come first."""
    inner = _reductions(base) if stay else {}
    for key in inner:
        del base._forward_hooks[key]
    move_input_hooks(source, target)
    move_output_hooks(source, target)
    for hook in reversed(inner.values()):
        base.register_forward_hook(hook, prepend=True)
    state: Any = sharding_of(source)
    kept = [s for s in state.syncs if stay and source is base and s.op in REDUCTIONS]
    moved = make_sharding(target, state.group.group)
    moved.syncs = (*moved.syncs, *(sync for sync in state.syncs if sync not in kept))
    state.syncs = tuple(kept)


def _reductions(base: nn.Module) -> dict[int, Any]:
    hooks: dict[int, Any] = base._forward_hooks
    outputs: dict[int, Any] = {k: hook for k, hook in hooks.items() if isinstance(hook, OutputHook)}
    return {key: hook for key, hook in outputs.items() if hook.op.name in REDUCTIONS}
