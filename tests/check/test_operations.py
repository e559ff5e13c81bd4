"""What operations of hand-written models make of slices and partial sums, right and wrong."""

import copy
import functools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.sharding import reduce_from_group
from slapo.sharding.groups import group_size
from slapo.verify.numeric.harness import gathered_gradients
from slapo.verify.placement import PlacementError, check, rules
from slapo.verify.placement.call import Call, name_of
from slapo.verify.placement.mode import _places_of
from slapo.verify.placement.offline import check_at
from slapo.verify.placement.place import PARTIAL_SUM, NoRule, sliced
from tests.check.verdicts import fake_world
from tests.runtimes.ranks import on_ranks

WIDTH, INNER = 24, 48
X = torch.randn(3, 7, WIDTH)


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    with fake_world(request.param, request.param - 1):
        yield request.param


class Base(nn.Module):
    """A layer, a pair that is split, and a function on the slices in between, of some numbers."""

    def __init__(
        self,
        inside: Callable[[Tensor], Tensor] = F.gelu,
        width: int = INNER,
        inner: int = INNER,
        **numbers: int,
    ) -> None:
        super().__init__()
        self.emb = nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, width), nn.Linear(inner, WIDTH)
        vars(self).update(numbers)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.inside(self.fc1(self.emb(x))))


def split(model: nn.Module, blocks: int = 1, reduces: bool = True) -> slapo.Schedule:
    return split_pair(slapo.create_schedule(model), blocks, reduces)


def split_pair(sch: slapo.Schedule, blocks: int = 1, reduces: bool = True) -> slapo.Schedule:
    sch["fc1"].shard("weight", 0, blocks=blocks).shard("bias", 0, blocks=blocks)
    sch["fc1"].sync("bwd_post", "all_reduce")
    sch["fc2"].shard("weight", 1)
    if reduces:
        sch["fc2"].sync("fwd_post", "all_reduce")
    return sch


def refused(sch: slapo.Schedule, inputs: Any = X) -> PlacementError:
    with pytest.raises(PlacementError) as caught:
        check(sch, inputs)
    return caught.value


