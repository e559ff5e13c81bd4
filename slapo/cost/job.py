"""The runs of a model that a dry run needs, kept for the next one."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from slapo.cost.layout import Layout
from slapo.cost.machine import Machine
from slapo.cost.models import (
    Small,
    Source,
    check_length,
    example_inputs,
    shrink,
    untie,
    whole_on_meta,
)
from slapo.cost.runs import Run, ScheduleFn, loss_of_output, run
from slapo.cost.stages import StageParts, divide
from slapo.errors import SlapoError
from slapo.model_schedule import apply_schedule
from slapo.model_schedule.apply import chosen
from slapo.model_schedule.cuts import chosen_cuts, even_cuts
from slapo.model_schedule.registry import AUTO, schedule_of
from slapo.model_schedule.verbs import cast
from slapo.schedule import Schedule, create_schedule

InputsFn = Callable[[int], Mapping[str, Any]]
LossFn = Callable[[Any, Any], Tensor]

T = TypeVar("T")


class _Kept(Generic[T]):
    """The latest of what took long to make, by all that it depends on."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._found: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is kept of this key, made if need be."""
        if key not in self._found:
            self._found[key] = make()
            if len(self._found) > self._size:
                self._found.popitem(last=False)
        self._found.move_to_end(key)
        return self._found[key]


#: Of questions that name all they depend on: what functions make may change from call to call.
_MODELS: _Kept[Small] = _Kept(8)
_RUNS: _Kept[Run] = _Kept(64)


