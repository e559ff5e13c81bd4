"""The engine of target "deepspeed" beyond plain training, and what goes wrong on all ranks."""

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from tests.distributed import run_distributed
from tests.runtimes.alone import compare, largest_difference, of_this_rank
from tests.runtimes.deepspeed_models import (
    SGD,
    Block,
    Model,
    OpaqueModel,
    alone,
    batches,
    cut,
    loss_fn,
    scheduled,
)

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]


def build(mesh: Any, model: nn.Module, **options: Any) -> Any:
    given = {"loss_fn": loss_fn, "optimizer": SGD, "micro_batches": 2, **options}
    return slapo.build(scheduled(mesh, model), target="deepspeed", mesh=mesh, **given)


def refused(mesh: Any, model: nn.Module, **options: Any) -> str:
    """The error that this rank meets."""
    try:
        build(mesh, model, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# --- without pipeline ----------------------------------------------------------------------------
def call_backward_step(mesh: Any, zero: int, model: nn.Module) -> dict[str, Any]:
    """Drive the engine by hand: each step is one update, whatever micro_batches is."""
    reference = alone(model, parts=2)
    engine, _ = build(mesh, model, zero=zero)
    errors = []
    for batch in batches(2, 3):
        inputs, targets = of_this_rank(mesh, batch)
        loss = loss_fn(engine(*inputs), targets)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        errors.append(abs(mean.item() / 2 - reference.step(batch)))
    return {"losses": max(errors), "state": largest_difference(engine, reference.state())}


def opaque_bfloat16(mesh: Any) -> float:
    """Gradients of one micro-batch must not stay for the next."""
    model = OpaqueModel()
    reference = alone(copy.deepcopy(model), parts=4, dtype=torch.bfloat16)
    engine, _ = build(mesh, model, dtype=torch.bfloat16)
    return compare(engine, reference, batches(2, 3))["losses"]


def two_backwards(mesh: Any, zero: int) -> str:
    engine, _ = build(mesh, Model(), zero=zero)
    inputs, targets = batches(1, 1)[0]
    engine.backward(loss_fn(engine(*inputs), targets))
    try:
        engine.backward(loss_fn(engine(*inputs), targets))
    except slapo.SlapoError as error:
        engine.step()  # what it says to do, and the engine is as before
        return str(error)
    return "nothing"


def by_config(mesh: Any) -> dict[str, Any]:
    """Optimizer, sizes and clipping out of the config."""
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
    }
    before = str(config)
    torch.manual_seed(0)
    model = Model()
    adam = lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.01)  # noqa: E731
    reference = alone(model, adam, 4, clip=0.3)
    engine, optimizer = build(mesh, model, optimizer=None, micro_batches=None, config=config)
    apart = compare(engine, reference, batches(2, 3))
    try:
        engine.train_batch(iter([batches(1, 1, size=6)[0]]))
    except ValueError as error:
        message = str(error)
    return {
        "losses": apart["losses"],
        "optimizer": type(optimizer).__name__,
        "unchanged": str(config) == before,
        "size": message,
    }


def without_optimizer(mesh: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    (batch,) = batches(2, 1)
    wanted = alone(model, parts=4).step(batch)
    engine, optimizer = build(mesh, model, optimizer=None)
    mine = of_this_rank(mesh, batch)
    loss = engine.eval_batch(iter([mine])).item()
    with pytest.raises(slapo.SlapoError, match="optimizer="):
        engine.train_batch(iter([mine]))
    return {"loss": abs(loss - wanted), "optimizer": optimizer}


def unpipelined(rank: int, world: int) -> dict[str, Any]:
    mesh = slapo.init_mesh(dp=2)
    torch.manual_seed(0)
    return {
        "by hand": [call_backward_step(mesh, zero, Model()) for zero in (0, 1, 2)],
        "opaque": [call_backward_step(mesh, zero, OpaqueModel()) for zero in (0, 1, 2)],
        "bfloat16": opaque_bfloat16(mesh),
        "twice": [two_backwards(mesh, zero) for zero in (0, 1)],
        "config": by_config(mesh),
        "no optimizer": without_optimizer(mesh),
        "errors": {
            "scalar": refused(mesh, Model(), zero=3),
            "frozen": refused(mesh, Model().requires_grad_(False), zero=1),
            "topology": refused(mesh, Model(), topology=object()),
            "optimizer": refused(mesh, Model(), optimizer=lambda params: "none"),
            "one rank": refused(
                mesh, Model(), optimizer=lambda params: SGD(params) if rank else 1 / 0
            ),
            "configs": refused(mesh, Model(), config={"gradient_clipping": 1.0 + rank}),
            "cuts": refused(slapo.init_mesh(pp=2), nn.Sequential(Model())[0], loss_fn=None),
        },
    }


def test_without_pipeline() -> None:
    results = run_distributed(unpipelined, 2, timeout=200)
    for found in results:
        for driven in (*found["by hand"], *found["opaque"]):
            assert max(driven["losses"], driven["state"]) < 1e-5, found
        assert found["bfloat16"] < 1e-2, found
        assert found["twice"][0] == "nothing"
        assert "call step() after each" in found["twice"][1]
        assert found["config"]["losses"] < 1e-5
        assert found["config"]["unchanged"]
        assert found["config"]["optimizer"] == "AdamW"
        assert "micro-batches of 2 samples" in found["config"]["size"]
        assert "some of 3" in found["config"]["size"]
        assert found["no optimizer"]["loss"] < 1e-5
        assert found["no optimizer"]["optimizer"] is None
        errors = found["errors"]
        assert errors["scalar"].startswith("ValueError")
        assert "temperature" in errors["scalar"]
        assert "no parameter on this rank needs a gradient" in errors["frozen"]
        assert "mesh= and topology=" in errors["topology"]
        assert "optimizer(parameters) returned a str" in errors["optimizer"]
        assert "clip_grad_norm differs between ranks" in errors["configs"]
        assert "loss_fn" in errors["cuts"]
    assert results[0]["errors"]["one rank"].startswith("ZeroDivisionError")
    assert "rank 0" in results[1]["errors"]["one rank"]


# --- with pipeline -------------------------------------------------------------------------------
class Detached(nn.Module):
    """The second stage passes no gradient on to one of the floats that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor, flags: Tensor) -> dict[str, Tensor]:
        first = self.embed(ids)
        x = first
        for block in self.blocks:
            x = block(x, flags.float().unsqueeze(-1) + 0.5)
        return {"logits": self.head(x + first.detach())}


class Dropping(nn.Module):
    """Loss and gradient depend on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.drop = nn.Dropout(0.9)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor, flags: Tensor) -> dict[str, Tensor]:
        x = self.drop(self.embed(ids))
        for block in self.blocks:
            x = block(x, flags.float().unsqueeze(-1) + 0.5)
        return {"logits": self.head(x)}


