"""Random schedules: what the placement check says of them, and what two processes compute.

``python -m tests.check.fuzz tensor 500`` compares the two for 500 seeds and writes what it found.
"""

from __future__ import annotations

import argparse
import copy
import csv
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from slapo.check import check
from slapo.sharding.checks import check_modules
from slapo.sharding.collectives import copy_to_group, reduce_from_group, reduce_scatter
from slapo.sharding.state import shards_of
from slapo.sharding.steps import carried_by
from slapo.verify.peers import Peers
from slapo.wrapper import innermost
from tests.distributed import run_distributed
from tests.sharding.families import (
    FAMILIES,
    Experts,
    Family,
    Region,
    Stack,
    Steps,
    is_whole,
)

BATCH = 3


class Random(Steps):
    """The right schedule, each decision of which is another one now and then.

    Parameters
    ----------
    choose
        The source of decisions.
    odds
        How often a decision is another one.
    """

    def __init__(
        self, family: Family, sequence_parallel: bool, choose: random.Random, odds: float
    ) -> None:
        super().__init__(family, sequence_parallel)
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
            layer[path].shard("weight", axis=1 - axis)
            return
        if chosen == "blocks":
            column = (path, axis, 1 if blocks > 1 else 2)
        super().column(layer, column, number)
        if chosen == "gathered":
            tells = self.choose.random() < 0.5
            node = layer[path]
            node.sync("fwd_post", "all_gather", axis=-1, tensor_parallel_output_grad=tells)

    def row(self, layer: slapo.Schedule, row: tuple[str, int], number: int) -> None:
        path, axis = row
        chosen = self.other(f"row {layer.path}.{path}", "whole", "not summed", "hook", "twice")
        if chosen == "whole":
            return
        if not chosen:
            super().row(layer, row, number)
            return
        layer[path].shard("weight", axis=axis)
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
        node = layer[experts.path].shard("gate_up_proj", axis=1, blocks=blocks)
        node.shard("down_proj", axis=2)
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
            head.shard("weight", axis=0)
        if getattr(head.mod, "bias", None) is not None:
            head.shard("bias", axis=0)
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
    from slapo.sharding.collectives import all_gather

    return (all_gather(args[0], None, 1, tensor_parallel_output_grad=False), *args[1:])


# --- one seed ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Verdict:
    """What was said of one seed: "equal" or "accepted", or how it went wrong."""

    seed: int
    said: str
    why: str = ""


def model_of(family: str) -> nn.Module:
    """No value that hides a mistake: no zeros, no ones."""
    torch.manual_seed(0)
    model = FAMILIES[family].build(0.0)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model


def random_steps(kind: str, seed: int) -> tuple[str, Random]:
    """The family and the schedule of a seed."""
    choose = random.Random(f"{kind} {seed}")
    family = choose.choice(list(FAMILIES))
    odds = choose.choice((0.01, 0.04, 0.1) if kind == "sequence" else (0.02, 0.06, 0.2))
    return family, Random(FAMILIES[family], kind == "sequence", choose, odds)


def inputs_of(kind: str, family: str) -> dict[str, Tensor]:
    return FAMILIES[family].inputs(BATCH, 6 if kind == "sequence" else 7)


def scheduled(kind: str, seed: int) -> tuple[slapo.Schedule | None, nn.Module, str, str]:
    """The schedule, or what refused it, the family and the decisions."""
    family, steps = random_steps(kind, seed)
    model = model_of(family)
    original = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    try:
        steps.apply(sch)
        check_modules(sch.mod)
    except (slapo.SlapoError, ValueError) as error:
        return None, original, family, f"{error}"
    return sch, original, family, "; ".join(steps.decisions)


def checked(kind: str, seeds: Iterable[int]) -> list[Verdict]:
    """What the check says, as rank 1 of two."""
    found = []
    for seed in seeds:
        sch, _, family, what = scheduled(kind, seed)
        if sch is None:
            found.append(Verdict(seed, "schedule", what))
            continue
        try:
            check(sch, inputs_of(kind, family))
            found.append(Verdict(seed, "accepted", f"{family}: {what}"))
        except slapo.SlapoError as error:
            found.append(Verdict(seed, "refused", f"{family}: {what} || {error}"))
    return found


