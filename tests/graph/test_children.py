"""Children that stay calls: what the graph above believes of them is true, or it is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo


class Above(nn.Module):
    """Asks for a size of what its child returns."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.emb = nn.Linear(4, 8)
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(self.emb(x))
        return y.sum(1) / y.shape[1]


class Fill(nn.Module):
    traceable = False

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, 0, max(0, 16 - x.shape[1])), value=1.0)


class Crop(nn.Module):
    traceable = False

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :600].contiguous()


class CropInEval(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x[:, :4]


def crop(module: nn.Module, x: Tensor) -> Tensor:
    return x if module.training else x[:, :4].contiguous()


class CropByHelper(nn.Module):
    traceable = False

    def forward(self, x: Tensor) -> Tensor:
        return crop(self, x)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(-1) / x.shape[-1]


class Shared(nn.Module):
    """One child for two widths."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.box = nn.Linear(4, 8), nn.Linear(4, 16), Mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.box(self.a(x)) + self.box(self.b(x))


class Widths(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.widths = {width: 1}

    def forward(self, x: Tensor) -> Tensor:
        return x[..., : max(self.widths)].contiguous()


class Siblings(nn.Module):
    """Children that differ in the keys of a table alone."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Widths(2), Widths(6)])

    def forward(self, x: Tensor) -> Tensor:
        outputs = [part(x) for part in self.parts]
        return outputs[0].sum(-1) / outputs[0].shape[-1] + outputs[1].sum(-1) / outputs[1].shape[-1]


CASES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "filled up": (lambda: Above(Fill()), (2, 20, 4), (2, 5, 4), {}),
    "cut": (lambda: Above(Crop()), (2, 20, 4), (2, 700, 4), {"recursive": False}),
    "two widths": (Shared, (2, 7, 4), (3, 5, 4), {}),
    "other table": (Siblings, (2, 7, 8), (2, 5, 8), {}),
    "another form in eval": (lambda: Above(CropInEval()), (2, 20, 4), (2, 20, 4), {}),
    "mode read by a helper": (lambda: Above(CropByHelper()), (2, 20, 4), (2, 20, 4), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_believed_of_a_child_is_true_or_refused(name: str) -> None:
    build, example, given, options = CASES[name]
    model = build()
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    x = torch.rand(given)
    if not sch.trace(tracer="huggingface", example_inputs=torch.rand(example), **options):
        return
    for mode in (True, False):
        reference.train(mode)
        sch.mod.train(mode)
        try:
            found = sch.mod(x)
        except slapo.SlapoError:
            continue
        assert torch.allclose(found, reference(x), atol=1e-6)
    sch.mod.train()
    example_input = torch.rand(example)
    assert torch.allclose(sch.mod(example_input), reference.train()(example_input), atol=1e-6)


def test_a_container_whose_form_is_unknown_in_a_mode_is_run_in_both() -> None:
    model = Above(CropInEval())
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    x = torch.rand(2, 20, 4)
    assert sch.trace_until("child", tracer="huggingface", example_inputs=x)
    for mode in (True, False):
        reference.train(mode)
        sch.mod.train(mode)
        assert torch.allclose(sch.mod(x), reference(x), atol=1e-6)


def test_a_container_of_two_widths_is_refused() -> None:
    sch = slapo.create_schedule(Shared())
    with pytest.warns(UserWarning, match="'box' cannot be a graph"):
        assert not sch.trace_until("box", tracer="huggingface", example_inputs=torch.rand(2, 7, 4))


class Table(nn.Module):
    """Keeps a table of the length it has met."""

    traceable = False
    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1], device=x.device)[:, None].float()
        return x * self.table[: x.shape[1]]


def test_what_a_child_notes_in_a_run_without_data_does_not_stay() -> None:
    model = Above(Table())
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    sch.trace(tracer="huggingface", example_inputs=torch.rand(2, 7, 4))
    assert model.child.table is None
    for length in (5, 20):
        x = torch.rand(2, length, 4)
        try:
            found = sch.mod(x)
        except slapo.SlapoError:
            continue
        assert torch.allclose(found, reference(x), atol=1e-6)
    assert torch.allclose(model(x), copy.deepcopy(reference)(x), atol=1e-6)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.aux = y.square().mean()
        return y


class ReadsAux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = Experts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.moe(x), self.moe.aux


def test_what_a_child_sets_and_its_parent_reads_is_named() -> None:
    sch = slapo.create_schedule(ReadsAux())
    with pytest.warns(UserWarning, match="'moe' sets its attribute 'aux'"):
        assert not sch.trace(tracer="huggingface", example_inputs=torch.rand(2, 7, 4))
    assert sch.mod.moe.aux is None


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"steps": 0})()

    def forward(self, x: Tensor) -> Tensor:
        self.config.steps += 1
        return x * self.config.steps


def test_effects_on_a_config_are_refused() -> None:
    sch = slapo.create_schedule(Counts())
    with pytest.warns(UserWarning, match="steps"):
        assert not sch.trace(tracer="huggingface", example_inputs=torch.rand(2, 7))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2

    def forward(self, x: Tensor) -> Tensor:
        return (lambda y: y * self.scale)(x)


