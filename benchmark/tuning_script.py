"""A trial of the tuner's benchmark: starts the ranks of a point, trains, reports samples/s.

``python -m benchmark.tuning_script`` trains one point by itself, without a search.
"""

from __future__ import annotations

from benchmark.measure import on_ranks
from benchmark.tuning_ranks import train_main
from benchmark.tuning_space import WORK, ranks_of
from slapo.autotune import report_result, trial_values


def main() -> None:
    """Train the point that the tuner gives."""
    plain = {"tp": 1, "pp": 1, "dp": 1, "micro_batches": 1, "checkpoint": 0.0, "attention": "sdpa"}
    point = trial_values(**plain)
    ranks = ranks_of(point)
    run = on_ranks(ranks, train_main, (ranks, point, WORK), print)
    report_result(run.throughput(WORK), others=round(run.others, 3))


if __name__ == "__main__":
    main()
