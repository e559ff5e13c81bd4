"""Mistakes planted in the right schedules of six families, in the second layer or at the head.

Each says in which modules it is: a message is right that names one of them, or one inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.sharding.collectives import all_gather, copy_to_group, reduce_from_group
from slapo.sharding.vocab import vocabulary_hooks
from tests.sharding.families import (
    FAMILIES,
    VOCABULARY,
    Experts,
    Family,
    Region,
    Stack,
    Steps,
    is_whole,
)

#: The layer that mistakes are in.
AT = 1


class Planted(Steps):
    """The right schedule with one mistake, in :attr:`AT`."""

    def __init__(self, family: Family, sequence_parallel: bool = False) -> None:
        super().__init__(family, sequence_parallel)
        self.places: list[str] = []

    def here(self, layer: slapo.Schedule, path: str) -> None:
        """Note where the mistake is."""
        self.places.append(f"{layer.path}.{path}".strip("."))

    def last_stack(self) -> Stack:
        return self.family.stacks[-1]

    def is_last(self, layer: slapo.Schedule) -> bool:
        return layer.path.startswith(self.last_stack().layers.removesuffix("*"))


class NoForwardSync(Planted):
    def row(self, layer: slapo.Schedule, row: tuple[str, int], number: int) -> None:
        if number == AT and self.is_last(layer) and row == self.last_stack().regions[0].rows[-1]:
            layer[row[0]].shard("weight", axis=row[1])
            self.here(layer, row[0])
        else:
            super().row(layer, row, number)


class NoBackwardSync(Planted):
    def enter(self, layer: slapo.Schedule, region: Region, number: int) -> None:
        if not (number == AT and self.is_last(layer) and region == self.last_stack().regions[0]):
            super().enter(layer, region, number)
            return
        self.here(layer, region.enter)
        self.places += [f"{layer.path}.{path}" for path, *_ in region.columns]
        if self.spreads:
            argument = region.arguments[0] if region.arguments else None
            layer[region.enter].sync(
                "fwd_pre",
                "all_gather",
                axis=1,
                argument=argument,
                tensor_parallel_output_grad=False,
            )


class WrongAxis(Planted):
    def column(self, layer: slapo.Schedule, column: tuple[str, int, int], number: int) -> None:
        path, axis, _ = column
        if (
            number == AT
            and self.is_last(layer)
            and column == self.last_stack().regions[0].columns[-1]
        ):
            layer[path].shard("weight", axis=1 - axis)
            self.here(layer, path)
        else:
            super().column(layer, column, number)


class OwnLinear(nn.Module):
    """A user's own layer, of which nothing is known: it adds its bias to what is a partial sum."""

    def __init__(self, like: Any, axis: int) -> None:
        super().__init__()
        self.weight, self.transposed = like.weight, axis == 0
        bias = getattr(like, "bias", None)
        self.bias = (
            nn.Parameter(like.weight.new_ones(like.weight.shape[1 - axis]))
            if bias is None
            else bias
        )

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight if self.transposed else F.linear(x, self.weight)) + self.bias


class BiasOnPartialSum(Planted):
    def row(self, layer: slapo.Schedule, row: tuple[str, int], number: int) -> None:
        if number == AT and self.is_last(layer) and row == self.last_stack().regions[0].rows[-1]:
            path, axis = row
            layer[path].replace(OwnLinear(layer[path].mod, axis))
            self.here(layer, path)
            layer[path].shard("weight", axis=axis).mod.register_forward_hook(self.reduced)
        else:
            super().row(layer, row, number)

    def reduced(self, module: Any, args: Any, output: Tensor) -> Tensor:
        from slapo.sharding.collectives import reduce_scatter

        return reduce_scatter(output, None, 1) if self.spreads else reduce_from_group(output)


class SummedTwice(Planted):
    def row(self, layer: slapo.Schedule, row: tuple[str, int], number: int) -> None:
        super().row(layer, row, number)
        if number == AT and self.is_last(layer) and row == self.last_stack().regions[0].rows[-1]:
            self.here(layer, row[0])
            layer[row[0]].mod.register_forward_hook(lambda m, a, out: reduce_from_group(out))


class GatheredForSummed(Planted):
    def row(self, layer: slapo.Schedule, row: tuple[str, int], number: int) -> None:
        if number == AT and self.is_last(layer) and row == self.last_stack().regions[0].rows[-1]:
            node = layer[row[0]].shard("weight", axis=row[1])
            self.here(layer, row[0])
            node.mod.register_forward_hook(self.gathered)
        else:
            super().row(layer, row, number)

    def gathered(self, module: Any, args: Any, output: Tensor) -> Tensor:
        size = output.shape[-1]
        whole = all_gather(output, None, axis=-1)[..., :size]
        return whole.chunk(2, 1)[0] if self.spreads else whole


