"""What users do between steps, and options that nobody would read: right, or an error in words."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from slapo.framework_dialect.deepspeed.load import quiet_warnings
from slapo.framework_dialect.precision import half_of
from tests.distributed import run_distributed
from tests.runtimes import contract
from tests.runtimes.alone import Alone
from tests.runtimes.contract import WithUnused, data, loss_fn, make, prepare
from tests.runtimes.test_contract import RUNTIMES, run, target

__all__ = ["target"]

SHARDED = [{}, {"dtype": torch.bfloat16}, {"data_parallel": "fsdp"}]


# --- between backward and step -------------------------------------------------------------------
@pytest.mark.parametrize("options", SHARDED, ids=str)
def test_a_forward_between_backward_and_step_changes_nothing(options: dict[str, Any]) -> None:
    """FSDP2 keeps what it has gathered for a backward that does not come."""
    losses = []
    for looks in (False, True):
        engine, _ = make("torch", (1, 1, 1), micro_batches=1, **options)
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


@pytest.mark.parametrize("options", SHARDED, ids=str)
def test_values_that_are_loaded_are_those_of_the_next_forward(options: dict[str, Any]) -> None:
    engine, _ = make("torch", (1, 1, 1), **options)
    assert uses_what_is_loaded(engine)


def uses_what_is_loaded(engine: Any) -> bool:
    """Whether a loss is what it was once the values are, after a step and evaluations."""
    start = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    batch = next(data())
    first = engine.eval_batch(iter([batch])).item()
    engine.train_batch(data())
    assert engine.eval_batch(iter([batch])).item() != first
    engine.load_state_dict(start)
    return bool(engine.eval_batch(iter([batch])).item() == first)


def load_after_evaluation(
    rank: int, world: int, setup: str | None, target: str, options: dict[str, Any]
) -> bool:
    prepare(setup)
    engine, _ = make(target, (2, 1, 1), **options)
    return uses_what_is_loaded(engine)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [*(("torch", options) for options in SHARDED), ("deepspeed", {}), ("megatron", {})],
    ids=str,
)
def test_values_that_are_loaded_in_stages_are_those_of_the_next_forward(
    name: str, options: dict[str, Any]
) -> None:
    """With stages, FSDP2 holds what is around its layers in a module outside of the model."""
    pytest.importorskip(RUNTIMES[name][1])
    assert all(run(load_after_evaluation, 2, name, options))


def test_gradients_of_parameters_that_are_not_stepped_do_not_add_up() -> None:
    def some(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters[2:], lr=0.0)

    engine, _ = make("torch", (1, 1, 1), optimizer=some, clip_grad_norm=100.0)
    batch = next(data())
    norms = []
    for _ in range(3):
        engine.train_batch(iter([batch]))
        norms.append(float(engine.grad_norm))
    assert norms[0] == norms[1] == norms[2]


def interrupted(rank: int, world: int, setup: str | None, target: str) -> str:
    """A key that interrupts the second micro-batch; then training goes on, as far as it may."""
    prepare(setup)
    calls = [0]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        return loss_fn(output, targets)

    engine, _ = make(target, (1, 1, 1), loss_fn=loss)
    batch = next(data())
    with pytest.raises(KeyboardInterrupt):
        engine.train_batch(iter([batch]))
    try:
        engine.train_batch(iter([batch]))
    except slapo.SlapoError as error:
        return str(error)
    alone = contract.alone()
    alone.step(batch)
    state = engine.state_dict()
    apart = max((state[n] - t).abs().max().item() for n, t in alone.state().items())
    return f"trained on, {'equal' if apart < 1e-6 else 'and leaked'}"


@pytest.mark.distributed
@pytest.mark.slow
def test_an_interrupted_step_does_not_leak_into_the_next(target: str) -> None:
    (text,) = run(interrupted, 1, target)
    assert text == "trained on, equal" or "a step before has failed with Keyboard" in text


def idle_step(rank: int, world: int, setup: str | None, target: str) -> str:
    prepare(setup)
    engine, _ = make(target, (1, 1, 1), micro_batches=1)
    engine.train_batch(data())
    before = copy.deepcopy(engine.state_dict())
    with pytest.raises(slapo.SlapoError) as caught:
        engine.step()
    assert engine.step_count == 1
    assert all(torch.equal(before[n], t) for n, t in engine.state_dict().items())
    return str(caught.value)


@pytest.mark.distributed
@pytest.mark.slow
def test_a_step_without_a_backward_is_an_error(target: str) -> None:
    assert "no gradients to go by; call engine.backward(loss)" in run(idle_step, 1, target)[0]


def test_a_backward_that_failed_leaves_nothing_to_step_on() -> None:
    engine, _ = make("torch", (1, 1, 1), micro_batches=1)
    ids, targets = next(data())
    engine.backward(loss_fn(engine(ids), targets))
    with pytest.raises(RuntimeError):
        engine.backward(torch.zeros(()))
    with pytest.raises(slapo.SlapoError, match="no gradients"):
        engine.step()


def test_no_step_is_taken_after_one_whose_scheduler_failed() -> None:
    """The optimizer has stepped, and nobody has counted it."""

    def fails(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 - step))

    engine, _ = make("torch", (1, 1, 1), lr_scheduler=fails)
    with pytest.raises(ZeroDivisionError):
        engine.train_batch(data())
    with pytest.raises(slapo.SlapoError, match="a step before has failed with ZeroDivision"):
        engine.train_batch(data())


# --- evaluations of unlike sizes -----------------------------------------------------------------
def evaluate_unevenly(
    rank: int, world: int, setup: str | None, target: str, options: dict[str, Any]
) -> float:
    """Ranks have 5 and 3 samples, which make 3 and 2 forwards."""
    prepare(setup)
    engine, _ = make(target, (1, 2, 1), **options)
    ids, targets = next(data())
    mine = slice(0, 5) if rank == 0 else slice(5, 8)
    loss, outputs = engine.eval_batch(iter([(ids[mine], targets[mine])]), return_outputs=True)
    assert sum(len(output) for output in outputs) == (5, 3)[rank]
    wanted, _ = contract.alone().evaluate((ids, targets))
    return abs(loss.item() - wanted)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("torch", {}), ("torch", {"data_parallel": "fsdp"}), ("deepspeed", {"zero": 3})],
    ids=str,
)
def test_replicas_evaluate_any_numbers_of_samples(name: str, options: dict[str, Any]) -> None:
    pytest.importorskip(RUNTIMES[name][1])
    assert max(run(evaluate_unevenly, 2, name, options)) < 1e-5


# --- options -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_grad_norm": True}, "clip_grad_norm is True; pass a number"),
        ({"check_batches": "no"}, "check_batches is 'no'; pass True or False"),
        ({"sync_replicated": "no"}, "sync_replicated is 'no'; pass True or False"),
        ({"compile": "yes"}, "compile is 'yes'; pass True or options"),
        (
            {"optimizer": torch.optim.LBFGS},
            r"LBFGS.step\(\) needs \['closure'\]: it computes",
        ),
        (
            {"data_parallel_options": {"static_graph": True}},
            "has static_graph, with which DDP cannot add up gradients of micro_batches=4",
        ),
        ({"lr_scheduler": lambda optimizer: None}, "returned a NoneType; it must return a sched"),
        (
            {"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
            r"ReduceLROnPlateau.step\(\) needs \['metrics'\]",
        ),
        (
            {"data_parallel_options": {"find_unused_parametrs": True}},
            "did you mean 'find_unused_parameters'",
        ),
        (
            {"data_parallel_options": {"find_unused_parameters": True}, "dtype": torch.bfloat16},
            "data_parallel_options of fully_shard' has no option 'find_unused_parameters'",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_options_that_would_be_passed_over(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make("torch", (1, 1, 1), **options)


def test_a_loss_without_a_gradient() -> None:
    engine, _ = make("torch", (1, 1, 1), loss_fn=lambda output, targets: output.detach().mean())
    assert engine.eval_batch(data()).item() != 0
    with pytest.raises(ValueError, match="loss_fn returned a loss without a gradient"):
        engine.train_batch(data())


def test_steps_inside_of_autocast() -> None:
    """Around a call by hand it does what it does around a module."""
    engine, _ = make("torch", (1, 1, 1))
    with torch.autocast("cpu", torch.bfloat16):
        assert engine(next(data())[0]).dtype == torch.bfloat16
        for step in (engine.train_batch, engine.eval_batch):
            with pytest.raises(slapo.SlapoError, match="was called inside of torch"):
                step(data())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale


def evaluate_scaled(rank: int, world: int) -> float:
    """6 and 2 samples, and an input that has one row for all of them."""
    mesh = slapo.init_mesh(dp=2, device="cpu")
    torch.manual_seed(0)
    model = Scaled()
    x, y, scale = torch.randn(8, 3), torch.randn(8, 3), torch.randn(1, 3)
    expected = nn.functional.mse_loss(model(x, scale), y).item()
    sch = slapo.create_schedule(model, group=mesh["tp"])
    engine, _ = slapo.build(sch, target="torch", mesh=mesh, loss_fn=nn.functional.mse_loss)
    mine = slice(0, 6) if rank == 0 else slice(6, 8)
    return abs(engine.eval_batch(iter([((x[mine], scale), y[mine])])).item() - expected)


@pytest.mark.distributed
def test_replicas_weigh_by_their_targets_where_inputs_are_of_several_sizes() -> None:
    assert max(run_distributed(evaluate_scaled, 2)) < 1e-6


def other_default(rank: int, world: int) -> str:
    with pytest.raises(slapo.SlapoError) as caught:
        make("torch", (1, 2, 1), optimizer=lambda p, lr=0.1 * (1 + rank): torch.optim.SGD(p, lr))
    return str(caught.value)


@pytest.mark.distributed
def test_defaults_of_functions_are_compared() -> None:
    for text in run_distributed(other_default, 2):
        assert "optimizer differs between ranks" in text
        assert "[0.1], None) on rank 0" in text


def pipelined_options(rank: int, world: int) -> str:
    with pytest.raises(TypeError) as caught:
        make("torch", (2, 1, 1), data_parallel_options={"bucket_cap_mb": 1})
    return str(caught.value)


@pytest.mark.distributed
def test_a_pipeline_has_no_use_for_options_of_ddp() -> None:
    for text in run_distributed(pipelined_options, 2):
        assert "['bucket_cap_mb'], and in a pipeline gradients are averaged without DDP" in text


def train_with_unused(rank: int, world: int) -> str:
    mesh = slapo.init_mesh(dp=2, device="cpu")
    torch.manual_seed(0)
    sch = slapo.create_schedule(WithUnused(), group=mesh["tp"])
    given = {"loss_fn": nn.functional.mse_loss, "optimizer": contract.sgd}
    engine, _ = slapo.build(sch, target="torch", mesh=mesh, **given)
    before = copy.deepcopy(engine.state_dict())
    batch = torch.randn(2, 3), torch.randn(2, 3)
    with pytest.raises(slapo.SlapoError) as caught:
        engine.train_batch(iter([batch]))
    assert all(torch.equal(before[n], t) for n, t in engine.state_dict().items())
    return str(caught.value)


@pytest.mark.distributed
def test_parameters_that_ddp_waits_for_are_named_before_the_first_step() -> None:
    for text in run_distributed(train_with_unused, 2):
        assert text.startswith("['unused.weight', 'unused.bias'] got no gradient. DDP misses")


def hsdp_timeouts(rank: int, world: int) -> set[float]:
    slapo.init_mesh(dp=2, device="cpu", timeout=50)
    engine, _ = make("torch", (1, 2, 1), data_parallel="fsdp", shard_size=1)
    groups = [engine.sharding.get_group(dim) for dim in range(2)]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return {backend.options._timeout.total_seconds() for backend in backends}


@pytest.mark.distributed
def test_groups_of_replicas_of_shards_have_the_timeout_of_the_job() -> None:
    assert run_distributed(hsdp_timeouts, 2) == [{50.0}] * 2


# --- dtypes --------------------------------------------------------------------------------------
def test_models_of_several_dtypes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(slapo.SlapoError, match=r"torch.bfloat16, torch.float32; say by dtype="):
        half_of(model)
    model[1].requires_grad_(False)  # as a model below adapters
    assert half_of(model) is None
    model[0].requires_grad_(False)
    model[1].requires_grad_(True)
    assert half_of(model) is torch.bfloat16


def test_a_model_of_float64_trains() -> None:
    mesh = slapo.init_mesh(device="cpu")
    torch.manual_seed(0)
    model = nn.Linear(3, 3).double()
    reference = Alone(copy.deepcopy(model).float(), nn.functional.mse_loss, contract.sgd)
    sch = slapo.create_schedule(model, group=mesh["tp"])
    given = {"loss_fn": nn.functional.mse_loss, "optimizer": contract.sgd}
    engine, _ = slapo.build(sch, target="torch", mesh=mesh, **given)
    batch = torch.ones(2, 3), torch.zeros(2, 3)
    loss = engine.train_batch(iter([tuple(t.double() for t in batch)]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(reference.step(batch), abs=1e-6)


def test_autocast_to_float16_scales_the_loss() -> None:
    """Gradients of 1e-8 would be 0 in float16."""

    def small(output: Tensor, targets: Tensor) -> Tensor:
        return 1e-7 * loss_fn(output.float(), targets)

    norms = []
    for options in ({}, {"autocast": torch.float16}):
        engine, _ = make("torch", (1, 1, 1), loss_fn=small, clip_grad_norm=1.0, **options)
        engine.train_batch(data())
        norms.append(float(engine.grad_norm))
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


class Positions(nn.Module):
    """A buffer whose numbers half precision cannot tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("positions", torch.arange(3000.0, 3004.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * torch.sin(self.positions).to(x.dtype))


def buffers(rank: int, world: int, setup: str | None, target: str) -> torch.dtype:
    prepare(setup)
    mesh = slapo.init_mesh(device="cpu")
    sch = slapo.create_schedule(Positions(), group=mesh["tp"])
    given = {"loss_fn": nn.functional.mse_loss, "optimizer": contract.sgd}
    engine, _ = slapo.build(sch, target=target, mesh=mesh, dtype=torch.bfloat16, **given)
    engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 4).bfloat16())]))
    return engine.module.positions.dtype


