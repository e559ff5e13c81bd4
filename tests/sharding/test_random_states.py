"""Dropout as several ranks draw it: masks that differ where activations do, and come again."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo


def drops() -> Any:
    """A dropout on replicated and one on sharded activations, around a layer."""
    inside = {"fc": nn.Linear(16, 16), "act": nn.Tanh()}
    return nn.Sequential(OrderedDict(whole=nn.Dropout(0.5), **inside, part=nn.Dropout(0.5)))


def recomputed(rank: int, order: str, reentrant: bool) -> Tensor:
    """Gradients of the same forward, with activations kept and recomputed."""
    found = []
    for checkpointed in (False, True):
        slapo.set_random_seed(3, tp_rank=rank)
        torch.manual_seed(1)
        model = drops()
        sch = slapo.create_schedule(model)
        if order == "fork inside":
            sch["part"].fork_rng()
        elif order == "fork under checkpoint":
            sch.fork_rng()
        if checkpointed:
            sch.checkpoint(use_reentrant=reentrant)
        if order == "fork around":
            sch.fork_rng()
        x = torch.ones(3, 16, requires_grad=True)
        y = sch.mod(x)
        after = torch.rand(2)  # draws between forward and backward must not matter
        (y * torch.linspace(0, 1, 48).view(3, 16)).sum().backward()
        later = sch.mod(torch.ones(3, 16, requires_grad=True))
        grads = {n: p.grad for n, p in model.named_parameters()}
        found.append({"y": y, "x": x.grad, "after": after, "later": later, **grads})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, msg=lambda m, n=name: f"{n}: {m}")
    y = found[0]["y"]
    assert isinstance(y, Tensor)
    return y.detach()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", ["fork inside", "fork under checkpoint", "fork around"])
def test_a_checkpoint_draws_the_same_masks_again(order: str, reentrant: bool) -> None:
    first, second = (recomputed(rank, order, reentrant) for rank in (0, 1))
    assert not torch.equal(first, second)
