"""The command ``slapo`` and its subcommands."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slapo.errors import (
    MissingPackageError,
    SlapoError,
    import_package,
    require_count,
    with_nearest,
)
from slapo.model_schedule import apply_schedule, recipe_keys, recipe_of
from slapo.model_schedule.drafts import draft
from slapo.model_schedule.registry import AUTO, DRAFT, description
from slapo.printing import page
from slapo.saving.inspect import inspect as inspect_folder
from slapo.verify.placement.offline import check_at, schedule_offline
from slapo.weights.meta import init_empty_weights

#: Keys of ``apply_schedule`` that are not model families.
_OTHERS = {
    AUTO: "Any model: the recipe of its family, or else a draft.",
    DRAFT: "Any model: a schedule derived from it, see slapo draft.",
}


#: Package -> (extra that installs it, features that need it).
_OPTIONAL = {
    "transformers": ("hf", "Hugging Face models, slapo train, slapo suggest"),
    "deepspeed": ("deepspeed", 'target="deepspeed"'),
    "megatron-core": ("megatron", 'target="megatron"'),
    "triton": ("kernels", "fused kernels on CUDA"),
    "liger-kernel": ("kernels", "gated MLPs and RMS norms on CUDA"),
    "xformers": ("kernels", "xFormers attention on CUDA"),
    "optuna": ("tune", "slapo tune"),
    "matplotlib": ("tune", "plots of slapo tune and slapo dryrun"),
    "rich": ("examples", "examples/quickstart.py"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 if it finds a problem, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="slapo", description="A schedule language for training large PyTorch models."
    )
    version = f"slapo {sys.modules['slapo'].__version__}"  # importing slapo would be a cycle
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_check(commands)
    _add_draft(commands)
    _add_draw(commands)
    _add_recipes(commands)
    _add_inspect(commands)
    doctor = commands.add_parser("doctor", help="list versions, devices and missing packages")
    doctor.set_defaults(run=_doctor)
    _add_passed_on(commands, "dryrun", _dryrun, "memory and time of a step on a described cluster")
    _add_passed_on(commands, "suggest", _suggest, "the fastest layouts of a model for N GPUs")
    _add_passed_on(commands, "train", _train, "train a model from a folder on a text")
    _add_passed_on(commands, "tune", _tune, "find the values that make a script train fastest")
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 2
    try:
        status = int(given.run(given))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as with `slapo recipes | head`: the reader has closed the pipe
        # Python flushes standard output again at exit, and would report the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except _UsageError as error:
        print(f"slapo {given.command}: {error}", file=sys.stderr)
        return 2


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="check a tensor-parallel schedule in one process and without weights",
        description=(
            "Apply a schedule as one of many ranks would, follow every tensor through one "
            "forward and backward pass, and refuse it if a gradient would differ from the "
            "model's. Runs at the given number of ranks and at two."
        ),
    )
    check.add_argument(
        "make",
        metavar="SCRIPT.py:FUNCTION",
        help="a function without arguments that returns (model, schedule) or (model, schedule, "
        "example_inputs), where schedule(sch) applies the primitives; or MODULE:FUNCTION",
    )
    _add_ranks(check)
    check.add_argument(
        "--sp", action="store_true", help="call the schedule with sequence_parallel=True"
    )
    check.set_defaults(run=_check)


def _check(given: argparse.Namespace) -> int:
    make = load(given.make)
    try:
        for checked in check_at(make, given.tp, given.sp):
            print(checked, flush=True)
    except (SlapoError, ValueError, TypeError, KeyError) as error:
        return _refused(error)
    return 0


def _refused(error: Exception) -> int:
    """Print the message of an error; return the exit status."""
    print(error.args[0] if error.args else error, file=sys.stderr)
    return 1


def _add_draft(commands: Any) -> None:
    command = commands.add_parser(
        "draft",
        help="derive a tensor-parallel recipe for a model, prove it, and print it as a program",
        description=(
            "Prints the program to standard output, and a summary of shards, replicated tensors "
            "and the verdict of slapo check to standard error. Runs in one process, without "
            "weights."
        ),
    )
    command.add_argument(
        "model",
        metavar="SCRIPT.py:FUNCTION|FOLDER",
        help="a function without arguments that returns (model, example_inputs), or only a "
        "Transformers model; or MODULE:FUNCTION; or a folder with a config.json",
    )
    _add_ranks(command)
    command.set_defaults(run=_draft)


def _add_ranks(command: Any) -> None:
    command.add_argument(
        "--tp", type=int, default=2, help="ranks that tensors are sharded over (%(default)s)"
    )


def _draft(given: argparse.Namespace) -> int:
    try:
        model, inputs = _to_draft(given.model)
        drafted = draft(model, inputs, given.tp)
    except (SlapoError, ValueError, TypeError) as error:
        return _refused(error)
    print(drafted, end="")
    print(drafted.summary(), file=sys.stderr)
    return 0 if drafted.verdict is None and drafted.recipe.splits else 1


def _to_draft(source: str) -> tuple[Any, Any]:
    """Return a model on meta and its example inputs."""
    from slapo.cost.command import config_of
    from slapo.cost.models import for_training, training_inputs

    if ":" not in source:
        config = config_of(source)
        with init_empty_weights():
            model = for_training(config)
        return model, training_inputs(model)
    with init_empty_weights():
        made = load(source)()
    if isinstance(made, tuple):
        if len(made) == 2:
            return made
        raise TypeError(f"{source} returned a tuple of {len(made)}; return (model, example_inputs)")
    return made, training_inputs(made)


def _add_draw(commands: Any) -> None:
    command = commands.add_parser(
        "draw",
        help="draw a schedule: the module tree with applied primitives, as an HTML page",
        description="Prints the page to standard output. Parameters take no memory.",
    )
    command.add_argument(
        "make",
        metavar="SCRIPT.py:FUNCTION",
        help="a function without arguments that returns (model, schedule), as for slapo check",
    )
    command.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (%(default)s)")
    command.set_defaults(run=_draw)


def _draw(given: argparse.Namespace) -> int:
    make = load(given.make)
    try:
        require_count("--tp", given.tp)
        print(page(schedule_offline(make, given.tp)))
    except (SlapoError, ValueError, TypeError, KeyError) as error:
        return _refused(error)
    return 0


def _add_recipes(commands: Any) -> None:
    recipes = commands.add_parser(
        "recipes",
        help="list the model families with a ready schedule, or show the table of one",
        description="Keys of apply_schedule; with a key, its table and all options.",
    )
    recipes.add_argument("key", nargs="?", help="a family, such as llama")
    recipes.set_defaults(run=_recipes)


def _recipes(given: argparse.Namespace) -> int:
    try:
        print(_list_recipes() if given.key is None else _show_recipe(given.key))
    except KeyError as error:
        raise _UsageError(error.args[0]) from None
    except MissingPackageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _list_recipes() -> str:
    """Table of keys and their descriptions."""
    said = {**{key: description(key) for key in recipe_keys()}, **_OTHERS}
    width = max(map(len, said))
    lines = [f"{key:{width}}  {text}" for key, text in said.items()]
    return "\n".join([*lines, "", "Table and options of a key: slapo recipes KEY"])


def _show_recipe(key: str) -> str:
    """Table of a family at its default sizes, followed by the options of all families."""
    if key in _OTHERS:
        return f"{_OTHERS[key]}\n\nOptions of apply_schedule:\n{_recipe_options()}"
    recipe = recipe_of(key, _default_config(key))
    return f"{description(key)}\n\n{recipe}\n\nOptions of apply_schedule:\n{_recipe_options()}"


def _default_config(key: str) -> Any:
    transformers = import_package("transformers", "the table of a recipe", "hf")
    try:
        return transformers.AutoConfig.for_model(key)
    except ValueError:  # not a model type of Transformers
        return None


def _recipe_options() -> str:
    """Options table from the docstring of ``apply_schedule``."""
    text = inspect.getdoc(apply_schedule) or ""
    _, _, after = text.partition("**options\n")
    table = after.partition("\nReturns\n")[0]
    lines = [line for line in table.splitlines() if line.strip(" =")]
    return "\n".join(f"  {line.strip()}" if line.startswith("    ``") else line for line in lines)


def _add_inspect(commands: Any) -> None:
    command = commands.add_parser(
        "inspect",
        help="show the contents of a run, a saved step or a Hugging Face folder",
        description=(
            "Step, layout, engine, optimizer, tensors and schedule of a checkpoint of "
            "engine.save, or the contents of a folder with weights."
        ),
    )
    command.add_argument("folder", metavar="FOLDER", help="a run, one step in it, or weights")
    command.add_argument("--verify", action="store_true", help="compare all checksums")
    command.set_defaults(run=_inspect)


def _inspect(given: argparse.Namespace) -> int:
    try:
        for line in inspect_folder(Path(given.folder), given.verify):
            print(line, flush=True)
    except (SlapoError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _doctor(given: argparse.Namespace) -> int:
    for line in _report():
        print(line)
    return 0


def _report() -> Iterator[str]:
    """Yield lines about this machine, versions and missing packages."""
    yield f"slapo {metadata.version('slapo')}, Python {platform.python_version()}"
    yield f"torch {torch.__version__} on {platform.platform()}"
    yield f"devices: {_devices()}"
    backends = [name for name in ("gloo", "nccl", "mpi") if _has_backend(name)]
    yield f"torch.distributed backends: {', '.join(backends) or 'none'}"
    missing: dict[str, list[str]] = {}
    for package, (extra, use) in _OPTIONAL.items():
        try:
            yield f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            missing.setdefault(extra, []).append(f"{package} ({use})")
    for extra, packages in missing.items():
        yield f"not installed: {', '.join(packages)}; pip install 'slapo[{extra}]'"


def _devices() -> str:
    cores = f"{os.cpu_count()} CPU cores"
    if not torch.accelerator.is_available():
        return f"{cores}, no accelerator"
    count, kind = torch.accelerator.device_count(), torch.accelerator.current_accelerator()
    if not torch.cuda.is_available():
        return f"{cores}, {count} x {kind}"
    properties = torch.cuda.get_device_properties(0)
    memory = properties.total_memory / 2**30
    return f"{cores}, {count} x {properties.name} ({memory:.0f} GiB), CUDA {torch.version.cuda}"


def _has_backend(name: str) -> bool:
    return dist.is_available() and bool(getattr(dist, f"is_{name}_available")())


def _add_passed_on(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> None:
    # The subcommand's own parser reads the rest: a script's options may look like the tuner's.
    command = commands.add_parser(name, help=text, add_help=False, prefix_chars="\0")
    command.add_argument("arguments", nargs=argparse.REMAINDER)
    command.set_defaults(run=run)


def _dryrun(given: argparse.Namespace) -> int:
    # Imported here, as below, so that the other commands start without it.
    from slapo.cost.command import main as dryrun

    return dryrun(given.arguments)


def _suggest(given: argparse.Namespace) -> int:
    from slapo.cost.command import suggest_main

    return suggest_main(given.arguments)


def _train(given: argparse.Namespace) -> int:
    from slapo.train import main as train

    return train(given.arguments)


def _tune(given: argparse.Namespace) -> int:
    from slapo.autotune.tune import main as tune

    return tune(given.arguments)


class _UsageError(Exception):
    """Raised if a command names something that does not exist."""


def load(name: str) -> Callable[..., Any]:
    """Return the function called ``script.py:function`` or ``module:function``."""
    where, colon, what = name.rpartition(":")
    if not colon or not what.isidentifier():
        raise _UsageError(f"{name!r} names no function; write script.py:function")
    module = _load_script(Path(where)) if where.endswith(".py") else _load_module(where)
    function = getattr(module, what, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and n[0] != "_"]
        raise _UsageError(
            with_nearest(what, known, f"{where} has no function {what!r}, it has {known[:8]}")
        )
    return function


def _load_script(path: Path) -> Any:
    if not path.exists():
        raise _UsageError(f"there is no file {path}")
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    # As Python does for scripts, so that a script can import its neighbors.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> Any:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _UsageError(f"{error}; run from its directory, or pass a .py file") from None
