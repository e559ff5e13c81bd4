"""What sharding leaves on a module: it goes wherever the module goes, and torch's ways keep it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo
from slapo.sharding import sync_ops
from slapo.sharding.state import sharding_of, shards_of
from tests.check.verdicts import fake_world
from tests.distributed import run_distributed

pytestmark = pytest.mark.distributed


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
    scale = 1.0 + torch.distributed.get_rank()
    (model(IDS) * torch.arange(4.0) * scale).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def marks(model: nn.Module) -> dict[str, Any]:
    return {
        name: (getattr(p, "orig_shape", None), getattr(p, "partial_grad", None))
        for name, p in model.named_parameters()
    }


def travel(rank: int, world: int) -> dict[str, list[bool]]:
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
    found = {}
    for name, other in ways.items():
        got = gradients(other)
        found[name] = [
            marks(other) == expected,
            all(torch.equal(got[n], grad) for n, grad in wanted.items()),
            type(other.down) is type(model.down),
            isinstance(other.down, nn.Linear),
            dict(shards_of(other.up)) == dict(shards_of(model.up)),
        ]
    # A copy is a copy: what is done to it is not done to the original.
    ways["deepcopy"].load_state_dict(model.state_dict())
    state = sharding_of(ways["deepcopy"].up)
    assert state is not None
    state.specs.clear()
    assert shards_of(model.up)
    bias = gradients(thawed)["norm.bias"]
    found["thawed"] = [bool((bias == 3 * 2 * 4 * torch.arange(4.0)).all())]
    return found


def test_copies_pickles_and_assigned_values_keep_it() -> None:
    for found in run_distributed(travel, 2):
        for name, right in found.items():
            assert all(right), (name, right)


def same_parameters(rank: int, world: int) -> dict[str, Any]:
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
    return {
        "same": all(a is b for a, b in zip(before, model.parameters(), strict=True)),
        "apart": abs(losses[0] - losses[1]),
        "hook": seen,
    }


def test_parameters_stay_the_objects_that_they_are() -> None:
    """An optimizer that was made before trains them, and hooks of the user's run."""
    for found in run_distributed(same_parameters, 2):
        assert found["same"]
        assert found["apart"] < 1e-6
        assert found["hook"] == [torch.Size([4, 4])] * 3


def told(act: Callable[[], Any]) -> str:
    """What an error says, or what was returned."""
    try:
        return repr(act())
    except (ValueError, TypeError, IndexError, slapo.SlapoError) as error:
        return f"{type(error).__name__}: {error}"


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(
        self, x: Tensor, y: Tensor, pair: Any = None, scale: Tensor | None = None
    ) -> Tensor:
        out = x * self.weight + 2 * y * self.weight
        if pair is not None:
            out = out + pair[0] + pair[1]
        return out if scale is None else out * scale