@pytest.mark.distributed
@pytest.mark.slow
def test_buffers_keep_their_dtype(target: str) -> None:
    assert run(buffers, 1, target) == [torch.float32]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.table)


def compute_with_buffers(rank: int, world: int, setup: str | None, target: str) -> str:
    prepare(setup)
    mesh = slapo.init_mesh(device="cpu")
    given = {"loss_fn": nn.functional.mse_loss, "optimizer": contract.sgd, "micro_batches": 2}
    batch = torch.ones(4, 4), torch.ones(4, 4).bfloat16()
    sch = slapo.create_schedule(Table(), group=mesh["tp"])
    engine, _ = slapo.build(sch, target=target, mesh=mesh, dtype=torch.bfloat16, **given)
    texts = []
    for run_it in (engine.eval_batch, engine.train_batch):
        with pytest.raises(slapo.SlapoError) as caught:
            run_it(iter([batch]))
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    sch = slapo.create_schedule(Table().bfloat16(), group=mesh["tp"])
    engine, _ = slapo.build(sch, target=target, mesh=mesh, **given)
    engine.train_batch(iter([batch]))
    return texts[0]


@pytest.mark.distributed
@pytest.mark.slow
def test_buffers_that_the_model_computes_with_are_named(target: str) -> None:
    (text,) = run(compute_with_buffers, 1, target)
    assert "The model computes in torch.bfloat16" in text
    assert "buffers are not: ['table']. Convert those" in text