# --- writes in place -----------------------------------------------------------------------------
class Shifted(Base):
    """Adds what a function makes of the input."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        return self.fc2(F.gelu(self.fc1(x))) + self.make(x)


def tokens_before(x: Tensor) -> Tensor:
    shifted = torch.zeros_like(x)
    shifted[:, 1:] = x[:, :-1]
    return shifted


def copied_into_a_view(x: Tensor) -> Tensor:
    blank = x.new_zeros(x.shape)
    blank[:, :, :].copy_(x)
    return blank


def parts_of_a_blank(x: Tensor) -> Tensor:
    blank = torch.empty_like(x)
    for token in range(x.shape[1]):
        blank[:, token] = x[:, token]
    return blank


@pytest.mark.parametrize("make", [tokens_before, copied_into_a_view, parts_of_a_blank])
def test_what_is_written_through_a_view_is_not_zero(ranks: int, make: Any) -> None:
    check(split(Shifted(make)), X)
    sch = split(Shifted(make), reduces=False)
    sch.sync("fwd_post", "all_reduce")
    assert "would count once per rank" in str(refused(sch))


def test_partial_gradients_in_a_view_of_zeros(ranks: int) -> None:
    """The backward pass of ``irfft`` writes them there."""

    class Spectral(Base):
        def forward(self, x: Tensor) -> Tensor:
            smooth = torch.fft.irfft(torch.fft.rfft(self.emb(x))[..., :5], n=WIDTH)
            return self.fc2(F.gelu(self.fc1(smooth)))

    sch = slapo.create_schedule(Spectral())
    sch["fc1"].shard("weight", 0).shard("bias", 0)
    sch["fc2"].shard("weight", 1).sync("fwd_post", "all_reduce")
    assert 'add sch["fc1"].sync("bwd_post", "all_reduce")' in str(refused(sch))
    sch["emb"].sync("fwd_post", "all_reduce_grad")
    check(sch, X)


# --- convolutions --------------------------------------------------------------------------------
def short_convolution(outputs: int) -> Base:
    """A depthwise convolution over a packed projection."""

    def inside(h: Tensor) -> Tensor:
        h = model.conv(h.transpose(1, 2)).transpose(1, 2)
        a, b = h.unflatten(-1, (-1, outputs)).sum(-1).chunk(2, -1)
        return a * torch.sigmoid(b)

    model: Any = Base(inside, width=2 * INNER)
    model.conv = nn.Conv1d(2 * INNER, 2 * INNER * outputs, 3, padding=1, groups=2 * INNER)
    return model


@pytest.mark.parametrize("outputs", [1, 3])
def test_filters_are_cut_as_their_channels(ranks: int, outputs: int) -> None:
    for blocks in (2, 1):
        sch = split(short_convolution(outputs), blocks=2)
        sch["conv"].shard("weight", 0, blocks=blocks).shard("bias", 0, blocks=blocks)
        if blocks == 2:
            check(sch, X)
        else:
            assert refused(sch).path == "conv"


# --- sizes ---------------------------------------------------------------------------------------
def by_group(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    return lambda h, groups: function(h.unflatten(-1, (groups, -1))).flatten(-2)


STATISTICS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "normalize": by_group(lambda h: F.normalize(h, dim=-1)),
    "variance": by_group(lambda h: h * torch.rsqrt(h.var(-1, keepdim=True) + 1)),
    "mean": by_group(lambda h: h - h.mean(-1, keepdim=True)),
    "largest": by_group(lambda h: h / h.abs().amax(-1, keepdim=True)),
    "sum": by_group(lambda h: h / h.abs().sum(-1, keepdim=True)),
    "logsumexp": by_group(lambda h: h - h.logsumexp(-1, keepdim=True)),
    "group_norm": lambda h, groups: F.group_norm(h.transpose(1, 2), groups).transpose(1, 2),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_groups_that_were_not_divided(ranks: int, name: str) -> None:
    model: Any = Base(lambda h: STATISTICS[name](h, model.groups), groups=4)
    sch = split(model)
    error = refused(sch)
    assert "in one process" in str(error) or name == "group_norm"
    sch.set("groups", whole=4)
    check(sch, X)


# --- what is computed slice by slice -------------------------------------------------------------
def written_as_a_view(h: Tensor) -> Tensor:
    h.view(h.shape[0], -1).mul_(2)
    return h


def columns_of_tokens(h: Tensor) -> Tensor:
    out = h.clone()
    out[:, :3] = h[:, 1:4] * 2
    return out


def one_token_of_a_copy(h: Tensor) -> Tensor:
    out = torch.empty_like(h)
    for token in range(h.shape[1]):
        out[:, token] = h[:, token]
    return out


def beside_what_all_columns_share(h: Tensor) -> Tensor:
    out = h.new_empty(h.shape)
    out[:, :3].copy_(h[:, :3])
    tokens = torch.arange(float(h.shape[1] - 3))[None, :, None]
    out[:, 3:].copy_(tokens.expand(h.shape[0], -1, h.shape[2]))
    return out


def backwards(h: Tensor) -> Tensor:
    """Numbers of the tokens, from the last to the first, for each column."""
    return torch.arange(h.shape[1]).flip(0)[None, :, None].expand_as(h)


def matrices_of_heads(h: Tensor) -> Tensor:
    """Linear attention by chunks solves one system for each head."""
    x = h.unflatten(-1, (-1, 4)).transpose(1, 2)
    lower = (x @ x.mT).tril(-1)
    eye = torch.eye(h.shape[1])
    solved = torch.linalg.solve_triangular(lower + eye, x, upper=False, unitriangular=True)
    inverse = torch.linalg.inv(2 * eye + 0.01 * (x @ x.mT)).triu()
    return (inverse @ solved).transpose(1, 2).flatten(2)


def masked_tokens(h: Tensor) -> Tensor:
    keep = torch.zeros(h.shape[:2], dtype=torch.bool)
    keep[:, ::2] = True
    out = torch.zeros_like(h)
    out[keep] = h[keep] * 2
    return out


def forked(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Draws from this rank's own state."""

    def draw(h: Tensor) -> Tensor:
        with slapo.get_rng_tracker().fork():
            return function(h)

    return draw