def trained(mesh: Any, model: nn.Module, **options: Any) -> dict[str, Any]:
    reference = alone(model, parts=2)
    engine, _ = build(mesh, model, **options)
    found = compare(engine, reference, batches(1, 3))
    return {**found, "modes": {module.training for module in engine.module.modules()}}


def seeded() -> nn.Module:
    """The same on all ranks, which have drawn other numbers before."""
    torch.manual_seed(7)
    return Model()


def in_turns(mesh: Any) -> float:
    """Two engines alive at one time."""
    models = [seeded(), seeded()]
    references = [alone(model, parts=2) for model in models]
    engines = [build(mesh, model)[0] for model in models]
    return max(
        abs(engine.train_batch(iter([batch])).item() - reference.step(batch))
        for batch in batches(1, 2)
        for engine, reference in zip(engines, references, strict=True)
    )


def backward_walks(mesh: Any) -> int:
    """How often backward comes by the embedding, from which two tensors reach the next stage."""
    engine, _ = build(mesh, Model())
    walks: list[Tensor] = []
    if mesh.get_local_rank("pp") == 0:
        engine.module.get_parameter("embed.weight").register_hook(walks.append)
    engine.train_batch(iter(batches(1, 1)))
    return len(walks)


def refused_calls(mesh: Any) -> list[str]:
    engine, _ = build(mesh, Model())
    inputs, targets = batches(1, 1)[0]
    messages = []
    for call in (
        lambda: engine(*inputs),
        lambda: engine.backward(torch.ones(())),
        lambda: engine.step(),
        lambda: engine.train_batch(iter([(inputs, targets)[:1]])),
        lambda: engine.train_batch(iter([(inputs[:1], targets)])),
    ):
        try:
            call()
        except (slapo.SlapoError, TypeError) as error:
            messages.append(str(error))
    return messages


class FrozenStart(Model):
    """Nothing to train before the first cut."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16)
        for part in (self.embed, *self.blocks[:2]):
            part.requires_grad_(False)
        self.temperature.requires_grad_(False)


def three_stages(mesh: Any) -> str:
    sch = slapo.create_schedule(Model(), group=mesh["tp"])
    cut(sch, 4)
    try:
        slapo.build(sch, target="deepspeed", mesh=mesh, loss_fn=loss_fn, optimizer=SGD)
    except slapo.SlapoError as error:
        return str(error)
    return "nothing"


def pipelined(rank: int, world: int) -> dict[str, Any]:
    mesh = slapo.init_mesh(pp=2)
    torch.manual_seed(0)
    return {
        "detached": trained(mesh, Detached()),
        "eval": trained(mesh, Dropping().eval()),
        "one": trained(mesh, seeded(), micro_batches=1, zero=1)["modes"],
        "turns": in_turns(mesh),
        "walks": backward_walks(mesh),
        "calls": refused_calls(mesh),
        "errors": {
            "frozen": refused(mesh, FrozenStart(), zero=1),
            "zero": refused(mesh, Model(), zero=2),
            "loss_fn": refused(mesh, Model(), loss_fn=None),
            "stages": three_stages(mesh),
        },
    }


def test_with_pipeline() -> None:
    results = run_distributed(pipelined, 2, timeout=200)
    assert [found["walks"] for found in results] == [2, 0]
    for found in results:
        assert max(found["detached"]["losses"], found["detached"]["state"]) < 1e-5, found
        assert found["eval"]["modes"] == {True}  # it arrives in eval mode, and trains
        assert found["one"] == {True}
        assert found["turns"] < 1e-5
        assert len(found["calls"]) == 5
        assert all("train_batch" in m for m in found["calls"][:3])
        assert "inputs" in found["calls"][3]
        assert "flags" in found["calls"][4]
        errors = found["errors"]
        assert "no parameter on" in errors["frozen"] or "rank 0" in errors["frozen"], errors
        assert "ZeRO stage 2 does not go with pp=2" in errors["zero"]
        assert "loss_fn" in errors["loss_fn"]
        assert "4 stages" in errors["stages"]
        assert "pp=2" in errors["stages"]


def timeouts(rank: int, world: int) -> set[float]:
    mesh = slapo.init_mesh(pp=2, timeout=50)
    engine, _ = build(mesh, Model())
    groups = [g for g in vars(engine.engine.grid).values() if isinstance(g, dist.ProcessGroup)]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return {backend.options._timeout.total_seconds() for backend in backends}


def test_groups_of_deepspeed_have_the_timeout_of_the_job() -> None:
    assert run_distributed(timeouts, 2) == [{50.0}] * 2
