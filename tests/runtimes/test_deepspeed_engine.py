"""The engine of target "deepspeed" beyond plain training, and what goes wrong on all ranks."""

import copy
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from tests.runtimes.alone import compare, largest_difference, of_this_rank
from tests.runtimes.deepspeed_models import (
    SGD,
    Block,
    Model,
    alone,
    batches,
    cut,
    loss_fn,
    scheduled,
)
from tests.runtimes.ranks import error_of, on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]


def build(mesh: Any, model: nn.Module, **options: Any) -> Any:
    given = {"loss_fn": loss_fn, "optimizer": SGD, "micro_batches": 2, **options}
    return slapo.build(scheduled(mesh, model), target="deepspeed", mesh=mesh, **given)[0]


def refused(mesh: Any, model: nn.Module, **options: Any) -> str:
    return error_of(lambda: build(mesh, model, **options))


# --- without pipeline ----------------------------------------------------------------------------
@on_ranks(2)
def test_call_backward_step() -> None:
    """Drive the engine by hand: each step is one update, whatever micro_batches is."""
    mesh = slapo.init_mesh(dp=2)
    torch.manual_seed(0)
    for zero in (0, 1, 2):
        model = Model()
        reference, engine = alone(model, parts=2), build(mesh, model, zero=zero)
        for batch in batches(2, 3):
            inputs, targets = of_this_rank(mesh, batch)
            loss = loss_fn(engine(*inputs), targets)
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            assert abs(mean.item() / 2 - reference.step(batch)) < 1e-5, zero
        assert largest_difference(engine, reference.state()) < 1e-5, zero
    for zero in (0, 1):
        engine = build(mesh, Model(), zero=zero)
        inputs, targets = batches(1, 1)[0]
        engine.backward(loss_fn(engine(*inputs), targets))
        loss = loss_fn(engine(*inputs), targets)
        text = error_of(partial(engine.backward, loss))
        assert ("call step() after each" in text) if zero else text == "no error"
        engine.step()  # what it says to do, and the engine is as before


@on_ranks(2)
def test_bfloat16_gradients_of_one_micro_batch_do_not_stay_for_the_next() -> None:
    torch.manual_seed(0)
    model = Model()
    reference = alone(copy.deepcopy(model), parts=4, dtype=torch.bfloat16)
    engine = build(slapo.init_mesh(dp=2), model, dtype=torch.bfloat16)
    assert compare(engine, reference, batches(2, 3))["losses"] < 1e-2


@on_ranks(2)
def test_optimizer_sizes_and_clipping_out_of_the_config() -> None:
    mesh = slapo.init_mesh(dp=2)
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
    }
    before = copy.deepcopy(config)
    torch.manual_seed(0)
    model = Model()
    reference = alone(model, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.01), 4, clip=0.3)
    engine = build(mesh, model, optimizer=None, micro_batches=None, config=config)
    assert compare(engine, reference, batches(2, 3))["losses"] < 1e-5
    assert type(engine.optimizer).__name__ == "AdamW"
    assert config == before


@on_ranks(2)
def test_refusals_without_pipeline() -> None:
    mesh, rank = slapo.init_mesh(dp=2), dist.get_rank()
    torch.manual_seed(0)
    model, (batch,) = Model(), batches(2, 1)
    wanted, mine = alone(model, parts=4).step(batch), of_this_rank(mesh, batch)
    engine = build(mesh, model, optimizer=None)
    assert engine.optimizer is None
    assert abs(engine.eval_batch(iter([mine])).item() - wanted) < 1e-5
    with pytest.raises(slapo.SlapoError, match="optimizer="):
        engine.train_batch(iter([mine]))
    text = refused(mesh, Model(), zero=3)
    assert text.startswith("ValueError")
    assert "temperature" in text
    text = "no parameter on this rank needs a gradient"
    assert text in refused(mesh, Model().requires_grad_(False), zero=1)
    assert "mesh= and topology=" in refused(mesh, Model(), topology=object())
    text = "optimizer(parameters) returned a str"
    assert text in refused(mesh, Model(), optimizer=lambda params: "none")
    text = refused(mesh, Model(), optimizer=lambda params: SGD(params) if rank else 1 / 0)
    assert "failed on rank 0" in text if rank else text.startswith("ZeroDivisionError")
    text = "clip_grad_norm differs between ranks"
    assert text in refused(mesh, Model(), config={"gradient_clipping": 1.0 + rank})
    assert "loss_fn" in refused(slapo.init_mesh(pp=2), Model(), loss_fn=None)
    assert "clip_grad_norm is -1" in refused(mesh, Model(), config={"gradient_clipping": -1})


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


