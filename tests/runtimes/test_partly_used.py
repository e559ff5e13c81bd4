"""Models of which a part is trained, or used, and by what names an optimizer gets their parameters.

Every test compares with one process, in which a parameter without a gradient has none.
"""

import copy
import functools
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from tests.graph.served import make as module_of
from tests.runtimes.alone import Alone, compare, largest_difference, of_this_rank
from tests.runtimes.contract import (
    TOLERANCE,
    Model,
    alone,
    build,
    data,
    loss_fn,
    make,
    seeded,
    sgd,
    with_unused,
)
from tests.runtimes.ranks import on_ranks, on_ranks_by_rows

pytestmark = pytest.mark.slow

FIND_UNUSED = {"data_parallel_options": {"find_unused_parameters": True}}


# --- frozen below what is trained ----------------------------------------------------------------
#: What is trained of four blocks in four stages.
TRAINED: dict[str, Any] = {
    "upper blocks": lambda name: name.startswith(("h.2.", "h.3.")),
    "weights of the last": lambda name: name.startswith("h.3.") and name.endswith("weight"),
    "biases": lambda name: name.endswith("bias"),
    "all but the first stage": lambda name: name.startswith(("h.1.", "h.2.", "h.3.")),
    "all but the third": lambda name: not name.startswith("h.2."),
}
FIRST_STAGE = ("emb.weight", "h.0.up.weight", "h.0.up.bias")


