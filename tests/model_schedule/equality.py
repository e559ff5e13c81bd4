"""A scheduled model against the one that it was made of: loss, logits, gradients, values."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.model_schedule import apply_schedule
from slapo.sharding.slicing import ShardSpec
from slapo.sharding.state import shards_of
from slapo.verify.numeric.harness import gathered_gradients
from slapo.wrapper import innermost
from tests.model_schedule.models import MODELS

#: Odd; and of what tokens are dealt out over two or four ranks from.
BATCH, LENGTH, EVEN_LENGTH = 3, 9, 12


def reference(key: str, **changes: Any) -> nn.Module:
    """The model as it is; with the attention that Transformers calls eager."""
    model = MODELS[key].build(**changes)
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")  # type: ignore[operator]
    return model


def result(output: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Loss and logits, if there are any."""
    if isinstance(output, Tensor):
        return F.cross_entropy(output, torch.arange(len(output)) % 10), output
    return output.loss, output.logits


def _whole_logits(logits: Tensor, like: Tensor, group: Any) -> Tensor:
    if logits.shape == like.shape:
        return logits
    ranks = torch.distributed.get_world_size(group)
    rank = torch.distributed.get_rank(group)
    size = like.shape[-1]
    step = -(-size // ranks)
    own = slice(rank * step, min(size, (rank + 1) * step))
    assert logits.shape[-1] == own.stop - own.start
    padded = like.new_zeros(like.shape)
    padded[..., own] = logits
    torch.distributed.all_reduce(padded, group=group)
    return padded


def difference(
    key: str,
    options: dict[str, Any],
    group: Any = None,
    **changes: Any,
) -> dict[str, float]:
    """Largest differences, relative to the largest number where that is above 1."""
    slapo.set_random_seed(7)
    length = EVEN_LENGTH if options.get("sequence_parallel") else LENGTH
    model = reference(key, **changes)
    scheduled = copy.deepcopy(MODELS[key].build(**changes))
    inputs = MODELS[key].inputs(BATCH, length)
    before = copy.deepcopy(model.state_dict())
    with torch.enable_grad():
        loss, logits = result(model(**inputs), inputs)
    loss.backward()
    sch = apply_schedule(scheduled, key, group=group, **options)
    built, _ = slapo.build(sch)
    _check_values(built, before, sch.group)
    new_loss, new_logits = result(built(**inputs), inputs)
    new_loss.backward()
    found = {"loss": _relative(new_loss, loss)}
    assert logits is not None
    if new_logits is not None:
        found["logits"] = _relative(_whole_logits(new_logits.detach(), logits, group), logits)
    else:
        assert options.get("fused_loss")
    gradients = gathered_gradients(built, sch.group)
    scale = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = float((gradients[name] - parameter.grad).abs().max()) / scale
    return found


def _relative(new: Tensor, old: Tensor) -> float:
    new, old = new.detach(), old.detach()
    return float((new - old).abs().max() / old.abs().max().clamp(min=1.0))


def _check_values(built: nn.Module, old: dict[str, Tensor], group: Any) -> None:
    """Values by original names, bit by bit, buffers among them."""
    new = built.state_dict()
    assert list(new) == list(old)
    for name, value in new.items():
        path, _, leaf = name.rpartition(".")
        spec: ShardSpec | None = shards_of(innermost(built.get_submodule(path))).get(leaf)
        whole = value if spec is None else spec.gather(value, group)
        assert torch.equal(whole, old[name]), name