SLICE_BY_SLICE: dict[str, Callable[[Tensor], Tensor]] = {
    "written in place": lambda h: h.relu_(),
    "written as a view": written_as_a_view,
    "columns of tokens": columns_of_tokens,
    "one token of a copy": one_token_of_a_copy,
    "beside what all columns share": beside_what_all_columns_share,
    "gathered tokens": lambda h: h.gather(1, backwards(h)),
    "along dim": lambda h: torch.take_along_dim(h, backwards(h)[:1, :, :1], 1),
    "scattered tokens": lambda h: torch.zeros_like(h).scatter(1, backwards(h), h),
    "gathered by own order": lambda h: h.gather(1, h.argsort(1)),
    "masked tokens": masked_tokens,
    "matrices of heads": matrices_of_heads,
    "random mask": forked(lambda h: h * (torch.rand(h.shape) > 0.5)),
    "random coins": forked(lambda h: h * torch.bernoulli(torch.full(h.shape, 0.5))),
    "random channels": forked(lambda h: F.dropout2d(h.mT.unsqueeze(-1)).squeeze(-1).mT),
    "prelu": lambda h: F.prelu(h, h.new_tensor([0.3])),
    "cummax": lambda h: h.cummax(1).values,
    "std_mean": lambda h: h * torch.std_mean(h, 1, keepdim=True)[0],
    "index_fill of tokens": lambda h: h.index_fill(1, torch.tensor([1]), 0.0),
    "roll": lambda h: h.roll(1, 1),
    "unfold": lambda h: h.unfold(1, 2, 1).sum(-1).repeat(1, 2, 1)[:, : h.shape[1]],
    "fft": lambda h: torch.fft.irfft(torch.fft.rfft(h, dim=1) * 2, n=h.shape[1], dim=1),
    "complex": lambda h: torch.view_as_real(
        torch.view_as_complex(h.unflatten(-1, (-1, 2))) * 1j
    ).flatten(-2),
    "added and multiplied": lambda h: torch.zeros_like(h).add_(F.gelu(h)).mul_(2.0),
}


@pytest.mark.parametrize("name", SLICE_BY_SLICE)
def test_what_is_computed_slice_by_slice(ranks: int, name: str) -> None:
    check(split(Base(SLICE_BY_SLICE[name])), X)
    assert "all_reduce" in str(refused(split(Base(SLICE_BY_SLICE[name]), reduces=False)))


ACROSS: dict[str, Callable[[Tensor], Tensor]] = {
    "gather of columns": lambda h: h.gather(2, torch.arange(h.shape[2]).flip(0).expand_as(h)),
    "roll of columns": lambda h: h.roll(1, 2),
    "roll of all": lambda h: h.roll(1),
    "fft of columns": lambda h: torch.fft.irfft(torch.fft.rfft(h), n=h.shape[2]),
    "unfold of columns": lambda h: h.unfold(2, 2, 2).flatten(-2),
    "tril": lambda h: h.tril(),
    "mask": lambda h: h * (torch.rand(h.shape) > 0.5),
}


@pytest.mark.parametrize("name", ACROSS)
def test_what_needs_other_slices(ranks: int, name: str) -> None:
    assert refused(split(Base(ACROSS[name]))).path in ("", "fc2")


def number_for_each_sample(h: Tensor) -> Tensor:
    return h * torch.rand(h.shape[0], 1, 1)


