"""Tensors of a stage boundary in one buffer: every bit arrives, every gradient comes back."""

import pytest
import torch
from torch import Tensor

from slapo.errors import SlapoError
from slapo.framework_dialect.boundary_codec import (
    WIRE_DTYPE,
    BufferLayout,
    anchored,
    pack,
    unpack,
)
from slapo.pipeline.boundaries import TensorMeta


def manifest_of(*tensors: Tensor) -> BufferLayout:
    return BufferLayout(tuple(TensorMeta.of(f"t{i}", t) for i, t in enumerate(tensors)))


def transfer(*tensors: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor]:
    """What a stage sends, and what the next one receives: a leaf, the tensors in it, an anchor."""
    manifest = manifest_of(*tensors)
    packed = pack(manifest, tensors, None)
    assert packed.dtype == WIRE_DTYPE
    assert packed.shape == manifest.shape
    buffer = packed.detach().clone().requires_grad_()
    return packed, buffer, *unpack(manifest, buffer)


def bits(tensor: Tensor) -> list[int]:
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.detach().contiguous().flatten().view(torch.uint8).tolist()


# In float32, these bits are NaNs with a payload, a signalling NaN, a denormal and -0.
PATTERNS = torch.tensor([0x7FC00001, 0x7F800001, 1, -(2**31), -1], dtype=torch.int32)

SAMPLES = {
    "int64": torch.tensor([[2**62 + 1, -1], [0, 7]]),
    "int32": PATTERNS,
    "float32": PATTERNS.view(torch.float32),
    "float64": torch.tensor([0.1, -0.0, float("inf")], dtype=torch.float64),
    "bfloat16": PATTERNS.view(torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "uint8": torch.arange(17, dtype=torch.uint8),
    "complex64": torch.tensor([1 + 2j]),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "strided": torch.arange(6.0).view(2, 3).t(),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_bits_arrive(name: str) -> None:
    sample, beside = SAMPLES[name], torch.tensor([1, 2, 3], dtype=torch.int16)
    packed, _, (first, received, last), _ = transfer(beside, sample, beside)
    # Megatron-Core frees what was sent, which it cannot with a view.
    assert packed._base is None
    assert received.shape == sample.shape
    assert received.dtype == sample.dtype
    assert bits(received) == bits(sample)
    assert bits(first) == bits(last) == bits(beside)
    assert not received.requires_grad


def test_a_buffer_without_gradients_still_has_one() -> None:
    """The stage before waits for it, or the job would hang."""
    tokens, table = torch.tensor([5, 6]), torch.ones(8, requires_grad=True)
    _, buffer, (received,), anchor = transfer(tokens)
    # A middle stage sends on; the last one computes the loss.
    sent = (table[received],)
    packed = pack(manifest_of(*sent), sent, anchor)
    assert packed.requires_grad
    loss = anchored(received.float().mean(), anchor)
    assert loss.item() == 5.5
    for output in (packed, loss):
        output.backward(torch.ones_like(output))
        assert buffer.grad is not None
        assert not buffer.grad.any()
        buffer.grad = None
    assert table.grad is not None
    assert table.grad.sum() == 2.0


def test_the_loss_is_copied() -> None:
    """The schedule divides in place what it gets."""
    loss = torch.tensor(6.0)
    anchored(loss, None).div_(2)
    anchored(loss, torch.zeros((), requires_grad=True)).detach().div_(2)
    assert loss.item() == 6.0


def test_received_tensors_may_be_changed() -> None:
    """Models add to their hidden states in place."""
    hidden = torch.ones(2, requires_grad=True) * 1
    _, buffer, (received,), anchor = transfer(hidden)
    received += 1
    anchored((received * received).sum(), anchor).backward()
    assert buffer.grad is not None
    assert buffer.grad[:2].tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    "sent",
    [torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, requires_grad=True)],
    ids=["shape", "dtype", "gradient"],
)
def test_other_forms_are_refused(sent: Tensor) -> None:
    manifest = manifest_of(torch.ones(2))
    with pytest.raises(SlapoError, match=r"expects TensorMeta\(name='t0', shape=\(2,\)"):
        pack(manifest, (sent,), None)
