"""``slapo.suggest``: layouts of a model for a number of devices, fastest first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from slapo.cost.api import dryrun
from slapo.cost.machine import Machine, machine_of
from slapo.cost.models import Source
from slapo.cost.result import DryRun, aligned, engine_of, size_of
from slapo.errors import SlapoError, require_count
from slapo.model_schedule.registry import AUTO

#: Engine options, which differ in memory and communication of a step.
ENGINES: tuple[dict[str, Any], ...] = (
    {"target": "torch", "data_parallel": "ddp"},
    {"target": "torch", "data_parallel": "fsdp"},
    {"target": "deepspeed", "zero": 1},
    {"target": "deepspeed", "zero": 2},
    {"target": "deepspeed", "zero": 3},
)
#: Fractions of the layers that recompute activations.
RATIOS = (0.0, 0.5, 1.0)
#: Default samples of a replica in a step, and the largest micro-batch.
SAMPLES, LARGEST_MICRO = 8, 8
#: Default tokens of a sample, if the model has as many positions.
LENGTH = 4096
#: Number of the fastest layout sizes for which larger micro-batches are tried.
FASTEST = 2
#: Maximum number of devices to try if nothing fits.
MOST_GPUS = 4096


@dataclass(frozen=True)
class Suggestion:
    """One layout.

    Parameters
    ----------
    dry_run
        Predicted memory and time.
    options
        Options of :func:`slapo.apply_schedule`.
    """

    dry_run: DryRun
    options: dict[str, Any]

    def lines(self, key: str = AUTO) -> str:
        """Return the lines of a script that run this layout."""
        layout, dtype = self.dry_run.layout, str(self.dry_run.dtype)
        sizes = ", ".join(f"{name}={getattr(layout, name)}" for name in ("pp", "dp", "tp"))
        said = "".join(f", {name}={quoted(value)}" for name, value in self.options.items())
        if layout.pp > 1:  # stages take a mask only if these inputs have one
            said += f", pipeline_cuts={layout.pp}, example_inputs=inputs"
        engine = {"target": layout.target, "micro_batches": layout.micro_batches}
        if layout.data_parallel != "ddp":
            engine["data_parallel"] = layout.data_parallel
        if layout.zero:
            engine["zero"] = layout.zero
        engine |= {"pipeline_schedule": layout.schedule} if layout.pp > 1 else {}
        built = "".join(f"    {name}={quoted(value)},\n" for name, value in engine.items())
        return (
            f"mesh = slapo.init_mesh({sizes})\n"
            f"sch = slapo.apply_schedule(model, {quoted(key)}, mesh=mesh{said})\n"
            "engine, _ = slapo.build(\n    sch,\n    mesh=mesh,\n    loss_fn=loss_fn,\n"
            "    optimizer=functools.partial(torch.optim.AdamW, lr=3e-4),\n"
            f"    dtype={dtype},\n{built})  # {layout.batch} samples of each replica in a step"
        )


def quoted(value: Any) -> str:
    """Return a value as Python source."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


@dataclass(frozen=True)
class Suggestions:
    """Result of :func:`slapo.suggest`: all layouts that were tried.

    Parameters
    ----------
    fitting
        Layouts that fit, by predicted tokens (or samples) per second, the fastest first.
    closest
        The layout that takes the least memory among those that do not fit; None if there is none.
    refused
        Reason of a refusal by the model or an engine -> number of layouts excluded.
    advice
        Advice if nothing fits: more devices, or shorter samples.
    key
        Key of the recipe.

    Examples
    --------
    >>> import slapo
    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4,
    ...     num_attention_heads=4, vocab_size=256)
    >>> found = slapo.suggest(config, machine="h100-80gb", gpus=2, seq_len=64)
    >>> found.best.dry_run.layout.ranks
    2
    """

    fitting: tuple[Suggestion, ...]
    closest: Suggestion | None
    refused: dict[str, int]
    advice: str
    key: str

    @property
    def best(self) -> Suggestion:
        """The fastest layout that fits.

        Raises
        ------
        SlapoError
            If none fits; the message names a change that would.
        """
        if not self.fitting:
            raise SlapoError(self.advice)
        return self.fitting[0]

    def text(self, count: int = 10) -> str:
        """Return a table of the fastest layouts, and the lines of a script for the first."""
        if not self.fitting:
            return self.advice
        run, all_of = self.best.dry_run, len(self.fitting)
        shown = f"the fastest {count} of {all_of} that fit" if all_of > count else "all that fit"
        return "\n".join(
            [
                f"{run.model} on {run.layout.ranks} x {run.machine.name} "
                f"({'measured' if run.machine.is_measured else 'data sheet'}), "
                f"{run.layout.batch * run.layout.dp} samples in a step; {shown}:",
                *aligned(_HEAD, *map(_row, self.fitting[:count])),
                "",
                self.best.lines(self.key),
            ]
        )

    def __str__(self) -> str:
        return self.text()


