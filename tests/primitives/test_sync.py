"""``.sync``: what is registered where, and the syncs that contradict a sharded module."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo
from slapo import Schedule
from slapo.hooks import get_hooks
from tests.fingerprint import refused


def node(module: nn.Module) -> Schedule:
    return slapo.create_schedule(nn.Sequential(module))["0"]


def column() -> Schedule:
    return node(nn.Linear(4, 4)).shard("weight", 0).shard("bias", 0)


def row() -> Schedule:
    return node(nn.Linear(4, 4)).shard("weight", 1)


def vocabulary() -> Schedule:
    return node(nn.Embedding(4, 4)).shard("weight", 0)


def table_columns() -> Schedule:
    return node(nn.Embedding(4, 4)).shard("weight", 1)


def conv_column() -> Schedule:
    return node(nn.Conv2d(4, 4, 3)).shard("weight", 0).shard("bias", 0)


def reduced() -> Schedule:
    return row().sync("fwd_post", "all_reduce")


def gathered_input() -> Schedule:
    return column().sync("fwd_pre", "all_gather", axis=1)


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


#: Schedule, call and message; beside those of ``tests/golden/mistakes``.
BAD: dict[str, tuple[Callable[[], Schedule], tuple[Any, ...], dict[str, Any], str]] = {
    "scatter a partial sum": (row, ("fwd_post", "scatter"), {"axis": 1}, "Partial()"),
    "reshard a partial sum": (row, ("fwd_post", "RS->RR"), {}, "Partial()"),
    "gather partial rows": (vocabulary, ("fwd_post", "all_gather"), {"axis": 0}, "Partial()"),
    "sum a slice's gradient": (column, ("fwd_post", "all_reduce_grad"), {}, "holds a slice"),
    "reduce-scatter a slice": (column, ("fwd_post", "reduce_scatter"), {"axis": -1}, "a slice"),
    "scatter a slice": (column, ("fwd_post", "scatter"), {"axis": -1}, "a slice"),
    "reduce columns": (table_columns, ("fwd_post", "all_reduce"), {}, "a slice"),
    "another axis, from the front": (column, ("fwd_post", "all_gather"), {"axis": 0}, "axis=-1"),
    "another axis of images": (conv_column, ("fwd_post", "all_gather"), {"axis": -1}, "axis=-3"),
    "another layout": (column, ("fwd_post", "SR->RS"), {}, "is 'RS' in a reshard, not 'SR'"),
    "gather what is whole": (reduced, ("fwd_post", "all_gather"), {"axis": -1}, "Replicate()"),
    "gather the input of rows": (row, ("fwd_pre", "all_gather"), {"axis": -1}, "expects its input"),
    "whole input of rows": (row, ("fwd_pre", "RS->RR"), {}, "is 'RS' in a reshard, not 'RR'"),
    "gradient of a slice": (row, ("bwd_post", "all_reduce"), {}, "already complete"),
    "gradient of a gathered input": (gathered_input, ("bwd_post", "all_reduce"), {}, "complete"),
    "an axis that is none": (
        plain,
        ("fwd_post", "scatter"),
        {"axis": True},
        "needs an axis of the activation",
    ),
    "odd letters": (plain, ("fwd_post", "RX->RR"), {}, "pass one of"),
    "no change": (plain, ("fwd_post", "RS->RS"), {}, "pass one of"),
    "two sharded axes": (plain, ("fwd_post", "SS->RR"), {}, "pass one of"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_sync_changes_nothing(name: str, pair: None) -> None:
    make, args, kwargs, message = BAD[name]
    sch = make()
    with refused(sch, ValueError, message):
        sch.sync(*args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (("fwd_post", "scatter"), {"axis": 1, "dim": 1}, r"does not take \['dim'\]"),
        (("fwd_post", 3), {}, "sync_op_or_fn is 3; pass a string or a function"),
    ],
)
def test_wrong_arguments(args: Any, kwargs: Any, message: str) -> None:
    sch = plain()
    with refused(sch, TypeError, message):
        sch.sync(*args, **kwargs)


@pytest.mark.parametrize("axis", [-1, 1, 2, 3])
def test_an_axis_from_the_front_may_fit(axis: int, pair: None) -> None:
    column().sync("fwd_post", "all_gather", axis=axis)


def test_it_is_checked_again_when_the_tensor_is_there(pair: None) -> None:
    sch = column().sync("fwd_post", "all_gather", axis=1)
    assert sch.mod(torch.ones(2, 4)).shape == (2, 4)
    with pytest.raises(ValueError, match=r"sharded along axis -1, not 1; pass axis=-1"):
        sch.mod(torch.ones(2, 3, 4))


def test_good_syncs_of_sharded_modules(pair: None) -> None:
    row().sync("fwd_pre", "RR->RS").sync("fwd_post", "all_reduce")
    row().sync("fwd_post", "reduce_scatter", axis=1).sync("fwd_post", "all_gather", axis=1)
    column().sync("fwd_pre", "SR->RR").sync("fwd_post", "RS->SR")
    column().sync("bwd_post", "all_reduce").sync("fwd_post", "RS->RR")
    conv_column().sync("fwd_post", "all_gather", axis=1)
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


class Two(nn.Module):
    def forward(self, *, mask: Any = None, x: Tensor) -> tuple[Any, Tensor]:
        return mask, x


def test_the_first_tensor_is_meant(pair: None) -> None:
    sch = node(Two()).sync("fwd_pre", "RR->RS").sync("fwd_post", "scatter", axis=0)
    flag, x = sch.mod(mask=None, x=torch.ones(4, 6))
    assert flag is None
    assert x.shape == (2, 3)


def test_calls_without_tensors_say_so() -> None:
    sch = node(Two()).sync("fwd_pre", "RR->RS")
    with pytest.raises(TypeError, match="the call has no tensor argument"):
        sch.mod(x=3)
    sch = node(Two()).sync("fwd_post", "all_reduce")
    with pytest.raises(TypeError, match="the output is a tuple without a tensor; put"):
        sch.mod(x=3)


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


def test_masks_of_ones_own_are_not_doubled(pair: None) -> None:
    from slapo.sharding.vocab import vocabulary_hooks

    sch = node(nn.Embedding(8, 3))
    table = sch.mod.weight.detach().clone()
    before, after = vocabulary_hooks(1, 2, 8, reduce=lambda part: part)
    sch.shard("weight", 0).sync("fwd_pre", before).sync("fwd_post", after)
    assert {m: len(h) for m, h in get_hooks(sch.mod).items()} == {
        "fwd_pre": 1,
        "fwd_post": 1,
        "bwd_post": 0,
    }
    out = sch.mod(torch.tensor([2, 6]))
    assert torch.equal(out[1], table[6])
    assert out[0].abs().sum() == 0


def test_a_module_that_is_not_called_any_more_is_refused() -> None:
    inner = nn.Sequential(OrderedDict(fc=nn.Linear(2, 2), act=nn.ReLU()))
    sch = slapo.create_schedule(nn.Sequential(inner, nn.ReLU()))
    sch.trace(flatten=True)
    with refused(sch, slapo.SlapoError, "'0' was inlined when the root"):
        sch["0"].sync("fwd_post", "all_reduce")
    sch["0.fc"].sync("fwd_post", "all_reduce")  # still a call of the graph


def test_a_gradient_of_an_output_is_summed_once(pair: None) -> None:
    sch = column()
    sch.sync("fwd_post", "all_gather", axis=-1)
    with pytest.raises(ValueError, match="'all_gather' sums the gradient of the module's output"):
        sch.sync("fwd_post", "all_reduce_grad")
    sch = row()
    sch.sync("fwd_post", "all_reduce").sync("fwd_post", "all_reduce_grad")
    with pytest.raises(ValueError, match="'all_reduce_grad' sums the gradient"):
        sch.sync("fwd_post", "all_reduce_grad")


@pytest.mark.parametrize("mode", ["fwd_post", "bwd_post"])
def test_what_torchscript_has_compiled_takes_no_hooks(mode: str) -> None:
    sch = slapo.create_schedule(nn.Sequential(torch.jit.script(nn.Linear(4, 4))))
    with pytest.raises(ValueError, match="put the sync on the module around it"):
        sch["0"].sync(mode, "all_reduce")
    with pytest.raises(ValueError, match="put the sync on the module around it"):
        sch["0"].checkpoint().sync(mode, "all_reduce")


@pytest.mark.filterwarnings("error")
def test_hooks_are_compiled_with_the_model_and_without_a_warning() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    wanted = model(x)
    sch = slapo.create_schedule(model)
    sch["0"].shard("weight", axis=0).sync("bwd_post", "all_reduce", argument="input")
    sch["1"].shard("weight", axis=1).sync("fwd_pre", "SR->RS").sync("fwd_post", "all_reduce")
    compiled = torch.compile(sch.mod, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted)