class Job:
    """The runs that a question needs."""

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
        self.recipe, self.layout, self.machine = recipe, layout, machine
        self._given_inputs, self._loss_fn = inputs, loss_fn
        self.options = dict(options)
        for name in ("bf16", "fp16"):
            if self.options.pop(name, False):
                dtype = torch.bfloat16 if name == "bf16" else torch.float16
        self.options.pop("compile", None)  # fused kernels are counted one by one
        if not isinstance(recipe, str) and options:
            raise TypeError(
                f"options {sorted(options)} are for recipes, and this is a function; bind them to "
                "it by functools.partial"
            )
        if isinstance(recipe, str) and recipe != AUTO:
            schedule_of(recipe)  # refuses an unknown one before a model is made
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is {dtype!r}; pass a torch.dtype, such as torch.bfloat16")
        key = _key_of(source)
        self._key = (key, dtype)
        self._source = source
        self._made: tuple[Any, Small] | None = None
        self._together: frozenset[frozenset[str]] = frozenset()
        is_recipe = recipe == AUTO or (isinstance(recipe, str) and schedule_of(recipe) is None)
        is_named = is_recipe and key is not None and inputs is None and loss_fn is None
        self._runs: _Kept[Run] = _RUNS if is_named else _Kept(2)
        #: whether few layers stand in for all
        self._few = isinstance(recipe, str)
        self.ratio = float(self.options.pop("ckpt_ratio", 0.0) or 0.0)
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ckpt_ratio is {self.ratio}; pass a share from 0 to 1")
        self.method = self.options.pop("checkpoint_method", "uniform")
        if self.method not in ("uniform", "head"):
            raise ValueError(
                f"checkpoint_method is {self.method!r}; pass one of ['uniform', 'head']"
            )

    @property
    def small(self) -> Small:
        """The model; stages have a parameter of their own where others of the model are tied."""
        key, dtype = self._key
        wanted = self._few, self._together
        if self._made is None or self._made[0] != wanted:
            make = partial(_make_small, self._source, dtype, self._few)
            whole = make() if key is None else _MODELS.get((key, dtype, self._few), make)
            small = whole if self.layout.pp == 1 else untie(whole, self._together)
            self._made = wanted, small
        return self._made[1]

    def stages(self, cuts: Sequence[int] | None) -> list[StageParts]:
        """The whole model, divided."""
        runs = self.runs()  # after which the small model is what it stays
        ends = self.ends(cuts)
        parts = divide(self.small, runs, self.again(), ends)
        if self.layout.pp > 1 and any(stage.together for stage in parts):
            self._together = frozenset(names for stage in parts for names in stage.together)
            parts = divide(self.small, self.runs(), self.again(), ends)
        return parts

    def inputs(self, samples: int) -> Mapping[str, Any]:
        """Of so many samples."""
        if self._given_inputs is None:
            check_length(self.small.model, self.layout.length)
            return example_inputs(self.small.model, samples, self.layout.length)
        given = self._given_inputs(samples)
        sizes = {name: t.shape[0] for name, t in given.items() if isinstance(t, Tensor) and t.dim()}
        if any(size != samples for size in sizes.values()):
            raise ValueError(
                f"inputs({samples}) returned tensors of {sizes} samples; make as many as it is "
                "asked for, along the first dimension"
            )
        return given

    def again(self) -> set[str]:
        """Paths of the layers that compute activations again."""
        if not isinstance(self.recipe, str) or not self.ratio or not self.small.costs:
            return set()
        return set(chosen(list(self.small.costs), self.ratio, self.method))

    def flops(self, parts: Sequence[StageParts]) -> float:
        """Of a micro-batch's products, each once, backward as twice the forward.

        Ranks that share layers may repeat work: then a model that nobody shares is asked.
        """
        if self.layout.tp > 1:
            layout = replace(self.layout, pp=1, tp=1, micro_batches=1, batch=self.layout.micro)
            options = {n: v for n, v in self.options.items() if n != "sequence_parallel"}
            given = self._given_inputs, self._loss_fn
            dtype = self._key[1]
            alone = Job(self.recipe, self._source, layout, self.machine, dtype, *given, options)
            parts = alone.stages(None)
        steps = [step for each in parts for step in each.steps]
        return 3.0 * sum(kernel.flops for step in steps for kernel in step.forward.kernels)

    def runs(self) -> dict[bool, Run]:
        """Of layers as they are, and of such that compute again, as far as there are such."""
        if not self._few or not self.small.costs:
            return {False: self._run(self.ratio)}
        again = self.again()
        found = {}
        if len(again) < len(self.small.costs):
            found[False] = self._run(0.0)
        if again:
            found[True] = self._run(1.0)
        if all(run.regular for run in found.values()):
            return found
        self._few = False  # none stands in for others
        return self.runs()

    def _run(self, ratio: float) -> Run:
        layout = self.layout
        what = (
            self._key,
            self._few,
            self.recipe,
            json.dumps(self.options, sort_keys=True, default=repr),
            ratio,
            layout.tp,
            layout.micro,
            layout.length,
            layout.pp > 1,
            self._together,
            self.machine.rounding,
            self.machine.is_asynchronous,
        )
        return self._runs.get(what, partial(self._make_run, ratio))

    def _make_run(self, ratio: float) -> Run:
        options = {**self.options, "ckpt_ratio": ratio} if ratio else self.options
        schedule: ScheduleFn
        if isinstance(self.recipe, str):
            schedule = partial(_apply, self.recipe, options)
        else:
            schedule = partial(_schedule, self.recipe)
        loss_of = loss_of_output if self._loss_fn is None else partial(_loss, self._loss_fn)
        layout = self.layout
        return run(
            self.small,
            schedule,
            self.inputs(layout.micro),
            layout.tp,
            loss_of,
            self.machine.rounding,
            traced=layout.pp > 1,
            accelerator=self.machine.is_asynchronous,
        )

    def ends(self, cuts: Sequence[int] | None) -> list[int]:
        """Numbers of the layers that end a stage."""
        pp = self.layout.pp
        if pp == 1:
            return []
        runs = self.runs()
        if not next(iter(runs.values())).regular or not self.small.costs:
            raise SlapoError(
                f"pp={pp}, and {type(self.small.model).__name__} has no list of two layers or more "
                "that run one after another, each once; pass pp=1"
            )
        if cuts is not None:
            chosen_ends = chosen_cuts(cuts, [stack.count for stack in self.small.stacks])
            if len(chosen_ends) != pp - 1:
                raise ValueError(
                    f"pipeline_cuts={list(cuts)} make {len(chosen_ends) + 1} stages, and the mesh "
                    f"has pp={pp}"
                )
            return chosen_ends
        costs = list(self.small.costs.values())
        costs[-1] += self._head_cost()
        return even_cuts(costs, pp)

    def _head_cost(self) -> float:
        embedding = getattr(self.small.model, "get_output_embeddings", lambda: None)()
        for path, module in self.small.model.named_modules():
            if module is embedding:
                return self.small.head.get(path, 0.0)
        return 0.0


def _key_of(config: Any) -> Any:
    """All that a config holds, also what its JSON leaves out; None for a function.

    What a function makes may change from call to call, and nothing of it is kept.
    """
    if not hasattr(config, "model_type"):
        return None
    entries = sorted(vars(config).items(), key=lambda entry: entry[0])
    values = [(n, _key_of(v) if hasattr(v, "model_type") else repr(v)) for n, v in entries]
    return type(config).__name__, tuple(values)


def _make_small(source: Source, dtype: torch.dtype | None, few: bool) -> Small:
    model = whole_on_meta(source)
    if dtype is not None:
        cast(model, dtype)
    return shrink(model, few)


def _apply(key: str, options: Mapping[str, Any], model: nn.Module) -> Schedule:
    is_recipe = key == AUTO or schedule_of(key) is None
    # What is to be proved is the check's affair, and takes longer than all else here.
    more: dict[str, Any] = {"check": False} if is_recipe else {}
    return apply_schedule(model, key, **more, **options)


def _schedule(function: Callable[[Schedule], Any], model: nn.Module) -> Schedule:
    sch = create_schedule(model)
    function(sch)
    return sch


def _loss(loss_fn: LossFn, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    given = dict(inputs)
    labels = given.pop("labels", None)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        given.setdefault("decoder_input_ids", labels)  # which it makes of labels itself
    return loss_fn(model(**given), labels)
