"""``slapo.draft``: derive a recipe from a model, prove it, and write it as a program."""

from __future__ import annotations

import copy
import logging
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.nn.parallel import DistributedDataParallel

from slapo.agreement import gathered
from slapo.derive.derivation import Derivation, derive
from slapo.errors import PlacementError, SlapoError
from slapo.example_inputs import text_config
from slapo.history import describe, numberless
from slapo.logger import only_from
from slapo.model_schedule.apply import apply_recipe, base_path
from slapo.model_schedule.auto import prove
from slapo.model_schedule.draft_table import recipe_of_derivation
from slapo.model_schedule.few_layers import keep_few_layers
from slapo.model_schedule.options import Options
from slapo.model_schedule.recipe import Recipe
from slapo.model_schedule.registry import recipe_keys
from slapo.node import history_of
from slapo.schedule import Schedule, create_schedule
from slapo.sharding.groups import group_size
from slapo.utils.calls import as_call, refuse_batch
from slapo.utils.raised import running_in
from slapo.verify.placement.fake_parameters import REAL_BYTES
from slapo.verify.placement.offline import check_at
from slapo.weights.slots import replacements
from slapo.wrapper import is_adapted

#: Maximum number of derivations, each without the axes that the check refused before.
_TRIES = 8


@dataclass(frozen=True)
class Draft:
    """A recipe derived from a model.

    Attributes
    ----------
    recipe
        The derived recipe; ``str(draft)`` is the program that registers it.
    model
        Name of the model's class.
    key
        Key under which the program registers the recipe.
    ranks
        Number of ranks that the recipe was derived for.
    share
        Fraction of all parameter bytes that is sharded.
    collectives
        Number of collectives in a forward and a backward pass.
    left_whole
        Name of each replicated matrix -> the reason for each of its axes.
    given_up
        Axes that were sharded in earlier attempts, and why they stay replicated.
    verdict
        The error of :func:`slapo.check`; None if it passed or was not run.
    """

    recipe: Recipe
    model: str
    key: str
    ranks: int
    share: float
    collectives: int
    left_whole: Mapping[str, list[str]]
    given_up: list[str] = field(default_factory=list)
    verdict: PlacementError | None = None

    def apply(self, sch: Schedule) -> Schedule:
        """Apply the recipe to the root schedule of such a model, and return the schedule."""
        _apply(self.recipe, sch)
        return sch

    def __str__(self) -> str:
        return _program(self)

    def summary(self) -> str:
        """Summarize the sharded fraction and the replicated matrices in a few lines."""
        lines = [
            f"{self.model} on {self.ranks} ranks: {self.share:.0%} of the parameters' bytes are "
            f"sharded, with {self.collectives} collectives in a forward and a backward pass"
        ]
        alike: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        for name, whys in self.left_whole.items():
            alike[(numberless(name), *whys)].append(name)
        for (name, *whys), names in alike.items():
            said = "; ".join(f"axis {axis}: {why}" for axis, why in enumerate(whys))
            lines.append(f"left whole: {name if len(names) > 1 else names[0]}: {said}")
        lines += [f"given up: {why}" for why in self.given_up]
        if self.verdict is not None:
            lines.append(str(self.verdict))
        return "\n".join(lines)


def draft(
    model: nn.Module,
    inputs: Any,
    ranks: int = 2,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    check: bool = True,
) -> Draft:
    """Derive a tensor-parallel recipe for a model, without a table of its family.

    The model runs forward once, in this process and without its weights. Every operation shows
    which parameter dimensions are the same axis, such as heads or features of an MLP. Axes that no
    operation needs in full are sharded, and missing reductions are added. Then :func:`slapo.check`
    proves the result for `ranks` and for two ranks, with one of each kind of equal layers if the
    model runs with these. Axes that it refuses stay replicated.

    Parameters
    ----------
    model
        Unscheduled model; its parameters may be on meta.
    inputs
        Example inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
    ranks
        Number of slices; axes that it does not divide stay replicated.
    loss_fn
        Function from the output to a scalar, as for :func:`slapo.check`.
    check
        False skips the proof.

    Returns
    -------
    Draft
        The result; as text it is an editable program that registers the recipe.

    Raises
    ------
    ValueError
        For fewer than two ranks, or a number that divides no axis.
    SlapoError
        If the model is already scheduled or wrapped, or does not run on the inputs.

    Examples
    --------
    >>> import slapo, torch
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
    ...     def forward(self, x):
    ...         return x + self.down(torch.relu(self.up(x)))
    >>> drafted = slapo.draft(nn.Sequential(Block(), Block()), torch.ones(3, 8), ranks=4)
    >>> for path, words in drafted.recipe.splits.items():
    ...     print(path, words)
    *.up columns, sum_grad(input)
    *.down rows
    """
    if not isinstance(model, nn.Module) or isinstance(ranks, bool) or not isinstance(ranks, int):
        raise TypeError(
            f"draft takes a model and a number of ranks, got {describe(model)} and "
            f"{describe(ranks)}"
        )
    if ranks < 2:
        raise ValueError(f"nothing can be sharded over {ranks} ranks; draft for 2 or more")

    def prove_alone(model: nn.Module, recipe: Recipe) -> None:
        def make() -> Any:
            return blank_copy(model), lambda sch: _apply(recipe, sch), inputs

        for _ in check_at(make, ranks, loss_fn=loss_fn):
            pass

    return _draft(model, inputs, ranks, prove_alone if check else None)


