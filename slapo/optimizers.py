"""Detection of optimizers created before a schedule put other parameters into the model.

Sharding keeps the parameter objects, so an optimizer still holds them. A replacement brings new
parameters, and so does the initialization of a model on meta: an earlier optimizer would step
without training any of these.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from slapo.errors import SlapoError

Known = Mapping[int, tuple[str, "weakref.ref[Tensor]"]]

#: Number of first steps of an optimizer that are checked: gradients may exist from the second on.
_LOOKS = 3

#: Model -> its parameters that are gone, and those that are new.
_REPLACED: weakref.WeakKeyDictionary[nn.Module, tuple[Known, Known]] = weakref.WeakKeyDictionary()
_SEEN: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_hooks: list[Any] = []


def parameters_of(model: nn.Module) -> Known:
    """Return the present parameters of a model by id, with weak references."""
    found: dict[int, tuple[str, weakref.ref[Tensor]]] = {}
    for path, module in model.named_modules():  # takes half the time of named_parameters
        for leaf, param in module._parameters.items():
            if param is not None and id(param) not in found:
                found[id(param)] = (f"{path}.{leaf}" if path else leaf, weakref.ref(param))
    return found


def refuse_earlier_optimizers(model: nn.Module, before: Known) -> None:
    """Make the first steps of an optimizer raise if it holds parameters that left the model."""
    now = parameters_of(model)
    # An id may have been taken over by a new tensor, so the objects are compared too.
    kept = {key for key, (_, ref) in before.items() if key in now and now[key][1]() is ref()}
    gone = {k: v for k, v in before.items() if k not in kept and v[1]() is not None}
    came = {k: v for k, v in now.items() if k not in kept}
    _REPLACED.pop(model, None)
    if gone and came:  # an old parameter is still referenced
        _REPLACED[model] = (gone, came)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    looks = _SEEN.get(optimizer, 0)
    if looks >= _LOOKS:
        return
    _SEEN[optimizer] = looks + 1
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for gone, came in list(_REPLACED.values()):
        # A parameter with a gradient is in use elsewhere, perhaps in another model.
        untrained = {k: p for k, p in held.items() if p.grad is None}
        stale = [name for k, (name, ref) in gone.items() if k in untrained and ref() is held[k]]
        trained = ((k, n, ref()) for k, (n, ref) in came.items() if k not in held)
        missing = [n for _, n, p in trained if p is not None and p.grad is not None]
        if stale and missing:
            raise SlapoError(
                f"this {type(optimizer).__name__} was created before the schedule and holds "
                f"{stale[:3]}, which the model no longer uses; it would not train new parameters "
                f"such as {missing[:3]}; create it after slapo.build, from model.parameters()"
            )