class FrozenStart(Model):
    """Nothing to train before the first cut."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16)
        for part in (self.embed, *self.blocks[:2]):
            part.requires_grad_(False)
        self.temperature.requires_grad_(False)


@on_ranks(2)
def test_with_pipeline() -> None:
    mesh = slapo.init_mesh(pp=2)
    torch.manual_seed(0)
    model = Detached()
    reference, engine = alone(model, parts=2), build(mesh, model)
    found = compare(engine, reference, batches(1, 3))
    assert max(found["losses"], found["state"]) < 1e-5
    # A model that arrives in eval mode trains; so does one with a single micro-batch.
    for model, options in ((Dropping().eval(), {}), (seeded(), {"micro_batches": 1, "zero": 1})):
        engine = build(mesh, model, **options)
        engine.train_batch(iter(batches(1, 1)))
        assert all(module.training for module in engine.module.modules())

    # Two engines alive at one time.
    models = [seeded(), seeded()]
    references = [alone(model, parts=2) for model in models]
    engines = [build(mesh, model) for model in models]
    for batch in batches(1, 2):
        for engine, reference in zip(engines, references, strict=True):
            assert abs(engine.train_batch(iter([batch])).item() - reference.step(batch)) < 1e-5

    # Backward comes by the embedding once for each micro-batch, though two tensors that hang on it
    # reach the next stage.
    engine, walks = build(mesh, Model()), []
    is_first = mesh.get_local_rank("pp") == 0
    if is_first:
        engine.module.get_parameter("embed.weight").register_hook(walks.append)
    engine.train_batch(iter(batches(1, 1)))
    assert len(walks) == 2 * is_first


def seeded() -> nn.Module:
    """The same on all ranks, which have drawn other numbers before."""
    torch.manual_seed(7)
    return Model()


@on_ranks(2)
def test_refusals_with_pipeline() -> None:
    mesh = slapo.init_mesh(pp=2)
    torch.manual_seed(0)
    engine = build(mesh, Model())
    inputs, targets = batches(1, 1)[0]
    for call in (lambda: engine(*inputs), lambda: engine.backward(torch.ones(())), engine.step):
        with pytest.raises(slapo.SlapoError, match="train_batch"):
            call()
    text = error_of(lambda: engine.train_batch(iter([(inputs, targets)[:1]])))
    assert text.startswith("TypeError")
    assert "inputs" in text
    assert "flags" in error_of(lambda: engine.train_batch(iter([(inputs[:1], targets)])))
    text = refused(mesh, FrozenStart(), zero=1)
    assert "no parameter on" in text or "rank 0" in text
    assert "ZeRO stage 2 does not fit pp=2" in refused(mesh, Model(), zero=2)
    assert "loss_fn" in refused(mesh, Model(), loss_fn=None)
    sch = slapo.create_schedule(Model(), group=mesh["tp"])
    cut(sch, 4)
    given = {"mesh": mesh, "loss_fn": loss_fn, "optimizer": SGD}
    with pytest.raises(slapo.SlapoError, match=r"4 stages, but pp=2"):
        slapo.build(sch, target="deepspeed", **given)


@on_ranks(2)
def test_groups_of_deepspeed_have_the_timeout_of_the_job() -> None:
    engine = build(slapo.init_mesh(pp=2, timeout=50), Model())
    groups = [g for g in vars(engine.engine.grid).values() if isinstance(g, dist.ProcessGroup)]
    assert groups
    for group in groups:
        backend = group._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == 50
