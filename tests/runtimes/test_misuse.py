"""What users do between steps, and options that would not be read: right, or an error in words."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.framework_dialect.deepspeed.load import quiet_warnings
from slapo.framework_dialect.precision import half_of
from tests.graph.served import make as module_of
from tests.runtimes.alone import Alone
from tests.runtimes.contract import (
    Model,
    alone,
    build,
    copied,
    data,
    is_unchanged,
    loss_fn,
    make,
    sgd,
    with_unused,
)
from tests.runtimes.ranks import on_ranks, on_ranks_by_rows

SHARDED = [{}, {"dtype": torch.bfloat16}, {"data_parallel": "fsdp"}]


# --- between backward and step -------------------------------------------------------------------
@pytest.mark.parametrize("options", SHARDED, ids=str)
def test_a_forward_between_backward_and_step_changes_nothing(options: dict[str, Any]) -> None:
    """FSDP2 keeps what it has gathered for a backward that does not come."""
    losses = []
    for looks in (False, True):
        engine = make("torch", (1, 1, 1), micro_batches=1, **options)
        found = []
        for ids, targets in data(4):
            loss = loss_fn(engine(ids), targets)
            engine.backward(loss)
            if looks:
                engine.eval_batch(iter([(ids, targets)]))
            engine.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1]


def test_gradients_of_parameters_that_are_not_stepped_do_not_add_up() -> None:
    def some(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters[2:], lr=0.0)

    engine = make("torch", (1, 1, 1), optimizer=some, clip_grad_norm=100.0)
    batch = next(data())
    norms = []
    for _ in range(3):
        engine.train_batch(iter([batch]))
        norms.append(float(engine.grad_norm))
    assert norms[0] == norms[1] == norms[2]


def test_a_backward_that_failed_leaves_nothing_to_step_on() -> None:
    engine = make("torch", (1, 1, 1), micro_batches=1)
    ids, targets = next(data())
    engine.backward(loss_fn(engine(ids), targets))
    with pytest.raises(RuntimeError):
        engine.backward(torch.zeros(()))
    with pytest.raises(slapo.SlapoError, match="no gradients"):
        engine.step()


class FailsHalfway(torch.optim.SGD):
    """It has changed some of the parameters."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].data.zero_()
        raise MemoryError("state of the next parameter")