def masters(
    rank: int, world: int, setup: str | None, target: str, layout: Any, options: dict[str, Any]
) -> float:
    """Differences of the optimizer's parameters from the model's, which bfloat16 would round."""
    prepare(setup)
    if target == "megatron" and options.pop("distributed_optimizer", False):
        from tests.runtimes.megatron_cases import megatron_adam

        options = {"optimizer": megatron_adam(), "distributed_optimizer": True}
    torch.manual_seed(0)
    exact = dict(contract.Model().named_parameters())
    engine, _ = make(target, layout, dtype=torch.bfloat16, **options)
    apart = 0.0
    for name, parameter in engine.lowering.trainable():
        wanted = exact[name].detach()
        if target == "deepspeed":
            from deepspeed.utils import safe_get_full_fp32_param

            with quiet_warnings():
                found = safe_get_full_fp32_param(parameter)
        else:
            found, flat = parameter.main_param, wanted.flatten()
            if found is None:  # another replica has it
                continue
            if getattr(parameter, "main_param_sharded", False):  # some piece of it
                starts = range(len(flat) - found.numel() + 1)
                apart += not any(torch.equal(flat[s : s + found.numel()], found) for s in starts)
                continue
        apart = max(apart, (found - wanted).abs().max().item())
    return apart


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("deepspeed", (2, 1, 1), {}),
        ("deepspeed", (1, 2, 1), {"zero": 1}),
        ("deepspeed", (1, 2, 1), {"zero": 3}),
        ("megatron", (2, 1, 1), {}),
        ("megatron", (1, 2, 1), {"distributed_optimizer": True}),
    ],
    ids=str,
)
def test_optimizers_start_from_values_that_are_not_rounded(
    name: str, layout: Any, options: dict[str, Any]
) -> None:
    pytest.importorskip(RUNTIMES[name][1])
    assert max(run(masters, 2, name, layout, options)) == 0.0