def draft_in_group(model: nn.Module, inputs: Any, group: Any) -> Draft:
    """Derive a recipe on all ranks of a group and check it on them together.

    Low-rank adapters are left out: they follow the shards of their layers. Raises PlacementError if
    the check refuses the last attempt too, and SlapoError if nothing can be sharded.
    """
    model = _without_adapters(model)

    def prove_here(model: nn.Module, recipe: Recipe) -> None:
        sch = create_schedule(blank_copy(model), group=group)
        _apply(recipe, sch)
        prove(sch, inputs, lambda other: _apply(recipe, other), "the draft of {}")

    def agree(names: list[str]) -> list[str]:
        """Merge the axes of all ranks, which may have found different modules."""
        return sorted({name for each in gathered(names, group) for name in each})

    drafted = _draft(model, inputs, group_size(group), prove_here, agree)
    if drafted.verdict is not None:
        raise drafted.verdict
    if not drafted.share:
        raise SlapoError(
            f"draft: no parameter of {drafted.model} can be sharded, and each of "
            f"{drafted.ranks} ranks would compute the whole model: "
            + "; ".join(drafted.summary().splitlines()[1:4])
            + "; use tp=1 with data parallelism, or register a recipe for this model"
        )
    return drafted


def _without_adapters(model: nn.Module) -> nn.Module:
    """Return the model, or a copy without the low-rank adapters around its layers."""
    adapted = [path for path, module in model.named_modules() if is_adapted(module)]
    if not adapted:
        return model
    plain = blank_copy(model)
    for path in adapted:
        owner, _, name = path.rpartition(".")
        setattr(plain.get_submodule(owner), name, plain.get_submodule(f"{path}.base_layer"))
    # A derivation sums the gradients only of what requires one.
    for parameter in plain.parameters():  # PEFT has frozen them.
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    return plain


def _refuse_unfit(model: nn.Module) -> None:
    """Refuse a model that is already scheduled, wrapped, quantized or adapted."""
    wrappers = (torch._dynamo.OptimizedModule, DistributedDataParallel, nn.DataParallel)
    kinds = {type(module).__module__.partition(".")[0] for module in model.modules()}
    dtypes = {parameter.dtype for parameter in model.parameters()}
    found = {
        "scheduled": bool(history_of(model)),
        "wrapped or compiled": isinstance(model, wrappers),
        # Packed integers have other shapes than the features that they encode.
        "quantized": not all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes),
        "given adapters": "peft" in kinds,
    }
    done = [what for what, is_so in found.items() if is_so]
    if done:
        raise SlapoError(
            f"draft: {type(model).__name__} is already {' and '.join(done)}; draft for the "
            "unmodified model, and schedule it before these changes"
        )


def _derive(model: nn.Module, inputs: Any, ranks: int, banned: set[str]) -> Derivation:
    """Derive the axes; an error of the model names the module."""
    args, kwargs = as_call(inputs)
    refuse_batch(model, args)
    try:
        return derive(model, args, kwargs, ranks, banned)
    except Exception as error:
        where = running_in(error, model)
        place = f"{where!r} ({type(model.get_submodule(where)).__name__})" if where else "the model"
        advice = "pass inputs that it accepts"
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            advice = (
                f"it reads values, but weights of more than {REAL_BYTES >> 20} MiB are fake "
                "tensors without values: draft for a smaller model of the same class"
            )
        raise SlapoError(
            f"draft: {place} fails with {type(error).__name__}: {error}; {advice}"
        ) from error


