"""Tensor-parallel schedules on real processes, against the same model on one process."""

import copy
import traceback
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import slapo
from slapo.sharding.shards import shards_of
from slapo.wrapper import innermost
from tests.distributed import run_distributed
from tests.sharding.parallel_models import CASES, Case

pytestmark = pytest.mark.distributed

# In float64, ranks add up the same products in another order: sums of some hundreds of numbers
# around 1 differ in the last three or four of sixteen digits. A wrong schedule is off by far more.
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def gathered(module: nn.Module, name: str, tensor: Tensor, group: Any) -> Tensor:
    spec = shards_of(module).get(name)
    return tensor if spec is None else spec.gather(tensor, group)


def check_case(case: Case, group: Any = None) -> None:
    """Outputs, gradients of input and parameters, and buffers."""
    torch.manual_seed(0)
    model = case.make().double()
    reference = copy.deepcopy(model)
    names = list(model.state_dict())
    inputs = case.inputs()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    sch = slapo.create_schedule(model, group=group)
    case.schedule(sch)
    scheduled, _ = slapo.build(sch)
    assert not case.keeps_names or list(scheduled.state_dict()) == names
    x, y = (inputs.clone().requires_grad_(inputs.is_floating_point()) for _ in range(2))
    expected, actual = reference(x), scheduled(y)
    torch.testing.assert_close(actual, expected, **CLOSE)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (actual * weight).sum().backward()
    if x.grad is not None:
        torch.testing.assert_close(y.grad, x.grad, **CLOSE, msg=lambda m: f"input: {m}")
    check_state(reference, scheduled, sch.group)
    # A copy, as Verify takes one, computes the same.
    torch.testing.assert_close(copy.deepcopy(scheduled).eval()(y), reference.eval()(x), **CLOSE)


def check_state(reference: nn.Module, scheduled: nn.Module, group: Any) -> None:
    sharded = 0
    for path, module in reference.named_modules():
        if not (module._parameters or module._buffers):
            continue
        try:
            own = innermost(scheduled.get_submodule(path))
        except AttributeError:  # packed with others; else the names have told
            continue
        for name, param in module._parameters.items():
            if param is None:
                continue
            local = own._parameters[name]
            assert local is not None
            assert local.grad is not None, f"{path}.{name} has no gradient"
            assert param.grad is not None
            full = gathered(own, name, local.grad, group)
            torch.testing.assert_close(
                full, param.grad, **CLOSE, msg=lambda m, n=name, p=path: f"{p}.{n}: {m}"
            )
            if name in shards_of(own):
                sharded += 1
                assert local.orig_shape == param.shape
                assert local.numel() < param.numel()
        for name, buffer in module._buffers.items():
            local_buffer = own._buffers[name]
            if buffer is not None and local_buffer is not None:
                torch.testing.assert_close(gathered(own, name, local_buffer, group), buffer)


def run_cases(rank: int, world_size: int, names: list[str]) -> dict[str, str]:
    """All cases in one job, for processes take longer to start than a case to run."""
    failures = {}
    for name in names:
        try:
            check_case(CASES[name])
        except Exception:
            failures[name] = f"on rank {rank}:\n{traceback.format_exc()}"
    return failures


@cache
def failures_of(world_size: int) -> dict[str, str]:
    reports = run_distributed(run_cases, world_size, list(CASES))
    return {name: text for report in reports for name, text in report.items()}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_schedule_computes_what_the_model_does(name: str, world_size: int) -> None:
    failures = failures_of(world_size)
    assert name not in failures, failures[name]


def run_in_part_of_a_mesh(rank: int, world_size: int) -> None:
    """Two groups of two, side by side."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    for name in ("column-row", "vocabulary", "sequence parallel", "Conv2d and BatchNorm2d"):
        check_case(CASES[name], mesh["tp"])


def test_a_group_may_be_a_part_of_the_world() -> None:
    run_distributed(run_in_part_of_a_mesh, 4)


def run_half_precision(rank: int, world_size: int) -> None:
    """Under autocast a row-parallel layer gives what the layer itself would."""
    torch.manual_seed(0)
    model = CASES["column-row"].make()
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    CASES["column-row"].schedule(sch)
    x = CASES["column-row"].inputs()
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = model(x), reference(x)
    assert actual.dtype is expected.dtype is torch.bfloat16
    # bfloat16 has 8 bits: each rank's part is rounded, so is their sum.
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_autocast() -> None:
    run_distributed(run_half_precision, 2)
