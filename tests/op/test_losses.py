"""Losses over a shared-out vocabulary, and of a head whose logits never exist as a whole."""

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import slapo
from slapo.cost import Meter
from slapo.op import cross_entropy
from slapo.op.cross_entropy import ParallelCrossEntropy, token_losses
from slapo.op.linear_loss import LossHead, Targets, linear_cross_entropy
from slapo.sharding.groups import share_of
from tests.distributed import Job

VOCAB, FEATURES, BATCH, SEQ = 97, 23, 3, 11

on_two_ranks, on_four_ranks = Job(2), Job(4)


@pytest.mark.distributed
@pytest.mark.parametrize("job", [on_two_ranks, on_four_ranks], ids=["two ranks", "four ranks"])
def test_all_cases_of_a_shared_out_vocabulary(job: Job) -> None:
    job.run()


def on_both(*rows: tuple[Any, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A case of two ranks and of four, for each of the rows."""
    return lambda fn: on_four_ranks.each(*rows)(on_two_ranks.each(*rows)(fn))


def labels_like(*shape: int, vocab: int = VOCAB) -> Tensor:
    labels = torch.randint(vocab, shape)
    labels.view(-1)[::4] = -100
    return labels


def operands(dtype: torch.dtype = torch.float32, tokens: int = 29) -> list[Tensor]:
    hidden, weight, bias = torch.randn(tokens, FEATURES), torch.randn(VOCAB, FEATURES), None
    bias = torch.randn(VOCAB)
    return [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)]


# --- losses of tokens ----------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 1), (0,)])
@pytest.mark.parametrize("vocab", [1, 2, VOCAB])
def test_each_token_has_the_loss_of_torch(shape: tuple[int, ...], vocab: int) -> None:
    logits = (5 * torch.randn(*shape, vocab)).requires_grad_()
    labels, scale = torch.randint(vocab, shape), torch.randn(shape)
    before = logits.detach().clone()
    losses = token_losses(logits, labels)
    wanted = F.cross_entropy(logits.view(-1, vocab), labels.view(-1), reduction="none").view(shape)
    torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=2e-6)
    (grad,) = torch.autograd.grad((losses * scale).sum(), logits)
    (wanted_grad,) = torch.autograd.grad((wanted * scale).sum(), logits)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits, before)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-torch.inf, 3.0, 0.0]])
    labels = torch.tensor([1, 2])
    wanted = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(token_losses(logits, labels), wanted)


@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_ignored_tokens_count_for_nothing(ignore_index: int) -> None:
    logits, labels = torch.randn(9, 5, requires_grad=True), torch.randint(5, (9,))
    labels[::2] = ignore_index
    losses = ParallelCrossEntropy(ignore_index=ignore_index)(logits, labels)
    wanted = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none")
    torch.testing.assert_close(losses, wanted)
    losses.sum().backward()
    assert logits.grad is not None
    assert not logits.grad[::2].any()
    assert logits.grad[1::2].any()


def loss_by(
    make: str, labels: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    if make == "tokens":
        return token_losses(F.linear(hidden, weight, bias), labels).sum()
    return linear_cross_entropy(hidden, weight, labels, bias, chunk=8)


@pytest.mark.parametrize("make", ["tokens", "linear"])
def test_a_retained_graph_gives_the_same_again(make: str) -> None:
    params = operands()
    labels = labels_like(29)
    once = loss_by(make, labels, *params)
    first = torch.autograd.grad(once, params, retain_graph=True)
    second = torch.autograd.grad(once, params)
    recomputed = checkpoint(loss_by, make, labels, *params, use_reentrant=False)
    again = torch.autograd.grad(recomputed, params)
    for grads in zip(first, second, again, strict=True):
        assert torch.equal(grads[0], grads[1])
        assert torch.equal(grads[0], grads[2])


@pytest.mark.parametrize("make", ["tokens", "linear"])
def test_a_gradient_of_the_gradient_is_refused(make: str) -> None:
    hidden, weight, _ = operands()
    loss = loss_by(make, labels_like(len(hidden)), hidden, weight)
    with pytest.raises(RuntimeError, match="is not differentiable"):
        torch.autograd.grad(loss, weight, create_graph=True)


# --- over several ranks --------------------------------------------------------------------------
def own_columns(whole: Tensor, rank: int, ranks: int, dim: int = -1) -> Tensor:
    return whole.chunk(ranks, dim)[rank].detach().clone().requires_grad_()


@on_two_ranks.each((VOCAB, torch.float32, 0.2))
@on_both(*itertools.product((96, VOCAB), (torch.float32, torch.bfloat16)))
def losses_of_a_shared_out_vocabulary(
    rank: int, ranks: int, vocab: int, dtype: torch.dtype, smoothing: float = 0.0
) -> None:
    logits = (4 * torch.randn(BATCH, SEQ, vocab)).to(dtype).requires_grad_()
    labels, scale = labels_like(BATCH, SEQ, vocab=vocab), torch.randn(BATCH, SEQ)
    how: dict[str, Any] = {"label_smoothing": smoothing}
    flat = logits.float().flatten(0, 1)
    wanted = F.cross_entropy(flat, labels.flatten(), reduction="none", **how)
    (wanted.view(BATCH, SEQ) * scale).sum().backward()
    group = dist.group.WORLD if rank else None  # None is the same
    module = ParallelCrossEntropy(group, **how)
    for vocab_size in (vocab, None):
        own = own_columns(logits, rank, ranks)
        losses = module(own, labels, vocab_size)
        torch.testing.assert_close(losses.flatten(), wanted, rtol=1e-6, atol=2e-6)
        (losses * scale).sum().backward()
        mine = own_columns(logits.grad, rank, ranks).detach()
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {}
        torch.testing.assert_close(own.grad, mine, **tolerance)
    with pytest.raises(IndexError, match="have no column"):  # on all ranks
        module(own_columns(logits, rank, ranks), torch.full((BATCH, SEQ), vocab), vocab)
    with pytest.raises(IndexError, match="on several ranks"):
        token_losses(logits, labels, 0, dist.group.WORLD)
    with pytest.raises(ValueError, match="columns by torch"):
        module(logits, labels, vocab)


@on_two_ranks
def two_collectives_and_none_in_the_backward_pass(rank: int, ranks: int) -> None:
    logits = torch.randn(5, 6, requires_grad=True)
    with Meter() as meter:
        losses = ParallelCrossEntropy()(logits, torch.tensor([0, 5, 6, 11, -100]), vocab_size=12)
        losses.sum().backward()
    assert [each.name for each in meter.collectives] == ["all_reduce", "all_reduce"]


@on_both(*itertools.product((torch.float32, torch.bfloat16), (8, 100)))
def a_fused_head_of_a_shared_out_vocabulary(
    rank: int, ranks: int, dtype: torch.dtype, chunk: int
) -> None:
    hidden, weight, bias = operands(dtype)
    labels = labels_like(len(hidden))
    wanted = reference(hidden, weight, bias, labels)
    wanted.backward()
    start, own = share_of(VOCAB, rank, ranks)
    rows, part = (own_columns(whole, rank, ranks, 0) for whole in (weight, bias))
    states = hidden.detach().clone().requires_grad_()
    group = dist.group.WORLD
    loss = linear_cross_entropy(states, rows, labels, part, start=start, group=group, chunk=chunk)
    loss.backward()
    assert states.grad is not None
    total = states.grad.float()
    dist.all_reduce(total)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else HALF
    torch.testing.assert_close(loss, wanted, **tolerance)
    torch.testing.assert_close(total, hidden.grad.float(), **tolerance)
    for mine, whole in ((rows, weight), (part, bias)):
        wanted_part = whole.grad.narrow(0, start, own)
        torch.testing.assert_close(mine.grad, wanted_part, **tolerance)


# --- the head and its loss in one ----------------------------------------------------------------
#: bfloat16 has 8 bits: logits near 20 are rounded by 1/16, and gradients again.
HALF = {"rtol": 2e-2, "atol": 6e-2}


def reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, reduction: str = "sum"
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.float(), labels, reduction=reduction)


@pytest.mark.parametrize("chunk", [1, 8, 29, 100, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_fused_head_is_the_head_and_the_loss(
    chunk: int | None, dtype: torch.dtype, has_bias: bool
) -> None:
    hidden, weight, bias = operands(dtype)
    labels = labels_like(len(hidden))
    params = [hidden, weight, bias] if has_bias else [hidden, weight]
    given = bias if has_bias else None
    wanted = reference(hidden, weight, given, labels)
    loss = linear_cross_entropy(hidden, weight, labels, given, chunk=chunk)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else HALF
    torch.testing.assert_close(loss, wanted, **tolerance)
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss / 7, params)
    for grad, whole in zip(grads, torch.autograd.grad(wanted / 7, params), strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad, whole, **tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_chunks_of_half_precision_lose_nothing(dtype: torch.dtype) -> None:
    """As against the gradient in float32, it is rounded twice: as a factor and at the end."""
    hidden, weight = torch.rand(400, 8).to(dtype), torch.randn(5, 8).to(dtype)
    weight.requires_grad_()
    labels = torch.zeros(400, dtype=torch.long)
    linear_cross_entropy(hidden, weight, labels, chunk=1).backward()
    exact = weight.detach().float().requires_grad_()
    reference(hidden.float(), exact, None, labels).backward()
    assert weight.grad is not None
    assert exact.grad is not None
    bits = 2 ** (-8 if dtype == torch.bfloat16 else -11)
    torch.testing.assert_close(weight.grad.float(), exact.grad, rtol=6 * bits, atol=40 * bits)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)])
def test_only_gradients_that_are_needed_are_made(needed: tuple[bool, bool]) -> None:
    hidden, weight, _ = operands()
    labels = labels_like(len(hidden))
    whole = torch.autograd.grad(reference(hidden, weight, None, labels), (hidden, weight))
    for tensor, need in zip((hidden, weight), needed, strict=True):
        tensor.requires_grad_(need)
    loss = linear_cross_entropy(hidden, weight, labels, chunk=8)
    assert loss.requires_grad == any(needed)
    if loss.requires_grad:
        loss.backward()
    for tensor, need, wanted in zip((hidden, weight), needed, whole, strict=True):
        assert (tensor.grad is not None) == need
        if tensor.grad is not None:
            torch.testing.assert_close(tensor.grad, wanted, rtol=1e-5, atol=1e-5)


def test_no_token_counts() -> None:
    hidden, weight, bias = operands()
    labels = torch.full((len(hidden),), -100)
    loss = linear_cross_entropy(hidden, weight, labels, bias)
    loss.backward()
    assert loss == 0
    assert all(tensor.grad is not None and not tensor.grad.any() for tensor in (hidden, weight))
    assert linear_cross_entropy(hidden[:0], weight, labels[:0]) == 0


def test_autocast_has_products_in_its_precision() -> None:
    hidden, weight, bias = operands()
    labels = labels_like(len(hidden))
    halves = [tensor.detach().bfloat16() for tensor in (hidden, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, bias)
    loss.backward()
    assert loss == linear_cross_entropy(halves[0], halves[1], labels, halves[2])
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


# --- memory --------------------------------------------------------------------------------------
def peak(loss: Callable[[], Tensor], *given: Tensor) -> tuple[int, int]:
    """Bytes beyond the given tensors at the worst moment, and elements of the largest tensor."""
    with Meter() as meter:
        meter.hold(given)
        before = meter.alive
        loss().backward()
    return meter.peak - before, max(kernel.elements for kernel in meter.kernels)


def test_the_whole_logits_never_exist() -> None:
    tokens, vocab, features, chunk = 512, 1000, 16, 64
    hidden, weight = torch.randn(tokens, features), torch.randn(vocab, features)
    hidden.requires_grad_()
    weight.requires_grad_()
    labels = torch.randint(vocab, (tokens,))
    most, largest = peak(
        lambda: linear_cross_entropy(hidden, weight, labels, chunk=chunk), hidden, weight, labels
    )
    gradients = 4 * features * (tokens + vocab)
    assert largest == chunk * vocab
    assert most < 1.1 * 4 * chunk * vocab + gradients


def test_one_copy_of_the_logits_becomes_their_gradient() -> None:
    logits = torch.randn(64, 1000, requires_grad=True)
    labels = torch.randint(1000, (64,))
    size = 4 * logits.numel()
    most, _ = peak(lambda: token_losses(logits, labels).sum(), logits, labels)
    assert most < 1.1 * size
    most, _ = peak(lambda: F.cross_entropy(logits, labels), logits, labels)
    assert most > 1.9 * size


# --- the head as a layer -------------------------------------------------------------------------
def body_and_head(bias: bool = False) -> Any:
    layers = {"body": nn.Linear(FEATURES, FEATURES), "head": nn.Linear(FEATURES, VOCAB, bias=bias)}
    return nn.Sequential(OrderedDict(layers))


def whole_loss(model: nn.Module, x: Tensor, targets: Targets) -> Tensor:
    """As Transformers computes it."""
    labels = targets.labels
    if targets.shift:
        labels = F.pad(labels, (0, 1), value=targets.ignore_index)[..., 1:]
    logits = model(x).float().flatten(0, 1)
    args: dict[str, Any] = {"ignore_index": targets.ignore_index}
    args["label_smoothing"] = targets.label_smoothing
    if targets.num_items is None:
        return F.cross_entropy(logits, labels.flatten(), **args)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum", **args) / targets.num_items


TARGETS = [
    {"shift": True},
    {"shift": False},
    {"shift": True, "num_items": 5},
    {"shift": True, "num_items": torch.tensor(5)},
    {"shift": False, "ignore_index": 3},
    {"shift": True, "label_smoothing": 0.1},
]


@pytest.mark.parametrize("settings", TARGETS)
def test_a_head_gives_the_loss(settings: dict[str, Any]) -> None:
    model, x = body_and_head(bias=True), torch.randn(BATCH, SEQ, FEATURES)
    labels = torch.randint(VOCAB, (BATCH, SEQ))
    labels[0, :4] = settings.get("ignore_index", -100)
    targets = Targets(labels, **settings)
    wanted = whole_loss(model, x, targets)
    grads = torch.autograd.grad(wanted, list(model.parameters()))
    names, logits = list(model.state_dict()), model(x)
    head = LossHead.like(model.head)
    assert head.weight is model.head.weight
    model.head = head
    assert list(model.state_dict()) == names
    assert torch.equal(model(x), logits)
    head.targets = targets
    for again in (model, copy.deepcopy(model)):
        loss = again(x)
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
        found = torch.autograd.grad(loss, list(again.parameters()))
        for grad, whole in zip(found, grads, strict=True):
            torch.testing.assert_close(grad, whole, rtol=1e-5, atol=1e-6)


def test_a_head_of_no_label_gives_nan_as_torch() -> None:
    head = LossHead(FEATURES, VOCAB)
    head.targets = Targets(torch.full((BATCH, SEQ), -100))
    assert head(torch.randn(BATCH, SEQ, FEATURES)).isnan()


@on_both((False, {"shift": True}), (True, {"shift": False, "num_items": 7}))
def a_head_whose_rows_are_shared_out(
    rank: int, ranks: int, bias: bool, settings: dict[str, Any]
) -> None:
    model, x = body_and_head(bias), torch.randn(BATCH, SEQ, FEATURES)
    targets = Targets(labels_like(BATCH, SEQ), **settings)
    wanted = whole_loss(model, x, targets)
    wanted.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    model.head = LossHead.like(model.head)
    sch = slapo.create_schedule(model, group=dist.group.WORLD)
    sch["head"].shard("weight", 0, uneven=True)
    if bias:
        sch["head"].shard("bias", 0, uneven=True)
    sch["head"].sync("bwd_post", "all_reduce")
    head = model.head
    start, own = share_of(VOCAB, rank, ranks)
    assert model(x).shape[-1] == own
    head.targets = targets
    slapo.check(sch, x)
    for each in (model, copy.deepcopy(model)):
        each.zero_grad()
        loss = each(x)
        loss.backward()
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
        for name, param in each.named_parameters():
            whole = grads[name]
            wanted_grad = whole.narrow(0, start, own) if name.startswith("head") else whole
            torch.testing.assert_close(param.grad, wanted_grad, rtol=1e-5, atol=1e-6)


@on_two_ranks
def a_whole_head_asks_no_other_rank(rank: int, ranks: int) -> None:
    """Data parallelism alone: each rank has tokens of its own, and all of the vocabulary."""
    torch.manual_seed(rank)
    hidden, weight, bias = operands()
    labels = labels_like(len(hidden))
    wanted = reference(hidden, weight, bias, labels, "mean")
    head = LossHead(FEATURES, VOCAB)
    head.weight, head.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
    head.targets = Targets(labels[None], shift=False)
    torch.testing.assert_close(head(hidden[None]), wanted)
    torch.testing.assert_close(
        token_losses(F.linear(hidden, weight, bias), labels).sum(),
        reference(hidden, weight, bias, labels),
    )


def test_in_a_trace_the_head_stays_a_call() -> None:
    model, x = body_and_head(), torch.randn(BATCH, SEQ, FEATURES)
    model.head = LossHead.like(model.head)
    sch = slapo.create_schedule(model)
    sch.trace(example_inputs=x)
    labels = labels_like(BATCH, SEQ)
    assert sch.mod(x).shape[-1] == VOCAB
    innermost = sch.mod.get_submodule("head")
    assert isinstance(innermost, LossHead)
    innermost.targets = Targets(labels)
    assert sch.mod(x).dim() == 0


@pytest.mark.slow
@pytest.mark.parametrize("make", ["tokens", "linear"])
def test_losses_are_captured_by_torch_compile(make: str) -> None:
    hidden, weight, _ = operands()
    labels = labels_like(len(hidden))
    compiled = torch.compile(loss_by, backend="aot_eager", fullgraph=True)
    wanted, found = (
        torch.autograd.grad(loss(make, labels, hidden, weight), (hidden, weight))
        for loss in (loss_by, compiled)
    )
    torch.testing.assert_close(found, wanted)


def test_the_ignored_label_is_that_of_torch() -> None:
    assert nn.CrossEntropyLoss().ignore_index == cross_entropy.IGNORED
