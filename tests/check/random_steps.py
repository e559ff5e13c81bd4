"""Tensor-parallel schedules that are right in most of their decisions."""

import random
from typing import Any

from torch import Tensor

import slapo
from slapo.sharding.collectives import (
    all_gather,
    copy_to_group,
    reduce_from_group,
    reduce_scatter,
)
from tests.sharding.families import Experts, Family, Region, Stack, Steps, is_whole


class Random(Steps):
    """The right schedule; `odds` is how often a decision that `choose` makes is another one."""

    def __init__(
        self,
        family: Family,
        sequence_parallel: bool,
        choose: random.Random,
        odds: float,
        uneven: bool = False,
    ) -> None:
        super().__init__(family, sequence_parallel, uneven)
        self.choose, self.odds = choose, odds
        self.decisions: list[str] = []

    def other(self, what: str, *choices: str) -> str:
        """One of the choices, or mostly "" for the right decision."""
        if self.choose.random() >= self.odds:
            return ""
        chosen = self.choose.choice(choices)
        self.decisions.append(f"{what}: {chosen}")
        return chosen

    # --- regions -----------------------------------------------------------------------------
    def region(self, layer: slapo.Schedule, region: Region, number: int) -> None:
        if not self.spreads and self.choose.random() < 0.15:
            self.decisions.append(f"{layer.path}.{region.enter}: left whole")
            return  # right, too
        super().region(layer, region, number)

    def enter(self, layer: slapo.Schedule, region: Region, number: int) -> None:
        node = layer[region.enter]
        if self.spreads:
            chosen = self.other(f"enter {node.path}", "none", "same", "axis 0")
            if chosen in ("same", "axis 0"):
                argument = region.arguments[0] if region.arguments else None
                axis = 0 if chosen == "axis 0" else 1
                tells = chosen != "same"
                node.sync(
                    "fwd_pre",
                    "all_gather",
                    axis=axis,
                    argument=argument,
                    tensor_parallel_output_grad=tells,
                )
        else:
            chosen = self.other(f"enter {node.path}", "none", "columns", "twice", "first input")
            if chosen == "columns":  # right, too
                for path, *_ in region.columns:
                    layer[path].sync("bwd_post", "all_reduce")
            elif chosen == "twice":
                super().enter(layer, region, number)
                layer[region.columns[0][0]].mod.register_forward_pre_hook(_copied)
            elif chosen == "first input":
                node.sync("bwd_post", "all_reduce", argument=region.arguments[:1] or None)
        if not chosen:
            super().enter(layer, region, number)

    def column(self, layer: slapo.Schedule, column: tuple[str, int, int], number: int) -> None:
        path, axis, blocks = column
        chosen = self.other(f"column {layer.path}.{path}", "whole", "axis", "blocks", "gathered")
        if chosen == "whole":
            return
        if chosen == "axis":
            layer[path].shard("weight", axis=1 - axis, uneven=self.uneven)
            return
        if chosen == "blocks":
            column = (path, axis, 1 if blocks > 1 else 2)
        super().column(layer, column, number)
        if chosen == "gathered":
            tells = self.choose.random() < 0.5
            node = layer[path]
            node.sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=tells)

    def parts(self, layer: slapo.Schedule, path: str) -> int | None:
        right = super().parts(layer, path)
        if right is None:
            return None
        chosen = self.other(f"heads {layer.path}.{path}", "as many as ranks", "one")
        return {"": right, "one": 1}.get(chosen)  # of one, each rank reads all that is there

    def groups(self, layer: slapo.Schedule, path: str, attribute: str, number: int) -> None:
        if not self.other(f"groups {layer.path}.{path}", "kept"):
            super().groups(layer, path, attribute, number)

    def row(self, layer: slapo.Schedule, row: tuple[str, int], number: int) -> None:
        path, axis = row
        chosen = self.other(f"row {layer.path}.{path}", "whole", "not summed", "hook", "twice")
        if chosen == "whole":
            return
        if not chosen:
            super().row(layer, row, number)
            return
        layer[path].shard("weight", axis=axis, uneven=self.uneven)
        if chosen in ("hook", "twice"):
            hook = _scattered if self.spreads else _summed
            layer[path].mod.register_forward_hook(hook)
        if chosen == "twice":
            layer[path].mod.register_forward_hook(_summed)

    def reduce(self, node: slapo.Schedule, number: int) -> None:
        chosen = self.other(f"reduce {node.path}", "other", "axis 0")
        if not chosen:
            super().reduce(node, number)
        elif chosen == "axis 0":
            node.sync("fwd_post", "reduce_scatter", axis=0)
        elif self.spreads:
            node.sync("fwd_post", "all_reduce")
        else:
            node.sync("fwd_post", "reduce_scatter", axis=-1)
            if self.choose.random() < 0.7:  # right, if the gradient is not summed again
                tells = self.choose.random() < 0.5
                node.sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=tells)

    def count(self, layer: slapo.Schedule, path: str, attribute: str, number: int) -> None:
        if not self.other(f"count {layer.path}.{path}", "kept"):
            super().count(layer, path, attribute, number)

    def whole_inside(self, layer: slapo.Schedule, path: str, number: int) -> None:
        if not self.other(f"inside {layer.path}.{path}", "not tagged"):
            super().whole_inside(layer, path, number)

    def experts(self, layer: slapo.Schedule, experts: Experts, number: int) -> None:
        chosen = self.other(
            f"experts {layer.path}", "blocks", "not summed", "no gradient", "router"
        )
        if not chosen:
            super().experts(layer, experts, number)
            return
        blocks = 1 if chosen == "blocks" else 2
        node = layer[experts.path]
        node.shard("gate_up_proj", axis=1, blocks=blocks, uneven=self.uneven)
        node.shard("down_proj", axis=2, uneven=self.uneven)
        if chosen == "router":
            layer[experts.block].sync("bwd_post", "all_reduce")
        elif chosen != "no gradient":
            node.sync("bwd_post", "all_reduce")
        if chosen != "not summed":
            node.sync("fwd_post", "all_reduce")
        if self.spreads:
            block = layer[experts.block]
            block.mod.register_forward_pre_hook(_gathered_tokens)
            block.sync("fwd_post", "scatter", axis=1)

    # --- tokens ------------------------------------------------------------------------------
    def tokens(self, layer: slapo.Schedule, stack: Stack, number: int) -> None:
        if number == 0 and self.other(f"tokens {layer.path}", "not dealt out"):
            number = -1
        super().tokens(layer, stack, number)

    def sees_tokens(self, layer: slapo.Schedule, path: str, number: int) -> None:
        if not self.other(f"norm {layer.path}.{path}", "not tagged"):
            super().sees_tokens(layer, path, number)

    def together(self, sch: slapo.Schedule, stack: Stack) -> None:
        chosen = self.other(f"together {stack.last}", "none", "other gradient", "axis 0")
        if chosen == "none":
            return
        tells = stack.reads_parts != (chosen == "other gradient")
        axis = 0 if chosen == "axis 0" else 1
        last = sch[stack.last]
        last.sync("fwd_post", "all_gather", axis=axis, tensor_parallel_output_grad=tells)
        if stack.norms_last and not self.other(f"last {stack.last}", "not tagged"):
            for name, _ in last.mod.named_parameters():
                last.annotate(name, "partial_grad", True)

    # --- vocabulary --------------------------------------------------------------------------
    def vocabulary(self, sch: slapo.Schedule) -> None:
        if self.choose.random() < 0.5:
            super().vocabulary(sch)

    def head(self, sch: slapo.Schedule) -> None:
        head = sch[self.family.head]
        split = not is_whole(head) or self.choose.random() < 0.7
        if split and not self.other("head", "no gradient", "gradient twice"):
            super().head(sch)
            return
        if not split:
            if self.spreads and self.family.stacks[-1].reads_parts:
                self.decisions.append("head: whole behind a gather that sums")
            return
        if is_whole(head):
            head.shard("weight", axis=0, uneven=self.uneven)
        if getattr(head.mod, "bias", None) is not None:
            head.shard("bias", axis=0, uneven=self.uneven)
        twice = self.decisions[-1].endswith("twice")
        if twice and not (self.spreads and self.family.stacks[-1].reads_parts):
            head.sync("bwd_post", "all_reduce")
        head.sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=twice)


def _copied(module: Any, args: Any) -> Any:
    return (copy_to_group(args[0]), *args[1:])


def _summed(module: Any, args: Any, output: Tensor) -> Tensor:
    return reduce_from_group(output)


def _scattered(module: Any, args: Any, output: Tensor) -> Tensor:
    return reduce_scatter(output, None, 1)


def _gathered_tokens(module: Any, args: Any) -> Any:
    return (all_gather(args[0], None, 1, tensor_parallel_output_grad=False), *args[1:])
