"""A made-up cluster of 64 devices: layouts of a model of 70B parameters, their memory and speed."""

import random
from collections.abc import Callable
from typing import Any

from slapo.autotune.space import Choices

CAPACITY = 80 * 2**30


def layouts(choose: Choices) -> dict[str, Any]:
    """1,960 of them, half of which fit."""
    tp = choose("tp", [1, 2, 4, 8, 16])
    pp = choose("pp", [stages for stages in (1, 2, 4, 8, 16) if tp * stages <= 64])
    return {
        "tp": tp,
        "pp": pp,
        "dp": 64 // (tp * pp),
        "zero": choose("zero", [0, 1, 3] if pp == 1 else [0, 1]),
        "micro": choose("micro", [1, 2, 4, 8, 16]),
        "checkpoint": choose("checkpoint", [0.0, 0.25, 0.5, 1.0]),
        "kernel": choose.choose("kernel", ["flash", "eager"]),
    }


def memory(point: dict[str, Any]) -> float:
    per_parameter = {0: 16, 1: 4 + 12 / point["dp"], 3: 16 / point["dp"]}[point["zero"]]
    state = 70e9 / (point["tp"] * point["pp"]) * per_parameter
    layers = 80 / point["pp"] * min(8, point["pp"])
    saved = 0.5e9 * (1 - 0.85 * point["checkpoint"]) * (1.5 if point["kernel"] == "eager" else 1)
    return state + point["micro"] * layers / point["tp"] * saved


def throughput(point: dict[str, Any]) -> float:
    bubble = (point["pp"] - 1) * point["dp"] * point["micro"] / 256
    links = 1 + 0.05 * (point["tp"] - 1) + (0.5 if point["tp"] > 8 else 0)
    zero = {0: 1, 1: 1.02, 3: 1.3}[point["zero"]]
    kernel = 0.7 if point["kernel"] == "eager" else 1
    work = (1 + bubble) * links * zero * (1 + 0.33 * point["checkpoint"])
    return 64 * kernel * point["micro"] / (point["micro"] + 1.5) / work


def measure(point: dict[str, Any]) -> float:
    if memory(point) > CAPACITY:
        raise MemoryError
    return throughput(point)


def noisy_prediction(seed: int) -> Callable[[dict[str, Any]], dict[str, float]]:
    """The truth, but for some percent of memory and a good tenth of the speed."""
    generator = random.Random(seed)

    def predict(point: dict[str, Any]) -> dict[str, float]:
        return {
            "memory": memory(point) * generator.gauss(1, 0.03),
            "capacity": CAPACITY,
            "throughput": throughput(point) * generator.gauss(1, 0.12),
        }

    return predict