def sum_gradients(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def leaves(count: int) -> list[Tensor]:
        return [torch.ones(2, requires_grad=True) for _ in range(count)]

    for name, arguments in {"all": {}, "named": {"argument": "y"}}.items():
        model = TwoInputs()
        slapo.create_schedule(model).sync("bwd_post", "all_reduce", **arguments)
        x, y, first, second = leaves(4)
        model(y=y, x=x, pair=(first, second), scale=torch.ones(2)).sum().backward()
        found[name] = [float(t.grad[0]) for t in (x, y, first, second)]
        x, y = leaves(2)
        model(x, y).sum().backward()
        found[f"{name}, by place"] = [float(t.grad[0]) for t in (x, y)]
    model = TwoInputs()
    slapo.create_schedule(model).sync("bwd_post", "all_reduce")
    (x,) = leaves(1)
    model(x, x).sum().backward()
    found["one twice"] = float(x.grad[0])
    return found


def test_gradients_of_all_inputs_are_summed() -> None:
    for found in run_distributed(sum_gradients, 2):
        assert found["all"] == [2.0, 4.0, 2.0, 2.0]
        assert found["all, by place"] == [2.0, 4.0]
        assert found["named"] == [1.0, 4.0, 1.0, 1.0]
        assert found["named, by place"] == [1.0, 4.0]
        assert found["one twice"] == 6.0


def change_in_place(rank: int, world: int) -> float:
    """The module behind a sum of gradients may change its input in place."""
    model = nn.Sequential(nn.ReLU(inplace=True))
    slapo.create_schedule(model)["0"].sync("bwd_post", "all_reduce")
    x = torch.ones(2, requires_grad=True)
    model(x * 2).sum().backward()
    with torch.no_grad():
        model(x * 2)
    return float(x.grad[0])


def look_up(rank: int, world: int) -> list[str]:
    def table(before: bool, after: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 4))
        wanted = model(torch.tensor([0, 7])).detach()

        def log(module: Any, args: Any) -> None:
            return None

        if before:
            model[0].register_forward_pre_hook(log)
        sch = slapo.create_schedule(model)
        sch["0"].shard("weight", 0).sync("fwd_post", "all_reduce")
        if after:
            model[0].register_forward_pre_hook(log)
        slapo.build(sch)
        return model, wanted

    def lookups() -> bool:
        model, wanted = table(False, True)
        return torch.equal(model(torch.tensor([0, 7])), wanted)

    return [
        told(lookups),
        told(lambda: table(True, False)),
        *(told(lambda t=t: table(False, False)[0](torch.tensor([t]))) for t in (8, -1)),
    ]


def test_tokens_of_a_vocabulary_that_is_spread() -> None:
    for right, hook, high, low in run_distributed(look_up, 2):
        assert right == "True"
        assert "the pre-forward hook 'log' runs before the table, and may or may not turn" in hook
        assert high.startswith("IndexError")
        assert low.startswith("IndexError")


def column(sch: slapo.Schedule, blocks: int = 1) -> slapo.Schedule:
    return sch.shard("weight", 0, blocks=blocks).shard("bias", 0, blocks=blocks)


#: Module, what is applied to it, and what is said of that, if anything; beside ``tests/mistakes``.
MISTAKES: list[tuple[Callable[[], nn.Module], Callable[[slapo.Schedule], Any], str]] = [
    (
        lambda: nn.PReLU(2),
        lambda s: s.shard("weight", 0),
        "a slice of one element of 'weight' would be applied to all",
    ),
    (
        lambda: nn.Linear(4, 4),
        lambda s: s.sync("fwd_post", "all_reduce"),
        "no parameter in it is sharded: the full output would be",
    ),
    (nn.Identity, lambda s: s.sync("fwd_post", "all_reduce"), ""),
    (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        lambda s: s.sync("fwd_post", "all_reduce").sync("fwd_post", "all_reduce"),
        "the module's output is Replicate() already",
    ),
    (
        lambda: nn.Linear(4, 12),
        lambda s: column(s, blocks=3).sync("fwd_post", "all_gather", axis=-1),
        "is Shard(-1, blocks=3), and a gather would concatenate the ranks' parts",
    ),
    (
        lambda: nn.Linear(4, 4),
        lambda s: s.sync("bwd_post", "all_reduce").sync("bwd_post", lambda *_: None),
        "would see the gradient before it is summed",
    ),
]


def mistakes(rank: int, world: int) -> list[str]:
    def build(make: Callable[[], nn.Module], act: Callable[[slapo.Schedule], Any]) -> None:
        sch = slapo.create_schedule(nn.Sequential(make()))
        act(sch["0"])
        slapo.build(sch)

    return [told(lambda make=make, act=act: build(make, act)) for make, act, _ in MISTAKES]


def test_schedules_that_would_compute_something_else() -> None:
    for found in run_distributed(mistakes, 2):
        for (_, _, message), text in zip(MISTAKES, found, strict=True):
            assert message in text if message else text == "None", text


