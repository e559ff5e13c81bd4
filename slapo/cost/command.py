"""Commands ``slapo dryrun`` and ``slapo suggest``."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from ast import literal_eval
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slapo.cost.api import dryrun
from slapo.cost.calibrate import calibrate
from slapo.cost.layout import DATA_PARALLEL, SCHEDULES, TARGETS
from slapo.cost.machine import MACHINES, Machine, machine_of
from slapo.cost.result import DryRun
from slapo.cost.suggestions import suggest
from slapo.errors import SlapoError, import_package

_MACHINES = (
    f"one of {', '.join(MACHINES)}; here, to measure this machine; or four numbers: bytes of "
    "memory, operations per second, bytes per second of memory and of links (%(default)s)"
)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``slapo dryrun``; exit status 0, 1 if the job does not fit, 2 for wrong usage."""
    given = _parser().parse_args(arguments)
    try:
        found = _run(given)
        print(json.dumps(found.data(), indent=2) if given.json else found)
        if given.plot:
            found.plot(given.plot)
    except Exception as error:  # status 1 means that the job does not fit
        return _said("dryrun", error)
    return 0 if found.fits else 1


def _said(command: str, error: Exception) -> int:
    message = error.args[0] if isinstance(error, KeyError) and error.args else error
    if not isinstance(error, (SlapoError, ValueError, TypeError, KeyError, OSError)):
        message = f"{type(error).__name__}: {error}"
    print(f"slapo {command}: {message}", file=sys.stderr)
    return 2


def suggest_main(arguments: Sequence[str] | None = None) -> int:
    """Run ``slapo suggest``; exit status 0, 1 if no layout fits, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="slapo suggest",
        description="Rank layouts of a model on N GPUs by predicted tokens per second, and print "
        "the code for the fastest: no weights, no GPU.",
        epilog="The status is 1 if none fits; the output then suggests what would.",
    )
    parser.add_argument("config", help="a config.json of Transformers, or its folder")
    parser.add_argument("--machine", default="h100-80gb", help=_MACHINES)
    parser.add_argument("--gpus", type=int, default=8, help="number of devices (%(default)s)")
    parser.add_argument("--seq", type=int, help="tokens per sample; by default at most 4096")
    parser.add_argument("--batch", type=int, help="total samples per step; 8 per device")
    parser.add_argument("--key", default="auto", help="a recipe (slapo recipes; %(default)s)")
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16")
    parser.add_argument("--count", type=int, default=10, help="rows of the table (%(default)s)")
    given = parser.parse_args(arguments)
    try:
        found = suggest(
            config_of(given.config),
            machine=_machine(given.machine),
            gpus=given.gpus,
            seq_len=given.seq,
            batch=given.batch,
            recipe=given.key,
            dtype=_DTYPES[given.dtype],
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
        print(found.text(given.count))
    except Exception as error:
        return _said("suggest", error)
    return 0 if found.fitting else 1


def _run(given: argparse.Namespace) -> DryRun:
    machine = _machine(given.machine)
    sizes = {"pp": given.pp, "dp": 1 if given.dp is None else given.dp, "tp": given.tp}
    if given.nodes is not None:
        ranks, model = given.nodes * machine.devices, given.pp * given.tp
        if ranks % model:
            raise ValueError(
                f"--nodes {given.nodes} of {machine.devices} devices are {ranks} ranks, not "
                f"divisible by --pp {given.pp} times --tp {given.tp} = {model}"
            )
        sizes["dp"] = ranks // model
    return dryrun(
        given.key,
        config_of(given.config),
        mesh=sizes,
        machine=machine,
        batch=given.batch,
        seq_len=given.seq_len,
        micro_batches=given.micro_batches,
        schedule=given.schedule,
        target=given.target,
        data_parallel=given.data_parallel,
        zero=given.zero,
        dtype=_DTYPES[given.dtype],
        **_options(given),
    )


def _machine(name: str) -> Machine:
    """Look up a machine, calibrate this one, or build one from four numbers."""
    if name == "here":
        return calibrate(lambda text: print(f"calibrating: {text}", file=sys.stderr, flush=True))
    if "," not in name:
        return machine_of(name)
    numbers = name.split(",")
    if len(numbers) != 4:
        raise ValueError(
            f"--machine {name} is not a list of four numbers; give bytes of memory, operations per "
            "second, bytes per second of memory and of links, such as 48e9,180e12,860e9,32e9"
        )
    memory, flops, bandwidth, inside = map(float, numbers)
    return Machine("custom", memory, flops, bandwidth, inside)


def config_of(path: str) -> Any:
    """Load the Transformers config of a file or a folder."""
    transformers = import_package("transformers", "a config", "hf")
    if not Path(path).exists():
        raise ValueError(f"there is no file {path}; pass a config.json of Transformers")
    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the exception type for a wrong entry depends on the family
        raise ValueError(f"{path} is not a Transformers config: {error}") from None


def _options(given: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"ckpt_ratio": given.ckpt_ratio}
    if given.sp:
        options["sequence_parallel"] = True
    for text in given.option:
        name, equals, value = text.partition("=")
        if name in options or name in inspect.signature(dryrun).parameters:
            raise ValueError(f"--option {text} has a flag of its own; leave --option out")
        if not equals:
            raise ValueError(f"--option {text} is not a pair; pass NAME=VALUE")
        try:
            options[name] = literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slapo dryrun",
        description="Memory and time of a step on a described cluster: no weights, no GPU.",
        epilog="The status is 1 if it does not fit.",
    )
    parser.add_argument("key", help="a recipe's key (slapo recipes), or auto")
    parser.add_argument("config", help="a config.json of Transformers, or its folder")
    parser.add_argument(
        "--machine",
        default="h100-80gb",
        help=_MACHINES,
    )
    replicas = parser.add_mutually_exclusive_group()
    replicas.add_argument("--nodes", type=int, help="machines, filled with replicas")
    replicas.add_argument("--dp", type=int, help="replicas, instead of --nodes")
    for name, what in (("pp", "stages"), ("tp", "tensor-parallel ranks")):
        parser.add_argument(f"--{name}", type=int, default=1, help=what)
    parser.add_argument("--batch", type=int, default=1, help="samples per replica and step")
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens per sample")
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16")
    parser.add_argument("--target", choices=TARGETS, default="torch", help="the engine")
    parser.add_argument("--data-parallel", choices=DATA_PARALLEL, default="ddp")
    parser.add_argument("--zero", type=int, default=0, help="stage of ZeRO")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of the pipeline")
    parser.add_argument("--ckpt-ratio", type=float, default=0.0, help="layers recomputed")
    parser.add_argument("--sp", action="store_true", help="sequence parallelism")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of the recipe"
    )
    parser.add_argument("--json", action="store_true", help="print data instead of the table")
    parser.add_argument("--plot", metavar="FILE", help="plot the memory of each stage")
    return parser
