"""Recipes for any model: that of its family, or its layers, with a proof of doubtful ones.

In one process a list of the layers is enough for kernels, checkpoints, stages and losses.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from slapo.errors import PlacementError, VerificationError
from slapo.logger import get_logger
from slapo.model_schedule.few_layers import shorten_config
from slapo.model_schedule.losses import own_loss
from slapo.model_schedule.recipe import Recipe, Stack
from slapo.model_schedule.registry import recipe_keys, recipe_of
from slapo.schedule import Schedule, create_schedule
from slapo.verify import Verify
from slapo.verify.placement import check
from slapo.verify.placement.fake_parameters import REAL_BYTES

logger = get_logger()


#: A module list is a list of layers if it has at least this fraction of the largest one's
#: parameters, or modules of the same class: the first blocks of a ResNet have few parameters.
_SMALL = 0.25
#: Options for which a model needs a list of layers.
OF_LAYERS = ("ckpt_ratio", "pipeline_cuts", "sequence_parallel")


def family_recipe(config: Any) -> Recipe | None:
    """Return the recipe of a config's family, or None if none is registered."""
    key = getattr(config, "model_type", None)
    return recipe_of(key, config) if key in recipe_keys() else None


def recipe_of_layers(model: nn.Module, base: str) -> Recipe:
    """Return a recipe of the layers alone, without entries for sharding."""
    found = lists_of_layers(model.get_submodule(base))
    return Recipe(
        stacks=tuple(Stack(path) for path in found),
        heads=_head(model),
        counts="",
        refuses={} if found else dict.fromkeys(OF_LAYERS, "the model has no list of layers"),
    )


def lists_of_layers(base: nn.Module) -> list[str]:
    """Return the paths of the outermost lists of modules that are large enough to hold layers."""
    lists: dict[str, nn.Module] = {}
    for path, module in base.named_modules():
        within = any(path.startswith(f"{other}.") for other in lists)
        if _holds_layers(module) and path and not within:
            lists[path] = module
    sizes = {path: sum(p.numel() for p in module.parameters()) for path, module in lists.items()}
    largest = max(sizes, key=lambda path: sizes[path], default="")
    return [
        path
        for path, size in sizes.items()
        if size
        and (size >= _SMALL * sizes[largest] or _kinds(lists[path]) == _kinds(lists[largest]))
    ]


def _kinds(module: nn.Module) -> set[type]:
    return set(map(type, module._modules.values()))


def _holds_layers(module: nn.Module) -> bool:
    items = list(module._modules.values())
    kinds = _kinds(module)
    if isinstance(module, nn.Sequential):  # blocks of one class, as in timm, not parts of a block
        return len(items) > 1 == len(kinds) and all(each and each._modules for each in items)
    # torch keeps the parametrizations of a tensor in a subclass of ModuleList. In a list of lists,
    # each is a stack. A list with gaps holds optional parts of one layer.
    is_list = isinstance(module, nn.ModuleList) and not isinstance(module, ParametrizationList)
    return is_list and bool(kinds) and not kinds & {nn.ModuleList, type(None)}


def _head(model: Any) -> str:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    # Loss heads and sharding by columns read a plain weight; other classes stay as they are.
    if type(head) is not nn.Linear:
        return ""
    return next((path for path, each in model.named_modules() if each is head), "")


# --- proof ---------------------------------------------------------------------------------------
def prove(sch: Schedule, inputs: Any, again: Callable[[Schedule], None], what: str) -> None:
    """Refuse a wrong schedule, by the placement check or else by comparing two layers' values."""
    kind = type(sch.mod).__name__
    try:
        check(sch, inputs)
    except PlacementError as error:
        said = error.args[0]
        # The second model is made from the config. A fake process group moves no values.
        can_compare = hasattr(sch.mod, "config") and dist.get_backend(sch.group) != "fake"
        if can_compare and not error.is_certain:
            logger.info("auto: comparing outputs and gradients of %s, since %s", kind, said)
            try:
                _compare(sch.mod, sch.group, inputs, again)
                return
            except VerificationError as found:
                said = f"{found}\nThe check alone was inconclusive: {said}"
        error.args = (
            f"{what.format(kind)} fails the check on {sch.world_size} ranks: {said}\nFix the "
            "table, or write one for the family (help(slapo.model_schedule.Recipe)), or pass "
            "check=False if you know that the check is wrong",
        )
        raise


def _compare(
    model: Any, group: dist.ProcessGroup | None, inputs: Any, again: Callable[[Schedule], None]
) -> None:
    """Compare outputs and gradients with the schedule and without; large models with two layers."""
    config = copy.deepcopy(model.config)
    if sum(tensor.nbytes for tensor in model.parameters()) > REAL_BYTES:
        text = config.get_text_config()
        layers = getattr(text, "num_hidden_layers", 0)
        # A new model is built from the config, so its number of layers and lists per layer must
        # agree.
        with suppress(NotImplementedError):  # from configs that count the layers of two stacks
            text.num_hidden_layers = min(2, layers)
            shorten_config(text, layers, range(min(2, layers)))
    # The model is made and filled on the CPU, so no random state of an accelerator is saved.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # all ranks have to start with the same weights
        small = type(model)(config).train(model.training)
        inputs = _various(inputs, config.get_text_config())
    device = next(model.parameters()).device
    sch = create_schedule(small if device.type == "meta" else small.to(device), group=group)
    with Verify(sch, inputs):
        again(sch)


def _various(inputs: dict[str, Any], config: Any) -> dict[str, Any]:
    """Use random tokens: attention among equal tokens has no gradient that could be wrong."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or len(ids.unique()) > 1:
        return inputs
    tokens = torch.randint(config.vocab_size, ids.shape).to(ids.device)
    return {name: tokens if name in ("input_ids", "labels") else x for name, x in inputs.items()}


def in_training(model: nn.Module, inputs: Any) -> Any:
    """Add labels, and disable the key-value cache, if the model accepts these arguments."""
    if not isinstance(inputs, dict):
        return inputs
    takes = inspect.signature(model.forward).parameters
    ids = inputs.get("input_ids")
    added: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
    # If the model computes no known loss of its own, labels may have another meaning.
    unlabeled = "labels" in takes and "labels" not in inputs and isinstance(ids, Tensor)
    if unlabeled and not isinstance(own_loss(model), str):
        added["labels"] = ids
    return {**added, **inputs}
