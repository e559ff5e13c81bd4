"""A recipe out of what a model's config says: its tensor-parallel plan and its pipeline plan.

A model without one has the recipe of its family, if that is registered; else its layers are looked
for, which is enough for kernels, checkpoints, stages and losses in one process.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo.errors import PlacementError, VerificationError
from slapo.logger import get_logger
from slapo.model_schedule.losses import own_loss
from slapo.model_schedule.plans import entries, plan_of, unknown_styles
from slapo.model_schedule.recipe import Recipe, Stack
from slapo.model_schedule.registry import recipe_keys, recipe_of
from slapo.schedule import Schedule, create_schedule
from slapo.verify import Verify
from slapo.verify.placement import check

logger = get_logger()


#: A list of modules with less of the parameters than this share of the largest is none of layers.
_SMALL = 0.25


def known_recipe(model: nn.Module, base: str, config: Any) -> Recipe | None:
    """The recipe of a model whose config carries a plan, or of its family."""
    plan = plan_of(model)
    kind = type(model).__name__
    if not plan:
        key = getattr(config, "model_type", None)
        if key in recipe_keys():
            logger.info("auto: %s has the recipe %r, and no plan in its config", kind, key)
            return recipe_of(key, config)
        return None
    unknown = unknown_styles(plan)
    if unknown:
        raise ValueError(
            f"the plan of {kind} has styles that nothing is known of: {unknown}; write a table of "
            "the family, see help(slapo.model_schedule.Recipe)"
        )
    layers = _layers(model, plan)
    if not layers:  # of a plan for the head alone
        return None
    embeddings, head = _embedding(model), _head(model)
    table: Any = model.get_submodule(embeddings) if embeddings else None
    vocabulary = {*embeddings.split(), head}
    if table is not None and any(True for _ in table.children()):
        # What it does with rows after the lookup needs whole ones; nor can a tied head be split.
        embeddings = head = ""
    kept = {path: style for path, style in plan.items() if path not in vocabulary}
    last = _last(model, layers)
    refuses = {}
    if not last:
        refuses["sequence_parallel"] = "its config does not say which norm ends the layers"
    within = f"{base}." if base else ""
    return Recipe(
        stacks=(Stack(layers.removeprefix(within), (), last=last.removeprefix(within)),),
        embeddings=" ".join(path.removeprefix(within) for path in embeddings.split()),
        heads=head,
        key_value_heads="num_key_value_heads",
        refuses=refuses,
        plan=kept,
    )


def recipe_of_layers(model: nn.Module, base: str) -> Recipe:
    """Layers, in lists of modules of one class, without a word on how they could be split."""
    kind = type(model).__name__
    none = f"{kind} carries no tensor-parallel plan of layers (base_model_tp_plan of its config)"
    found = lists_of_layers(model.get_submodule(base))
    if not found:
        raise ValueError(
            f"{none}, and there is no list of layers in it; pass the key of a family that `slapo "
            "recipes` lists, or register_recipe() a table"
        )
    return Recipe(
        stacks=tuple(Stack(path, ()) for path in found),
        heads=_head(model),
        counts="",
    )


def lists_of_layers(base: nn.Module) -> list[str]:
    """Paths of the lists of layers: of modules of one or of several classes, none of them small."""
    lists: dict[str, int] = {}
    for path, module in base.named_modules():
        within = any(path.startswith(f"{other}.") for other in lists)
        kinds = {type(each) for each in module} if isinstance(module, nn.ModuleList) else set()
        if kinds and nn.ModuleList not in kinds:  # in a list of lists, each is a stack
            lists |= {} if within else {path: sum(p.numel() for p in module.parameters())}
    return [path for path, size in lists.items() if size >= max(1, _SMALL * max(lists.values()))]


def _layers(model: nn.Module, plan: dict[str, str]) -> str:
    """Path of the list of layers of the language model; nothing where the plan names none."""
    paths = [path for path in entries(model, plan) if re.search(r"\.\d+\.", path)]
    lists = [re.split(r"\.\d+\.", path)[0] for path in paths]
    if not lists:
        return ""
    return max(dict.fromkeys(lists), key=lists.count)


def _last(model: Any, layers: str) -> str:
    """Path of the module that runs after the layers; empty where that is not known."""
    order = [path.rpartition(".")[2] for path in getattr(model, "pp_plan", None) or {}]
    own, within = layers.rpartition(".")[2], layers.rpartition(".")[0]
    place = order.index(own) + 1 if own in order else len(order)
    named = order[place] if place < len(order) else ""
    siblings = dict(model.get_submodule(within).named_children())
    if named not in siblings:
        # Where no plan says it: the only norm beside the layers. The check proves that it is.
        norms = [name for name, each in siblings.items() if "Norm" in type(each).__name__]
        named = norms[0] if len(norms) == 1 else ""
    return f"{within}.{named}".lstrip(".") if named else ""


def _embedding(model: Any) -> str:
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    return _path_of(model, table) if isinstance(table, nn.Embedding) else ""


def _head(model: Any) -> str:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return _path_of(model, head) if type(head) is nn.Linear else ""


def _path_of(model: nn.Module, module: nn.Module) -> str:
    return next((path for path, each in model.named_modules() if each is module), "")


# --- proof ---------------------------------------------------------------------------------------
def prove(sch: Schedule, inputs: Any, again: Callable[[Schedule], None], what: str) -> None:
    """Refuse a schedule that is wrong: by the placement check, else by numbers of two layers."""
    kind = type(sch.mod).__name__
    try:
        check(sch, inputs)
    except PlacementError as error:
        said = error.args[0]
        can_compare = hasattr(sch.mod, "config") and dist.get_backend(sch.group) != "fake"
        if can_compare and not error.is_certain:
            logger.info("auto: two layers of %s are compared by numbers, since %s", kind, said)
            try:
                _compare(sch.mod, sch.group, inputs, again)
                return
            except VerificationError as found:
                said = f"{found}\nThe check alone was not certain: {said}"
        error.args = (
            f"{what.format(kind)} does not hold on {sch.world_size} ranks: {said}\nWrite "
            "a table of the family (help(slapo.model_schedule.Recipe)), or pass check=False if you "
            "know that the check is wrong here",
        )
        raise


def _compare(
    model: Any, group: dist.ProcessGroup | None, inputs: Any, again: Callable[[Schedule], None]
) -> None:
    """Outputs and gradients of a model of two layers, with and without a schedule."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    layers = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layers:  # one for each layer
            setattr(text, name, value[:2])
    text.num_hidden_layers = min(2, layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # all ranks have to start with the same weights
        small = type(model)(config).train(model.training)
        inputs = _various(inputs, text.vocab_size)
    device = next(model.parameters()).device
    sch = create_schedule(small if device.type == "meta" else small.to(device), group=group)
    with Verify(sch, inputs):
        again(sch)


def _various(inputs: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """With random tokens: among equal ones, attention has no gradient that could be wrong."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        return inputs
    tokens = torch.randint(vocabulary, ids.shape).to(ids.device)
    return {name: tokens if name in ("input_ids", "labels") else x for name, x in inputs.items()}


def labelled(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """With labels, where the model takes them."""
    takes = inspect.signature(model.forward).parameters
    ids = inputs.get("input_ids")
    own = "labels" in takes and "labels" not in inputs and isinstance(ids, Tensor)
    if own and not isinstance(own_loss(model), str):  # else labels may be of something else
        return {**inputs, "labels": ids}
    return inputs
