"""Random schedules: what the placement check says of them, and what processes compute.

``python -m tests.check.fuzz tensor 500`` compares the two for 500 seeds and writes what it found.
"""

import argparse
import copy
import logging
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from benchmark import report
from benchmark.measure import Result
from slapo.sharding.checks import check_modules
from slapo.sharding.steps import carried_by
from slapo.verify.numeric.rank_sync import RankSync
from slapo.verify.placement import check
from tests.check import mixed
from tests.check.random_steps import Random
from tests.check.verdicts import Verdict, fake_world, is_crash, is_false_alarm, is_miss
from tests.distributed import run_distributed
from tests.sharding.families import FAMILIES, SHARED, Family

BATCH = 3


# --- one seed ------------------------------------------------------------------------------------
def families_of(kind: str) -> dict[str, Family]:
    return SHARED if kind == "shared" else FAMILIES


def ranks_of(kind: str) -> int:
    """How many processes; more than there are heads of keys and values, where these are shared."""
    return 4 if kind == "shared" else 2


def model_of(family: Family, is_odd: bool = False) -> nn.Module:
    """No value that hides a mistake: no zeros, no ones."""
    torch.manual_seed(0)
    model = family.build(0.0, extra=int(is_odd))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model


def random_steps(kind: str, seed: int) -> tuple[str, Random]:
    """The family and the schedule of a seed."""
    choose = random.Random(f"{kind} {seed}")
    families = families_of(kind)
    name = choose.choice(list(families))
    spreads = kind == "sequence" or (kind == "shared" and choose.random() < 0.3)
    odds = choose.choice((0.01, 0.04, 0.1) if spreads else (0.02, 0.06, 0.2))
    # Of every third seed the sizes are odd, and ranks have unequal shares.
    return name, Random(families[name], spreads, choose, odds, seed % 3 == 0)


def inputs_of(kind: str, family: str) -> dict[str, Tensor]:
    lengths = {"tensor": 7, "sequence": 6, "shared": 8}
    return families_of(kind)[family].inputs(BATCH, lengths[kind])


def scheduled(kind: str, seed: int) -> tuple[slapo.Schedule | None, nn.Module, str, str]:
    """The schedule, or what refused it, the family and the decisions."""
    family, steps = random_steps(kind, seed)
    model = model_of(families_of(kind)[family], steps.uneven)
    original = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    try:
        steps.apply(sch)
        check_modules(sch.mod)
    except (slapo.SlapoError, ValueError) as error:
        return None, original, family, f"{error}"
    return sch, original, family, "; ".join(steps.decisions)


def checked(kind: str, seeds: Iterable[int]) -> list[Verdict]:
    """What the check says, as the last rank."""
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
    """What processes compute: the truth."""
    logging.disable(logging.ERROR)
    slapo.set_random_seed(1, tp_rank=rank)
    return [_compute(kind, seed) for seed in seeds]


def _compute(kind: str, seed: int) -> Verdict:
    sch, original, family, what = scheduled(kind, seed)
    if sch is None:
        return Verdict(seed, "schedule", what)
    return computed_by_ranks(seed, sch, original, inputs_of(kind, family))


def computed_by_ranks(
    seed: int, sch: slapo.Schedule, original: nn.Module, inputs: dict[str, Tensor]
) -> Verdict:
    """Loss and gradients of the ranks of this job, against those of one process."""
    peers = RankSync(dist.group.WORLD)
    try:
        with peers.reported():
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
    for name, (param, spec) in mixed.parts_of(model).items():
        target = wanted.get(name)
        if target is None or target.grad is None:
            continue
        whole = target.grad
        mine = torch.zeros_like(param) if param.grad is None else param.grad
        part = spec.slice(whole) if spec is not None else whole
        # A sum that cancels, as that for the bias of keys, has rounding alone.
        scale = max(float(whole.abs().max()), 1e-2 * largest)
        worst = max(worst, float((mine - part).abs().max()) / scale)
    return worst


def compared(kind: str, seeds: list[int]) -> list[tuple[Verdict, Verdict]]:
    """Check and truth of each seed."""
    if kind == "mixed":
        return mixed.compared(seeds)
    ranks = ranks_of(kind)
    with fake_world(ranks):
        said = checked(kind, seeds)
    true = run_distributed(computed, ranks, kind, seeds, timeout=60 + ranks * len(seeds))[0]
    return list(zip(said, true, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["tensor", "sequence", "shared", "mixed"])
    parser.add_argument("count", type=int)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help=f"write to {report.RESULTS}")
    given = parser.parse_args()
    logging.disable(logging.ERROR)
    counts, begun = Counter[tuple[str, str]](), time.monotonic()
    primitives, refused = Counter[str](), Counter[str]()
    for start in range(given.start, given.start + given.count, 50):
        seeds = list(range(start, min(start + 50, given.start + given.count)))
        for said, true in compared(given.kind, seeds):
            counts[said.said, true.said] += 1
            primitives.update(move.partition(" ")[0] for move in said.done)
            refused.update(move.partition(" ")[0] for move, _ in said.refused)
            if any(found(said, true) for found in (is_miss, is_false_alarm, is_crash)):
                print(f"seed {said.seed}: {said.said}, {true.said} {true.why}\n  {said.why}")
        print(
            f"{seeds[-1] + 1 - given.start} seeds, {time.monotonic() - begun:.0f} s",
            file=sys.stderr,
        )
    for (said, true), count in sorted(counts.items()):
        print(f"{said:>9} {true:>9} {count:>6}")
    for name, count in primitives.most_common():
        print(f"{name:>19} {count:>6}, {refused[name]} refused")
    if given.keep:
        first, last = given.start, given.start + given.count - 1
        about = {"kind": given.kind, "seeds": f"{first} to {last}"}
        rows = [
            {**about, "check": said, "processes": true, "count": count}
            for (said, true), count in sorted(counts.items())
        ]
        command = shlex.join(["python", "-m", "tests.check.fuzz", *sys.argv[1:]])
        print(*report.write(f"check_fuzz_{given.kind}", Result(rows), command))


if __name__ == "__main__":
    main()