def computed(rank: int, world_size: int, kind: str, seeds: list[int]) -> list[Verdict]:
    """What two processes compute: the truth."""
    logging.disable(logging.ERROR)
    slapo.set_random_seed(1, tp_rank=rank)
    return [_compute(kind, seed) for seed in seeds]


def _compute(kind: str, seed: int) -> Verdict:
    sch, original, family, what = scheduled(kind, seed)
    if sch is None:
        return Verdict(seed, "schedule", what)
    return computed_by_two(seed, sch, original, inputs_of(kind, family))


def computed_by_two(
    seed: int, sch: slapo.Schedule, original: nn.Module, inputs: dict[str, Tensor]
) -> Verdict:
    """Loss and gradients of the ranks of this job, against those of one process."""
    peers = Peers(dist.group.WORLD)
    try:
        with peers.told():
            with carried_by(peers.carry_out):
                loss = sch.mod(**inputs).loss
                loss.backward()
            peers.meet("end")
    except Exception as error:
        return Verdict(seed, "error", f"{type(error).__name__}: {error}")
    wanted = original(**inputs).loss
    wanted.backward()
    worst = max(_difference(sch.mod, original), float((loss - wanted).detach().abs()))
    total = torch.tensor([worst])
    dist.all_reduce(total, dist.ReduceOp.MAX)
    return Verdict(seed, "equal" if total.item() < 2e-4 else "wrong", f"{total.item():.2g}")


def _difference(model: nn.Module, original: nn.Module) -> float:
    """The largest difference of a gradient, relative to its largest value."""
    wanted = dict(original.named_parameters(remove_duplicate=False))
    largest = max(float(p.grad.abs().max()) for p in wanted.values() if p.grad is not None)
    worst = 0.0
    for path, outer in model.named_modules():
        module = innermost(outer)
        for leaf, param in module._parameters.items():
            target = wanted.get(f"{path}.{leaf}")
            if param is None or target is None or target.grad is None:
                continue
            spec, whole = shards_of(module).get(leaf), target.grad
            mine = torch.zeros_like(param) if param.grad is None else param.grad
            part = spec.slice(whole) if spec is not None else whole
            # A sum that cancels, as that for the bias of keys, has rounding alone.
            scale = max(float(whole.abs().max()), 1e-2 * largest)
            worst = max(worst, float((mine - part).abs().max()) / scale)
    return worst


@contextmanager
def fake_world(world_size: int = 2, rank: int = 1) -> Any:
    """Groups of ranks that do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def compared(kind: str, seeds: list[int]) -> list[tuple[Verdict, Verdict]]:
    """Check and truth of each seed."""
    with fake_world():
        said = checked(kind, seeds)
    true = run_distributed(computed, 2, kind, seeds, timeout=60 + 2 * len(seeds))[0]
    return list(zip(said, true, strict=True))


def is_miss(said: Verdict, true: Verdict) -> bool:
    """Accepted, and wrong."""
    return said.said == "accepted" and true.said in ("wrong", "error")


def is_false_alarm(said: Verdict, true: Verdict) -> bool:
    """Refused, and right."""
    return said.said == "refused" and true.said == "equal"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["tensor", "sequence"])
    parser.add_argument("count", type=int)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--csv")
    given = parser.parse_args()
    logging.disable(logging.ERROR)
    rows, counts, begun = [], Counter[tuple[str, str]](), time.monotonic()
    for start in range(given.start, given.start + given.count, 50):
        seeds = list(range(start, min(start + 50, given.start + given.count)))
        for said, true in compared(given.kind, seeds):
            counts[said.said, true.said] += 1
            rows.append((given.kind, said.seed, said.said, true.said))
            if is_miss(said, true) or is_false_alarm(said, true):
                print(f"seed {said.seed}: {said.said}, {true.said} {true.why}\n  {said.why}")
        print(
            f"{seeds[-1] + 1 - given.start} seeds, {time.monotonic() - begun:.0f} s",
            file=sys.stderr,
        )
    for (said, true), count in sorted(counts.items()):
        print(f"{said:>9} {true:>9} {count:>6}")
    if given.csv:
        with open(given.csv, "w", newline="") as file:
            csv.writer(file).writerows([("kind", "seed", "check", "two processes"), *rows])


if __name__ == "__main__":
    main()