def test_random_numbers_that_all_channels_share_are_whole(ranks: int) -> None:
    check(split(Base(number_for_each_sample)), X)
    own = split(Base(forked(number_for_each_sample)))
    assert "from this rank's own state" in str(refused(own))


class Images(nn.Module):
    """A convolutional pair around an operation on pixels."""

    def __init__(self, inside: Callable[[Tensor], Tensor], flat: bool) -> None:
        super().__init__()
        kind = nn.Conv1d if flat else nn.Conv2d
        self.fc1, self.fc2 = kind(3, 16, 3, padding=1), kind(16, 5, 1)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.inside(self.fc1(x)))


def unpooled(x: Tensor) -> Tensor:
    values, places = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(values, places, 2, output_size=x.shape)


PIXELS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": nn.MaxPool2d(2),
    "average": nn.AvgPool2d(2),
    "adaptive": nn.AdaptiveAvgPool2d(3),
    "adaptive to one": nn.AdaptiveAvgPool2d(1),
    "adaptive max": nn.AdaptiveMaxPool2d(2),
    "norm": nn.LPPool2d(2, 2),
    "nearest": nn.Upsample(scale_factor=2),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "bicubic": nn.Upsample(scale_factor=2, mode="bicubic"),
    "reflection": nn.ReflectionPad2d(1),
    "replication": nn.ReplicationPad2d(1),
    "max 1d": nn.MaxPool1d(2),
    "average 1d": nn.AvgPool1d(2),
    "adaptive 1d": nn.AdaptiveAvgPool1d(3),
    "linear": nn.Upsample(scale_factor=2, mode="linear"),
    "reflection 1d": nn.ReflectionPad1d(1),
    "antialiased": functools.partial(F.interpolate, size=5, mode="bilinear", antialias=True),
    "antialiased bicubic": functools.partial(F.interpolate, size=5, mode="bicubic", antialias=True),
    "unpooled": unpooled,
    "shuffled": nn.Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(2)),
}


@pytest.mark.parametrize("name", PIXELS)
def test_pools_of_sliced_channels(ranks: int, name: str) -> None:
    flat = "1d" in name or name == "linear"
    x = torch.randn(3, 3, 7) if flat else torch.randn(3, 3, 9, 11)
    check(split(Images(PIXELS[name], flat)), x)
    sch = split(Images(PIXELS[name], flat), reduces=False)
    assert refused(sch, x).suspect == "fc2"


# --- the truth -----------------------------------------------------------------------------------
@on_ranks(2)
def test_what_is_accepted_computes_the_same_on_processes() -> None:
    """But for what draws."""
    cases: dict[str, tuple[nn.Module, Tensor]] = {}
    torch.manual_seed(0)
    for name, inside in SLICE_BY_SLICE.items():
        if not name.startswith("random"):
            cases[name] = (Base(inside), torch.randn(3, 7, WIDTH))
    for name, pool in PIXELS.items():
        flat = "1d" in name or name == "linear"
        x = torch.randn(3, 3, 7) if flat else torch.randn(3, 3, 9, 11)
        cases[name] = (Images(pool, flat), x)
    for each in (tokens_before, copied_into_a_view, parts_of_a_blank):
        cases[each.__name__] = (Shifted(each), torch.randn(3, 7, WIDTH))
    found = {name: difference(model.double(), x.double()) for name, (model, x) in cases.items()}
    assert {name: apart for name, apart in found.items() if apart > 1e-9} == {}


def difference(
    model: nn.Module, x: Tensor, schedule: Callable[[nn.Module], slapo.Schedule] = split
) -> float:
    whole = copy.deepcopy(model)
    sch = schedule(model)
    wanted, found = whole(x), model(x)
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).double()
    (wanted * weight).sum().backward()
    (found * weight).sum().backward()
    apart = [float((found - wanted).detach().abs().max())]
    gradients = gathered_gradients(model, sch.group or dist.group.WORLD)
    for name, grad in gathered_gradients(whole, None).items():
        apart.append(float((gradients[name] - grad).abs().max()))
    return max(apart)