class NotDeferred(Planted):
    """Ranks keep the whole weight of one column layer whose siblings are split."""

    def column(self, layer: slapo.Schedule, column: tuple[str, int, int], number: int) -> None:
        region = self.last_stack().regions[0]
        if number == AT and self.is_last(layer) and column in region.columns[1:]:
            self.here(layer, region.enter)
            self.here(layer, column[0])
        else:
            super().column(layer, column, number)


class VocabularyMistake(Planted):
    def vocabulary(self, sch: slapo.Schedule) -> None:
        for number, path in enumerate(self.family.embeddings):
            if number == 0:
                sch[path].shard("weight", axis=0)
            self.places.append(path)
            self.around(sch, sch[path].mod)

    def around(self, sch: slapo.Schedule, table: nn.Module) -> None:
        raise NotImplementedError


class NoMask(VocabularyMistake):
    def around(self, sch: slapo.Schedule, table: nn.Module) -> None:
        table.register_forward_hook(lambda module, args, out: reduce_from_group(out))
        table.register_forward_pre_hook(lambda module, args: (args[0] % (VOCABULARY // 2),))


class MaskOfRankZero(VocabularyMistake):
    def around(self, sch: slapo.Schedule, table: nn.Module) -> None:
        pre, post = vocabulary_hooks(0, sch.world_size, VOCABULARY, reduce_from_group)
        table.register_forward_pre_hook(pre)
        table.register_forward_hook(post)


class MaskedNotSummed(VocabularyMistake):
    def around(self, sch: slapo.Schedule, table: nn.Module) -> None:
        pre, post = vocabulary_hooks(sch.rank, sch.world_size, VOCABULARY, lambda part: part)
        table.register_forward_pre_hook(pre)
        table.register_forward_hook(post)


class NormNotTagged(Planted):
    def sees_tokens(self, layer: slapo.Schedule, path: str, number: int) -> None:
        if number == AT and self.is_last(layer) and path == self.last_stack().norms[0]:
            self.here(layer, path)
        else:
            super().sees_tokens(layer, path, number)


class InnerNormNotTagged(Planted):
    def whole_inside(self, layer: slapo.Schedule, path: str, number: int) -> None:
        if number == AT:
            self.here(layer, path)
        else:
            super().whole_inside(layer, path, number)


class NotForked(Planted):
    def fork(self, layer: slapo.Schedule, path: str, number: int) -> None:
        if number == AT and self.is_last(layer) and not self.places:
            self.here(layer, path)
        else:
            super().fork(layer, path, number)


class ForkedWhole(Planted):
    """A dropout of what is whole on every rank draws from each rank's own state."""

    def apply(self, sch: slapo.Schedule) -> None:
        super().apply(sch)
        stack = self.last_stack()
        for path in stack.dropouts if not self.spreads else ():
            layer = f"{stack.layers.removesuffix('*')}{AT}"
            sch[f"{layer}.{path}"].fork_rng()
            self.places.append(f"{layer}.{path}")
            return


class GradientSummedTwice(Planted):
    def column(self, layer: slapo.Schedule, column: tuple[str, int, int], number: int) -> None:
        super().column(layer, column, number)
        region = self.last_stack().regions[-1]
        if number == AT and self.is_last(layer) and column == region.columns[-1]:
            self.here(layer, column[0])
            self.here(layer, region.enter)
            group = layer.group
            layer[column[0]].mod.register_forward_pre_hook(
                lambda module, args: (copy_to_group(copy_to_group(args[0], group), group),)
            )


class HeadGradientsSummed(Planted):
    """Logits that every rank uses alike are gathered as if each rank used them otherwise."""

    def head(self, sch: slapo.Schedule) -> None:
        head = sch[self.family.head]
        self.places.append(head.path)
        if is_whole(head):
            head.shard("weight", axis=0)
        if getattr(head.mod, "bias", None) is not None:
            head.shard("bias", axis=0)
        if not (self.spreads and self.family.stacks[-1].reads_parts):
            head.sync("bwd_post", "all_reduce")
        head.sync("fwd_post", "all_gather", axis=-1)


class NotInBlocks(Planted):
    def column(self, layer: slapo.Schedule, column: tuple[str, int, int], number: int) -> None:
        path, axis, blocks = column
        if number == AT and blocks > 1:
            self.here(layer, path)
            self.here(layer, "attn")
            column = (path, axis, 1)
        super().column(layer, column, number)

    def experts(self, layer: slapo.Schedule, experts: Experts, number: int) -> None:
        if number != AT:
            super().experts(layer, experts, number)
            return
        self.here(layer, experts.path)
        node = layer[experts.path].shard("gate_up_proj", axis=1)
        node.shard("down_proj", axis=2).sync("bwd_post", "all_reduce").sync(
            "fwd_post", "all_reduce"
        )
        if self.spreads:
            block = layer[experts.block]
            block.sync("fwd_pre", "all_gather", axis=1, tensor_parallel_output_grad=False)
            block.sync("fwd_post", "scatter", axis=1)


class HeadSizeCut(Planted):
    """Half the size of a head where half the number of heads was meant: every shape fits."""

    NAMES = ("head_dim", "attention_head_size", "key_value_proj_dim")

    def region(self, layer: slapo.Schedule, region: Region, number: int) -> None:
        super().region(layer, region, number)
        module = layer[region.enter].mod
        name = next((n for n in self.NAMES if hasattr(module, n)), None)
        if number == AT and self.is_last(layer) and name and not self.places:
            self.here(layer, region.enter)
            setattr(module, name, getattr(module, name) // layer.world_size)
            for path, attribute in region.counts:
                if attribute in ("num_heads", "num_attention_heads", "n_heads"):
                    whole = getattr(layer[path].mod, attribute) * layer.world_size
                    setattr(layer[path].mod, attribute, whole)


class RouterSummed(Planted):
    """A router's whole gradient goes through a gather that sums."""

    def experts(self, layer: slapo.Schedule, experts: Experts, number: int) -> None:
        super().experts(layer, experts, number)
        if number == AT and not self.spreads:
            layer[experts.block].mod.register_forward_pre_hook(
                lambda module, args: (copy_to_group(args[0]), *args[1:])
            )
            self.here(layer, experts.block)


class StatesNotSummed(Planted):
    """Cross attention sends back a part of the gradient of the encoder's states."""

    def enter(self, layer: slapo.Schedule, region: Region, number: int) -> None:
        if len(region.arguments) < 2 or number != AT:
            super().enter(layer, region, number)
            return
        self.here(layer, region.enter)
        self.places += [f"{layer.path}.{path}" for path, *_ in region.columns]
        one = Region(region.enter, region.columns, region.rows, region.arguments[:1])
        super().enter(layer, one, number)


class GatheredAlongBatch(Planted):
    def enter(self, layer: slapo.Schedule, region: Region, number: int) -> None:
        first = region == self.last_stack().regions[0]
        if not (self.spreads and number == AT and self.is_last(layer) and first):
            super().enter(layer, region, number)
            return
        self.here(layer, region.enter)
        argument = region.arguments[0] if region.arguments else None
        layer[region.enter].sync("fwd_pre", "all_gather", axis=0, argument=argument)


class SummedForScattered(Planted):
    """All ranks get all tokens where each goes on with its own."""

    def reduce(self, node: slapo.Schedule, number: int) -> None:
        if self.spreads and number == AT and not self.places:
            self.places.append(node.path)
            self.places.append(node.path.rpartition(".")[0])
            node.sync("fwd_post", "all_reduce")
        else:
            super().reduce(node, number)


class NotTogether(Planted):
    """Tokens are not put together again behind the last norm."""

    def together(self, sch: slapo.Schedule, stack: Stack) -> None:
        if stack != self.last_stack():
            super().together(sch, stack)
        else:
            self.places += [stack.last, self.family.head, stack.last.rpartition(".")[0]]


MISTAKES: dict[str, type[Planted]] = {
    "no_forward_sync": NoForwardSync,
    "no_backward_sync": NoBackwardSync,
    "wrong_axis": WrongAxis,
    "bias_on_partial_sum": BiasOnPartialSum,
    "summed_twice": SummedTwice,
    "gathered_for_summed": GatheredForSummed,
    "only_one_column_split": NotDeferred,
    "no_vocabulary_mask": NoMask,
    "mask_of_rank_0": MaskOfRankZero,
    "vocabulary_not_summed": MaskedNotSummed,
    "norm_not_tagged": NormNotTagged,
    "inner_norm_not_tagged": InnerNormNotTagged,
    "dropout_not_forked": NotForked,
    "whole_dropout_forked": ForkedWhole,
    "gradient_summed_twice": GradientSummedTwice,
    "logits_gradient_summed": HeadGradientsSummed,
    "not_in_blocks": NotInBlocks,
    "head_size_cut": HeadSizeCut,
    "router_summed": RouterSummed,
    "states_not_summed": StatesNotSummed,
    "gathered_along_batch": GatheredAlongBatch,
    "summed_for_scattered": SummedForScattered,
    "not_together": NotTogether,
}


@dataclass(frozen=True)
class Case:
    """One planted mistake."""

    mistake: str
    family: str
    sequence_parallel: bool

    def __str__(self) -> str:
        return f"{self.mistake}-{self.family}-{'sp' if self.sequence_parallel else 'tp'}"

    def steps(self) -> Planted:
        return MISTAKES[self.mistake](FAMILIES[self.family], self.sequence_parallel)


def cases() -> Iterator[Case]:
    for mistake in MISTAKES:
        for family in FAMILIES:
            for spreads in (False, True):
                yield Case(mistake, family, spreads)


Make = Callable[[], nn.Module]


def names_the_place(path: str, places: list[str]) -> bool:
    """Whether a module that a message names is where the mistake is, or inside."""
    return any(path == place or (place and path.startswith(f"{place}.")) for place in places)
