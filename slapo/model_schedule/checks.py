"""What is refused before anything changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from slapo.model_schedule.options import Options
from slapo.model_schedule.recipe import Recipe, Stack
from slapo.schedule import Schedule

#: Names of the config: probabilities of dropout within attention.
_DROPOUTS = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "attn_dropout",
    "dropout_rate",
)

_ABSENT = object()


def check(base: Schedule, recipe: Recipe, options: Options, config: Any) -> None:
    """Refuse what the model, its family or the group cannot have.

    Raises
    ------
    ValueError
        Saying which, and what to pass.
    """
    _check_refused(recipe, options, base.world_size)
    _check_paths(base, recipe)
    if not (options.disable_fuse_bias_gelu or recipe.bias_gelu):
        raise ValueError(
            "disable_fuse_bias_gelu=False is not for this family: no module of its layers has a "
            "linear layer whose bias goes into a GELU; leave it out"
        )
    if base.world_size > 1:
        _check_names(base, recipe, options, config)
        _check_known(base, recipe)
        _check_counts(config, recipe, base.world_size)
        if options.attn_op_name is None and recipe.attention is None:
            check_own_dropout(config, "attn_op_name=None keeps the model's own attention")
    if not options.delay_init:
        _check_values(base)


def _check_refused(recipe: Recipe, options: Options, ranks: int) -> None:
    wanted = dict(options.asked())
    if wanted.get("attn_op_name", "auto") is None:
        del wanted["attn_op_name"]  # the model's own, which it has
    if ranks > 1:
        wanted["tensor parallelism"] = True
    for name, why in recipe.refuses.items():
        if name in wanted:
            value = f"={wanted[name]!r}" if name in options.asked() else f" over {ranks} ranks"
            raise ValueError(f"{name}{value} is not for this family: {why}; leave it out")


def _check_paths(base: Schedule, recipe: Recipe) -> None:
    for stack in recipe.stacks:
        if not has_layers(base, stack):
            raise ValueError(
                f"{type(base.mod).__name__} at {base.path!r} has no layers {stack.layers!r}, as "
                f"the recipe says: {base.describe_unknown(stack.layers)}; pass the key of the "
                "family, or as prefix= the path of its base model"
            )


def has_layers(base: Schedule, stack: Stack) -> bool:
    """Whether a stack is there, and not empty."""
    try:
        return len(base.mod.get_submodule(stack.layers)) > 0  # type: ignore[arg-type]
    except (AttributeError, TypeError):
        return False


def _check_names(base: Schedule, recipe: Recipe, options: Options, config: Any) -> None:
    """What may be absent in some classes of a family, and a slip of the pen makes so in all."""
    root = base.get_top_schedule()
    model: Any = root.mod
    wrong: dict[str, str] = {}
    if options.parallel_vocabulary:
        if recipe.embeddings and not any(path in base for path in recipe.embeddings.split()):
            wrong["embeddings"] = recipe.embeddings
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if head is not None and recipe.heads and not any(p in root for p in recipe.heads.split()):
            wrong["heads"] = recipe.heads
    if config is not None and not recipe.plan:  # a plan does not say how its heads are counted
        lacking = [
            n for n in recipe.counts.split() if _count(config, n, default=_ABSENT) is _ABSENT
        ]
        wrong |= {"counts": " ".join(lacking)} if lacking else {}
    for stack in recipe.stacks:
        layers = list(base.select(f"{stack.layers}.*"))
        for region in stack.regions:
            for name in ("forked", "by_head"):
                paths = getattr(region, name).split()
                lacking = [path for path in paths if not any(path in layer for layer in layers)]
                wrong |= {name: " ".join(lacking)} if lacking else {}
    if wrong:
        raise ValueError(
            f"the recipe names what {type(model).__name__} and its config do not have: {wrong}; "
            "correct the table, or pass the key of the model's own family"
        )


def _check_known(base: Schedule, recipe: Recipe) -> None:
    """Whatever lies in a split block sees slices, or is run by each rank for itself."""
    for stack in recipe.stacks:
        for layer in base.select(f"{stack.layers}.*"):
            unknown = _unknown_parameters(layer.mod, stack)
            if unknown:
                raise ValueError(
                    f"{layer.path} ({type(layer.mod).__name__}) has the parameters {unknown} in a "
                    "block that is split, and the recipe knows nothing of them; pass the key of "
                    "the model's own family, or 'auto'; adapters are for a group of one rank"
                )


def _unknown_parameters(layer: nn.Module, stack: Stack) -> list[str]:
    blocks = [(region.enter.split(), region.paths) for region in stack.regions]
    found = []
    for name, _ in layer.named_parameters():
        known = [paths for enter, paths in blocks if _lies_in(name, enter)]
        if known and not any(_lies_in(name, paths) for paths in known):
            found.append(name)
    return found


def _lies_in(path: str, modules: Iterable[str]) -> bool:
    return any(path.startswith(f"{each}.") for each in modules)


def _check_counts(config: Any, recipe: Recipe, ranks: int) -> None:
    for name in recipe.counts.split():
        count = _count(config, name)
        if isinstance(count, int) and count % ranks:
            raise ValueError(_unfit(name, count, ranks, list(_factors(count))))
    name = recipe.key_value_heads
    count = _count(config, name) if name else None
    if count and count % ranks and ranks % count:
        heads = getattr(config, recipe.counts.split()[0])
        fit = [n for n in _factors(heads) if count % n == 0 or n % count == 0]
        raise ValueError(_unfit(name, count, ranks, fit))


def _count(config: Any, name: str, default: Any = None) -> Any:
    try:
        return getattr(config, name, default)
    except Exception as error:  # of the config's own: where it is one for each layer
        raise ValueError(f"{type(config).__name__}.{name} is not one number: {error}") from error


def _factors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def _unfit(name: str, count: int, ranks: int, fit: list[int]) -> str:
    return (
        f"{name} is {count}, and the group has {ranks} ranks, over which these heads cannot be "
        f"dealt out; sizes of groups that fit: {fit}"
    )


def dropouts(config: Any) -> dict[str, float]:
    """Probabilities of dropout within attention that are not 0."""
    found = {name: getattr(config, name, None) for name in _DROPOUTS}
    return {name: value for name, value in found.items() if value}


def check_own_dropout(config: Any, why: str) -> None:
    """Attention of the model's own would drop the same of each rank's heads.

    Raises
    ------
    ValueError
        If it drops any.
    """
    active = dropouts(config)
    if active:
        raise ValueError(
            f"{why}, whose dropout ({active}) would be the same on all ranks, for different heads; "
            "set these to 0, or attn_op_name to what the model can take"
        )


def _check_values(base: Schedule) -> None:
    empty = [name for name, p in base.get_top_schedule().mod.named_parameters() if p.is_meta]
    if empty:
        raise ValueError(
            f"delay_init=False, and {len(empty)} parameters have no values yet ({empty[0]!r} is on "
            "meta); leave it out, and build() makes them"
        )