# --- functions of autograd -----------------------------------------------------------------------
class FusedRow(torch.autograd.Function):
    """A product whose backward gets a whole gradient, and slices by what it has kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1)


class FusedRowInTwo(torch.autograd.Function):
    """The same, with a context that is set up behind it."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = FusedRow.backward


class RowByFunction(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, INNER))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight)


@pytest.mark.parametrize("function", [FusedRow, FusedRowInTwo])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_rule_is_asked_where_only_what_was_kept_is_sliced(
    ranks: int, function: Any, is_checkpointed: bool
) -> None:
    before = dict(rules._FUNCTIONS)
    slapo.register_place_rule(
        function, lambda call: PARTIAL_SUM, backward=lambda call: [sliced(2), sliced(1)]
    )
    try:
        for whole in (False, True):
            model = Base()
            model.fc2 = RowByFunction(function)  # type: ignore[assignment]
            sch = slapo.create_schedule(model)
            if not whole:
                sch = split(model, reduces=False)
                sch["fc2"].sync("fwd_post", lambda module, args, out: reduce_from_group(out))
            if is_checkpointed:
                sch["fc2"].checkpoint()
            check(sch, X)
    finally:
        rules._FUNCTIONS.clear()
        rules._FUNCTIONS.update(before)


# --- what only looks right -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("groups", "blocks", "is_right"), [(4, 2, 1), (8, 2, 1), (2, 2, 0), (4, 4, 0)]
)
def test_groups_stay_whole(groups: int, blocks: int, is_right: bool) -> None:
    conv = nn.Conv1d(8, 8, 3, padding=1, groups=groups)
    layers = OrderedDict(fc1=nn.Conv1d(3, 8, 1), conv=conv, fc2=nn.Conv1d(8, 5, 1))
    with fake_world():
        sch = slapo.create_schedule(nn.Sequential(layers))
        for name in ("fc1", "conv"):
            sch[name].shard("weight", 0, blocks=blocks).shard("bias", 0, blocks=blocks)
        sch["fc1"].sync("bwd_post", "all_reduce")
        sch["fc2"].shard("weight", 1, blocks=blocks).sync("fwd_post", "all_reduce")
        if is_right:
            check(sch, torch.randn(3, 3, 7))
        else:
            assert refused(sch, torch.randn(3, 3, 7)).path == "conv"


def written_by_index(h: Tensor) -> Tensor:
    h = h.clone()
    h[..., torch.tensor([0, 1])] = torch.zeros(*h.shape[:2], 2)
    return h


def numbered(h: Tensor) -> Tensor:
    """Of the columns of all ranks: each one writes the numbers of the first ones."""
    out = h.new_empty(h.shape)
    out[:, :3].copy_(h[:, :3])
    out[:, 3:].copy_(torch.arange(float(h.shape[2])).expand(h[:, 3:].shape))
    return out


def scaled_in_part(h: Tensor) -> Tensor:
    scale = torch.ones(h.shape[-1])
    scale[0:5] = torch.arange(5.0)
    return h * scale


LOOK_RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "a number for each column": numbered,
    "a constant that is written through a view": scaled_in_part,
    "scatter of a number": lambda h: h.scatter(-1, torch.zeros(3, 7, 1, dtype=torch.long), 0.0),
    "scatter": lambda h: h.scatter(-1, torch.ones(3, 7, 1, dtype=torch.long), torch.zeros(3, 7, 1)),
    "index_add": lambda h: h.index_add(-1, torch.tensor([1, 2]), torch.ones(3, 7, 2)),
    "index_put": written_by_index,
    "index_fill": lambda h: h.index_fill(-1, torch.tensor([1]), 0.0),
    "a number by the slice": lambda h: h * h.shape[-1] ** -0.5,
    "one coin for a sample, expanded": lambda h: h * _coins().expand_as(h),
    "one coin for a sample, repeated": lambda h: h * _coins().repeat(1, 1, h.shape[-1]),
    "one coin for a sample, chosen by": lambda h: torch.where(_coins().expand_as(h) > 0, h, 0.0),
}


