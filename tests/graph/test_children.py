"""Children that stay calls: a capture follows what they return, or refuses it."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.errors import TraceError
from tests.graph.served import assert_alike, make, rewritten, trace


class Child(nn.Module):
    """A leaf whose forward is a function."""

    traceable = False

    def __init__(self, forward: Any, **attributes: Any) -> None:
        super().__init__()
        self.body = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def above(child: nn.Module) -> nn.Module:
    """Asks for a size of what the child returns."""
    return make(lambda s, x: divided(s.child(s.emb(x))), child=child, emb=nn.Linear(4, 8))


def divided(y: Tensor) -> Tensor:
    return y.sum(1) / y.shape[1]


def in_both(self: Any, x: Tensor) -> Any:
    x = nn.functional.avg_pool1d(x, 2)
    return (x, x * 2) if self.training else x


def structured(self: Any, x: Tensor) -> Any:
    rows = x.flatten(0, 1)
    return {"rows": rows, "count": x.size(1), "two": (2, None), "shape": x.shape}


def keeps_table(self: Any, x: Tensor) -> Tensor:
    if self.table is None or len(self.table) < x.shape[1]:
        self.table = torch.arange(x.shape[1], device=x.device)[:, None].float()
    return x * self.table[: x.shape[1]]


def rows_one_by_one(self: Any, x: Tensor) -> Tensor:
    """The path depends on the data, the result is like the input."""
    out = torch.zeros_like(x)
    for row in (x.sum((1, 2)) > 0).nonzero()[:, 0].tolist():
        out[row] = x[row]
    return out


def two_widths(s: Any, x: Tensor) -> Tensor:
    return s.box(s.a(x)) + s.box(s.b(x))


def reads_structure(s: Any, x: Tensor) -> Any:
    found = s.child(x)
    rows, count = found["rows"], found["count"] + found["two"][0]
    known = 0 if found["two"][1] is None else 1
    return rows.new_ones(rows.size(0)), x.new_zeros(count), known, found["shape"].numel()


def sums_parts(s: Any, x: Tensor) -> Tensor:
    found = s.child(x)
    return found[0] + found[1] if isinstance(found, tuple) else found


def same_object(s: Any, x: Tensor) -> Tensor:
    return x * 2 if s.child(x) is x else x


def none_of_parts(s: Any, x: Tensor) -> Tensor:
    y, w = s.child(x)
    match w:
        case None:
            return y * 3  # type: ignore[no-any-return]
    return y  # type: ignore[no-any-return]


def mean(self: Any, x: Tensor) -> Tensor:
    return x.sum(-1) / x.shape[-1]


#: A module, and the shapes that it is called with: the first is the example.
CASES: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "filled up": (
        lambda: above(
            Child(lambda s, x: nn.functional.pad(x, (0, 0, 0, max(0, 16 - x.shape[1])), value=1.0))
        ),
        [(2, 20, 4), (2, 5, 4), (3, 16, 4)],
    ),
    "two widths": (
        lambda: make(two_widths, a=nn.Linear(4, 8), b=nn.Linear(4, 16), box=Child(mean)),
        [(2, 7, 4), (3, 5, 4)],
    ),
    "siblings with other tables": (
        lambda: make(
            lambda s, x: sum(divided(part(x)) for part in s.parts),
            parts=nn.ModuleList(
                Child(lambda s, x: x[:, : max(s.widths)].contiguous(), widths={width: 1})
                for width in (2, 6)
            ),
        ),
        [(2, 7, 8), (2, 8, 8)],
    ),
    "another structure in eval mode": (
        lambda: make(sums_parts, child=Child(in_both)),
        [(3, 4, 6), (2, 4, 8)],
    ),
    "a structure": (lambda: make(reads_structure, child=Child(structured)), [(3, 5, 4), (2, 7, 4)]),
    "large steps": (
        lambda: make(lambda s, x: x.new_zeros(s.child(x).size(-1) * 2), child=nn.AvgPool1d(16)),
        [(2, 3, 20), (2, 3, 100)],
    ),
    "another layout": (
        lambda: make(
            lambda s, x: s.child(x).transpose(1, 2).view(-1),
            child=Child(lambda s, x: x.transpose(1, 2)),
        ),
        [(3, 5, 4), (2, 7, 3)],
    ),
    "written in place": (
        lambda: make(
            lambda s, x: s.child(x).add_(1),
            child=Child(lambda s, x: x * s.fc.weight.sum(), fc=nn.Linear(5, 6)),
        ),
        [(3, 4, 5), (2, 7, 5)],
    ),
    "a table": (lambda: above(Child(keeps_table, table=None)), [(2, 7, 4), (2, 5, 4), (2, 20, 4)]),
    "rows": (lambda: above(Child(rows_one_by_one)), [(2, 7, 4), (3, 5, 4)]),
    "its input": (lambda: make(same_object, child=Child(lambda s, x: x)), [(3, 4), (2, 5)]),
    "a copy": (lambda: make(same_object, child=Child(lambda s, x: x + 0)), [(3, 4), (2, 5)]),
    "none": (
        lambda: make(none_of_parts, child=Child(lambda s, x: (x + 1, None))),
        [(3, 4), (2, 5)],
    ),
    "a constant": (
        lambda: make(
            lambda s, x: s.child(x, 2) + s.child(x, 3) + s.child(x, 2),
            child=Child(lambda s, x, factor: x * factor),
        ),
        [(3, 5), (1, 2)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_results_of_leaves_are_followed(name: str) -> None:
    build, (example, *shapes) = CASES[name]
    plain = build()
    module = rewritten(copy.deepcopy(plain), torch.rand(example), recursive=False)
    for training in (True, False):
        plain.train(training), module.train(training)
        for shape in (*shapes, example):
            assert_alike(module, plain, torch.rand(shape), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_modules_are_leaves() -> None:
    fused = torch.jit.script(nn.Sequential(nn.Linear(5, 6), nn.GELU()))
    plain = make(lambda s, x: s.fused(x).view(x.size(0) * x.size(1), -1), fused=fused)
    module = rewritten(plain, torch.ones(3, 4, 5))
    x = torch.randn(2, 7, 5)
    assert torch.equal(module(x), fused(x).view(14, 6))
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    failing = make(lambda s, x: s.fused(x) if x.sum() > 0 else x, fused=fused)
    with pytest.warns(UserWarning, match="only real data has"):
        assert not slapo.create_schedule(failing).trace(tracer="huggingface", example_inputs=x)


def test_sizes_that_a_leaf_needs_equal_fail_as_in_the_leaf() -> None:
    masked = Child(lambda s, x, mask: x + mask[None, :, None])
    plain = make(lambda s, ids, mask: s.masked(s.emb(ids), mask) * 2, masked=masked)
    plain.emb = nn.Embedding(9, 4)
    ids, mask = torch.ones(5, 5, dtype=torch.long), torch.rand(5)
    module = rewritten(copy.deepcopy(plain), ids, mask)
    assert_alike(module, plain, ids[:2], mask)
    with pytest.raises(RuntimeError, match=r"size of tensor a \(3\)|must match"):
        module(ids[:2, :3], mask)


def test_a_data_dependent_result_that_is_not_like_the_input_fails_at_the_call() -> None:
    """Its size is not known before; one that is like the input is served."""
    module = trace(above(Child(lambda s, x: x[:, x[0, :, 0] > 0])), torch.rand(2, 7, 4))
    x = torch.rand(2, 7, 4)
    assert module(x).shape == (2, 8)  # without rewrites it runs its own forward
    rewritten_module = rewritten(above(Child(lambda s, x: x[:, x[0, :, 0] > 5])), x)
    with pytest.raises(TraceError, match=r"'child' returned \(2, \d, 8\)"):
        rewritten_module(x)


def test_a_leaf_that_returns_other_structures_in_two_calls_is_refused() -> None:
    child = Child(lambda s, x, several: (x, x) if several else x)
    module = make(lambda s, x: s.child(x, True)[0] + s.child(x, False), child=child)
    with pytest.warns(UserWarning, match="'child' returns results of different structure"):
        assert not slapo.create_schedule(module).trace(
            tracer="huggingface", recursive=False, example_inputs=torch.rand(2, 3)
        )


def sets_aux(self: Any, x: Tensor) -> Tensor:
    y = self.fc(x)
    self.aux = y.square().mean()
    return y


def fills_list(self: Any, x: Tensor, to: list[Tensor]) -> Tensor:
    to.append(x.mean())
    return x * 2


def reads_list(s: Any, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    return s.child(x, found) + sum(found)


@pytest.mark.parametrize(
    ("child", "forward"),
    [
        (Child(sets_aux, fc=nn.Linear(4, 4), aux=None), lambda s, x: (s.child(x), s.child.aux)),
        (Child(sets_aux, fc=nn.Linear(4, 4), aux=0.0), lambda s, x: s.child(x) + s.child.aux),
        (Child(fills_list), reads_list),
    ],
)
def test_what_a_leaf_leaves_behind_and_its_parent_reads_is_equal_or_refused(
    child: nn.Module, forward: Any
) -> None:
    plain = make(forward, child=child)
    sch = slapo.create_schedule(copy.deepcopy(plain))
    x = torch.rand(2, 7, 4)
    with pytest.warns(UserWarning, match="'child'"):
        assert not sch.trace(tracer="huggingface", recursive=False, example_inputs=x)
    assert_alike(sch.mod, plain, x)


def test_what_a_leaf_does_to_generators_is_undone() -> None:
    def seeds(s: Any, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x + torch.rand_like(x)

    module, x = nn.Sequential(Child(seeds), nn.Linear(4, 4)), torch.rand(3, 4)
    state = torch.get_rng_state()
    rewritten(module, x)
    assert torch.equal(torch.get_rng_state(), state)


def test_hooks_of_leaves_and_entered_modules_run_once() -> None:
    plain = make(
        lambda s, x: s.entered(s.leaf(x)), entered=nn.Sequential(nn.ReLU()), leaf=nn.ReLU()
    )
    for part in (plain, plain.entered, plain.leaf):
        part.register_forward_hook(lambda _, args, out: out * 2 + 1)
    module = rewritten(copy.deepcopy(plain), torch.ones(3, 5))
    assert_alike(module, plain, torch.randn(3, 5))
    plain.entered.register_full_backward_hook(lambda m, i, o: (i[0] * 2,))
    module.entered.register_full_backward_hook(lambda m, i, o: (i[0] * 2,))
    assert_alike(module, plain, torch.randn(3, 5).requires_grad_())


def test_models_on_meta_and_with_weights_share_code() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    with slapo.init_empty_weights():
        empty = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    module = rewritten(empty, torch.rand(3, 4))
    assert all(p.is_meta for p in module.parameters())
    module.to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert_alike(module, plain, torch.rand(3, 4))


@pytest.mark.parametrize("tracer", ["pytorch", "huggingface"])
def test_a_norm_that_counts_may_be_taken_out(tracer: str) -> None:
    """Captures to come see a stand-in of it, to whose statistics its forward writes."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    module = copy.deepcopy(plain)
    sch = slapo.create_schedule(module)
    inputs = {} if tracer == "pytorch" else {"example_inputs": torch.rand(3, 4)}
    assert sch.trace(tracer=tracer, **inputs)
    sch.fuse(sch.find(lambda x: F.relu(slapo.call_module("1", x))), name="NormRelu")
    for training, size in ((True, 3), (True, 5), (False, 7), (True, 3)):
        x = torch.rand(size, 4)
        torch.testing.assert_close(module.train(training)(x), plain.train(training)(x))
    held = dict(module.named_buffers())
    for name, buffer in plain[1].named_buffers():
        torch.testing.assert_close(held[f"NormRelu_0.1.{name}"], buffer)


def test_a_child_may_have_attributes_of_any_name() -> None:
    child: Any = make(lambda self, x: self.fc(x) * self.trace, fc=nn.Linear(4, 4))
    child.origin, child.trace = "somewhere", 3
    plain = nn.Sequential(child, nn.ReLU())
    for flatten in (True, False):
        assert_alike(
            rewritten(copy.deepcopy(plain), torch.rand(3, 4), flatten=flatten),
            plain,
            torch.rand(3, 4),
        )