def out_of_objects(rank: int, world: int) -> list[str]:
    from dataclasses import dataclass

    from transformers.utils import ModelOutput

    @dataclass
    class Output(ModelOutput):
        logits: Tensor | None = None
        more: Tensor | None = None

    class Gives(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.kind, self.linear = kind, nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Any:
            return self.kind(self.linear(x))

    kinds: dict[str, Any] = {
        "output": lambda x: Output(logits=x, more=x),
        "dict": lambda x: {"n": 3, "x": x},
        "tuple": lambda x: (x, x),
    }
    texts = []
    for kind in kinds.values():
        torch.manual_seed(0)
        model = Gives(kind)
        wanted = model(torch.ones(1, 4))
        sch = slapo.create_schedule(model)
        sch["linear"].shard("weight", 1)
        sch.sync("fwd_post", "all_reduce")
        got = model(torch.ones(1, 2))
        assert type(got) is type(wanted)
        first = next(v for v in _values(got) if isinstance(v, Tensor))
        expected = next(v for v in _values(wanted) if isinstance(v, Tensor))
        texts.append(str(torch.allclose(first, expected, atol=1e-6)))
    return texts


def _values(output: Any) -> Any:
    return list(output.values()) if hasattr(output, "values") else list(output)


def test_a_sync_maps_the_first_tensor_of_an_output_object() -> None:
    pytest.importorskip("transformers")
    assert run_distributed(out_of_objects, 2) == [["True"] * 3] * 2


# --- loops and wrappers of the user's own ----------------------------------------------------
def clip(rank: int, world: int) -> dict[str, float]:
    torch.manual_seed(0)
    reference = Model()
    model, _ = scheduled()
    slapo.build(slapo.create_schedule(reference, group=torch.distributed.new_subgroups(1)[0]))
    norms = []
    for each, function in (
        (reference, nn.utils.clip_grad_norm_),
        (model, lambda p, limit: slapo.clip_grad_norm_(model, limit)),
    ):
        (each(IDS) * torch.arange(4.0)).square().sum().backward()
        if each is model:  # what this tag is for is tested above
            model.norm.weight.grad /= world
        norms.append(float(function(each.parameters(), 0.5)))
    up = reference.up.weight.grad.chunk(world)[rank]
    assert up is not None
    return {
        "norms": abs(norms[0] / norms[1] - 1),
        "slice": float((model.up.weight.grad - up).abs().max()),
        "whole": float((model.down.bias.grad - reference.down.bias.grad).abs().max()),
    }


def test_the_norm_of_the_whole_model_is_clipped() -> None:
    for found in run_distributed(clip, 2):
        assert max(found.values()) < 1e-6, found


def clip_as_torch_does(rank: int, world: int) -> tuple[str, bool]:
    model, _ = scheduled()
    model(IDS).square().sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    text = told(lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    nn.utils.clip_grad_norm_(Model().parameters(), 0.5)  # of a model that is whole
    nn.utils.clip_grad_norm_(model.norm.weight, 1e9)
    same = all(map(torch.equal, before, (p.grad for p in model.parameters())))
    return text, same


def test_torch_does_not_clip_by_the_norm_of_slices() -> None:
    for text, unchanged in run_distributed(clip_as_torch_does, 2):
        assert "the norm of this rank's slices, such as (" in text
        assert "call slapo.clip_grad_norm_(model, max_norm)" in text
        assert unchanged


def clip_under_fsdp(rank: int, world: int) -> tuple[float, float, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

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
    reference(IDS).square().sum().backward()
    fully_shard(models[0], mesh=mesh["dp"])
    models[0](IDS).square().sum().backward()
    norm = slapo.clip_grad_norm_(models[0], 0.5)
    wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    up = models[0].up.weight.grad.full_tensor()
    error = (up - reference.up.weight.grad.chunk(2)[mesh.get_local_rank("tp")]).abs().max()
    flat = FullyShardedDataParallel(
        models[1], process_group=mesh.get_group("dp"), device_id=torch.device("cpu")
    )
    return (
        abs(float(norm / wanted) - 1),
        float(error),
        told(lambda: slapo.clip_grad_norm_(flat, 0.5)),
    )


def test_the_norm_is_that_of_the_model_under_fsdp() -> None:
    for norm, error, flat in run_distributed(clip_under_fsdp, 4):
        assert max(norm, error) < 1e-6
        assert "FullyShardedDataParallel mixes sharded and replicated" in flat


def test_a_limit_that_is_none() -> None:
    with pytest.raises(ValueError, match="max_norm is 0; pass a number above 0"):
        slapo.clip_grad_norm_(nn.Linear(2, 2), 0)


def summed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return sync_ops.reduce_forward_output(output, None)


def wrap(rank: int, world: int, by_name: bool) -> dict[str, str]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    found = {}
    for name, groups in {"tp": (None, None), "dp": dist.new_subgroups(1)[:1] * 2}.items():
        torch.manual_seed(0)
        model = Model()
        sch = slapo.create_schedule(model, group=groups[0])
        sch["up"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
        down = sch["down"].shard("weight", 1)
        if by_name:
            down.sync("fwd_post", "all_reduce")
        else:
            down.sync("fwd_post", summed)
        slapo.build(sch)
        found[name] = told(lambda model=model: DistributedDataParallel(model)(IDS).sum().backward())
    return found


@pytest.mark.parametrize("by_name", [True, False])
def test_ddp_over_the_ranks_that_a_model_is_sharded_over(by_name: bool) -> None:
    for found in run_distributed(wrap, 2, by_name):
        assert (
            "DistributedDataParallel would treat the ranks [0, 1] as replicas, but" in found["tp"]
        )
        assert found["dp"] == "None"


def shard_slices(rank: int, world: int) -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

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
    return found


def test_fsdp_over_the_ranks_that_a_model_is_sharded_over() -> None:
    for rank, found in enumerate(run_distributed(shard_slices, 4)):
        tp = [0, 1] if rank < 2 else [2, 3]
        for version in (1, 2):
            assert f"FSDP would shard parameters over the ranks {tp}, over" in found[f"tp{version}"]
            assert found[f"dp{version}"] == "None"


def an_output_from_before(rank: int, world: int) -> None:
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


def test_an_output_from_before_may_be_kept() -> None:
    run_distributed(an_output_from_before, 2)


def other_seeds(rank: int, world: int) -> tuple[str, float, str]:
    def make(seed: int) -> slapo.Schedule:
        torch.manual_seed(seed)
        sch = slapo.create_schedule(Model())
        split(sch)
        return sch

    refused = told(lambda: slapo.build(make(rank)) and None)
    model, _ = slapo.build(make(rank), sync_replicated=True)
    sch = slapo.create_schedule(nn.Linear(2, 2))
    verified = told(lambda: verify_other_sizes(sch, rank))
    return refused, float(model.down.bias.detach().sum()), verified


def verify_other_sizes(sch: slapo.Schedule, rank: int) -> None:
    with slapo.Verify(sch, torch.ones(2 + rank, 2)):
        pass


def test_ranks_that_hold_other_values_or_inputs() -> None:
    found = run_distributed(other_seeds, 2)
    for refused, total, verified in found:
        assert "has different values on tensor-parallel ranks that must agree" in refused
        assert total == found[0][1]
        assert "Verify: example_inputs differs between ranks" in verified
        assert "pass inputs of the same shape" in verified


class Around(nn.Module):
    """A user's model around one of Transformers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def save_and_resize(rank: int, world: int) -> list[tuple[str, str]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=16, bos_token_id=0, eos_token_id=0
    )
    found = []
    for is_inner in (False, True):
        model = GPT2LMHeadModel(config)
        sch = slapo.create_schedule(Around(model) if is_inner else model)
        base = sch["inner"] if is_inner else sch
        base["transformer.h.0.mlp.c_fc"].shard("weight", 1).shard("bias", 0)
        said = told(lambda model=model: copy.deepcopy(model).save_pretrained("nowhere"))
        model.resize_token_embeddings(18)  # whose tables are whole
        base["transformer.wte"].shard("weight", 0)
        found.append((said, told(lambda model=model: model.resize_token_embeddings(20))))
    return found


def test_a_sharded_model_is_not_saved_or_resized_as_a_whole() -> None:
    pytest.importorskip("transformers")
    for found in run_distributed(save_and_resize, 2):
        for saved, resized in found:
            assert "save_pretrained would write only this rank's slices" in saved
            assert "resize the model before slapo.create_schedule" in resized


def other_modules(rank: int, world: int) -> dict[str, str]:
    found = {}
    for name, new in {
        "configuration": nn.GELU(approximate="none" if rank == 0 else "tanh"),
        "same": nn.GELU(),
        "function": None,
    }.items():
        sch = slapo.create_schedule(nn.Sequential(nn.ReLU()))
        if new is not None:
            sch["0"].replace(new)
        else:
            sch["0"].sync("fwd_post", (lambda *_: None) if rank else (lambda *_: _[2] * 2))
        found[name] = told(lambda sch=sch: slapo.build(sch) and None)
    return found


def test_ranks_that_pass_other_modules_and_functions() -> None:
    for found in run_distributed(other_modules, 2):
        assert found["same"] == "None"
        for name in ("configuration", "function"):
            assert "ranks applied different schedules: step 0 is" in found[name]
            assert "with a different module or function of that name" in found[name]


# --- scripts of the published library ------------------------------------------------------------
def published_collectives(rank: int, world: int) -> list[bool]:
    import slapo.sharding.sync_ops as ops

    x = torch.arange(4.0).view(2, 2) + rank
    return [
        torch.equal(ops.all_gather_forward_output(x, 1, None)[:, :2], x - rank),
        torch.equal(ops.reduce_forward_output(x, None), 2 * (x - rank) + 1),
        torch.equal(ops.reduce_scatter_forward_output(x, 0, None), (2 * (x - rank) + 1)[[rank]]),
        torch.equal(ops.scatter_forward_output(x, 1, None), x[:, [rank]]),
        torch.equal(ops.reduce_backward_grad(x, None), x),
        slapo.sharding.all_gather_forward_output is ops.all_gather_forward_output,
    ]


def made_by_build(rank: int, world: int) -> list[bool]:
    """Marks of parameters that were on meta go with copies too."""
    with slapo.init_empty_weights():
        model, sch = scheduled()
    slapo.build(sch)
    new = copy.deepcopy(model)
    return [
        marks(new) == marks(model),
        marks(model)["up.weight"][0] == (8, 4),
        not any(p.is_meta for p in new.parameters()),
        sum(p.is_meta for s in [sharding_of(new.up)] if s for p in s._carriers.values()) == 0,
    ]


@pytest.mark.parametrize(
    ("worker", "expected"),
    [(change_in_place, 4.0), (published_collectives, [True] * 6), (made_by_build, [True] * 4)],
)
def test_each_of_two_ranks_finds(worker: Callable[[int, int], Any], expected: Any) -> None:
    assert run_distributed(worker, 2) == [expected] * 2


def test_a_snapshot_leaves_the_hooks_of_parameters_as_they_are() -> None:
    with fake_world(2):
        sch = slapo.create_schedule(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))
        sch["0"].annotate("weight", "partial_grad", True)
        weight, state = sch["0"].mod.weight, sharding_of(sch["0"].mod)
        assert state is not None
        assert len(weight._backward_hooks) == 1
        state.snapshot()
        assert len(weight._backward_hooks) == 1