def _coins() -> Tensor:
    with slapo.get_rng_tracker().fork():
        return (torch.rand(3, 1, 1) > 0.5).float()


@pytest.mark.parametrize("name", LOOK_RIGHT)
def test_what_only_looks_right(ranks: int, name: str) -> None:
    refused(split(Base(LOOK_RIGHT[name])))


def test_a_gather_that_is_shorter_than_the_slice(ranks: int) -> None:
    def shorter(h: Tensor) -> Tensor:
        return h.gather(1, torch.zeros(3, 7, model.count, dtype=torch.long))

    model: Any = Base(shorter, inner=12, count=12)
    sch = split(model)
    sch.set("count", whole=12)
    refused(sch)


def test_fixed_bounds_in_a_packed_tensor(ranks: int) -> None:
    def cut(start: int, stop: int) -> slapo.Schedule:
        model: Any = Base(
            lambda h: h[..., model.start : model.stop], width=16, inner=8, start=start, stop=stop
        )
        return split(model, blocks=2)

    check(cut(8, 16).set("start", whole=8).set("stop", whole=16), X)
    if ranks == 2:
        assert "in one process" in str(refused(cut(4, 12)))


# --- what goes by the size of a slice ------------------------------------------------------------
def packed(h: Tensor) -> Tensor:
    q, k, v = h.reshape(*h.shape[:2], 2, -1).chunk(3, -1)  # in two groups, as of CodeGen in four
    return torch.cat([q * 2, k.tanh(), v], -1).flatten(-2)


