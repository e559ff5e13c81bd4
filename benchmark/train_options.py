"""What ``python -m benchmark train`` is told: a command line, and values of a tuner's trial."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmark import report
from benchmark.train_models import MODELS, SMALL_LENGTH, Model, model_named
from slapo.errors import with_nearest

OURS = ("slapo-torch", "slapo-deepspeed", "slapo-megatron")
PEERS = ("eager", "compile", "deepspeed", "megatron", "dtensor", "tp_plan")
IMPLS = (*PEERS, *OURS)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: What is asked of a recipe's kernels, from nothing to all of it.
KERNELS: dict[str, dict[str, Any]] = {
    "none": {"kernels": False, "attn_op_name": None},
    "ops": {},
    "fused": {"fused_loss": True},
}
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "zbv")
#: The variable of a tuner: JSON of options that it tries.
TRIAL = "SLAPO_TRIAL"
#: What a small job has at most: samples of all replicas, and ranks.
SMALL_BATCH, SMALL_RANKS = 8, 2


class Refused(ValueError):
    """A combination that one side cannot run, by a reason that is no fault of the benchmark."""


#: Options without a number unless one is given.
_MAYBE = ("micro_batches", "zero")


@dataclass(frozen=True)
class TrainOptions:
    """One point: a model, a way to train it, and the sizes.

    Parameters
    ----------
    model, impl
        Names in ``MODELS`` and ``IMPLS``.
    gpus, tp, pp
        Ranks of the job, and of one tensor-parallel group and one pipeline. The rest are replicas.
    batch_size
        Samples of a step and replica, over all micro-batches.
    seq_len
        Tokens of a sequence.
    checkpoint_ratio
        Share of the layers that compute activations again.
    micro_batches
        Parts of a batch; by default four for a pipeline, else one.
    zero
        ZeRO stage; by default 3 for DeepSpeed as it comes, else the runtime's own.
    kernels, compile
        Of ours: what of the recipe's kernels, and each layer by ``torch.compile``.
    schedule
        Of the pipeline.
    warmup, steps
        Steps before the clock starts, and timed ones.
    small
        Whether model, batch, length and ranks are shrunk to what a CPU trains in seconds.
    device
        ``"cpu"`` or ``"cuda"``.
    memory_limit
        MiB that a rank may take, as on a smaller card; 0 is no limit.
    """

    model: str = "bert"
    impl: str = "slapo-torch"
    gpus: int = 1
    batch_size: int = 8
    seq_len: int = 512
    dtype: str = "float32"
    checkpoint_ratio: float = 0.0
    tp: int = 1
    pp: int = 1
    micro_batches: int | None = None
    zero: int | None = None
    kernels: str = "ops"
    compile: bool = False
    schedule: str = "1f1b"
    warmup: int = 3
    steps: int = 10
    small: bool = False
    device: str = "cpu"
    memory_limit: int = 0

    @property
    def spec(self) -> Model:
        """The model's entry."""
        return model_named(self.model)

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return self.gpus // (self.tp * self.pp)

    @property
    def parts(self) -> int:
        """Micro-batches."""
        return self.micro_batches or (4 if self.pp > 1 else 1)

    @property
    def is_ours(self) -> bool:
        """Whether a schedule of ours runs."""
        return self.impl in OURS

    def check(self) -> None:
        """Refuse what no side can run.

        Raises
        ------
        ValueError
            What is wrong, and what to pass.
        """
        _ = self.spec
        for name, known in (("impl", IMPLS), ("dtype", DTYPES), ("kernels", KERNELS)):
            _check_choice(name, getattr(self, name), list(known))
        _check_choice("schedule", self.schedule, list(SCHEDULES))
        counts = ("gpus", "batch_size", "seq_len", "tp", "pp", "steps")
        wrong = {n: getattr(self, n) for n in counts if not _is_count(getattr(self, n), 1)}
        wrong |= {
            n: v for n in ("warmup", "memory_limit") if not _is_count(v := getattr(self, n), 0)
        }
        if wrong:
            raise ValueError(f"{wrong} must be whole numbers, and not less than 1 (warmup: 0)")
        if not 0 <= self.checkpoint_ratio <= 1:
            raise ValueError(f"checkpoint_ratio is {self.checkpoint_ratio}; pass a share, 0 to 1")
        if self.gpus % (self.tp * self.pp):
            raise ValueError(
                f"gpus={self.gpus} is not divisible by tp={self.tp} x pp={self.pp}; the quotient "
                "is the number of replicas"
            )
        if self.batch_size % self.parts:
            raise ValueError(
                f"batch_size={self.batch_size} is not divisible by micro_batches={self.parts}; "
                "change either"
            )

    def shrunk(self) -> TrainOptions:
        """The point at the size of a CPU: `small`, with at most two ranks.

        A pipeline keeps its two ranks before tensor parallelism does.
        """
        pp = min(self.pp, SMALL_RANKS)
        tp = min(self.tp, SMALL_RANKS // pp)
        gpus = max(min(self.gpus, SMALL_RANKS), tp * pp)
        batch = min(self.batch_size, max(1, SMALL_BATCH // (gpus // (tp * pp))))
        parts = self.micro_batches and min(self.micro_batches, batch)
        return replace(
            self,
            small=True,
            device="cpu",
            dtype="float32",
            gpus=gpus,
            tp=tp,
            pp=pp,
            batch_size=batch,
            micro_batches=parts,
            seq_len=min(self.seq_len, SMALL_LENGTH),
            warmup=min(self.warmup, 1),
            steps=min(self.steps, 3),
        )

    def with_trial(self, environment: Mapping[str, str] = os.environ) -> TrainOptions:
        """The values of a tuner's trial in the place of these."""
        text = environment.get(TRIAL, "")
        if not text:
            return self
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{TRIAL} is {text!r}, no JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{TRIAL} is {text!r}; pass an object, option to value")
        known = [each.name for each in fields(self)]
        for name in values:
            if name not in known:
                rest = f"options are {', '.join(known)}"
                raise ValueError(f"{TRIAL}: no option {name!r}; {with_nearest(name, known, rest)}")
            kind = type(getattr(self, name) or 0) if name in _MAYBE else type(getattr(self, name))
            if type(values[name]) is not kind and (kind, type(values[name])) != (float, int):
                raise ValueError(
                    f"{TRIAL}: {name} is {values[name]!r}, a {type(values[name]).__name__}; pass "
                    f"a value of type {kind.__name__}"
                )
        return replace(self, **values)

    def command(self) -> list[str]:
        """The command line that this is, without what it has by default."""
        words = ["train"]
        for each in fields(self):
            value, flag = getattr(self, each.name), f"--{each.name.replace('_', '-')}"
            if value == each.default and each.name not in ("model", "impl", "device"):
                continue
            words += [flag] if value is True else [flag, str(value)]
        return words

    def described(self) -> dict[str, Any]:
        """Columns of a row."""
        found = asdict(self)
        return {**found, "dp": self.dp, "micro_batches": self.parts}


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_choice(name: str, value: Any, known: list[str]) -> None:
    if value not in known:
        rest = f"pass one of {', '.join(known)}"
        raise ValueError(f"{name} is {value!r}; {with_nearest(str(value), known, rest)}")


# --- command line --------------------------------------------------------------------------------
def parser() -> argparse.ArgumentParser:
    """Of ``python -m benchmark train``."""
    made = argparse.ArgumentParser(
        "python -m benchmark train",
        description="Speed and peak memory of training steps of one model, one way.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument
    default = TrainOptions()
    add("--model", choices=list(MODELS), default=default.model)
    add("--impl", choices=IMPLS, default=default.impl)
    add("--gpus", type=int, default=default.gpus, help="ranks of the job, also on a CPU")
    add("--batch-size", type=int, default=default.batch_size, help="samples of a replica and step")
    add("--seq-len", type=int, default=default.seq_len)
    add("--dtype", choices=list(DTYPES), default=default.dtype)
    add("--checkpoint-ratio", type=float, default=default.checkpoint_ratio)
    add("--tp", type=int, default=default.tp, help="ranks of a tensor-parallel group")
    add("--pp", type=int, default=default.pp, help="ranks of a pipeline")
    add("--micro-batches", type=int, default=None, help="None: 4 for a pipeline, else 1")
    add("--zero", type=int, choices=(0, 1, 2, 3), default=None)
    add("--kernels", choices=list(KERNELS), default=default.kernels, help="of ours")
    add("--compile", action="store_true", help="ours: each layer by torch.compile")
    add("--schedule", choices=SCHEDULES, default=default.schedule, help="of the pipeline")
    add("--warmup", type=int, default=default.warmup)
    add("--steps", type=int, default=default.steps)
    add("--small", action="store_true", help="what a CPU trains in seconds, on two ranks at most")
    add("--device", choices=("cpu", "cuda"), default=None, help="None: CUDA if there is one")
    add("--memory-limit", type=int, default=0, help="MiB of a rank, as on a smaller card")
    add("--experiment", default="", help="of which this is a point: names the CSV file")
    add("--place", nargs=3, default=("", "", ""), metavar=("PANEL", "GROUP", "SIDE"))
    add("--timeout", type=float, default=600.0, help="seconds, after which ranks are ended")
    add("--results", type=Path, default=None, help=f"folder for a CSV file, as {report.RESULTS}")
    return made


def parse(arguments: Sequence[str]) -> tuple[TrainOptions, argparse.Namespace]:
    """Options of a point, and all that the command line said.

    Raises
    ------
    ValueError
        If they do not fit together.
    """
    given = parser().parse_args(arguments)
    names = [each.name for each in fields(TrainOptions)]
    values = {name: getattr(given, name) for name in names if name != "device"}
    values["device"] = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = TrainOptions(**values).with_trial()
    if options.small:
        if given.device == "cuda":
            raise ValueError("--small trains on a CPU; leave out --device cuda, or --small")
        options = options.shrunk()
    options.check()
    return options, given