@pytest.mark.parametrize("options", [{}, {"data_parallel": "fsdp"}], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv", "interleaved_1f1b"])
@on_ranks(2)
def test_stages_above_frozen_ones_train(schedule: str, options: dict[str, Any]) -> None:
    """A backward that is split finds parameters by what a stage has received: or it is refused."""
    for what, is_trained in TRAINED.items():
        model = seeded()
        for name, parameter in model.named_parameters():
            parameter.requires_grad = is_trained(name)
        reference = Alone(model, loss_fn, sgd, clip=1.0)
        given = {"model": model, "pipeline_schedule": schedule, "clip_grad_norm": 1.0, **options}
        engine = make("torch", (2, 1, 1), stages=2 if schedule == "1f1b" else 4, **given)
        if not schedule.endswith("1f1b") and not any(map(is_trained, FIRST_STAGE)):
            with pytest.raises(slapo.SlapoError, match=r"stage \d in two.* before it are frozen"):
                engine.train_batch(data())
            continue
        found = compare(engine, reference, data(3))
        assert max(found.values()) < TOLERANCE, (what, found)


# --- replicas that use different parameters ------------------------------------------------------
def chooses(self: Any, x: Tensor) -> Tensor:
    """The sign of the first number says which of two layers a micro-batch goes through."""
    chosen = self.first if x[0, 0] > 0 else self.second
    return self.last(torch.tanh(chosen(x)))


def experts() -> nn.Module:
    torch.manual_seed(0)
    return module_of(chooses, **{name: nn.Linear(3, 3) for name in ("first", "second", "last")})


#: For each step, the signs of the micro-batches of both replicas.
SIGNS = [(1, 1, -1, -1), (-1, 1, 1, 1), (1, -1, 1, -1), (1, 1, 1, 1)]


def expert_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for signs in SIGNS:
        x, y = torch.randn(2, 8, 3, generator=generator)
        x[:, 0] = torch.tensor(signs).repeat_interleave(2) * x[:, 0].abs()
        found.append((x, y))
    return found


def make_experts(target: str, options: dict[str, Any]) -> tuple[Any, Alone]:
    """Two replicas with two micro-batches each, and one process."""
    model, optimizer = experts(), functools.partial(torch.optim.SGD, lr=0.1)
    given = {"optimizer": optimizer, "micro_batches": 2, **options}
    reference = Alone(model, F.mse_loss, optimizer, parts=2 * given["micro_batches"])
    return build(model, target, (1, 2, 1), **given), reference


@on_ranks_by_rows(
    [
        ("torch", (1, 2, 1), FIND_UNUSED),
        ("torch", (1, 2, 1), {"data_parallel": "fsdp"}),
        ("torch", (1, 2, 1), {"dtype": torch.bfloat16}),
        ("torch", (1, 2, 1), {"dtype": torch.bfloat16, "micro_batches": 1}),
        ("deepspeed", (1, 2, 1), {"zero": 0}),
        ("megatron", (1, 2, 1), {}),
    ]
)
def test_replicas_may_use_different_parameters(
    target: str, layout: Any, options: dict[str, Any]
) -> None:
    engine, reference = make_experts(target, options)
    for batch in expert_batches():
        reference.step(batch)
        engine.train_batch(iter([of_this_rank(engine.mesh, batch)]))
        # Steps of 0.1, of gradients that were rounded to 8 bits on the way.
        close = 2e-3 if "dtype" in options else 1e-6
        assert largest_difference(engine, reference.state()) < close


def looks(self: Any, x: Tensor, pictures: Tensor | None = None) -> Tensor:
    """A tower that replicas without pictures do not enter, of layers that FSDP2 gathers alone."""
    if pictures is not None:
        x = x + self.tower(pictures)
    for layer in self.layers:
        x = x + torch.tanh(layer(x))
    return x


#: Whether each of two replicas has pictures, for each step.
HAVING = [(True, True), (True, False), (False, False), (False, True)]


def picture_batches() -> list[list[Any]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for having in HAVING:
        x, pictures, y = torch.randn(3, 2, 4, 3, generator=generator)
        found.append(
            [
                ({"x": x[i], **({"pictures": pictures[i]} if has else {})}, y[i])
                for i, has in enumerate(having)
            ]
        )
    return found


def make_pictures(**options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model = module_of(looks, tower=tower, layers=nn.ModuleList(nn.Linear(3, 3) for _ in range(2)))
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    reference = copy.deepcopy(model)
    return build(model, "torch", (1, 2, 1), optimizer=optimizer, **options), reference


@on_ranks_by_rows(
    [
        ("torch", (1, 2, 1), options)
        for options in (
            {"data_parallel": "fsdp"},
            {"data_parallel": "fsdp", "micro_batches": 2},
            {"data_parallel": "fsdp", "shard_size": 1},
            {"data_parallel": "fsdp", "data_parallel_options": {"reshard_after_forward": False}},
            {"data_parallel": "fsdp", "dtype": torch.bfloat16, "micro_batches": 2},
            FIND_UNUSED,
        )
    ]
)
def test_a_replica_without_pictures(target: str, layout: Any, options: dict[str, Any]) -> None:
    engine, reference = make_pictures(**options)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    rank = engine.mesh.get_local_rank("dp")
    for step, replicas in enumerate(picture_batches()):
        optimizer.zero_grad()
        losses = [F.mse_loss(reference(**inputs), targets) for inputs, targets in replicas]
        wanted = torch.stack(losses).mean()
        evaluated = engine.eval_batch(iter([replicas[rank]]))
        loss = engine.train_batch(iter([replicas[rank]]))
        wanted.backward()
        optimizer.step()
        close = 2e-2 if "dtype" in options else 1e-6
        assert abs(evaluated - wanted) < close, step
        assert abs(loss - wanted) < close, step
        state = {name: value.detach() for name, value in reference.state_dict().items()}
        assert largest_difference(engine, state) < close, step


@on_ranks(2)
def test_ddp_refuses_replicas_that_use_different_parameters() -> None:
    began = time.monotonic()
    engine, _ = make_pictures()
    for step, replicas in enumerate(picture_batches()[:2]):
        batch = iter([replicas[engine.mesh.get_local_rank("dp")]])
        if not step:
            engine.train_batch(batch)
            continue
        with pytest.raises(slapo.SlapoError, match=r"\['tower.0.weight'.*find_unused_parameters"):
            engine.train_batch(batch)
    assert time.monotonic() - began < 20


def drops(self: Any, x: Tensor) -> Tensor:
    """The sign of the first number says which layer of a list is left out."""
    for index, layer in enumerate(self.layers):
        if index != int(x[0, 0] > 0):
            x = x + torch.tanh(layer(x))
    return x


@on_ranks(2)
def test_replicas_that_leave_out_layers() -> None:
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    given = {"optimizer": optimizer, "micro_batches": 2, "data_parallel": "fsdp"}
    torch.manual_seed(0)
    model = module_of(drops, layers=nn.ModuleList(nn.Linear(3, 3) for _ in range(2)))
    engine = build(copy.deepcopy(model), "torch", (1, 2, 1), **given, **FIND_UNUSED)
    reference = Alone(model, F.mse_loss, optimizer, parts=4)
    for batch in expert_batches():
        reference.step(batch)
        engine.train_batch(iter([of_this_rank(engine.mesh, batch)]))
        assert largest_difference(engine, reference.state()) < 1e-6
    engine = build(model, "torch", (1, 2, 1), **given)
    message = r"one has reached 'layers.0' and another 'layers.1', and FSDP2 gathers layers"
    with pytest.raises(slapo.SlapoError, match=message):
        engine.train_batch(iter([of_this_rank(engine.mesh, expert_batches()[0])]))


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("target", ["deepspeed"])
@on_ranks(2)
def test_zero_refuses_replicas_that_use_different_parameters(target: str, zero: int) -> None:
    engine, _ = make_experts(target, {"zero": zero})
    text = r"replicas use different parameters: \['first.weight', 'first.bias'.*ZeRO stage "
    with pytest.raises(slapo.SlapoError, match=f"{text}{zero}"):
        engine.train_batch(iter([of_this_rank(engine.mesh, expert_batches()[0])]))


@on_ranks(2)
def test_ddp_tells_of_parameters_that_the_last_micro_batch_does_not_use() -> None:
    """A layer that the first micro-batch uses, and the one that DDP reduces does not."""
    model = experts()
    batch = expert_batches()[0]
    batch[0][:, 0] = torch.tensor([1, 1, -1, -1, 1, 1, -1, -1]) * batch[0][:, 0].abs()

    def pair(**options: Any) -> tuple[Any, Alone, Any]:
        given = {"micro_batches": 2, **options}
        engine = build(copy.deepcopy(model), layout=(1, 2, 1), **given)
        return engine, Alone(model, F.mse_loss, sgd, parts=4), of_this_rank(engine.mesh, batch)

    engine, reference, mine = pair()
    text = "DDP misses gradients of parameters that the last micro-batch did not use"
    with pytest.raises(slapo.SlapoError, match=text):
        engine.train_batch(iter([mine]))
    assert largest_difference(engine, reference.state()) == 0
    engine, reference, mine = pair(**FIND_UNUSED)
    for _ in range(2):
        reference.step(batch)
        engine.train_batch(iter([mine]))
    assert largest_difference(engine, reference.state()) < 1e-6


@on_ranks_by_rows(
    [
        ("torch", (1, 1, 1), {}, False),
        ("torch", (1, 1, 1), {"data_parallel": "fsdp"}, True),
        ("deepspeed", (1, 1, 1), {}, True),
        ("megatron", (1, 1, 1), {}, True),
    ]
)
def test_what_is_unused_everywhere_has_no_gradient_or_one_of_zero(
    target: str, layout: Any, options: dict[str, Any], shrinks: bool
) -> None:
    """As the guide says: where gradients are in common buffers, it is one of zero."""
    torch.manual_seed(0)
    decay = functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)
    engine = build(with_unused(), target, optimizer=decay, **options)
    before = engine.state_dict()["unused.weight"].clone()
    engine.train_batch(iter([(torch.randn(2, 3), torch.randn(2, 3))]))
    ratio = float((engine.state_dict()["unused.weight"] / before).mean())
    assert ratio == pytest.approx(0.95 if shrinks else 1.0, abs=1e-6)


# --- names ---------------------------------------------------------------------------------------
def decay_by_name(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """None for tables, which one process knows as ``emb.weight`` where the head is tied to it."""
    groups = [
        {"params": [p], "weight_decay": 0.0 if name.startswith("emb") else 0.1}
        for name, p in named_parameters
    ]
    assert {name for name, _ in named_parameters} <= dict(Model().named_parameters()).keys()
    return torch.optim.SGD(groups, lr=0.1)


@on_ranks_by_rows(
    [
        ("torch", (2, 1, 1), {}),
        ("torch", (2, 1, 1), {"pipeline_schedule": "interleaved_1f1b"}),
        ("torch", (2, 1, 1), {"data_parallel": "fsdp"}),
        ("deepspeed", (2, 1, 1), {}),
        ("deepspeed", (2, 1, 1), {"zero": 1}),
        ("megatron", (2, 1, 1), {}),
    ]
)
def test_optimizers_get_the_names_of_the_model(
    target: str, layout: Any, options: dict[str, Any]
) -> None:
    stages = 4 if "pipeline_schedule" in options else 2
    engine = make(target, layout, stages, optimizer=decay_by_name, **options)
    reference = alone(optimizer=decay_by_name, named=True)
    found = compare(engine, reference, data(4))
    assert max(found.values()) < TOLERANCE, found