def by_parts(h: Tensor) -> Tensor:
    parts = h.split(INNER // 2, -1)
    return torch.cat([part.tanh() * (number + 1) for number, part in enumerate(parts)], -1)


def in_a_loop(h: Tensor) -> Tensor:
    for _ in range(h.shape[-1] // 12):
        h = torch.sin(h)
    return h


def expanded(h: Tensor) -> Tensor:
    groups = h.unflatten(-1, (-1, 4)).unsqueeze(3)
    repeated = groups.expand(-1, -1, -1, INNER // h.shape[-1], -1)
    return repeated.cumsum(3).select(3, -1).flatten(-2)


def in_another_order(h: Tensor) -> Tensor:
    return h.sin().exp() if h.shape[-1] == INNER else h.exp().sin()


#: Of a slice they compute something else than of the whole.
BY_SIZE: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": packed,
    "view": lambda h: h.view(*h.shape[:2], 2, -1).flip(-1).flatten(-2),
    "reshape": lambda h: h.reshape(*h.shape[:2], 4, -1).cumsum(-1).flatten(-2),
    "unflatten": lambda h: h.unflatten(-1, (2, -1)).roll(1, -1).flatten(-2),
    "chunk": lambda h: torch.cat(h.view(*h.shape[:2], 4, -1).chunk(2, 3)[::-1], 3).flatten(-2),
    "split": by_parts,
    "expand": expanded,
    "loop": in_a_loop,
    "if": lambda h: h * 2 if h.shape[-1] == INNER else h,
    "if it is small": lambda h: h * 2 if h.shape[-1] < INNER else h,
    "either": lambda h: F.relu(h) if h.shape[-1] == INNER else F.gelu(h),
    "order": in_another_order,
    "tensor of a float": lambda h: h / torch.tensor(float(h.shape[-1])),
    "tensor of an integer": lambda h: h + torch.tensor([h.shape[-1]]),
    "filled": lambda h: h / torch.full((), h.shape[-1]),
    "filled like another": lambda h: h + torch.full_like(h, h.shape[-1]),
    "padded": lambda h: h * F.pad(h.new_ones(1, 0), (0, 1), value=h.shape[-1]),
    "factor": lambda h: torch.add(h, h, alpha=h.shape[-1]),
    "summand": lambda h: h + h.shape[-1],
    "exponent": lambda h: h.abs() ** (h.shape[-1] / INNER),
    "bound": lambda h: h.clamp(max=h.shape[-1] / INNER - 0.5),
}


@pytest.mark.parametrize("name", BY_SIZE)
def test_what_goes_by_the_size_of_a_slice(ranks: int, name: str) -> None:
    error = refused(split(Base(BY_SIZE[name])))
    assert error.path == ""
    assert "in one process" in str(error)


@on_ranks(2)
def test_what_goes_by_the_size_of_a_slice_differs_on_processes() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 7, WIDTH).double()
    found = {name: difference(Base(each).double(), x) for name, each in BY_SIZE.items()}
    assert {name: apart for name, apart in found.items() if apart < 1e-2} == {}


@pytest.mark.parametrize("by_share", [False, True])
def test_what_is_made_in_the_first_run_alone(ranks: int, by_share: bool) -> None:
    """The next ones, and the ranks, find it where it was kept."""

    @functools.cache
    def table(tokens: int, columns: int) -> Tensor:
        return torch.linspace(1, 2, tokens)[:, None].expand(tokens, columns) * 2

    for _ in range(2):
        check(split(Base(lambda h: h * table(h.shape[1], h.shape[2] if by_share else 1))), X)


def skipped_by_a_coin(h: Tensor) -> Tensor:
    for _ in range(6):
        h = torch.sin(h) if torch.rand(()) > 0.5 else h
    return h


class Routed(Base):
    """Each token goes through one of several layers, which one goes by values."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Base() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc2(self.fc1(x))
        rows = x.flatten(0, 1)
        chosen, out = self.router(rows).argmax(-1), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (at,) = torch.where(chosen == number)
            if len(at):
                out = out.index_add(0, at, expert(rows[at]))
        return out.view_as(x)


class Sorted(Base):
    """Rows are sorted by expert; a router of its own reads how many rows each expert gets."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc2(self.fc1(x))
        rows = x.flatten(0, 1)
        order, counts = self.router(rows)
        return (
            torch.zeros_like(rows).index_add(0, order, self.experts(rows[order], counts)).view_as(x)
        )


class Router(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, 3)

    def forward(self, rows: Tensor) -> Any:
        chosen = super().forward(rows).argmax(-1)
        return chosen.sort(stable=True).indices, F.one_hot(chosen, 3).sum(0).tolist()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        parts = rows.split(counts)
        return torch.cat([F.linear(p, w) for p, w in zip(parts, self.weight, strict=True)])


def skipped_by_a_coin_of_python(h: Tensor) -> Tensor:
    for _ in range(6):
        h = torch.sin(h) if random.random() > 0.5 else h
    return h


COINS = [skipped_by_a_coin, skipped_by_a_coin_of_python]


@pytest.mark.parametrize(
    "make", [Routed, Sorted, *(functools.partial(Base, coin) for coin in COINS)]
)
def test_what_goes_by_values(ranks: int, make: Callable[[], nn.Module]) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        sch = split(make())
        for number in range(3 if isinstance(sch.mod, Routed) else 0):
            split_pair(sch[f"experts.{number}"])
        check(sch, X)


def test_one_row_found_by_values(ranks: int) -> None:
    """Rounding routes another number of rows in one process, which is no other size."""

    found = {True: torch.tensor(1), False: torch.tensor(11)}

    class Found(Base):
        def forward(self, x: Tensor) -> Tensor:
            rows = self.emb(x).flatten(0, 1)
            (at,) = torch.where(torch.arange(len(rows)) < found[group_size() > 1])
            return self.fc2(self.fc1(rows[at]))

    check(split(Found()), X)


def test_a_copy_with_other_strides(ranks: int) -> None:
    """A step of the schedule makes one; torch runs other operations for a layer then."""

    class Cut(Base):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, 1:]

    sch = slapo.create_schedule(nn.Sequential(Cut(), Base(), Cut()))
    for number in "012":
        split_pair(sch[number])
    sch["1"].mod.emb = nn.Identity()
    check(sch, X)


