"""Gradients of whole parameters in split regions: summed over the ranks, in loops and engines."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import slapo
from tests.distributed import Job

LAYERS = 4

on_two_ranks, on_four_ranks = Job(2), Job(4)


@pytest.mark.parametrize("job", [on_two_ranks, on_four_ranks], ids=["two ranks", "four ranks"])
def test_gradients_are_those_of_the_whole(job: Job) -> None:
    job.run()


class Norms(nn.Module):
    """Norms over tokens, of which each rank sees its part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(3) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).square() + x
        return x


def scheduled(
    group: Any = None, key: str = "partial_grad", reentrant: bool = True
) -> tuple[nn.Module, nn.Module]:
    """The model, and a copy that does not know of ranks."""
    torch.manual_seed(3)
    model = Norms()
    for p in model.parameters():
        nn.init.normal_(p)
    whole = copy.deepcopy(model)
    sch = slapo.create_schedule(model, group=group)
    sch["layers.0"].checkpoint(use_reentrant=reentrant)
    sch["layers.1"].checkpoint()
    for layer in sch.select("layers.*"):
        layer.annotate("weight", key, True).annotate("bias", key, True)
    return slapo.build(sch)[0], whole


def tokens(count: int) -> list[Tensor]:
    torch.manual_seed(7)
    return [torch.randn(2, 3) for _ in range(count)]


def compare(model: nn.Module, whole: nn.Module) -> None:
    for mine, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        assert_close(mine.grad, wanted.grad)


@on_two_ranks
def passes(rank: int, world: int) -> None:
    """Two passes that add up; a reentrant checkpoint is a pass of its own within the other."""
    model, whole = scheduled()
    for turn in range(2):
        x = tokens(world * 2)[turn * world : (turn + 1) * world]
        again = [each * 2 for each in x]
        whole(torch.cat(x)).sum().backward()
        whole(torch.cat(again)).sum().backward()
        given = model(x[rank].requires_grad_()).sum() + model.layers[0].mod(x[rank]).sum() * 0
        (given + model(again[rank].requires_grad_()).sum()).backward()
        compare(model, whole)


@on_two_ranks
def what_others_see(rank: int, world: int) -> None:
    """Those that look at a gradient within the pass see the sum."""
    model, whole = scheduled(reentrant=False)
    mine, wanted = list(model.layers[3].parameters()), list(whole.layers[3].parameters())
    x = tokens(world)

    given = torch.autograd.grad(model(x[rank]).sum(), mine)
    assert_close(given, torch.autograd.grad(whole(torch.cat(x)).sum(), wanted))
    twice = torch.autograd.grad(model(x[rank]).sum(), mine, create_graph=True)
    assert_close(twice, given)
    assert twice[0].requires_grad

    seen: dict[int, Tensor] = {}
    mine[1].register_hook(lambda grad: grad.clamp(-0.05, 0.05))  # of a user's, after the sum
    wanted[1].register_hook(lambda grad: grad.clamp(-0.05, 0.05))
    for p in mine:
        p.register_post_accumulate_grad_hook(lambda p: seen.update({id(p): p.grad.clone()}))
    whole(torch.cat(x)).sum().backward()
    model(x[rank]).sum().backward()
    compare(model, whole)
    assert_close([seen[id(p)] for p in mine], [p.grad for p in wanted])


@on_two_ranks
def with_other_parameters(rank: int, world: int) -> None:
    """Those of a conversion, and those that a functional call puts in for itself."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model, whole = scheduled(reentrant=False)
        model(tokens(world)[rank])
        before = dict(model.named_parameters())
        model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert not any(before[name] is p for name, p in model.named_parameters())
    x = [each.double() for each in tokens(world)]
    whole.double()(torch.cat(x)).sum().backward()
    for _ in range(20):  # more often than it looks at all modules
        model.zero_grad()
        model(x[rank]).sum().backward()
    compare(model, whole)

    theirs = {name: (p * 1.0).detach().requires_grad_() for name, p in model.named_parameters()}
    functional_call(model, theirs, (x[rank],)).sum().backward()
    for name, wanted in whole.named_parameters():
        assert_close(theirs[name].grad, wanted.grad)
    model.zero_grad()
    model(x[rank]).sum().backward()
    compare(model, whole)
    compare(copy.deepcopy(model), copy.deepcopy(whole))


@on_four_ranks
def with_replicas(rank: int, world: int) -> None:
    """The replicas' averages, of micro-batches that add up first and of one alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, whole = scheduled(mesh["tp"], "sequence_parallel", reentrant=False)
    for view in (False, True):
        replicated = DistributedDataParallel(
            model, process_group=mesh.get_group("dp"), gradient_as_bucket_view=view
        )
        model.zero_grad()
        whole.zero_grad()
        x, y = tokens(world), [each + 1 for each in tokens(world)]
        ((whole(torch.cat(x)).sum() + whole(torch.cat(y)).sum()) / 2).backward()
        with replicated.no_sync():
            replicated(x[rank]).sum().backward()
        replicated(y[rank]).sum().backward()
        compare(model, whole)


@on_four_ranks
def fsdp_by_hand_would_lose_the_sums(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for wrap in (
        lambda model: fully_shard(model, mesh=mesh["dp"]),
        lambda model: (fully_shard(model[1], mesh=mesh["dp"]), model)[1],
        lambda model: FullyShardedDataParallel(
            model, process_group=mesh.get_group("dp"), device_id=torch.device("cpu")
        ),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
        sch = slapo.create_schedule(model, group=mesh["tp"])
        sch["0"].shard("weight", 0).shard("bias", 0).sync("fwd_post", "all_gather", axis=-1)
        sch["1"].annotate("weight", "partial_grad", True)
        slapo.build(sch)
        with pytest.raises(slapo.SlapoError) as caught:
            wrap(model)(torch.ones(2, 3))
        text = str(caught.value)
        assert "LayerNorm's 'weight', annotated as partial_grad, would not be summed" in text
        assert "data_parallel='fsdp'" in text
