"""Build a runnable model or engine from a schedule."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo.agreement import all_ranks_or_none, gathered, has_peers, same_on_all_ranks
from slapo.errors import PlacementError, SlapoError, with_nearest
from slapo.framework_dialect import Engine, Lowering, Runtime, get_dialect_cls
from slapo.framework_dialect.gradient_check import compare_first_gradients
from slapo.framework_dialect.replicas import share_wholes
from slapo.logger import get_logger
from slapo.node import ScheduleState
from slapo.optimizers import refuse_earlier_optimizers
from slapo.pipeline import PipelinedModule, generate_pipeline_partition
from slapo.pipeline.partition import cut_nodes
from slapo.pipeline.pipelined import release
from slapo.schedule import Schedule
from slapo.sharding.checks import check_modules
from slapo.sharding.guards import guard_wrappers
from slapo.sharding.state import sharding_of
from slapo.snapshot import restored_on_error
from slapo.utils.raised import note_module
from slapo.verify.placement import check as check_places
from slapo.verify.placement.run import check_call
from slapo.weights.holdings import holdings
from slapo.weights.materialize import has_meta_tensors, materialize
from slapo.weights.meta import allow_calls
from slapo.weights.provenance import note_adapters, write_down
from slapo.weights.slots import TieGroups, check_ties
from slapo.wrapper import innermost

logger = get_logger("slapo")

FIRST_BATCH = "first batch"


def build(
    sch: Schedule,
    target: str | None = None,
    init_weights: bool | Callable[..., Any] = True,
    check: Any = FIRST_BATCH,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Make the scheduled model ready to run.

    Checks that ranks agree on the schedule and that ties hold. Cuts the model into pipeline stages,
    creates parameters that are on ``meta``, and lowers the schedule to a runtime. Frees the
    parameters of stages that run on other ranks.

    Parameters
    ----------
    sch
        The root schedule. A node below it is built as a model of its own, provided that nothing
        above it was scheduled.
    target
        None for the transformed ``nn.Module`` itself, else the name of a runtime: ``"torch"``,
        ``"deepspeed"``, ``"megatron"``, or one that you registered.
    init_weights
        Initialization of parameters on ``meta``: True for the model's own, a callable
        ``fn(module)`` or ``fn(module, path)``, or False to leave them on ``meta``.
    check
        When :func:`slapo.check` runs, if something is sharded. ``"first batch"``: on the first
        micro-batch that the engine trains on. Example inputs: on these, before the build starts.
        True: on the last inputs of the schedule, from :class:`slapo.Verify`, ``check`` or the
        `example_inputs` of a trace. False: never. Without a target, every value but False also
        compares the first gradients of parameters that are replicated over the tensor-parallel
        ranks. Engines compare them at the first steps and at every hundredth.
    **kwargs
        Options of the runtime; an unknown name raises an error with the nearest one. Without a
        target the only option is ``sync_replicated``: True copies the first rank's values of
        replicated tensors to all ranks, instead of raising an error where they differ.

        Every target takes ``mesh`` (from :func:`slapo.init_mesh`), ``loss_fn(output, target)``
        (the mean of a micro-batch, or ``(sum, count)``), ``loss_mean``,
        ``optimizer(parameters)`` (or ``optimizer(named_parameters)``), ``micro_batches``,
        ``batch_dims``, ``clip_grad_norm``, ``lr_scheduler(optimizer)``, ``dtype``, ``nonfinite``,
        ``check_batches`` and ``sync_replicated``.

        ``"torch"``: also ``pipeline_schedule`` (``"1f1b"``, ``"gpipe"``, ``"interleaved_1f1b"``,
        ``"zero_bubble"``, ``"zbv"``), ``data_parallel`` (``"ddp"``, ``"fsdp"``), ``shard_size``
        (HSDP), ``data_parallel_options``, ``autocast`` and ``compile``.

        ``"deepspeed"``: also ``zero`` (0 to 3) and ``config``; or, without a mesh, ``config`` and
        ``topology``, to get DeepSpeed's own engine.

        ``"megatron"``: also ``distributed_optimizer``, ``overlap_grad_reduce`` and
        ``data_parallel_options``.

        Each option is documented at :class:`slapo.framework_dialect.options.TrainingOptions`, at
        the options of the target, and in the guide on runtimes.

    Returns
    -------
    model
        The module, or the runtime's engine.
    optimizer
        The runtime's optimizer; None if there is none.

    Raises
    ------
    PlacementError
        If `check` finds that the model would train something else.
    SlapoError
        If ranks applied different schedules or hold different values of a replicated tensor;
        something above a node was scheduled; a tie is broken; a module cannot initialize its
        parameters; or the schedule needs a runtime that it is not built for.

    Examples
    --------
    >>> import torch.nn as nn
    >>> import slapo
    >>> sch = slapo.create_schedule(nn.Linear(2, 2))
    >>> model, optimizer = slapo.build(sch)
    >>> model is sch.mod, optimizer
    (True, None)
    """
    if not isinstance(sch, Schedule):
        raise TypeError(
            f"build takes a schedule, got {type(sch).__name__}; pass "
            "slapo.create_schedule(model, group=...), after its primitives"
        )
    if not (isinstance(init_weights, bool) or callable(init_weights)):
        raise TypeError(
            f"init_weights is {init_weights!r}; pass True, False or a function of a "
            "module and its path"
        )
    is_late = isinstance(check, str)
    if is_late and check != FIRST_BATCH:
        raise ValueError(
            f"check is {check!r}; pass {FIRST_BATCH!r}, example inputs of the model, True or False"
        )
    if not is_late and check is not False:
        _check_places(sch, check)
    if sch.state.original.folder is not None:
        _remember_folder(sch, sch.state.original.folder)
    sch = _as_whole(sch)
    if target is None:
        model = _build_module(sch, init_weights, **kwargs)
        if check is not False and sch.world_size > 1:
            compare_first_gradients(model, sch.group)
        return model, None
    dialect = get_dialect_cls("runtime", target)
    what = f"build(target={target!r})"
    # From here on each step either succeeds on all ranks or raises on all: a rank that raised alone
    # would leave the others waiting in a collective.
    runtime = all_ranks_or_none(what, lambda: dialect(sch, **kwargs))
    same_on_all_ranks(what, runtime.described())
    check_same_schedule(sch, everywhere=True)
    lowering = all_ranks_or_none(what, lambda: _prepare(sch, runtime))
    model = lowering.model
    try:
        if sch.state.loader is not None:
            sch.state.loader.reads = runtime.reads_weights
        named = _tensors_of(lowering.module)
        lowering.created = frozenset(name for name, tensor in named if tensor.is_meta)
        create = partial(_create_all, what, sch, lowering, init_weights)
        # Such a runtime first shards the parameters on meta, then has them filled share by share.
        if runtime.fills_shares and has_meta_tensors(model):
            lowering.fill = create
        else:
            create()
        # Before lower(): runtimes copy and flatten parameters, and the copies lose their origins.
        write_down(model, sch.state.original)
        lowering.history = tuple(sch.state.history)
        allow_calls(model)
        guard_wrappers(model, None)
        _hook_in(model, lowering.stages.values() or [model])
        if is_late and sch.world_size > 1:
            lowering.check_call = partial(_check_first_call, sch)
        built = runtime.lower(lowering)
        if sch.state.loader is not None and isinstance(built[0], Engine):
            built[0].fill_masters(sch.state.loader)
        # Last, since a failed build may be corrected by further primitives.
        sch.state.built_for = target
        return built
    finally:
        if isinstance(model, PipelinedModule):
            # After an error too: the full model would keep the tensors of all stages.
            model.forget_whole()