def test_a_cast_around_a_sum_over_several_ranks(ranks: int) -> None:
    def summed(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return reduce_from_group(out.double()).float() if group_size() > 1 else out

    sch = split(Base(), reduces=False)
    sch["fc2"].sync("fwd_post", summed)
    check(sch, X)


def test_halves_of_a_packed_tensor(ranks: int) -> None:
    check(split(Base(lambda h: F.glu(h, -1), width=2 * INNER), blocks=2), X)


def test_a_table_of_ones_own_read_by_sliced_tokens(ranks: int) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.begin, self.index = nn.Identity(), nn.Identity()
            self.table = nn.Parameter(torch.randn(12, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            positions = self.index(torch.arange(x.shape[1]).expand(x.shape[:2]))
            return self.begin(x) + self.table[positions]

    for tagged in (True, False):
        sch = slapo.create_schedule(Positions())
        for name in ("begin", "index"):
            sch[name].sync("fwd_post", "scatter", axis=1)
        sch.sync("fwd_post", "all_gather", axis=1, tensor_parallel_output_grad=False)
        if tagged:
            sch.annotate("table", "partial_grad", True)
            check(sch, torch.randn(3, 12, WIDTH))
        else:
            assert "partial_grad" in str(refused(sch, torch.randn(3, 12, WIDTH)))


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_efficient_attention_forward"])
def test_attention_kernels_with_tokens_before_heads_have_no_rule(name: str) -> None:
    """Slices along their dimension 1 are tokens, which would attend to themselves only."""
    func, q = getattr(torch.ops.aten, name).default, torch.empty(2, 6, 4, 8, device="meta")
    call = Call(func, name_of(func), (q, q, q), {}, [q, q, q], [q], [sliced(1)] * 3, 0, 2)
    with pytest.raises(NoRule):
        _places_of(call)


def test_uneven_shares_are_checked_where_they_are_larger_too() -> None:
    """The last of three ranks has two of eight features, which pair up; the others have three."""

    def make() -> Any:
        model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8))

        def schedule(sch: slapo.Schedule) -> None:
            sch["0"].shard("weight", 0, uneven=True).shard("bias", 0, uneven=True)
            sch["0"].sync("bwd_post", "all_reduce")
            sch["1"].sync("fwd_post", _softmax_of_pairs)
            sch["2"].shard("weight", 1, uneven=True).sync("fwd_post", "all_reduce")

        return model, schedule, torch.randn(3, 5, 8)

    with pytest.raises(slapo.SlapoError, match=r"unflatten|view"):
        list(check_at(make, 3))


def _softmax_of_pairs(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out.unflatten(-1, (-1, 2)).softmax(-1).flatten(-2)


# --- axis rules: what a draft shards, the check accepts ------------------------------------------
#: Functions of slices but for those that are written for a model that is split.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    name: inside
    for name, inside in {**SLICE_BY_SLICE, **ACROSS, **LOOK_RIGHT, **BY_SIZE}.items()
    if name not in ("random mask", "random coins") and not name.startswith("one coin for a sample")
}
FUNCTIONS["number for each sample"] = number_for_each_sample


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_what_a_draft_shards_passes_the_check(name: str) -> None:
    drafted = slapo.draft(Base(FUNCTIONS[name]), X)
    assert drafted.verdict is None
    # Numbers and branches that go by a size are seen where it is compared with one process's.
    by_size = ("over all ranks, and", "invalid for input of size", "must match the size")
    refused = [why for why in drafted.given_up if "check:" in why]
    assert all(any(said in why for said in by_size) for why in refused), refused