def test_attributes_read_by_functions_within_a_forward_are_built_in() -> None:
    sch = slapo.create_schedule(Scaled())
    assert sch.trace()
    with pytest.raises(slapo.SlapoError, match="scale"):
        sch.mod.scale = 5


class Masked(nn.Module):
    traceable = False

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + mask[None, :, None]


class MaskedTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.masked = nn.Embedding(9, 4), Masked()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.masked(self.emb(ids), mask) * 2


def test_only_sizes_that_have_to_be_equal_are_tied() -> None:
    model = MaskedTokens()
    sch = slapo.create_schedule(model)
    ids, mask = torch.ones(5, 5, dtype=torch.long), torch.rand(5)
    assert sch.trace(tracer="huggingface", example_inputs=(ids, mask))
    assert sch.mod(ids[:2], mask).shape == (2, 5, 4)
    with pytest.raises(slapo.SlapoError, match="mask"):
        sch.mod(ids[:2, :3], mask)


class Pick(nn.Module):
    """The length of what it returns depends on the data."""

    traceable = False

    def forward(self, x: Tensor) -> Tensor:
        return x[:, x[0, :, 0] > 0]


class FirstOf(nn.Module):
    """The width of what it returns lies in a buffer."""

    traceable = False
    count: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(count))

    def forward(self, x: Tensor) -> Tensor:
        return x[..., : int(self.count)]


class Sorted(nn.Module):
    """Its path depends on the data, what it returns is like its input."""

    traceable = False

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for row in (x.sum((1, 2)) > 0).nonzero()[:, 0].tolist():
            out[row] = x[row]
        return out


class Block(nn.Module):
    """The child lies deeper."""

    traceable = False

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) * 2


class PerWidth(nn.Module):
    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.emb, self.several = nn.Linear(4, 8), nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        return torch.stack([y.sum(-1) / y.shape[-1] for y in (each(x) for each in self.several)])


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("block", [nn.Sequential, Block])
@pytest.mark.parametrize("child", [Pick(), FirstOf(3)], ids=["pick", "first"])
def test_a_guessed_output_is_tried_on_numbers(child: nn.Module, block: Any, meta: bool) -> None:
    model = Above(block(copy.deepcopy(child)))
    if meta:
        model.to("meta")
    sch = slapo.create_schedule(model)
    with pytest.warns(UserWarning, match=r"depends on values.*leaf"):
        assert not sch.trace(
            tracer="huggingface",
            recursive=False,
            example_inputs=torch.rand(2, 7, 4, device="meta" if meta else "cpu"),
        )


@pytest.mark.parametrize("block", [nn.Sequential, Block])
def test_a_right_guess_serves_all_sizes(block: Any) -> None:
    model = Above(block(Sorted())).double()
    reference = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    assert sch.trace(
        tracer="huggingface", recursive=False, example_inputs=torch.rand(2, 7, 4).double()
    )
    x = torch.randn(3, 5, 4).double()
    assert torch.equal(sch.mod(x), reference(x))


def test_values_that_decide_an_output_are_not_shared() -> None:
    model = PerWidth(FirstOf(8), FirstOf(3))
    sch = slapo.create_schedule(model)
    with pytest.warns(UserWarning, match=r"'several.1'.*depends on values"):
        assert not sch.trace(
            tracer="huggingface", recursive=False, example_inputs=torch.rand(2, 7, 4)
        )


class Shaped(nn.Module):
    """Returns a shape beside the tensor."""

    def __init__(self, child: nn.Module | None = None) -> None:
        super().__init__()
        self.fc, self.child = nn.Linear(8, 8), child

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        if self.child is None:
            return y, x.shape
        z, shape = self.child(y)
        return z.reshape(shape[0] * shape[1], 8).view(shape), shape.numel()


@pytest.mark.parametrize("kwargs", [{}, {"flatten": True}, {"recursive": False}], ids=repr)
@pytest.mark.parametrize("model", [Shaped(), Shaped(Shaped())], ids=["returned", "used"])
def test_shapes_of_inputs_are_those_of_each_call(model: nn.Module, kwargs: Any) -> None:
    model = copy.deepcopy(model)
    sch = slapo.create_schedule(copy.deepcopy(model))
    assert sch.trace(tracer="huggingface", example_inputs=torch.rand(2, 5, 8), **kwargs)
    x = torch.rand(3, 7, 8)
    (ours, size), (theirs, expected) = sch.mod(x), model(x)
    torch.testing.assert_close(ours, theirs)
    assert size == expected
    assert type(size) is type(expected)


class TwoAlike(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return x + y.sum(), y.shape


def test_a_shape_of_one_of_several_inputs_alike_is_refused() -> None:
    sch = slapo.create_schedule(TwoAlike())
    alike = {"x": torch.rand(2, 5), "y": torch.rand(2, 5)}
    with pytest.warns(UserWarning, match=r"one of several tensors.*tuple\(x.shape\)"):
        assert not sch.trace(tracer="huggingface", example_inputs=alike)
    assert sch.trace(tracer="huggingface", example_inputs={**alike, "y": torch.rand(2, 4)})
    assert sch.mod(torch.rand(3, 3), torch.rand(3, 7))[1] == (3, 7)
