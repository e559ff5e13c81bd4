"""``slapo.dryrun``: predict the cost of a schedule on a cluster without weights or GPUs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo.cost.layout import Layout, sizes_of
from slapo.cost.machine import Machine, machine_of
from slapo.cost.memory import memory_of
from slapo.cost.models import (
    ReducedModel,
    Source,
    check_length,
    shrink,
    training_inputs,
    untie,
    whole_on_meta,
)
from slapo.cost.result import DryRun
from slapo.cost.runs import Run, loss_of_output, run
from slapo.cost.stages import StageParts, divide
from slapo.cost.steptime import time_of
from slapo.cost.update import Update
from slapo.errors import SlapoError
from slapo.model_schedule import apply_schedule
from slapo.model_schedule.apply import chosen
from slapo.model_schedule.auto import family_recipe
from slapo.model_schedule.drafts import draft
from slapo.model_schedule.options import Options
from slapo.model_schedule.recipe import Recipe
from slapo.model_schedule.registry import AUTO, DRAFT, maker_of, schedule_of
from slapo.model_schedule.stage_cuts import chosen_cuts, even_cuts, layer_costs
from slapo.model_schedule.tensor_parallel import cast
from slapo.schedule import Schedule, create_schedule

InputsFn = Callable[[int], Mapping[str, Any]]
LossFn = Callable[[Any, Any], Tensor]
T = TypeVar("T")

#: Recipe options that the dry run handles itself. `compile` has no effect, as kernels are counted
#: one by one. `check` has none, as fake tensors have no values to compare.
_OWN = ("bf16", "fp16", "ckpt_ratio", "checkpoint_method", "compile", "check")

#: Results for configs and recipes. Functions are not cached, as their result may change.
_MODELS: dict[Hashable, ReducedModel] = {}
_RUNS: dict[Hashable, Run] = {}
_STAGES: dict[Hashable, list[StageParts]] = {}
_DRAFTS: dict[Hashable, Recipe] = {}


def dryrun(
    recipe: str | Callable[[Schedule], Any],
    model_config: Source,
    *,
    mesh: Any = None,
    machine: str | Machine = "h100-80gb",
    batch: int = 1,
    seq_len: int = 1024,
    micro_batches: int = 1,
    schedule: str = "1f1b",
    target: str = "torch",
    data_parallel: str = "ddp",
    zero: int = 0,
    bucket: int = 500_000_000,
    dtype: torch.dtype | None = None,
    optimizer: Callable[[list[Any]], torch.optim.Optimizer] = torch.optim.AdamW,
    inputs: InputsFn | None = None,
    loss_fn: LossFn | None = None,
    pipeline_cuts: Sequence[int] | None = None,
    **options: Any,
) -> DryRun:
    """Predict memory and time of a training step, in seconds, on one process.

    The model is built on meta with few layers, scheduled as one rank of its group, and run forward
    and backward on fake tensors. The costs of each layer then give the costs of the stages and of
    the job. Times are only as accurate as the machine's figures. Data sheets suffice to rank
    layouts; absolute speed needs :func:`slapo.cost.calibrate`.

    Parameters
    ----------
    recipe
        A key of :func:`slapo.model_schedule.apply_schedule`, or a function ``f(sch)`` that
        schedules; with a function all layers are run.
    model_config
        A config of Transformers, or a function without arguments that makes the model.
    mesh
        Sizes ``{"pp": .., "dp": .., "tp": ..}``; each defaults to 1.
    machine
        A name of ``slapo.cost.MACHINES``, or a :class:`slapo.cost.Machine`.
    batch
        Samples of a replica in a step, as passed to an engine's ``train_batch``.
    seq_len
        Tokens of a sample.
    micro_batches
        Number of micro-batches in a step.
    schedule
        Pipeline schedule: ``"1f1b"`` or ``"gpipe"``.
    target, data_parallel, zero
        The engine: ``"torch"`` with ``"ddp"`` or ``"fsdp"``, ``"deepspeed"`` with a stage of ZeRO,
        ``"megatron"``, with ``zero=1`` for its distributed optimizer.
    bucket
        DeepSpeed's ``reduce_bucket_size``, in elements.
    dtype
        Dtype of the computation; by default that of the model. In half precision the optimizer
        keeps float32 copies.
    optimizer
        Function from parameters to an optimizer, as for :func:`slapo.build`.
    inputs
        ``f(samples)`` that returns the model's inputs, labels included; needed if these are neither
        tokens nor images.
    loss_fn
        ``f(output, labels)``, as for engines; by default the loss that the model returns.
    pipeline_cuts
        Indices of the layers that end stages; by default stages of about equal work.
    **options
        Options of the recipe, such as ``ckpt_ratio=0.5`` or ``sequence_parallel=True``; ``compile``
        and ``check`` have no effect here.

    Returns
    -------
    DryRun
        ``print`` it for a table; ``.peak``, ``.fits``, ``.throughput``, ``.data()``, ``.plot()``.

    Raises
    ------
    KeyError
        For an unknown recipe or machine.
    TypeError, ValueError
        For sizes that form no layout, and options that the recipe refuses.
    SlapoError
        Inside a process group; for stages of a model whose layers do not run one after another; and
        if the model or the optimizer needs tensor values.

    Examples
    --------
    >>> import slapo
    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=8,
    ...     num_attention_heads=4, vocab_size=256)
    >>> found = slapo.dryrun("llama", config, mesh={"pp": 2, "dp": 2, "tp": 2}, batch=8,
    ...     micro_batches=4, seq_len=64, ckpt_ratio=0.5)
    >>> len(found.stages), found.layout.ranks, found.fits
    (2, 8, True)
    """
    if dist.is_initialized() and (dist.get_world_size() > 1 or sizes_of(mesh)["tp"] > 1):
        raise SlapoError(
            "slapo.dryrun needs a fake process group, but this process already has a group; "
            "call it in a separate process, or before init_process_group"
        )
    node = machine_of(machine)
    layout = Layout(
        **sizes_of(mesh),
        batch=batch,
        length=seq_len,
        micro_batches=micro_batches,
        schedule=schedule,
        target=target,
        data_parallel=data_parallel,
        zero=zero,
        bucket=bucket,
    )
    job = _DryRunSession(recipe, model_config, layout, node, dtype, inputs, loss_fn, options)
    parts, small = job.stages(pipeline_cuts), job.small
    update = Update.of(optimizer, accelerator=node.is_asynchronous)
    any_run = parts[0].steps[0].run
    memory = tuple(
        memory_of(each, number, layout, any_run, update, small.dtype)
        for number, each in enumerate(parts)
    )
    micro = job.inputs(layout.micro)
    tokens = micro["input_ids"].numel() if "input_ids" in micro else 0
    if inputs is not None and tokens:
        layout = replace(layout, length=tokens // layout.micro)
    return DryRun(
        model=type(small.model).__name__,
        parameters=small.parameters,
        dtype=small.dtype,
        machine=node,
        layout=layout,
        stages=memory,
        timed=partial(time_of, parts, layout, node, update),
        flops=job.flops(parts) * layout.micro_batches * layout.dp,
        tokens=tokens * layout.micro_batches * layout.dp,
    )


def _cached(cache: dict[Hashable, T], size: int, key: Hashable, make: Callable[[], T]) -> T:
    value = cache.pop(key) if key in cache else make()
    cache[key] = value  # moves the key to the end, since the oldest entries are dropped first
    while len(cache) > size:
        del cache[next(iter(cache))]
    return value


class _DryRunSession:
    """Runs of one :func:`slapo.dryrun` call, made when first needed."""

    def __init__(
        self,
        recipe: str | Callable[[Schedule], Any],
        source: Source,
        layout: Layout,
        machine: Machine,
        dtype: torch.dtype | None,
        inputs: InputsFn | None,
        loss_fn: LossFn | None,
        options: Mapping[str, Any],
    ) -> None:
        if options and not isinstance(recipe, str):
            raise TypeError(
                f"options {sorted(options)} are for recipe keys, but recipe is a function; bind "
                "them with functools.partial"
            )
        self.recipe, self.layout, self.machine = recipe, layout, machine
        self._source, self._inputs, self._loss_fn = source, inputs, loss_fn
        self.options = {name: value for name, value in options.items() if name not in _OWN}
        self._own = Options(**{name: options[name] for name in _OWN if name in options})
        self._dtype = _dtype_of(dtype, self._own)
        self._key = _key_of(source)
        self._is_recipe = isinstance(recipe, str) and (
            recipe in (AUTO, DRAFT) or not schedule_of(recipe)
        )
        is_cached = self._is_recipe and self._key is not None and inputs is None and loss_fn is None
        self._runs: dict[Hashable, Run] = _RUNS if is_cached else {}
        self._stages: dict[Hashable, list[StageParts]] = _STAGES if is_cached else {}
        self._smalls: dict[Hashable, ReducedModel] = {}
        #: True if few layers represent all.
        self._few = isinstance(recipe, str)
        #: Names of tied parameters within one stage.
        self._together: frozenset[frozenset[str]] = frozenset()

    @property
    def small(self) -> ReducedModel:
        """The model; parameters shared between stages are untied."""
        wanted = self._few, self._together
        if wanted not in self._smalls:
            key = self._key, self._dtype, self._few, torch.get_default_dtype()
            cache = {} if self._key is None else _MODELS
            whole = _cached(cache, 8, key, self._make_small)
            self._smalls[wanted] = whole if self.layout.pp == 1 else untie(whole, self._together)
        return self._smalls[wanted]

    def _make_small(self) -> ReducedModel:
        model = whole_on_meta(self._source)
        if self._dtype is not None:
            cast(model, self._dtype)
        return shrink(model, self._few)

    def stages(self, cuts: Sequence[int] | None) -> list[StageParts]:
        """Return the stages, which engines and replica counts share."""
        own = self._own
        key = self._settings(own.ckpt_ratio), own.checkpoint_method, self.layout.pp, repr(cuts)
        return _cached(self._stages, 64, key, partial(self._make_stages, cuts))

    def _make_stages(self, cuts: Sequence[int] | None) -> list[StageParts]:
        runs = self._all_runs()  # may run all layers, which changes the small model
        ends = self._ends(cuts, next(iter(runs.values())).regular)
        parts = divide(self.small, runs, self._recomputed(), ends)
        if self.layout.pp > 1 and any(stage.together for stage in parts):
            # Which tied parameters fall into one stage is known after the cut: run once more with
            # these tied.
            self._together = frozenset(names for stage in parts for names in stage.together)
            parts = divide(self.small, self._all_runs(), self._recomputed(), ends)
        return parts

    def inputs(self, samples: int) -> Mapping[str, Any]:
        if self._inputs is None:
            check_length(self.small.model, self.layout.length)
            made = training_inputs(self.small.model, samples, self.layout.length)
            # Full samples need no mask, and kernels are faster without one.
            return {n: value for n, value in made.items() if not n.endswith("attention_mask")}
        given = self._inputs(samples)
        tokens = given.get("input_ids")
        if isinstance(tokens, Tensor) and tokens.dim() == 2:
            check_length(self.small.model, tokens.shape[1])
        sizes = {name: t.shape[0] for name, t in given.items() if isinstance(t, Tensor) and t.dim()}
        if any(size != samples for size in sizes.values()):
            raise ValueError(
                f"inputs({samples}) returned tensors of {sizes} samples; return as many as "
                "requested, along the first dimension"
            )
        return given

    def flops(self, parts: Sequence[StageParts]) -> float:
        """Count the FLOPs of a micro-batch's matrix products, without recomputation.

        Tensor-parallel ranks may repeat work, so the count uses the model of a single rank.
        """
        samples = 1
        if self.layout.tp > 1:
            # FLOPs are proportional to samples, so all micro-batch sizes share the run of one
            # sample.
            samples = self.layout.micro
            layout = replace(self.layout, pp=1, tp=1, micro_batches=1, batch=1)
            # One rank has no group to shard tokens over.
            options = {n: v for n, v in self.options.items() if n != "sequence_parallel"}
            given = self.machine, self._dtype, self._inputs, self._loss_fn
            parts = _DryRunSession(self.recipe, self._source, layout, *given, options).stages(None)
        flops = 0.0
        for step in (step for each in parts for step in each.steps):
            forward, backward = step.forward.flops, step.backward(first=False).flops
            # The backward has twice the forward's FLOPs, or less for frozen parameters.
            flops += forward + min(backward, 2.0 * forward)
        return flops * samples

    # --- runs ------------------------------------------------------------------------------------
    def _recomputed(self) -> set[str]:
        ratio, paths = self._own.ckpt_ratio, list(self.small.costs)
        return set(chosen(paths, ratio, self._own.checkpoint_method)) if ratio and paths else set()

    def _all_runs(self) -> dict[bool, Run]:
        """Run layers that keep activations, and layers that recompute them, if any."""
        count = len(self.small.costs)
        if not self._few or not count:
            return {False: self._run(self._own.ckpt_ratio)}
        recomputed = self._recomputed()
        found = {}
        if len(recomputed) < count:
            found[False] = self._run(0.0)
        if recomputed:
            found[True] = self._run(1.0)
        if all(run.regular for run in found.values()):
            return found
        self._few = False  # no layer can represent others
        return self._all_runs()

    def _settings(self, ratio: float) -> Hashable:
        """Return all that the costs of a layer depend on."""
        layout, machine, cuda = self.layout, self.machine, torch.backends.cuda
        return (
            (self._key, self._dtype, self._few, self._together, ratio),
            (layout.tp, layout.micro, layout.length, bool(self.small.ties)),
            (machine.rounding, machine.is_asynchronous),
            # The function and not its key, which may be registered anew.
            maker_of(self.recipe) if isinstance(self.recipe, str) else None,
            repr(sorted(self.options.items())),
            # Global switches of torch change which kernels a model runs.
            torch.get_default_dtype(),
            *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
        )

    def _run(self, ratio: float) -> Run:
        return _cached(self._runs, 64, self._settings(ratio), partial(self._make_run, ratio))

    def _make_run(self, ratio: float) -> Run:
        return run(
            self.small,
            partial(self._schedule, ratio, self._drafted()),
            self.inputs(self.layout.micro),
            self.layout.tp,
            loss_of_output if self._loss_fn is None else self._loss,
            self.machine.rounding,
            traced=self.layout.pp > 1 and self._inputs is not None,
            accelerator=self.machine.is_asynchronous,
        )

    def _schedule(self, ratio: float, drafted: Recipe | None, model: nn.Module) -> Schedule:
        if not isinstance(self.recipe, str):
            sch = create_schedule(model)
            self.recipe(sch)
            return sch
        options = {**self.options, **({"ckpt_ratio": ratio} if ratio else {})}
        # The placement check would take longer than the dry run.
        options.update({"check": False} if self._is_recipe else {})
        return apply_schedule(model, drafted or self.recipe, **options)

    def _drafted(self) -> Recipe | None:
        """Return a draft if the recipe needs one; deriving it takes values, which the runs lack."""
        family = family_recipe(getattr(self.small.model, "config", None))
        is_draft = self.recipe == DRAFT or (self.recipe == AUTO and family is None)
        if not is_draft or self.layout.tp == 1:
            return None

        def derive() -> Recipe:
            model, make = self.small.model, self._inputs
            inputs = training_inputs(model) if make is None else make(3)
            return draft(model, inputs, self.layout.tp, check=False).recipe

        cache = {} if self._key is None or self._inputs is not None else _DRAFTS
        return _cached(cache, 8, (self._key, self.layout.tp), derive)

    def _loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        assert self._loss_fn is not None
        given = dict(inputs)
        labels = given.pop("labels", None)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            given.setdefault("decoder_input_ids", labels)  # the model makes them from labels itself
        return self._loss_fn(model(**given), labels)

    # --- stages ----------------------------------------------------------------------------------
    def _ends(self, cuts: Sequence[int] | None, regular: bool) -> list[int]:
        """Return the indices of the layers that end a stage."""
        pp, small = self.layout.pp, self.small
        if pp == 1:
            if cuts is not None:
                raise ValueError(
                    f"pipeline_cuts={list(cuts)} need stages, but pp=1; pass a mesh with "
                    f"pp={len(list(cuts)) + 1}, or leave the cuts out"
                )
            return []
        if not regular or not small.costs:
            raise SlapoError(
                f"pp={pp}, but {type(small.model).__name__} has no list of two or more layers "
                "that run in order, each once; pass pp=1"
            )
        if cuts is not None:
            ends = chosen_cuts(cuts, [len(stack.stand_ins) for stack in small.stacks])
            if len(ends) != pp - 1:
                raise ValueError(
                    f"pipeline_cuts={list(cuts)} make {len(ends) + 1} stages, but the mesh has "
                    f"pp={pp}"
                )
            return ends
        costs = list(small.costs.values())
        head = getattr(small.model, "get_output_embeddings", lambda: None)()
        # The last stage computes the head as well.
        costs[-1] += layer_costs(head, [""])[0] if isinstance(head, nn.Module) else 0.0
        return even_cuts(costs, pp)


def _key_of(config: Any) -> Any:
    """Return all entries of a config, even those omitted from its JSON; None for a function."""
    if not hasattr(config, "model_type"):
        return None
    entries = sorted(vars(config).items(), key=lambda entry: entry[0])
    values = [(n, _key_of(v) if hasattr(v, "model_type") else repr(v)) for n, v in entries]
    return type(config).__name__, tuple(values)


def _dtype_of(dtype: torch.dtype | None, own: Options) -> torch.dtype | None:
    """Return the dtype from the argument or from an option of the recipe."""
    half = torch.bfloat16 if own.bf16 else torch.float16 if own.fp16 else dtype
    if dtype not in (None, half):
        raise ValueError(f"dtype={dtype} and an option request different dtypes; pass one of them")
    return half