def _remember_folder(sch: Schedule, folder: str) -> None:
    """Register the folder of `from_pretrained` as the source of tensors that it left on meta."""
    if sch.state.loader is not None or not has_meta_tensors(sch.mod):
        return
    if sch.parent is not None:
        raise SlapoError(
            f"build(sch[{sch.path!r}]): the weights in {folder} are read only when the root is "
            "built; make the model outside of init_empty_weights()"
        )
    from slapo.pretrained import load_pretrained  # for models of Transformers only

    load_pretrained(sch, folder)


def _hook_in(model: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Take over the model's own saving; let errors name the module that was running."""
    # Notes on exceptions came with Python 3.11.
    for part in parts if sys.version_info >= (3, 11) else ():
        # A model may be built twice.
        if note_module not in part._forward_hooks.values():
            part.register_forward_hook(note_module, always_call=True)
    if hasattr(innermost(model), "save_pretrained"):
        from slapo.pretrained import take_over_saving  # for models of Transformers only

        take_over_saving(model)


def _check_places(sch: Schedule, inputs: Any) -> None:
    if inputs is True:
        inputs = sch.state.example_inputs
        if inputs is None:
            raise ValueError(
                "build(check=True): this schedule has no example inputs; pass check=example_inputs"
            )
    all_ranks_or_none("build(check=...)", lambda: check_places(sch, inputs))


def _check_first_call(sch: Schedule, *call: Any) -> None:
    """Check placements on a batch; if the check cannot follow it, only gradients are compared."""
    began = time.monotonic()
    try:
        check_call(sch, *call)
    except Exception as error:
        # An uncertain finding may be a missing rule, and must not stop a training that is right.
        if isinstance(error, PlacementError) and error.is_certain:
            raise
        logger.warning(
            "the placement check could not follow the first batch, so only gradients are "
            "compared: %s; add a rule with register_place_rule(), or skip the check with "
            "build(check=False)",
            error,
        )
    else:
        seconds = time.monotonic() - began
        logger.info("the placement check of the first batch took %.1f s", seconds)


def _as_whole(sch: Schedule) -> Schedule:
    """Return a node as the root of its own schedule; a root is returned as it is."""
    if sch.parent is None:
        return sch
    top, above = sch.get_top_schedule(), {node.path for node in sch.ancestors()}
    around = next((record for record in sch.history if record.path in above), None)
    if around is not None:
        raise SlapoError(
            f"build(sch[{sch.path!r}]): {around} was applied above this node, so the node is no "
            "longer a separate model; build the root, or schedule the part alone: "
            f"slapo.create_schedule(model.{sch.model_path})"
        )
    # The new state knows only ties inside the part, so those to the rest are checked here.
    check_ties(top.mod, top.state.ties)
    state = ScheduleState(TieGroups(sch.mod), sch.state.start_note)
    state.original = sch.state.original  # the names of its tensors stay those of the original model
    state.history += [
        replace(record, path=record.path[len(sch.path) :].lstrip("."))
        for record in sch.history
        if f"{record.path}.".startswith(f"{sch.path}.")
    ]
    whole = Schedule(sch.mod, "", "", None, sch.group, state)
    for (_, old), (_, new) in zip(sch.named_schedules(), whole.named_schedules(), strict=True):
        new.metadata = old.metadata
    whole.metadata.tie_weights = state.ties.as_dict()
    return whole


def _build_module(
    sch: Schedule,
    init_weights: bool | Callable[..., Any],
    sync_replicated: bool = False,
    **kwargs: Any,
) -> nn.Module:
    _refuse_runtime_features(sch, kwargs)
    check_same_schedule(sch)
    _check_tensors(sch)
    _create(sch, sch.mod, init_weights)
    share_wholes(sch.mod, sch.group, sync_replicated)
    guard_wrappers(sch.mod, sch.group)
    allow_calls(sch.mod)
    note_adapters(sch.mod, sch.state.original)
    write_down(sch.mod, sch.state.original)
    _hook_in(sch.mod, [sch.mod])
    # Materialization and replace() make new parameters, which an optimizer made before does not
    # have.
    refuse_earlier_optimizers(sch.mod, sch.state.parameters)
    if sch.world_size > 1:
        from slapo.sharding.whole_steps import watch_optimizers  # only if something may be sharded

        watch_optimizers(sch.mod, sch.group)
    sch.state.built_for = ""
    return sch.mod


def _prepare(sch: Schedule, runtime: Runtime) -> Lowering:
    """Check the schedule and cut it; an error restores the schedule."""
    whole = sch.mod
    if isinstance(whole, PipelinedModule):
        return _share_out(sch, whole, runtime)
    _check_tensors(sch)
    note_adapters(whole, sch.state.original)
    if not cut_nodes(sch):
        runtime.stages_of_this_rank(1)
        return Lowering(whole, tp_group=sch.group)
    with restored_on_error(sch):
        generate_pipeline_partition(sch)
        assert isinstance(sch.mod, PipelinedModule), "that is what a partition makes"
        return _share_out(sch, sch.mod, runtime)


def _share_out(sch: Schedule, pipelined: PipelinedModule, runtime: Runtime) -> Lowering:
    stages = pipelined.stages
    mine = runtime.stages_of_this_rank(len(stages))
    local = {index: stages[index] for index in mine}
    return Lowering(pipelined, local, len(stages), pipelined.ties, sch.group)


def _create_all(
    what: str,
    sch: Schedule,
    lowering: Lowering,
    init_weights: bool | Callable[..., Any],
    **given: Any,
) -> None:
    """`_create`, then refuse parameters left on meta."""
    _create(sch, lowering.module, init_weights, tuple(lowering.stages), **given)
    all_ranks_or_none(what, lambda: _check_filled(lowering, what))


def _create(
    sch: Schedule,
    here: nn.Module,
    init_weights: bool | Callable[..., Any],
    stages: Sequence[int] = (),
    among: dist.ProcessGroup | None = None,
    shares: Any = None,
) -> None:
    """Create the meta tensors that run here, load values of the folder, release other stages."""
    model, group, loader = sch.mod, sch.group, sch.state.loader
    divide = None if shares is None else shares.divide
    if isinstance(model, PipelinedModule):
        if model.whole is not None:
            model.give_tensors(stages)
            wanted = {id(tensor) for _, tensor in _tensors_of(here)}
            # One seed for all ranks: stages must initialize shared parameters alike.
            # Gathered, so that all ranks take the first rank's draw.
            seed = gathered(int(torch.randint(2**31, ())), None)[0]
            materialize(model.whole, init_weights, group, None, wanted, loader, among, seed)
            model.renew_tensors()
        release(model, stages)
    elif has_meta_tensors(model):
        with restored_on_error(sch):
            materialize(model, init_weights, group, loader=loader, among=among, share=divide)
    if loader is not None:
        held = holdings(here)
        loader.fill(held if shares is None else shares.of(held))


def _check_filled(lowering: Lowering, what: str) -> None:
    blank = [n for n, t in lowering.module.named_parameters() if t.is_meta]
    if blank:
        raise SlapoError(
            f"{what} needs values, but {blank[:3]} are on meta; build with init_weights=True, or "
            "initialize them first"
        )


def _tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _refuse_runtime_features(sch: Schedule, kwargs: dict[str, Any]) -> None:
    if kwargs:
        name = min(kwargs)
        hint = with_nearest(
            name,
            ("target", "init_weights", "sync_replicated"),
            "pass target= to use runtime options",
        )
        raise TypeError(
            "build without a target takes no further arguments except sync_replicated, got "
            f"{sorted(kwargs)}; {hint}"
        )
    cuts = [node.path for node in cut_nodes(sch)]
    if cuts:
        raise SlapoError(
            f"pipeline stages are cut after {cuts}, but a plain module cannot run stages; build "
            "with a target runtime, or remove the cuts"
        )


def check_same_schedule(sch: Schedule, everywhere: bool = False) -> None:
    """Refuse schedules that differ between ranks: primitives and their order must be the same."""
    group = None if everywhere else sch.group
    if not has_peers(group) or (sch.world_size == 1 and not everywhere):
        return
    # First only the digests: full histories are large, and equal in nearly all runs.
    digests = gathered(sch.digest(), group)
    if len(set(digests)) == 1:
        return
    histories = gathered([str(r) for r in sch.history], group)
    calls = gathered([(r.call(), r.identity) for r in sch.history], group)
    other = next(rank for rank, made in enumerate(calls) if made != calls[0])
    index = _first_difference(calls[0], calls[other])
    shown = [h[index] if index < len(h) else "nothing" for h in (histories[0], histories[other])]
    if shown[0].partition("  #")[0] == shown[1].partition("  #")[0]:
        shown[1] += " (with a different module or function of that name)"
    raise SlapoError(
        f"ranks applied different schedules: step {index} is {shown[0]} on rank 0 and {shown[1]} "
        f"on rank {other}; a schedule must be the same on every rank"
    )


def _first_difference(left: list[Any], right: list[Any]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _check_tensors(sch: Schedule) -> None:
    """Refuse broken ties, and shards that do not compute what the original module does."""
    check_ties(sch.mod, sch.state.ties)
    if sch.world_size > 1:
        # The model and not the tree: a flat trace removes modules inside its leaves from the tree.
        check_modules(sch.mod)
    for module in map(innermost, sch.mod.modules()):
        state = sharding_of(module)
        if state is not None:
            state.attach(module)  # also tags parameters that the user has replaced by hand
