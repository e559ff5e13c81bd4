"""Tensors that know of what they are made, against the same code on values."""

import copy
import pickle
import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slapo.weights.pieces import Box, Computed, Pieced, box_of, boxes_of_range, index_of

Pair = tuple[Tensor, Pieced]


def changed(rng: random.Random, pairs: list[Pair]) -> Pair:
    """One operation on a tensor and on its pieces."""
    value, pieced = rng.choice(pairs)
    dim = rng.randrange(value.dim())
    size = value.shape[dim]
    start = rng.randrange(size)
    order = rng.sample(range(value.dim()), value.dim())
    others = [pair for pair in pairs if pair[0].shape == value.shape]
    other = rng.choice(others)
    step = rng.randint(1, size)
    index = (slice(None),) * dim + (slice(start, size),)
    moves = {
        "narrow": lambda t, _: t.narrow(dim, start, size - start),
        "split": lambda t, _: t.split(step, dim)[-1],
        "chunk": lambda t, _: torch.chunk(t, step, dim)[0],
        "transpose": lambda t, _: t.transpose(dim, -1),
        "permute": lambda t, _: t.permute(*order),
        "t": lambda t, _: t.t() if t.dim() == 2 else t,
        "unsqueeze": lambda t, _: t.unsqueeze(-1) if t.dim() < 4 else t,
        "squeeze": lambda t, _: t.squeeze() if t.squeeze().dim() else t,
        "getitem": lambda t, _: t[index],
        "pad": lambda t, _: F.pad(t, (0, 2)),
        "cat": lambda t, u: torch.cat([t, u], dim),
        "stack": lambda t, u: torch.stack([t, u]) if t.dim() < 4 else t,
        "to": lambda t, _: t.to(torch.float64).detach().contiguous(),
    }
    move = moves[rng.choice(list(moves))]
    return move(value, other[0]), move(pieced, other[1])


@pytest.mark.parametrize("seed", range(100))
def test_code_that_moves_values_is_followed(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    values = {name: torch.rand(rng.randint(1, 4), rng.randint(1, 4)) for name in "abc"}
    pairs = [(t, Pieced.leaf(name, t.shape, t.dtype)) for name, t in values.items()]
    for _ in range(12):
        pair = changed(rng, pairs)
        if pair[0].numel() < 200:
            pairs.append(pair)

    def read(name: str, box: Box) -> Tensor:
        return values[name][index_of(box)]

    for value, pieced in pairs:
        assert pieced.shape == value.shape
        assert pieced.dtype == value.dtype
        assert torch.equal(pieced.read(read).to(value.dtype), value)
        covered = torch.zeros_like(value)
        for piece in pieced.pieces:
            assert isinstance(piece.leaf, str)
            source = values[piece.leaf][index_of(piece.source)].to(value.dtype)
            assert torch.equal(piece.to_source(value[index_of(piece.place)]), source)
            covered[index_of(piece.place)] += 1
        assert ((covered == 1) | (value == 0)).all()


def test_what_is_not_followed_is_computed() -> None:
    value = torch.arange(12.0).reshape(4, 3)
    leaf = Pieced.leaf("a", (4, 3), torch.float32)
    for move in (
        lambda t: t.view(2, 2, 3).transpose(0, 1).reshape(4, 3),
        lambda t: (t * 2 + 1)[1:],
        lambda t: t[[2, 0]],
    ):
        pieced = move(leaf)
        assert isinstance(pieced.pieces[0].leaf, Computed)
        assert list(pieced.needs()) == [("a", box_of((4, 3)))]
        assert torch.equal(pieced.read(lambda _, box: value[index_of(box)]), move(value))


def test_copies_and_pickles_are_the_same() -> None:
    made = torch.cat([Pieced.leaf("a", (2, 3), torch.float32)] * 2).t()
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (again.pieces, again.shape, again.dtype) == (made.pieces, made.shape, made.dtype)


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (3, 2, 4), (2, 1, 3, 2)])
def test_ranges_of_flattened_tensors(shape: tuple[int, ...]) -> None:
    value = torch.arange(torch.Size(shape).numel()).reshape(shape)
    flat = value.reshape(-1)
    for start in range(len(flat) + 1):
        for stop in range(start, len(flat) + 1):
            boxes = list(boxes_of_range(shape, start, stop))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            seen = [flat.new_empty(0)]
            for at, box in boxes:
                part = value[index_of(box)].reshape(-1)
                assert at == start + sum(len(t) for t in seen)
                seen.append(part)
            assert torch.equal(torch.cat(seen), flat[start:stop])
