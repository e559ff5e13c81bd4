"""Options of a recipe, refused if invalid before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from slapo.history import numberless
from slapo.model_schedule.recipe import Recipe, Stack
from slapo.model_schedule.splits import (
    OF_ATTRIBUTES,
    OF_ENTRIES,
    OF_PARAMETERS,
    Entry,
    attribute_at,
    entries_of,
    is_within,
)
from slapo.op.attention import known_backend
from slapo.primitives.set import SIZE
from slapo.schedule import Schedule
from slapo.sharding.sync_hooks import input_names
from slapo.utils.calls import as_call
from slapo.wrapper import innermost

METHODS = ("uniform", "head")


@dataclass(frozen=True)
class Options:
    """Options of :func:`slapo.model_schedule.apply_schedule`, which documents each."""

    fp16: bool = False
    bf16: bool = False
    attn_op_name: str | None = "auto"
    ckpt_ratio: float = 0.0
    checkpoint_method: str = "uniform"
    pipeline_cuts: int | Sequence[Any] | None = None
    bcast_input: bool = False
    delay_init: bool = True
    disable_fuse_bias_gelu: bool = True
    sequence_parallel: bool = False
    kernels: bool = True
    compile: bool = False
    parallel_vocabulary: bool = True
    gather_logits: bool = True
    fused_loss: bool = False
    check: bool = True
    example_inputs: Any = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            # A number or string would count as True, as in ``fp16="no"``.
            if isinstance(each.default, bool) and not isinstance(value, bool):
                raise TypeError(f"{each.name} is {value!r}; pass True or False")
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 are both True; pass one of them")
        if not (self.disable_fuse_bias_gelu or self.kernels):
            raise ValueError("disable_fuse_bias_gelu=False needs the GELU of kernels=True")
        ratio = self.ckpt_ratio
        is_number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
        if not is_number or not 0 <= ratio <= 1:
            raise ValueError(f"ckpt_ratio is {ratio!r}; pass a fraction of the layers, from 0 to 1")
        if self.checkpoint_method not in METHODS:
            raise ValueError(
                f"checkpoint_method is {self.checkpoint_method!r}; pass one of {list(METHODS)}"
            )
        if self.attn_op_name is not None:
            # The dataclass is frozen; aliases of a backend become its one name.
            object.__setattr__(self, "attn_op_name", known_backend(self.attn_op_name))
        if self.pipeline_cuts is not None:
            self._check_cuts()
        if self.example_inputs is not None:
            as_call(self.example_inputs)

    def _check_cuts(self) -> None:
        cuts = self.pipeline_cuts
        if isinstance(cuts, (bool, str)) or not isinstance(cuts, (int, Sequence)):
            raise TypeError(
                f"pipeline_cuts is {cuts!r}; pass the number of stages, or a list of indices of "
                "the layers that end a stage"
            )
        apart = {
            "compile": "stages are cut from a trace, and compiled layers cannot be traced",
            "fused_loss": "the engine computes the loss of a pipeline: pass loss_fn to build()",
            "bcast_input": "the engine passes inputs to the first stage",
        }
        for name, why in apart.items():
            if getattr(self, name):
                raise ValueError(f"{name}=True with pipeline_cuts: {why}; leave {name} out")

    def asked(self) -> dict[str, Any]:
        """Return the options that differ from the defaults."""
        pairs = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        return {name: value for name, value, default in pairs if value != default}


# --- limits of the model, its family and the group -----------------------------------------------
#: Config entries for attention dropout probabilities.
_DROPOUTS = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "attn_dropout",
    "dropout_rate",
)

_ABSENT = object()


def check(base: Schedule, recipe: Recipe, options: Options, config: Any) -> None:
    """Refuse options that the model, its family or the group does not support."""
    _check_refused(recipe, options, base.world_size)
    _check_paths(base, recipe)
    if not (options.disable_fuse_bias_gelu or recipe.bias_gelu):
        raise ValueError(
            "disable_fuse_bias_gelu=False is not supported by this family: its layers have no "
            "linear layer whose bias feeds a GELU; leave it out"
        )
    if base.world_size > 1:
        entries = _check_names(base, recipe, options, config)
        if recipe.proven:  # others are proved as a whole, unless check=False
            _check_known(entries)
        _check_counts(config, recipe, base.world_size)
        if options.attn_op_name is None and recipe.attention is None:
            check_own_dropout(config, "attn_op_name=None keeps the model's own attention")
    if not options.delay_init:
        _check_values(base)


def _check_refused(recipe: Recipe, options: Options, ranks: int) -> None:
    wanted = dict(options.asked())
    if wanted.get("attn_op_name", "auto") is None:
        del wanted["attn_op_name"]  # every family supports its own attention
    if ranks > 1:
        wanted["tensor parallelism"] = True
    for name, why in recipe.refuses.items():
        if name in wanted:
            value = f"={wanted[name]!r}" if name in options.asked() else f" over {ranks} ranks"
            raise ValueError(f"{name}{value} does not fit this family: {why}; leave it out")


def _check_paths(base: Schedule, recipe: Recipe) -> None:
    for stack in recipe.stacks:
        if not has_layers(base, stack):
            raise ValueError(
                f"{type(base.mod).__name__} at {base.path!r} has no layers {stack.layers!r}, "
                f"which the recipe names: {base.describe_unknown(stack.layers)}; pass the "
                "family's key, or its base model's path as prefix="
            )


def has_layers(base: Schedule, stack: Stack) -> bool:
    """Return whether a stack exists and is not empty."""
    try:
        return len(base.mod.get_submodule(stack.layers)) > 0  # type: ignore[arg-type]
    except (AttributeError, TypeError):
        return False


def _check_names(base: Schedule, recipe: Recipe, options: Options, config: Any) -> list[Entry]:
    """Return the entries of the table; refuse those that no module or attribute matches."""
    root = base.get_top_schedule()
    model: Any = root.mod
    wrong: dict[str, str] = {}
    if options.parallel_vocabulary:
        if recipe.embeddings and not any(path in base for path in recipe.embeddings.split()):
            wrong["embeddings"] = recipe.embeddings
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if head is not None and recipe.heads and not any(p in root for p in recipe.heads.split()):
            wrong["heads"] = recipe.heads
    if config is not None:
        lacking = [
            n for n in recipe.counts.split() if _count(config, n, default=_ABSENT) is _ABSENT
        ]
        wrong |= {"counts": " ".join(lacking)} if lacking else {}
    entries, absent = entries_of(base, recipe.table)
    if absent:
        wrong["splits"] = " ".join(absent)
    attributes = {
        f"{numberless(entry.node.path)}.{name}"
        for entry in entries
        for word in entry.words
        for name in (word.names if word.name == "divide" else word.names[:1])
        if word.name in OF_ATTRIBUTES and not _has_attribute(entry.node.mod, name)
    }
    if attributes:
        wrong["attributes"] = " ".join(sorted(attributes))
    if wrong:
        hint = f"; {base.describe_unknown(next(iter(absent)).replace('*', '0'))}" if absent else ""
        raise ValueError(
            f"the recipe names entries that {type(model).__name__} and its config lack: {wrong}"
            f"{hint}; fix the table, or pass the key of the model's own family or 'auto'"
        )
    return entries


def _check_known(entries: list[Entry]) -> None:
    """Refuse parameters inside a sharded block that the recipe does not name."""
    # An unnamed parameter inside would get a partial gradient on each rank, in silence.
    handled = {e.node.path for e in entries if not e.words or e.has(OF_PARAMETERS)}
    for node in (entry.node for entry in entries if entry.has(OF_ENTRIES)):
        names = [name for name, _ in node.mod.named_parameters()]
        unknown = [name for name in names if not is_within(f"{node.path}.{name}", handled)]
        if unknown:
            raise ValueError(
                f"{node.path} ({type(node.mod).__name__}) has the parameters {unknown} in a "
                "sharded block, but the recipe does not name them; pass the key of the model's own "
                "family or 'auto', or name their modules in the table, without words where they "
                "are replicated"
            )


def _has_attribute(module: nn.Module, path: str) -> bool:
    if size := SIZE.fullmatch(path):
        return any(size[1] in names for names in input_names(innermost(module)))
    return attribute_at(module, path) is not None


def _check_counts(config: Any, recipe: Recipe, ranks: int) -> None:
    for name in recipe.counts.split():
        count = _count(config, name)
        if isinstance(count, int) and count % ranks:
            raise ValueError(_unfit(name, count, ranks, list(_factors(count))))
    name = recipe.key_value_heads
    count = _count(config, name) if name else None
    # With fewer heads than ranks, ranks // count ranks share each head.
    if count and count % ranks and ranks % count:
        heads = getattr(config, recipe.counts.split()[0]) if recipe.counts else count
        fit = [n for n in _factors(heads) if count % n == 0 or n % count == 0]
        raise ValueError(_unfit(name, count, ranks, fit))


def _count(config: Any, name: str, default: Any = None) -> Any:
    try:
        return getattr(config, name, default)
    except Exception as error:  # configs with a value per layer raise their own errors
        raise ValueError(f"{type(config).__name__}.{name} is not one number: {error}") from error


def _factors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def _unfit(name: str, count: int, ranks: int, fit: list[int]) -> str:
    return (
        f"{name} is {count}, but these heads cannot be sharded over the group's {ranks} ranks; "
        f"group sizes that fit: {fit}"
    )


def dropouts(config: Any) -> dict[str, float]:
    """Return the nonzero attention dropout probabilities."""
    found = {name: getattr(config, name, None) for name in _DROPOUTS}
    return {name: value for name, value in found.items() if value}


def check_own_dropout(config: Any, why: str) -> None:
    """Refuse dropout in the model's own attention, which would be the same on all ranks."""
    active = dropouts(config)
    if active:
        raise ValueError(
            f"{why}, whose dropout ({active}) would be the same on all ranks, for different "
            "heads; set these to 0, or attn_op_name to a supported backend"
        )


def _check_values(base: Schedule) -> None:
    empty = [name for name, p in base.get_top_schedule().mod.named_parameters() if p.is_meta]
    if empty:
        raise ValueError(
            f"delay_init=False, but {len(empty)} parameters have no values yet ({empty[0]!r} is "
            "on meta); leave it out, and build() creates them"
        )