def _draft(
    model: nn.Module,
    inputs: Any,
    ranks: int,
    prove_copy: Callable[[nn.Module, Recipe], None] | None,
    agree: Callable[[list[str]], list[str]] = list,
) -> Draft:
    """Derive and prove until nothing is refused or no axis is left to give up."""
    _refuse_unfit(model)
    base = base_path(model, "")
    banned: set[str] = set()
    given_up: list[str] = []
    verdict: PlacementError | None = None
    refused: set[tuple[str, type]] = set()
    for _ in range(_TRIES):
        derivation = _derive(model, inputs, ranks, banned)
        # Later attempts have fewer free axes, and end with nothing sharded instead of this error.
        if not banned:
            _refuse_unfit_ranks(derivation)
        # The paths of a recipe start at the base model.
        # Ranks agree in every turn: each of them must leave the loop in the same one.
        while outside := agree(derivation.axes_below(base, outside=True)):
            given_up.append(f"{', '.join(outside)}: outside of the base model {base!r}")
            banned |= set(outside)
            derivation = _derive(model, inputs, ranks, banned)
        recipe = recipe_of_derivation(derivation, base)
        verdict = None
        try:
            if prove_copy is not None:
                with only_from(logging.WARNING):
                    _prove(model, recipe, prove_copy)
            break
        except PlacementError as error:
            verdict = error
            # A module may have several shards: only those that meet in the operation are given up.
            paths = {_sharded_at(derivation, path) for path in error.origins or (error.path,)}
            # The second of its kind stands for all layers: a try for each would take too long.
            kind_of = {path: (numberless(path), type(each)) for path, each in model.named_modules()}
            kinds = {kind_of[path] for path in paths}
            if kinds <= refused:
                paths = {path for path, kind in kind_of.items() if kind in kinds}
            refused |= kinds
            more = agree([name for path in paths for name in derivation.axes_below(path)])
            if not more or banned.issuperset(more):
                break
            given_up.append(str(error).partition("; ")[0])
            banned |= set(more)
    return Draft(
        recipe,
        type(model).__name__,
        _key(model),
        ranks,
        derivation.share(),
        _count(derivation),
        derivation.left_whole(),
        given_up + derivation.given_up,
        verdict,
    )


def _prove(
    model: nn.Module, recipe: Recipe, prove_copy: Callable[[nn.Module, Recipe], None]
) -> None:
    """Prove a recipe with few layers; if these are refused or fail, all layers decide."""
    # A path with the number of a layer may name a layer that the small model lacks.
    if not any(part.isdigit() for path in recipe.splits for part in path.split(".")):
        small = blank_copy(model)
        if any(len(stack.kept) < len(stack.stand_ins) for stack in keep_few_layers(small)):
            with suppress(Exception):
                return prove_copy(small, recipe)
    return prove_copy(model, recipe)


def _refuse_unfit_ranks(derivation: Derivation) -> None:
    """Refuse a number of ranks that divides none of the axes that could be sharded."""
    free: dict[int, str] = {}
    for axis in derivation.free_axes():
        free.setdefault(axis.size, axis.name.partition(":")[0])
    if free and all(size % derivation.ranks for size in free):
        sizes = ", ".join(f"{size} ({name!r})" for size, name in sorted(free.items()))
        raise ValueError(
            f"draft: no shardable axis is divisible by {derivation.ranks} ranks; the sizes are "
            f"{sizes}"
        )


def _sharded_at(derivation: Derivation, path: str) -> str:
    """Return the path of a module, or of the nearest enclosing one, with sharded parameters."""
    while path and not derivation.axes_below(path):
        path = path.rpartition(".")[0]
    return path


def _apply(recipe: Recipe, sch: Schedule) -> None:
    config = text_config(getattr(sch.mod, "config", None))
    # Kernels would replace modules that the table names. check=False, as the caller does the proof.
    apply_recipe(sch, recipe, Options(kernels=False, check=False), config, base_path(sch.mod, ""))


def blank_copy(model: nn.Module) -> nn.Module:
    """Copy a model, without its weights if these are large."""
    tensors = [*model.parameters(), *model.buffers()]
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= REAL_BYTES:
        return copy.deepcopy(model)
    # deepcopy takes these tensors from its memo, and so never copies the weights.
    return copy.deepcopy(model, replacements(model, lambda tensor: tensor.detach().to("meta")))


def _count(derivation: Derivation) -> int:
    """Count the collectives of a forward and a backward pass, including embeddings and heads."""
    placed = derivation.collectives
    return (
        len(placed.sums)
        + len(placed.gradients)
        + 2 * len(derivation.gathering)
        + len(derivation.tables)
        + 2 * len(derivation.heads)
    )


# --- the program --------------------------------------------------------------------------------
def _key(model: Any) -> str:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    key = str(kind or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(model).__name__).lower())
    # register_recipe() in the printed program refuses a key that is taken.
    return key if key not in recipe_keys() else f"drafted_{key}"


def _program(drafted: Draft) -> str:
    recipe = drafted.recipe
    lines = ["stacks=("]
    for stack in recipe.stacks:
        last = f', last="{stack.last}"' if stack.last else ""
        lines.append(f'    Stack("{stack.layers}"{last}),')
    lines += [
        "),",
        f'embeddings="{recipe.embeddings}",',
        f'heads="{recipe.heads}",',
        'counts="",',
    ]
    if recipe.refuses:
        lines += ["refuses={", *(f'    "{n}": "{why}",' for n, why in recipe.refuses.items()), "},"]
    lines += ["splits={", *(f'    "{path}": "{w}",' for path, w in recipe.splits.items()), "},"]
    name = re.sub(r"\W", "_", drafted.key)
    return (
        "from slapo.model_schedule import Recipe, Stack, register_recipe\n\n\n"
        f'@register_recipe("{drafted.key}")\n'
        f"def {name}(config):\n"
        f'    """{drafted.model}, drafted for {drafted.ranks} ranks."""\n'
        "    return Recipe(\n" + textwrap.indent("\n".join(lines), " " * 8) + "\n    )\n"
    )
