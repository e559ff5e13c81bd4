"""Optimizers that compute from whole tensors, over slices, shares and stages: as one process."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

pytest.importorskip("transformers")

import slapo
from examples.parallel_models import FAMILIES
from slapo.sharding.whole_steps import ELEMENT, MODEL, TENSOR, reach_of_steps, slices_of
from tests.runtimes.alone import Alone, of_this_rank, specs_of, whole
from tests.runtimes.layouts import batches, build, model_of
from tests.runtimes.ranks import error_of, on_ranks

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Muon(torch.optim.Optimizer):
    """Jordan et al., 2024, in float32: torch's rounds to bfloat16, and differs by that."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["sum"] = p.grad + 0.9 * state.get("sum", 0)
                x = state["sum"] / state["sum"].norm().clamp(min=1e-4)
                for _ in range(4):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                p.sub_(x, alpha=self.param_groups[0]["lr"])


class MuonAndAdam(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, each an optimizer of its own."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        matrices = [p for p in params if p.dim() == 2]
        rest = [p for p in params if p.dim() != 2]
        self.parts = [Muon(matrices), torch.optim.AdamW(rest, lr=0.02, eps=1e-3)]
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class Coupled(torch.optim.SGD):
    """Each step as long as the gradient of all tensors says."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in held) ** 0.5
        for p in held:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


OPTIMIZERS: dict[str, Make] = {
    "muon": MuonAndAdam,
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, eps=1e-3),
}
FSDP = {"data_parallel": "fsdp"}
WIDE = pytest.mark.wide
CASES = [
    pytest.param(target, layout, options, name, marks=marks)
    for target, layout, options, *marks in [
        ("torch", (1, 1, 2), {}),
        ("torch", (1, 2, 2), FSDP),
        ("deepspeed", (1, 1, 2), {"zero": 0}),
        ("megatron", (1, 1, 2), {}),
        ("torch", (1, 2, 1), FSDP, WIDE),
        ("torch", (2, 1, 1), {}, WIDE),
        ("torch", (1, 2, 2), {}, WIDE),
        ("torch", (2, 1, 2), {}, WIDE),
        ("deepspeed", (2, 1, 2), {"zero": 0}, WIDE),
    ]
    for name, marks in (("gpt2", marks), ("llama", [WIDE]))
]
#: In parts of what five steps change; the gradients are equal to 1e-6.
TOLERANCE = 5e-5


def _apart(found: Tensor, wanted: Tensor, before: Tensor) -> float:
    """The distance of two values in parts of what training has changed."""
    return float((found - wanted).norm() / (wanted - before).norm().clamp(min=1e-2))


def _part(spec: Any, tensor: Tensor) -> Tensor:
    return tensor if spec is None else spec.slice(tensor)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "layout", "options", "family"), CASES)
@on_ranks(timeout=280)
def test_steps_equal_those_of_one_process(
    target: str, layout: Any, options: Any, family: str
) -> None:
    start, data = model_of(family).state_dict(), batches(FAMILIES[family])
    for name, make in OPTIMIZERS.items():
        alone = Alone(model_of(family), FAMILIES[family].loss, make)
        engine = build(family, target, layout, optimizer=make, **options)
        for batch in data:
            loss = engine.train_batch(iter([of_this_rank(engine.mesh, batch)])).item()
            assert abs(loss - alone.step(batch)) < TOLERANCE, name
        specs, wanted = specs_of(engine), alone.state()
        for key, value in engine.state_dict().items():
            parts = [_part(specs.get(key), state[key]) for state in (wanted, start)]
            assert _apart(whole(value), *parts) < TOLERANCE, (name, key)


def _linears(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    with torch.no_grad():
        model[0].weight[:8] *= 3
    return model


def _split(model: nn.Module, group: Any) -> slapo.Schedule:
    sch = slapo.create_schedule(model, group=group)
    sch["0"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
    sch["2"].shard("weight", 1).sync("fwd_post", "all_reduce")
    return sch


def _data(steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 4, 8, generator=generator).unbind()) for _ in range(steps)]  # type: ignore[misc]


def _train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for x, y in _data(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def _check_values(model: nn.Module, wanted: nn.Module) -> None:
    specs = slices_of(model)
    for (name, value), other in zip(model.named_parameters(), wanted.parameters(), strict=True):
        part = _part(specs.get(id(value)), other.detach())
        torch.testing.assert_close(value.detach(), part, atol=1e-5, rtol=1e-4, msg=name)


@on_ranks(2)
def test_a_loop_of_ones_own() -> None:
    """Without an engine, the first step shows what the optimizer needs."""
    for name, make in OPTIMIZERS.items():
        mesh, wanted = slapo.init_mesh(tp=2, device="cpu"), _linears()
        _train(wanted, make(list(wanted.parameters())))
        model, _ = slapo.build(_split(_linears(), mesh["tp"]))
        optimizer = make(list(model.parameters()))
        _train(model, optimizer)
        _check_values(model, wanted)
        assert all(p.grad is not None for p in model.parameters()), name


@on_ranks(2)
def test_a_state_goes_on_in_another_optimizer() -> None:
    mesh, wanted = slapo.init_mesh(tp=2, device="cpu"), _linears()
    make = OPTIMIZERS["adafactor"]
    model, _ = slapo.build(_split(_linears(), mesh["tp"]))
    for one in (wanted, model):
        first = make(list(one.parameters()))
        _train(one, first)
        second = make(list(one.parameters()))
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        _train(one, second)
    _check_values(model, wanted)
    sizes = [sum(t.numel() for t in each.values()) for each in second.state.values()]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, len(sizes))
    # Two matrices and a bias are sharded; the other bias is whole on both.
    assert sum(everyone) == 3 + 2


@on_ranks(2)
def test_optimizers_that_need_other_tensors_are_refused() -> None:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return Coupled(params, lr=0.1)

    given = {"loss_fn": nn.functional.mse_loss, "optimizer": make}
    mesh = slapo.init_mesh(tp=2, device="cpu")
    error = error_of(
        lambda: slapo.build(_split(_linears(), mesh["tp"]), "torch", mesh=mesh, **given)
    )
    assert "Coupled computes the step of a tensor from other tensors too" in error
    model, _ = slapo.build(_split(_linears(), mesh["tp"]))
    before = copy.deepcopy(model.state_dict())
    error = error_of(lambda: _train(model, make(list(model.parameters()))))
    assert "Coupled computes the step of a tensor from other tensors too" in error
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # Whole tensors, of which each rank has all.
    mesh, wanted = slapo.init_mesh(dp=2, device="cpu"), _linears()
    engine, _ = slapo.build(
        slapo.create_schedule(_linears(), group=mesh["tp"]), "torch", mesh=mesh, **given
    )
    engine.train_batch(iter(_data()))
    _train(wanted, make(list(wanted.parameters())), steps=1)
    _check_values(engine.module, wanted)


@on_ranks(2)
def test_steps_are_shared_among_replicas_only() -> None:
    """ZeroRedundancyOptimizer sends each parameter to its whole group, by default the world."""
    mesh = slapo.init_mesh(tp=2, device="cpu")
    given = {"loss_fn": nn.functional.mse_loss, "mesh": mesh}

    def make(params: Any, group: Any = None) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(params, torch.optim.SGD, process_group=group, lr=0.1)

    def build(group: Any = None) -> Any:
        schedule = _split(_linears(), mesh["tp"])
        return slapo.build(schedule, "torch", optimizer=partial(make, group=group), **given)[0]

    model, _ = slapo.build(_split(_linears(), mesh["tp"]))
    for refused in (build, lambda: _train(model, make(model.parameters()))):
        assert "shares its steps with ranks" in error_of(refused)
    wanted, engine = _linears(), build(mesh["dp"].get_group())
    for batch in _data():
        engine.train_batch(iter([batch]))
    _train(wanted, make(wanted.parameters(), mesh["dp"].get_group()))
    _check_values(engine.module, wanted)


@pytest.mark.parametrize("target", ["deepspeed"])
@pytest.mark.parametrize("options", [{"zero": 1}, {"zero": 2}], ids=str)
@on_ranks(2)
def test_flat_pieces_are_refused(options: Any, target: str) -> None:
    mesh = slapo.init_mesh(dp=2, device="cpu")
    sch = slapo.create_schedule(_linears(), group=mesh["tp"])
    given = {"loss_fn": nn.functional.mse_loss, "optimizer": OPTIMIZERS["adafactor"], **options}
    error = error_of(lambda: slapo.build(sch, target, mesh=mesh, **given))
    stage = options["zero"]
    assert f"Adafactor computes steps from whole tensors, but ZeRO stage {stage} has flat" in error


# --- what a step depends on ----------------------------------------------------------------------
ELEMENTWISE = ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam"]
ELEMENTWISE += ["RMSprop", "Rprop", "SGD"]


def test_what_a_step_depends_on() -> None:
    params = list(_linears().parameters())
    for name, make in OPTIMIZERS.items():
        found = reach_of_steps(make(params))
        wanted = dict.fromkeys(params, ELEMENT if name == "adamw" else TENSOR)
        if name == "muon":
            wanted |= {p: ELEMENT for p in params if p.dim() == 1}
        assert found == wanted, name
    muon = torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.0)
    for optimizer, reach in [
        *((getattr(torch.optim, name)(params), ELEMENT) for name in ELEMENTWISE),
        (muon, TENSOR),
        (Coupled(params), MODEL),
        (torch.optim.LBFGS(params), MODEL),  # it evaluates the model
    ]:
        assert set(reach_of_steps(optimizer).values()) == {reach}, optimizer


class Hidden(torch.optim.Optimizer):
    """Has an optimizer in an unusual attribute."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})
        self.parts = SimpleNamespace(inner=torch.optim.SGD(params, lr=1.0))

    def step(self) -> None:  # type: ignore[override]
        self.parts.inner.step()


@pytest.mark.parametrize("make", [MuonAndAdam, Hidden])
def test_a_trial_leaves_no_trace(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = _linears()
    optimizer = make(list(model.parameters()))
    _train(model, optimizer)
    before, values = copy.deepcopy(vars(optimizer)), copy.deepcopy(model.state_dict())
    reach_of_steps(optimizer)
    assert str(optimizer.parts) == str(before["parts"])
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert all(p.grad is not None for p in model.parameters())
    assert ("Hidden could not be tested on small tensors" in caplog.text) == (make is Hidden)