def step_in_float16(rank: int, world: int, setup: str | None, target: str) -> bool:
    prepare(setup)
    engine, _ = make(target, (1, 1, 1), dtype=torch.float16)
    before = copy.deepcopy(engine.state_dict())
    engine.train_batch(data())
    return any(not torch.equal(before[n], t) for n, t in engine.state_dict().items())


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "megatron"])
def test_the_first_step_in_float16_is_one(name: str) -> None:
    """Megatron-Core's own scale to begin with takes 17 steps to come down."""
    pytest.importorskip(RUNTIMES[name][1])
    assert run(step_in_float16, 1, name) == [True]


# --- state ---------------------------------------------------------------------------------------
class Counts(nn.Module):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(2, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_state_that_is_no_tensor() -> None:
    mesh = slapo.init_mesh(device="cpu")
    engine, _ = slapo.build(
        slapo.create_schedule(nn.Sequential(Counts()), group=mesh["tp"]), target="torch", mesh=mesh
    )
    state = engine.state_dict()
    engine(torch.ones(1, 2))
    engine.load_state_dict({**state, "0._extra_state": {"count": 7}})
    assert engine.module[0].count == 7
    with pytest.raises(ValueError, match=r"'0.linear.bias' is a int"):
        engine.load_state_dict({**state, "0.linear.bias": 3})


def test_two_values_for_tied_weights() -> None:
    engine, _ = make("torch", (1, 1, 1))
    state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    engine.load_state_dict(state)
    state["head.weight"] += 1
    with pytest.raises(ValueError, match=r"'emb.weight' and 'head.weight' are one tensor"):
        engine.load_state_dict(state)


def config_with_optimizer(rank: int, world: int) -> list[float]:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine, _ = make(
        "deepspeed",
        (1, 1, 1),
        optimizer=None,
        config=config,
        lr_scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
    )
    engine.train_batch(data())
    dist.barrier()
    return list(engine.scheduler.get_last_lr())


@pytest.mark.distributed
@pytest.mark.slow
def test_a_scheduler_of_an_optimizer_that_the_config_describes() -> None:
    pytest.importorskip("deepspeed")
    assert run_distributed(config_with_optimizer, 1) == [[0.05]]


def optimizer_state(rank: int, world: int, setup: str | None, target: str, options: Any) -> float:
    """Two steps, the state in and out of another engine, and a third step on both."""
    prepare(setup)
    engines = [make(target, (1, 1, 1), optimizer=two_groups, **options)[0] for _ in range(2)]
    batches = list(data(3))
    engines[0].train_batch(iter(batches[:1]))
    engines[0].train_batch(iter(batches[1:2]))
    saved = copy.deepcopy(engines[0].optimizer.state_dict())
    engines[1].load_state_dict(copy.deepcopy(engines[0].state_dict()))
    engines[1].optimizer.load_state_dict(saved)
    states = []
    for engine in engines:
        engine.train_batch(iter(batches[2:]))
        states.append(engine.state_dict())
    return max((states[0][n] - t).abs().max().item() for n, t in states[1].items())


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": parameters[:3], "lr": 0.1}, {"params": parameters[3:], "lr": 0.01}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("torch", {}),
        ("torch", {"dtype": torch.bfloat16}),
        ("deepspeed", {}),
        ("megatron", {}),
        ("megatron", {"dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_the_state_of_an_optimizer_out_and_in(name: str, options: dict[str, Any]) -> None:
    pytest.importorskip(RUNTIMES[name][1])
    assert run(optimizer_state, 1, name, options) == [0.0]