_HEAD = ["", "tp", "pp", "dp", "engine", "recomputed", "micro-batch", "memory", "MFU", "per second"]


def _row(suggestion: Suggestion) -> list[str]:
    run, layout = suggestion.dry_run, suggestion.dry_run.layout
    speed = run.tokens_per_second or run.throughput
    sizes = [str(getattr(layout, name)) for name in ("tp", "pp", "dp")]
    ratio = suggestion.options.get("ckpt_ratio", 0.0)
    unit = "tokens" if run.tokens_per_second else "samples"
    cells = [engine_of(layout), f"{ratio:.0%}", str(layout.micro), size_of(run.peak)]
    return ["", *sizes, *cells, f"{run.mfu:.1%}", f"{speed:,.0f} {unit}"]


def suggest(
    model_config: Source,
    *,
    machine: str | Machine = "h100-80gb",
    gpus: int = 8,
    seq_len: int | None = None,
    batch: int | None = None,
    recipe: str = AUTO,
    dtype: torch.dtype = torch.bfloat16,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Suggestions:
    """Predict all layouts of a model on `gpus` devices, and sort those that fit.

    Runs :func:`slapo.dryrun` in one process and without weights. The search combines pipeline, data
    and tensor parallelism, engines, fractions of recomputed layers and micro-batch sizes. Tensor
    parallelism stays within a node, and shards tokens too if the recipe supports it.

    Parameters
    ----------
    model_config
        A config of Transformers, or a function without arguments that makes the model.
    machine
        A name of ``slapo.cost.MACHINES``, or a :class:`slapo.cost.Machine`.
    gpus
        Number of devices.
    seq_len
        Tokens of a sample; by default 4,096, or as many positions as the model has.
    batch
        Samples of a step over all replicas; by default 8 per device.
    recipe
        A key of :func:`slapo.apply_schedule`.
    dtype
        Dtype of the computation.
    say
        Function that is called with a line of progress for each layout size.
    **options
        Options of the recipe and of :func:`slapo.dryrun`, such as ``fused_loss=True``.

    Returns
    -------
    Suggestions
        ``print`` it for a table and the lines to type for the fastest one.

    Raises
    ------
    ValueError
        If `gpus` is not a positive integer.
    SlapoError
        If the model cannot run on fake tensors.

    Examples
    --------
    >>> import slapo
    >>> from transformers import GPT2Config
    >>> config = GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=128)
    >>> found = slapo.suggest(config, machine="v100-16gb", gpus=2, seq_len=32)
    >>> found.fitting[0].dry_run.fits
    True
    """
    require_count("gpus", gpus)
    length = _length(model_config) if seq_len is None else seq_len
    ask = _Search(model_config, machine_of(machine), length, recipe, dtype, options)
    found = ask.over(gpus, SAMPLES * gpus if batch is None else batch, say)
    if found.fitting or found.closest is None:
        return found
    return replace(found, advice=_advice(ask, found.closest, gpus))


def _length(source: Any) -> int:
    positions = getattr(source, "max_position_embeddings", None)
    return min(LENGTH, positions) if isinstance(positions, int) else LENGTH


def _advice(ask: _Search, closest: Suggestion, gpus: int) -> str:
    """Suggest more devices, or shorter samples."""
    run = closest.dry_run
    lines = [
        f"nothing fits: {run.model} takes at least {size_of(run.peak)} of "
        f"{size_of(run.machine.memory)} on {gpus} x {run.machine.name}, with "
        f"{_described(closest)}"
    ]
    # With the least memory only (all layers recomputed, micro-batches of one sample): the question
    # is what fits at all.
    count = 2 * gpus
    while count <= MOST_GPUS:
        more = ask.over(count, SAMPLES * count, None, only_least=True)
        if more.fitting:
            lines.append(f"would fit: {count} of them, with {_described(more.best)}")
            break
        count *= 2
    for part in (2, 4, 8) if ask.length >= 64 else ():
        shorter = replace(ask, length=ask.length // part)
        less = shorter.over(gpus, SAMPLES * gpus, None, only_least=True)
        if less.fitting:
            lines.append(f"would fit: seq_len={shorter.length}, with {_described(less.best)}")
            break
    if len(lines) == 1:
        lines.append("a smaller model or a device with more memory would")
    return "\n".join(lines)


def _described(suggestion: Suggestion) -> str:
    layout = suggestion.dry_run.layout
    ratio = suggestion.options.get("ckpt_ratio", 0.0)
    return (
        f"pp {layout.pp}, dp {layout.dp}, tp {layout.tp}, {engine_of(layout)}, {ratio:.0%} of the "
        f"layers recomputed, micro-batches of {layout.micro}"
    )


@dataclass(frozen=True)
class _Search:
    """A model, and the settings that all its layouts share."""

    source: Source
    machine: Machine
    length: int
    recipe: str
    dtype: torch.dtype
    options: dict[str, Any]

    def over(
        self, gpus: int, batch: int, say: Callable[[str], None] | None, only_least: bool = False
    ) -> Suggestions:
        """Predict all layouts of so many devices, or only those with the least memory.

        Micro-batches of one sample show the fastest layout sizes. Only these get larger ones, with
        the choices that fit so far and while speed increases.
        """
        tried: list[Suggestion] = []
        refused: dict[str, int] = {}
        first = len(RATIOS) - 1 if only_least else 0
        fit: dict[tuple[int, int], list[_Choice]] = {}

        def extend(tp: int, pp: int, micro: int, choices: list[_Choice]) -> list[_Choice]:
            dp, fits = gpus // tp // pp, []
            for engine, start in choices:
                for number in range(start, len(RATIOS)):
                    layout = tp, pp, dp, batch, micro
                    found = self._one(layout, ENGINES[engine], RATIOS[number], refused)
                    tried.extend([found] if found else [])
                    if found is None or found.dry_run.fits:
                        fits += [(engine, number)] if found else []
                        break  # more recomputation is not faster
            if say is not None:
                count = sum(each.dry_run.fits for each in tried)
                at = f"tp {tp}, pp {pp}, dp {dp}, micro-batches of {micro}"
                say(f"{at}: {count} of {len(tried)} layouts fit so far")
            return fits

        for tp, pp in _sizes(gpus, self.machine.devices):
            engines = ENGINES if gpus > tp * pp else ENGINES[:1]
            fit[tp, pp] = extend(tp, pp, 1, [(number, first) for number in range(len(engines))])
        if not only_least:
            layouts = [each.dry_run.layout for each in _fitting(tried)]
            for size in [*dict.fromkeys((each.tp, each.pp) for each in layouts)][:FASTEST]:
                # Larger micro-batches make larger kernels, and FSDP2 and ZeRO 3 gather less often,
                # until memory or the number of micro-batches of a pipeline limits them.
                micro, before = 2, 0.0
                while fit[size] and micro <= LARGEST_MICRO:
                    now = _fastest(tried, *size)
                    if now <= before:
                        break
                    fit[size] = extend(*size, micro, fit[size])
                    micro, before = 2 * micro, now
        full = [each for each in tried if not each.dry_run.fits]
        closest = min(full, key=lambda each: each.dry_run.peak, default=None)
        advice = "" if tried else "no layout can run: " + "; ".join(refused)
        return Suggestions(_fitting(tried), closest, refused, advice, self.recipe)

    def _one(
        self,
        layout: tuple[int, int, int, int, int],
        engine: dict[str, Any],
        ratio: float,
        refused: dict[str, int],
    ) -> Suggestion | None:
        """Return the dry run of a layout, or None if the model or the engine refuses it."""
        tp, pp, dp, batch, micro = layout
        options: dict[str, Any] = {**self.options, **({"ckpt_ratio": ratio} if ratio else {})}
        spread: dict[str, Any] = {"sequence_parallel": True}
        said = f"{batch} samples cannot form micro-batches of {micro} on {dp} replicas"
        # With sharded tokens first, which takes less memory; not every recipe has the option.
        for more in (spread, {}) if tp > 1 else ({},):
            if batch % (dp * micro):
                break
            try:
                run = dryrun(
                    self.recipe,
                    self.source,
                    mesh={"pp": pp, "dp": dp, "tp": tp},
                    machine=self.machine,
                    batch=batch // dp,
                    seq_len=self.length,
                    micro_batches=batch // (dp * micro),
                    dtype=self.dtype,
                    **engine,
                    **options,
                    **more,
                )
                return Suggestion(run, {**options, **more})
            except (ValueError, TypeError, SlapoError) as error:
                said = str(error).partition("; ")[0]
        refused[said] = refused.get(said, 0) + 1
        return None


#: Index of an engine, and of the first recomputed fraction to try.
_Choice = tuple[int, int]


def _fitting(tried: list[Suggestion]) -> tuple[Suggestion, ...]:
    fit = [each for each in tried if each.dry_run.fits]
    return tuple(sorted(fit, key=lambda each: -each.dry_run.throughput))


def _fastest(tried: list[Suggestion], tp: int, pp: int) -> float:
    """Return the samples per second of the fastest fitting layout of one size."""
    runs = [each.dry_run for each in tried if each.dry_run.fits]
    return max(r.throughput for r in runs if (r.layout.tp, r.layout.pp) == (tp, pp))


def _sizes(gpus: int, devices: int) -> Iterator[tuple[int, int]]:
    """Yield sizes of tensor parallelism, within a node, and of the pipeline."""
    tp = 1
    while tp <= min(gpus, devices) and gpus % tp == 0:
        rest = gpus // tp
        yield from ((tp, pp) for pp in range(1, min(rest, 64) + 1) if rest % pp == 0)
        tp *= 2
