"""What every engine is compared with: the same model, unscheduled, in one process.

All tests of runtimes train through :func:`compare` or step an :class:`Alone` by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from slapo.agreement import gathered
from slapo.sharding.shards import shards_of
from slapo.wrapper import innermost


class Alone:
    """A model that one process trains on whole batches: a copy, by parameters of float32.

    `loss_fn`, `optimizer` and `lr_scheduler` are as ``build`` takes them; ``(sum, count)`` is of a
    whole batch only. The optimizer may get names too. The copy computes in `dtype`, and gradients
    of the `parts` of a batch are added up in float32.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Any],
        optimizer: Callable[[list[Any]], Any],
        *,
        named: bool = False,
        clip: float | None = None,
        lr_scheduler: Callable[[Any], Any] | None = None,
        dtype: torch.dtype | None = None,
        parts: int = 1,
    ) -> None:
        self.model, self.loss_fn, self.parts = copy.deepcopy(model), loss_fn, parts
        self._masters = {
            id(p): nn.Parameter(
                p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True),
                p.requires_grad,
            )
            for p in self.model.parameters()
        }
        self.model.to(dtype)
        trained = [(n, self._masters[id(p)]) for n, p in self._trained()]
        self.optimizer = optimizer(trained if named else [master for _, master in trained])
        self.scheduler = None if lr_scheduler is None else lr_scheduler(self.optimizer)
        self.clip = float("inf") if clip is None else clip
        self.losses: list[float] = []
        self.norms: list[float] = []

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def step(self, batch: Any) -> float:
        """The loss of a whole batch, after which parameters are the next ones."""
        pairs = [(p, self._masters[id(p)]) for _, p in self._trained()]
        for master in self._masters.values():
            master.grad = None
        total = 0.0
        for inputs, targets in cut(batch, self.parts):
            loss = self._loss(inputs, targets) / self.parts
            loss.backward()
            total += loss.item()
            for parameter, master in pairs:
                if parameter.grad is not None:
                    before = torch.zeros_like(master) if master.grad is None else master.grad
                    master.grad = before + parameter.grad
                parameter.grad = None
        trained = [master for _, master in pairs]
        self.norms.append(nn.utils.clip_grad_norm_(trained, self.clip).item())
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master)
        self.losses.append(total)
        return total

    def train(self, batches: Iterable[Any]) -> Alone:
        """A step for each batch."""
        for batch in batches:
            self.step(batch)
        return self

    @torch.no_grad()
    def evaluate(self, batch: Any) -> tuple[float, Any]:
        """The loss of a whole batch in eval mode, and the output."""
        inputs, targets = batch
        mode = self.model.training
        output = call(self.model.eval(), inputs)
        self.model.train(mode)
        return _mean(self.loss_fn(output, targets)).item(), output

    def _loss(self, inputs: Any, targets: Any) -> Tensor:
        return _mean(self.loss_fn(call(self.model, inputs), targets)).float()

    def state(self) -> dict[str, Tensor]:
        """Values by name, parameters as the optimizer has them."""
        return {
            name: self._masters.get(id(tensor), tensor).detach().clone()
            for name, tensor in self.model.state_dict(keep_vars=True).items()
        }


def call(model: Any, inputs: Any) -> Any:
    """A model, or an engine, on what a batch has for it."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _mean(loss: Any) -> Tensor:
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


def cut(batch: Any, parts: int) -> list[Any]:
    """Equal parts of a batch, one after the other."""
    leaves, spec = pytree.tree_flatten(batch)
    pieces = [
        leaf.chunk(parts) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * parts
        for leaf in leaves
    ]
    return [pytree.tree_unflatten(list(part), spec) for part in zip(*pieces, strict=True)]


def of_this_rank(mesh: Any, batch: Any) -> Any:
    """The part of a whole batch that a data-parallel rank gets."""
    return cut(batch, mesh["dp"].size())[mesh.get_local_rank("dp")]


def compare(
    engine: Any, alone: Alone, batches: Iterable[Any], form: Callable[[Any], Any] | None = None
) -> dict[str, float]:
    """Train both on the same batches; the largest differences, of norms relative ones.

    `form` makes of a batch what the engine gets. The norm is 0 where the engine takes none.
    """
    found = {"losses": 0.0, "norms": 0.0}
    for batch in batches:
        mine = of_this_rank(engine.mesh, batch)
        loss = engine.train_batch(iter([mine if form is None else form(mine)]))
        assert (loss.dim(), loss.dtype, loss.requires_grad) == (0, torch.float32, False)
        assert len(set(gathered(loss.item(), None))) == 1, "the same on all ranks"
        found["losses"] = max(found["losses"], abs(loss.item() - alone.step(batch)))
        if engine.grad_norm is not None:
            apart = abs(float(engine.grad_norm) / alone.norms[-1] - 1)
            found["norms"] = max(found["norms"], apart)
    return {**found, "state": largest_difference(engine, alone.state())}


def compare_by_hand(
    engine: Any, alone: Alone, batches: Iterable[Any], parts: int = 1
) -> dict[str, float]:
    """As :func:`compare`, by calls, backwards and a step; a batch goes back in so many parts."""
    apart = 0.0
    for batch in batches:
        total = torch.zeros(())
        for inputs, targets in cut(of_this_rank(engine.mesh, batch), parts):
            loss = _mean(alone.loss_fn(call(engine, inputs), targets)) / parts
            engine.backward(loss)
            total += loss.detach()
        engine.step()
        losses = gathered(total.item(), None)
        apart = max(apart, abs(sum(losses) / len(losses) - alone.step(batch)))
    return {"losses": apart, "state": largest_difference(engine, alone.state())}


def whole(tensor: Any) -> Tensor:
    """All of a tensor of which FSDP2 may hold a share here."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def largest_difference(engine: Any, expected: Mapping[str, Tensor]) -> float:
    """Of this rank's values from their parts of the expected ones."""
    specs, largest = specs_of(engine), 0.0
    found = engine.state_dict()
    assert len(found) >= len(list(engine.lowering.module.parameters()))
    for name, value in found.items():
        value = whole(value)
        part = specs[name].slice(expected[name]) if name in specs else expected[name]
        assert value.shape == part.shape, name
        if value.numel():
            # What is shown in half precision was rounded from the optimizer's.
            apart = (value.float() - part.to(value.dtype).float()).abs().max().item()
            largest = max(largest, apart)
    return largest


def specs_of(engine: Any) -> dict[str, Any]:
    """Name in the model -> how it is sliced; of this rank's parameters that are."""
    lowering = engine.lowering
    roots = lowering.stages or {None: lowering.module}
    found = {}
    for index, root in roots.items():
        others = {} if index is None else lowering.pipelined.original_names(index)
        for path, module in root.named_modules():
            for leaf, spec in shards_of(innermost(module)).items():
                name = f"{path}.{leaf}" if path else leaf
                found.update(dict.fromkeys((name, *others.get(name, ())), spec))
    return found
