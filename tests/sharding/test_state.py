"""What sharding leaves on a module: it goes wherever the module goes, and torch's ways keep it."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import slapo
from slapo.agreement import gathered
from slapo.sharding import sync_ops
from slapo.sharding.state import sharding_of, shards_of
from slapo.snapshot import restored_on_error
from tests.check.verdicts import fake_world
from tests.distributed import Job
from tests.graph.served import make

pytestmark = pytest.mark.distributed

on_two_ranks, on_four_ranks = Job(2), Job(4)


@pytest.mark.parametrize("job", [on_two_ranks, on_four_ranks], ids=["two ranks", "four ranks"])
def test_all_cases(job: Job) -> None:
    pytest.importorskip("transformers")
    job.run()


class Model(nn.Module):
    """A vocabulary, a column- and a row-sharded layer, and norms of parts of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def split(sch: slapo.Schedule) -> None:
    sch["up"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", 1).sync("fwd_post", "all_reduce")


def scheduled() -> tuple[nn.Module, slapo.Schedule]:
    torch.manual_seed(0)
    model = Model()
    sch = slapo.create_schedule(model)
    sch["table"].shard("weight", 0).sync("fwd_post", "all_reduce")
    split(sch)
    sch["norm"].annotate("weight", "partial_grad", True)
    return model, sch


IDS = torch.arange(8).view(2, 4)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    # Each rank has another part of the norm's gradient.
    scale = 1.0 + dist.get_rank()
    (model(IDS) * torch.arange(4.0) * scale).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def marks(model: nn.Module) -> dict[str, Any]:
    return {
        name: (getattr(p, "orig_shape", None), getattr(p, "partial_grad", None))
        for name, p in model.named_parameters()
    }


@on_two_ranks
def copies_pickles_and_assigned_values_keep_it(rank: int, world: int) -> None:
    model, _ = scheduled()
    wanted, expected = gradients(model), marks(model)
    assert expected["up.weight"] == ((8, 4), None)
    assert expected["norm.weight"] == (None, True)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assigned = copy.deepcopy(model)
    assigned.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
    thawed, sch = scheduled()
    thawed.requires_grad_(False)
    sch["norm"].annotate("bias", "partial_grad", True)
    thawed.requires_grad_(True)
    ways = {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
        "assign": assigned,
        "twice": copy.deepcopy(pickle.loads(pickle.dumps(copy.deepcopy(model)))),
    }
    for name, other in ways.items():
        got = gradients(other)
        assert marks(other) == expected, name
        assert all(torch.equal(got[n], grad) for n, grad in wanted.items()), name
        assert type(other.down) is type(model.down), name
        assert isinstance(other.down, nn.Linear), name
        assert dict(shards_of(other.up)) == dict(shards_of(model.up)), name
    # A copy is a copy: what is done to it is not done to the original.
    ways["deepcopy"].load_state_dict(model.state_dict())
    state = sharding_of(ways["deepcopy"].up)
    assert state is not None
    state.specs.clear()
    assert shards_of(model.up)
    bias = gradients(thawed)["norm.bias"]
    assert torch.equal(bias, 3 * 2 * 4 * torch.arange(4.0))


@on_two_ranks
def parameters_stay_the_objects_that_they_are(rank: int, world: int) -> None:
    """An optimizer that was made before trains them, and hooks of the user's run."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model = copy.deepcopy(reference)
    seen: list[torch.Size] = []
    model[0].weight.register_hook(lambda grad: seen.append(grad.shape))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    before = list(model.parameters())
    sch = slapo.create_schedule(model)
    sch["0"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
    sch["1"].shard("weight", 1).sync("fwd_post", "all_reduce")
    slapo.build(sch)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    losses = []
    for each, optimizer in zip((reference, model), optimizers, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            loss = each(x).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert abs(losses[0] - losses[1]) < 1e-6
    assert seen == [torch.Size([4, 4])] * 3


def told(act: Callable[[], Any]) -> str:
    """What an error says, or what was returned."""
    try:
        return repr(act())
    except (ValueError, TypeError, IndexError, slapo.SlapoError) as error:
        return f"{type(error).__name__}: {error}"


def adds(self: Any, x: Tensor, y: Tensor, pair: Any = None, scale: Tensor | None = None) -> Tensor:
    out = x * self.weight + 2 * y * self.weight
    if pair is not None:
        out = out + pair[0] + pair[1]
    return out if scale is None else out * scale


def leaves(count: int) -> list[Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(count)]


@on_two_ranks
def gradients_of_all_inputs_are_summed(rank: int, world: int) -> None:
    def summed_of(*args: Tensor, names: str = "", **kwargs: Any) -> list[float]:
        """Gradients of the tensors that the call of a new model was made of."""
        model = make(adds)
        model.weight = nn.Parameter(torch.ones(2))
        slapo.create_schedule(model).sync("bwd_post", "all_reduce", argument=names or None)
        model(*args, **kwargs).sum().backward()
        pair = kwargs.get("pair", ())
        return [float(t.grad[0]) for t in (*args, *(kwargs[n] for n in "xy" if n in kwargs), *pair)]

    for names, x_grad, of_pair in (("", 2.0, 2.0), ("y", 1.0, 1.0)):
        x, y, first, second = leaves(4)
        found = summed_of(names=names, y=y, x=x, pair=(first, second), scale=torch.ones(2))
        assert found == [x_grad, 4.0, of_pair, of_pair]
        assert summed_of(*leaves(2), names=names) == [x_grad, 4.0]
    (x,) = leaves(1)
    assert summed_of(x, x)[0] == 6.0  # one tensor twice


@on_two_ranks
def a_module_behind_a_sum_of_gradients_may_change_its_input(rank: int, world: int) -> None:
    model = nn.Sequential(nn.ReLU(inplace=True))
    slapo.create_schedule(model)["0"].sync("bwd_post", "all_reduce")
    (x,) = leaves(1)
    model(x * 2).sum().backward()
    with torch.no_grad():
        model(x * 2)
    assert float(x.grad[0]) == 4.0


@on_two_ranks
def tokens_of_a_vocabulary_that_is_spread(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4))
    wanted = model(torch.tensor([0, 7])).detach()
    sch = slapo.create_schedule(model)
    sch["0"].shard("weight", 0).sync("fwd_post", "all_reduce")
    model[0].register_forward_pre_hook(lambda module, args: None)
    slapo.build(sch)
    assert torch.equal(model(torch.tensor([0, 7])), wanted)
    for token in (8, -1):
        with pytest.raises(IndexError):
            model(torch.tensor([token]))


@on_two_ranks
def a_sync_maps_the_first_tensor_of_an_output_object(rank: int, world: int) -> None:
    from transformers.utils import ModelOutput

    @dataclass
    class Output(ModelOutput):
        logits: Tensor | None = None
        more: Tensor | None = None

    kinds: dict[str, Any] = {
        "output": lambda x: Output(logits=x, more=x),
        "dict": lambda x: {"n": 3, "x": x},
        "tuple": lambda x: (x, x),
    }
    for kind in kinds.values():
        torch.manual_seed(0)
        linear = nn.Linear(4, 4, bias=False)
        model = make(lambda self, x, kind=kind: kind(self.linear(x)), linear=linear)
        wanted = model(torch.ones(1, 4))
        sch = slapo.create_schedule(model)
        sch["linear"].shard("weight", 1)
        sch.sync("fwd_post", "all_reduce")
        got = model(torch.ones(1, 2))
        assert type(got) is type(wanted)
        first = next(v for v in _values(got) if isinstance(v, Tensor))
        expected = next(v for v in _values(wanted) if isinstance(v, Tensor))
        torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)


def _values(output: Any) -> Any:
    return list(output.values()) if hasattr(output, "values") else list(output)


# --- loops and wrappers of the user's own ----------------------------------------------------
@on_two_ranks
def the_norm_of_the_whole_model_is_clipped(rank: int, world: int) -> None:
    torch.manual_seed(0)
    reference = Model()
    model, _ = scheduled()
    slapo.build(slapo.create_schedule(reference, group=dist.new_subgroups(1)[0]))
    norms = []
    for each, function in (
        (reference, nn.utils.clip_grad_norm_),
        (model, lambda p, limit: slapo.clip_grad_norm_(model, limit)),
    ):
        (each(IDS) * torch.arange(4.0)).square().sum().backward()
        if each is model:  # what this tag is for is tested above
            model.norm.weight.grad /= world
        norms.append(float(function(each.parameters(), 0.5)))
    assert abs(norms[0] / norms[1] - 1) < 1e-6
    up = reference.up.weight.grad.chunk(world)[rank]
    exact = {"rtol": 0.0, "atol": 1e-6}
    torch.testing.assert_close(model.up.weight.grad, up, **exact)
    torch.testing.assert_close(model.down.bias.grad, reference.down.bias.grad, **exact)


@on_four_ranks
def the_norm_is_that_of_the_model_under_fsdp(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Model()
        sch = slapo.create_schedule(model, group=mesh["tp"])
        split(sch)
        models.append(slapo.build(sch)[0])
    torch.manual_seed(0)
    reference = Model()
    (reference(IDS) * torch.arange(4.0)).square().sum().backward()
    fully_shard(models[0], mesh=mesh["dp"])
    (models[0](IDS) * torch.arange(4.0)).square().sum().backward()
    norm = slapo.clip_grad_norm_(models[0], 0.5)
    wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    assert abs(float(norm / wanted) - 1) < 1e-6
    up = models[0].up.weight.grad.full_tensor()
    part = reference.up.weight.grad.chunk(2)[mesh.get_local_rank("tp")]
    torch.testing.assert_close(up, part, rtol=0.0, atol=1e-6)
    flat = FullyShardedDataParallel(
        models[1], process_group=mesh.get_group("dp"), device_id=torch.device("cpu")
    )
    text = told(lambda: slapo.clip_grad_norm_(flat, 0.5))
    assert "FullyShardedDataParallel mixes sharded and replicated" in text


@on_four_ranks
def fsdp_over_the_ranks_that_a_model_is_sharded_over(rank: int, world: int) -> None:
    both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for name, mesh in {"tp": init_device_mesh("cpu", (world,)), "dp": both["dp"]}.items():
        for version in (1, 2):
            torch.manual_seed(0)
            model = Model()
            sch = slapo.create_schedule(model, group=both["tp"])
            split(sch)
            sch["up"].checkpoint()
            slapo.build(sch)
            wanted = model(IDS)
            if version == 1:
                cpu = {"device_id": torch.device("cpu")}
                model = FullyShardedDataParallel(model, process_group=mesh.get_group(), **cpu)
            else:
                fully_shard(model, mesh=mesh)

            def step(model: Any = model, wanted: Tensor = wanted) -> None:
                output = model(IDS)
                torch.testing.assert_close(output, wanted)
                output.sum().backward()

            found[f"{name}{version}"] = told(step)
    tp = [0, 1] if rank < 2 else [2, 3]
    for version in (1, 2):
        assert f"FSDP would shard parameters over the ranks {tp}, over" in found[f"tp{version}"]
        assert found[f"dp{version}"] == "None"


@on_two_ranks
def an_output_from_before_may_be_kept(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = Model()
    whole = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model(IDS)  # its graph lives on
    sch = slapo.create_schedule(model)
    split(sch)
    slapo.build(sch)
    after = model(IDS)
    torch.testing.assert_close(after, before)
    after.sum().backward()
    whole(IDS).sum().backward()
    part = whole.up.weight.grad.chunk(world)[rank]
    torch.testing.assert_close(model.up.weight.grad, part)
    optimizer.step()


@on_two_ranks
def ranks_that_hold_other_values(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    sch = slapo.create_schedule(Model())
    split(sch)
    model, _ = slapo.build(sch, sync_replicated=True)
    sums = gathered(float(model.down.bias.detach().sum()), None)
    assert sums[0] == sums[1]


@on_two_ranks
def ranks_that_verify_with_inputs_of_other_sizes(rank: int, world: int) -> None:
    verify = slapo.Verify(slapo.create_schedule(nn.Linear(2, 2)), torch.ones(2 + rank, 2))
    text = "Verify: example_inputs differs between ranks.*pass inputs of the same shape"
    with pytest.raises(slapo.SlapoError, match=f"(?s){text}"), verify:
        pass


@on_two_ranks
def a_sharded_table_is_not_resized_as_a_whole(rank: int, world: int) -> None:
    from tests.mistakes import gpt2

    sch = slapo.create_schedule(gpt2())
    sch["transformer.wte"].shard("weight", 0)
    said = told(lambda: sch.mod.resize_token_embeddings(20))
    assert "resize the model before slapo.create_schedule" in said


# --- scripts of the published library ------------------------------------------------------------
@on_two_ranks
def collectives_of_the_published_library(rank: int, world: int) -> None:
    ops = sync_ops
    x = torch.arange(4.0).view(2, 2) + rank
    total = 2 * (x - rank) + 1
    assert torch.equal(ops.all_gather_forward_output(x, 1, None)[:, :2], x - rank)
    assert torch.equal(ops.reduce_forward_output(x, None), total)
    assert torch.equal(ops.reduce_scatter_forward_output(x, 0, None), total[[rank]])
    assert torch.equal(ops.scatter_forward_output(x, 1, None), x[:, [rank]])
    assert torch.equal(ops.reduce_backward_grad(x, None), x)
    assert slapo.sharding.all_gather_forward_output is ops.all_gather_forward_output


@on_two_ranks
def marks_of_parameters_that_were_on_meta_go_with_copies(rank: int, world: int) -> None:
    with slapo.init_empty_weights():
        model, sch = scheduled()
    slapo.build(sch)
    new = copy.deepcopy(model)
    assert marks(new) == marks(model)
    assert marks(model)["up.weight"][0] == (8, 4)
    assert not any(p.is_meta for p in new.parameters())
    assert not any(p.is_meta for s in [sharding_of(new.up)] if s for p in s._carriers.values())


def test_a_snapshot_leaves_the_hooks_of_parameters_as_they_are() -> None:
    with fake_world(2):
        sch = slapo.create_schedule(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))
        sch["0"].annotate("weight", "partial_grad", True)
        weight, state = sch["0"].mod.weight, sharding_of(sch["0"].mod)
        assert state is not None
        assert len(weight._backward_hooks) == 1
        state.snapshot()
        assert len(weight._backward_hooks) == 1


class Frozen(dict[str, int]):
    """As the configs of diffusers."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("frozen")


def test_a_failed_primitive_leaves_frozen_containers_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.config = Frozen(heads=2)
    sch = slapo.create_schedule(model)
    with pytest.raises(KeyError), restored_on_error(sch):
        model.added = 1
        raise KeyError
    assert model.config == {"heads": 2}
    assert not hasattr(model, "added")