def fails_after_the_optimizer(optimizer: Any) -> Any:
    """The optimizer has stepped, and the engine has not counted it."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 - step))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"lr_scheduler": fails_after_the_optimizer}, ZeroDivisionError),
        ({"optimizer": functools.partial(FailsHalfway, lr=0.1)}, MemoryError),
    ],
    ids=["scheduler", "optimizer"],
)
def test_no_step_is_taken_after_one_that_failed_halfway(options: Any, error: Any) -> None:
    engine = make("torch", (1, 1, 1), **options)
    with pytest.raises(error):
        engine.train_batch(data())
    with pytest.raises(slapo.SlapoError, match=f"an earlier step failed with {error.__name__}"):
        engine.train_batch(data())


# --- evaluations of unlike sizes -----------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "options"),
    [("torch", {}), ("torch", {"data_parallel": "fsdp"}), ("deepspeed", {"zero": 3})],
    ids=str,
)
@on_ranks(2)
def test_replicas_evaluate_any_numbers_of_samples(target: str, options: dict[str, Any]) -> None:
    """Ranks have 5 and 3 samples, which make 4 and 3 forwards."""
    engine = make(target, (1, 2, 1), **options)
    ids, targets = next(data())
    mine = slice(5, 8) if torch.distributed.get_rank() else slice(0, 5)
    loss, outputs = engine.eval_batch(iter([(ids[mine], targets[mine])]), return_outputs=True)
    assert sum(len(output) for output in outputs) == len(ids[mine])
    assert abs(loss.item() - alone().evaluate((ids, targets))[0]) < 1e-5


# --- options -------------------------------------------------------------------------------------


def test_steps_inside_of_autocast() -> None:
    """Around a call by hand it does what it does around a module."""
    engine = make("torch", (1, 1, 1))
    with torch.autocast("cpu", torch.bfloat16):
        assert engine(next(data())[0]).dtype == torch.bfloat16
        for step in (engine.train_batch, engine.eval_batch):
            with pytest.raises(slapo.SlapoError, match="was called inside torch"):
                step(data())


@on_ranks(2)
def test_parameters_that_ddp_waits_for_are_named_before_the_first_step() -> None:
    torch.manual_seed(0)
    engine = build(with_unused(), layout=(1, 2, 1))
    before = copied(engine)
    text = r"^\['unused.weight', 'unused.bias'\] got no gradient. DDP misses"
    with pytest.raises(slapo.SlapoError, match=text):
        engine.train_batch(iter([(torch.randn(2, 3), torch.randn(2, 3))]))
    assert is_unchanged(engine, before)


@on_ranks(2)
def test_groups_of_replicas_of_shards_have_the_timeout_of_the_job() -> None:
    slapo.init_mesh(dp=2, device="cpu", timeout=50)
    engine = make("torch", (1, 2, 1), data_parallel="fsdp", shard_size=1)
    for dim in range(2):
        backend = engine.sharding.get_group(dim)._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == 50


# --- dtypes --------------------------------------------------------------------------------------
def test_models_of_several_dtypes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    said = r"torch.bfloat16, torch.float32; pass the compute dtype as dtype="
    with pytest.raises(slapo.SlapoError, match=said):
        half_of(model)
    model[1].requires_grad_(False)  # as a model below adapters
    assert half_of(model) is None
    model[0].requires_grad_(False)
    model[1].requires_grad_(True)
    assert half_of(model) is torch.bfloat16


def test_a_model_of_float64_trains() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3).double()
    reference = Alone(copy.deepcopy(model).float(), F.mse_loss, sgd)
    batch = torch.ones(2, 3), torch.zeros(2, 3)
    loss = build(model).train_batch(iter([tuple(t.double() for t in batch)]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(reference.step(batch), abs=1e-6)


def test_autocast_to_float16_scales_the_loss() -> None:
    """Gradients of 1e-8 would be 0 in float16."""

    def small(output: Tensor, targets: Tensor) -> Tensor:
        return 1e-7 * loss_fn(output.float(), targets)

    norms = []
    for options in ({}, {"autocast": torch.float16}):
        engine = make("torch", (1, 1, 1), loss_fn=small, clip_grad_norm=1.0, **options)
        engine.train_batch(data())
        norms.append(float(engine.grad_norm))
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


def positions(casts: bool) -> nn.Module:
    """A buffer whose numbers half precision cannot tell apart."""

    def forward(self: Any, x: Tensor) -> Tensor:
        table = torch.sin(self.positions)
        return self.linear(x * (table.to(x.dtype) if casts else table))

    model = module_of(forward, linear=nn.Linear(4, 4))
    model.register_buffer("positions", torch.arange(3000.0, 3004.0))
    return model


@pytest.mark.slow
@on_ranks(1)
def test_buffers_keep_their_dtype(target: str) -> None:
    """One that the model computes with has to be converted there: torch says so."""
    batch = torch.ones(4, 4), torch.ones(4, 4).bfloat16()
    engine = build(positions(casts=True), target, dtype=torch.bfloat16)
    engine.train_batch(iter([batch]))
    assert engine.module.positions.dtype == torch.float32
    engine = build(positions(casts=False), target, dtype=torch.bfloat16, micro_batches=2)
    for step in (engine.eval_batch, engine.train_batch):
        with pytest.raises(RuntimeError, match="same dtype"):
            step(iter([batch]))
    engine = build(positions(casts=False).bfloat16(), target, micro_batches=2)
    engine.train_batch(iter([batch]))


@pytest.mark.slow
@on_ranks_by_rows(
    [
        ("deepspeed", (2, 1, 1), {}),
        ("deepspeed", (1, 2, 1), {"zero": 1}),
        ("deepspeed", (1, 2, 1), {"zero": 3}),
        ("megatron", (2, 1, 1), {}),
        ("megatron", (1, 2, 1), {"distributed_optimizer": True}),
    ]
)
def test_optimizers_start_from_values_that_are_not_rounded(
    target: str, layout: Any, options: dict[str, Any]
) -> None:
    """As a model's would be by bfloat16."""
    if options.get("distributed_optimizer"):
        from tests.runtimes.layouts import megatron_adam

        options = {"optimizer": megatron_adam(), **options}
    torch.manual_seed(0)
    exact = dict(Model().named_parameters())
    engine = make(target, layout, dtype=torch.bfloat16, **options)
    for name, parameter in engine.lowering.trainable():
        wanted = exact[name].detach()
        if target == "deepspeed":
            from deepspeed.utils import safe_get_full_fp32_param

            with quiet_warnings():
                assert torch.equal(safe_get_full_fp32_param(parameter), wanted)
            continue
        found, flat = parameter.main_param, wanted.flatten()
        if getattr(parameter, "main_param_sharded", False) and found is not None:  # a piece of it
            starts = range(len(flat) - found.numel() + 1)
            assert any(torch.equal(flat[s : s + found.numel()], found) for s in starts)
        elif found is not None:  # else another replica has it
            assert torch.equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["torch", "megatron"])
@on_ranks(1)
def test_the_first_step_in_float16_is_one(target: str) -> None:
    """Megatron-Core's own scale to begin with takes 17 steps to come down."""
    engine = make(target, (1, 1, 1), dtype=torch.float16)
    before = copy.deepcopy(engine.state_dict())
    engine.train_batch(data())
    assert not is_unchanged(engine, before)


# --- state ---------------------------------------------------------------------------------------
class Counts(nn.Linear):
    """Has state that is no tensor."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_state_that_is_no_tensor() -> None:
    engine = build(nn.Sequential(Counts(2, 2)))
    state = engine.state_dict()
    engine.load_state_dict({**state, "0._extra_state": {"count": 7}})
    assert engine.module[0].count == 7
    with pytest.raises(ValueError, match=r"'0.bias' is a int"):
        engine.load_state_dict({**state, "0.bias": 3})
    engine.load_state_dict({"0.bias": torch.ones(2)}, strict=False)
    assert torch.equal(engine.state_dict()["0.bias"], torch.ones(2))
