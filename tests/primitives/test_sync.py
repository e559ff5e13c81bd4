"""``.sync``: what is registered where; ``golden/mistakes`` has the syncs that are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo
from slapo import Schedule
from slapo.hooks import get_hooks
from tests.fingerprint import refused
from tests.graph.served import make


def node(module: nn.Module) -> Schedule:
    return slapo.create_schedule(nn.Sequential(module))["0"]


def column() -> Schedule:
    return node(nn.Linear(4, 4)).shard("weight", 0).shard("bias", 0)


def row() -> Schedule:
    return node(nn.Linear(4, 4)).shard("weight", 1)


def plain() -> Schedule:
    return node(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("op", "modes", "kwargs"),
    [
        ("all_reduce", {"fwd_post", "bwd_post"}, {}),
        ("all_gather", {"fwd_pre", "fwd_post"}, {"axis": 1}),
        ("reduce_scatter", {"fwd_post"}, {"axis": 1}),
        ("scatter", {"fwd_post"}, {"axis": 1}),
        *((spec, {"fwd_pre", "fwd_post"}, {}) for spec in ("RS->SR", "RR->RS", "SR->RR")),
    ],
)
def test_each_op_in_each_mode(op: str, modes: set[str], kwargs: Any) -> None:
    for mode in ("fwd_pre", "fwd_post", "bwd_post"):
        sch = plain()
        if mode in modes:
            assert sch.sync(mode, op, **kwargs) is sch
            hooks = get_hooks(sch.mod)
            assert {m: len(h) for m, h in hooks.items() if h} == {mode: 1}
        else:
            with refused(sch, ValueError, f"works in modes .*, not in '{mode}'"):
                sch.sync(mode, op, **kwargs)


def test_good_syncs_of_sharded_modules(pair: None) -> None:
    row().sync("fwd_pre", "RR->RS").sync("fwd_post", "all_reduce")
    row().sync("fwd_post", "reduce_scatter", axis=1).sync("fwd_post", "all_gather", axis=1)
    column().sync("fwd_pre", "SR->RR").sync("fwd_post", "RS->SR")
    column().sync("bwd_post", "all_reduce").sync("fwd_post", "RS->RR")
    for axis in (-1, 1, 2, 3):  # one from the front may be the last
        sch = column().sync("fwd_post", "all_gather", axis=axis)
        assert sch.mod(torch.ones([2] * max(axis, 1) + [4])).shape[-1] == 4
    node(nn.Conv2d(4, 4, 3)).shard("weight", 0).sync("fwd_post", "all_gather", axis=1)
    gathered = column().sync("fwd_pre", "all_gather", axis=1, tensor_parallel_output_grad=False)
    gathered.sync("bwd_post", "all_reduce")


def test_functions_become_hooks_of_the_mode() -> None:
    seen: list[tuple[str, Any]] = []

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(("before", type(module)))
        return (inputs[0] + 1,)

    def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append(("after", len(inputs)))
        return output * 2

    def backward(module: nn.Module, grad_in: tuple[Any, ...], grad_out: tuple[Any, ...]) -> Any:
        seen.append(("backward", len(grad_in)))
        return (grad_in[0] * 10,)

    sch = node(nn.Identity())
    sch.sync("fwd_pre", before).sync("fwd_post", after).sync("bwd_post", backward)
    assert get_hooks(sch.mod) == {
        "fwd_pre": [before],
        "fwd_post": [after],
        "bwd_post": [backward],
    }
    x = torch.ones(3, requires_grad=True)
    y = sch.mod(x)
    y.sum().backward()
    assert torch.equal(y, torch.full((3,), 4.0))
    assert torch.equal(x.grad, torch.full((3,), 20.0))
    assert seen == [("before", nn.Identity), ("after", 1), ("backward", 1)]
    assert sch.metadata.primitives["sync"] == [
        "fwd_pre before",
        "fwd_post after",
        "bwd_post backward",
    ]


def two() -> nn.Module:
    return make(lambda self, *, mask=None, x: (mask, x))


def test_the_first_tensor_is_meant(pair: None) -> None:
    sch = node(two()).sync("fwd_pre", "RR->RS").sync("fwd_post", "scatter", axis=0)
    flag, x = sch.mod(mask=None, x=torch.ones(4, 6))
    assert flag is None
    assert x.shape == (2, 3)


def test_masks_come_with_the_reduction_of_a_vocabulary(pair: None) -> None:
    sch = node(nn.Embedding(8, 3))
    table = sch.mod.weight.detach().clone()
    sch.shard("weight", 0).sync("fwd_post", "all_reduce")
    out = sch.mod(torch.tensor([[1, 4], [7, 3]]))  # rank 1 has rows 4 to 7; nothing is summed here
    assert torch.equal(out[0, 1], table[4])
    assert torch.equal(out[1, 0], table[7])
    assert out[0, 0].abs().sum() == out[1, 1].abs().sum() == 0
    # Called by keyword, too.
    assert torch.equal(sch.mod(input=torch.tensor([5])), table[5:6])


@pytest.mark.filterwarnings("error")
def test_hooks_are_compiled_with_the_model_and_without_a_warning() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    wanted = model(x)
    sch = slapo.create_schedule(model)
    sch["0"].shard("weight", axis=0).sync("bwd_post", "all_reduce", argument="input")
    sch["1"].shard("weight", axis=1).sync("fwd_pre", "SR->RS").sync("fwd_post", "all_reduce")
    compiled = torch.compile(sch.mod, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted)
