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
from slapo.cost.stages import StageParts, Step, divide
from slapo.errors import SlapoError
from slapo.model_schedule import apply_schedule
from slapo.model_schedule.apply import chosen
from slapo.model_schedule.cuts import chosen_cuts, even_cuts, layer_costs
from slapo.model_schedule.registry import (
    AUTO,
    have_one_recipe,
    maker_of,
    recipe_keys,
    schedule_of,
)
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
        _check_functions(recipe, inputs, loss_fn, options)
        self.options = dict(options)
        dtype = _dtype_of(dtype, self.options)
        for name in ("compile", "check"):  # kernels count one by one, and nothing is computed
            self.options.pop(name, None)
        if isinstance(recipe, str):
            _check_key(recipe, source)
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
        ratio = self.options.pop("ckpt_ratio", 0.0) or 0.0
        if not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
            raise ValueError(f"ckpt_ratio is {ratio!r}; pass a share from 0 to 1")
        self.ratio = float(ratio)
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
            what = key, dtype, self._few, torch.get_default_dtype()
            whole = make() if key is None else _MODELS.get(what, make)
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
        if not isinstance(given, Mapping):
            raise TypeError(
                f"inputs({samples}) returned a {type(given).__name__}; return a dict of what the "
                "model is called with, by name"
            )
        tokens = given.get("input_ids")
        if isinstance(tokens, Tensor) and tokens.dim() == 2:
            check_length(self.small.model, tokens.shape[1])
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
        """Of a micro-batch's products, each once: not again those that a backward repeats.

        Ranks that share layers may repeat work: then a model that nobody shares is asked.
        """
        if self.layout.tp > 1:
            layout = replace(self.layout, pp=1, tp=1, micro_batches=1, batch=self.layout.micro)
            options = {n: v for n, v in self.options.items() if n != "sequence_parallel"}
            given = self._given_inputs, self._loss_fn
            dtype = self._key[1]
            alone = Job(self.recipe, self._source, layout, self.machine, dtype, *given, options)
            parts = alone.stages(None)
        return sum(_flops_of(step) for each in parts for step in each.steps)

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
            maker_of(self.recipe) if isinstance(self.recipe, str) else self.recipe,
            _switches(),
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
            if cuts is not None:
                raise ValueError(
                    f"pipeline_cuts={list(cuts)} and pp=1 make no pipeline; pass a mesh with "
                    f"pp={len(list(cuts)) + 1}, or leave the cuts out"
                )
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
        head = getattr(self.small.model, "get_output_embeddings", lambda: None)()
        return layer_costs(head, [""])[0] if isinstance(head, nn.Module) else 0.0


def _key_of(config: Any) -> Any:
    """All that a config holds, also what its JSON leaves out; None for a function.

    What a function makes may change from call to call, and nothing of it is kept.
    """
    if not hasattr(config, "model_type"):
        return None
    entries = sorted(vars(config).items(), key=lambda entry: entry[0])
    values = [(n, _key_of(v) if hasattr(v, "model_type") else repr(v)) for n, v in entries]
    return type(config).__name__, tuple(values)


def _switches() -> tuple[Any, ...]:
    """What torch is told for the whole process, by which the same model runs otherwise."""
    backends = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
    )


def _check_functions(recipe: Any, inputs: Any, loss_fn: Any, options: Mapping[str, Any]) -> None:
    if not isinstance(recipe, str):
        if not callable(recipe):
            raise TypeError(
                f"recipe is a {type(recipe).__name__}; pass a key, or a function that schedules"
            )
        if options:
            raise TypeError(
                f"options {sorted(options)} are for recipes, and this is a function; bind them to "
                "it by functools.partial"
            )
    for name, given in (("inputs", inputs), ("loss_fn", loss_fn)):
        if given is not None and not callable(given):
            raise TypeError(f"{name} is a {type(given).__name__}; pass a function")


def _check_key(recipe: str, source: Source) -> None:
    """Refuse an unknown key before a model is made, and that of another family."""
    family = getattr(source, "model_type", None)
    if recipe == AUTO or schedule_of(recipe) is not None or family not in recipe_keys():
        return
    from transformers import CONFIG_MAPPING  # there is a config

    # A key of one's own may be for any family.
    if recipe in CONFIG_MAPPING and not have_one_recipe(recipe, str(family)):
        raise ValueError(
            f"{recipe!r} is no key for a {type(source).__name__}; pass {family!r}, or 'auto'"
        )


def _dtype_of(dtype: Any, options: dict[str, Any]) -> torch.dtype | None:
    """The one that is asked for, by a recipe's options too, which are taken away."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"dtype is {dtype!r}; pass a torch.dtype of floating point, such as torch.bfloat16"
        )
    asked = {} if dtype is None else {"dtype": dtype}
    for name, half in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        given = options.pop(name, False)
        if not isinstance(given, bool):
            raise TypeError(f"{name} is {given!r}; pass True or False")
        if given:
            asked[name] = half
    if len(set(asked.values())) > 1:
        raise ValueError(f"{asked} ask for different types; pass one of them")
    return next(iter(asked.values()), None)


def _flops_of(step: Step) -> float:
    """Forward and backward, which is twice the forward where everything trains, and else less."""
    forward = sum(kernel.flops for kernel in step.forward.kernels)
    backward = sum(kernel.flops for kernel in step.backward(first=False).kernels)
    return forward + min(backward, 2.0 * forward)


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
