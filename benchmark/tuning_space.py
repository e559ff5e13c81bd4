"""Layouts of a small GPT-2 on one or two processes, as a configuration of the tuner.

From the root of the repository::

    python -m slapo.autotune.tune --config benchmark/tuning_space.py --db trials.db

Every point trains the same model on the same number of samples a step.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

# The tuner loads this file by its path.
sys.path.append(str(Path(__file__).parent.parent))

from benchmark.measure import on_ranks
from slapo.cost import Machine, dryrun

#: Numbers of this machine, for one process and for each of two.
MACHINES_FILE = Path(__file__).parent / "results" / "tuning_machines.json"
#: One process alone, or two by tensor parallelism, in a pipeline, or as replicas.
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {"tp": 1, "pp": 1, "dp": 1},
    "tensor": {"tp": 2, "pp": 1, "dp": 1},
    "pipeline": {"tp": 1, "pp": 2, "dp": 1},
    "replicas": {"tp": 1, "pp": 1, "dp": 2},
}


@dataclass(frozen=True)
class Work:
    """A step that all points take.

    Parameters
    ----------
    hidden, layers, heads, vocabulary
        Of the model.
    length
        Tokens of a sample.
    samples
        Of a step, over all ranks.
    warm_up, steps
        Taken before the clock starts, and measured.
    """

    hidden: int = 192
    layers: int = 4
    heads: int = 4
    vocabulary: int = 2048
    length: int = 128
    samples: int = 8
    warm_up: int = 2
    steps: int = 7

    def config(self) -> Any:
        """Of a GPT-2, without dropout."""
        from transformers import GPT2Config

        return GPT2Config(
            n_embd=self.hidden,
            n_layer=self.layers,
            n_head=self.heads,
            n_positions=self.length,
            vocab_size=self.vocabulary,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )


WORK = Work()
#: Of a quick run.
TINY = Work(hidden=32, layers=2, heads=2, vocabulary=64, length=16, warm_up=1, steps=3)


def space(choose: Callable[[str, list[Any]], Any]) -> dict[str, Any]:
    """Layout, micro-batches, recomputation and attention; more for some layouts."""
    layout = choose("layout", list(LAYOUTS))
    micro_batches = choose("micro_batches", [1, 2, 4])
    point = {
        **LAYOUTS[layout],
        "micro_batches": micro_batches,
        "checkpoint": choose("checkpoint", [0.0, 0.5, 1.0]),
        "attention": choose("attention", ["eager", "sdpa"]),
    }
    if layout == "tensor":
        point["sequence_parallel"] = choose("sequence_parallel", [False, True])
    if layout == "pipeline":  # 1F1B needs as many micro-batches as stages
        orders = ["1f1b", "gpipe"] if micro_batches > 1 else ["gpipe"]
        point["schedule"] = choose("schedule", orders)
    return point


def predict(point: dict[str, Any]) -> Any:
    """The dry run, with the numbers of this machine; these are measured once and kept."""
    return predict_for(point, WORK, machines())


def command(point: dict[str, Any]) -> list[str]:
    """A trial."""
    return [sys.executable, "-m", "benchmark.tuning_script"]


# --- a point -------------------------------------------------------------------------------------
def ranks_of(point: Mapping[str, Any]) -> int:
    """Processes of a point."""
    return int(point["tp"] * point["pp"] * point["dp"])


def recipe_options(point: Mapping[str, Any]) -> dict[str, Any]:
    """What a point asks of :func:`slapo.model_schedule.apply_schedule`, but for stages."""
    return {
        "attn_op_name": point["attention"],
        "ckpt_ratio": point["checkpoint"],
        "sequence_parallel": point.get("sequence_parallel", False),
    }


def token_loss(output: Any, labels: Tensor) -> Tensor:
    """Mean over the tokens; the labels are the next ones."""
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def predict_for(point: Mapping[str, Any], work: Work, by_ranks: Mapping[int, Machine]) -> Any:
    """The dry run of a point, on the machine of that number of processes."""
    return dryrun(
        "gpt2",
        work.config(),
        mesh={name: point[name] for name in ("tp", "pp", "dp")},
        machine=by_ranks[ranks_of(point)],
        batch=work.samples // point["dp"],
        seq_len=work.length,
        micro_batches=point["micro_batches"],
        schedule=point.get("schedule", "1f1b"),
        loss_fn=token_loss,
        **recipe_options(point),
    )


# --- machines ------------------------------------------------------------------------------------
def machines(
    path: Path = MACHINES_FILE, say: Callable[[str], None] = print, seconds: float = 20.0
) -> dict[int, Machine]:
    """Number of processes -> what each of them reaches on this machine.

    Parameters
    ----------
    path
        Where the numbers are kept; they are measured if there is no such file.
    say
        Gets lines of progress.
    seconds
        About how long a calibration takes.
    """
    if not path.exists():
        # Late: the processes' main function needs this file.
        from benchmark.tuning_ranks import calibrate_main

        found = {}
        for ranks in (1, 2):
            say(f"calibrates {ranks} process{'es' * (ranks > 1)}, {seconds:.0f} s each")
            found[ranks] = on_ranks(ranks, calibrate_main, (ranks, seconds), say)
        path.parent.mkdir(parents=True, exist_ok=True)
        numbers = {ranks: dataclasses.asdict(machine) for ranks, machine in found.items()}
        path.write_text(json.dumps(numbers, indent=1) + "\n")
    return {int(ranks): _machine(values) for ranks, values in json.loads(path.read_text()).items()}


def _machine(values: Mapping[str, Any]) -> Machine:
    curve = tuple((size, speed) for size, speed in values["curve"])
    return Machine(**{**values, "curve": curve, "latency": tuple(values["latency"])})
