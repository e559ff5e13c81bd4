"""From the batch of a data loader to micro-batches."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

import slapo
from slapo.framework_dialect.batches import Batch, target_counts
from tests.graph.served import make as module_of
from tests.runtimes.alone import Alone, compare
from tests.runtimes.contract import sgd
from tests.runtimes.ranks import on_ranks


def split_batch(batch: Any, micro_batches: int) -> list[Batch]:
    return Batch.of(batch, "cpu").cut(micro_batches)


def rows(n: int) -> torch.Tensor:
    return torch.arange(2 * n).view(n, 2)


def test_a_tensor_is_cut_in_views() -> None:
    inputs, targets = rows(6), torch.arange(6)
    parts = split_batch((inputs, targets), 3)
    assert len(parts) == 3
    assert torch.equal(torch.cat([part.args[0] for part in parts]), inputs)
    assert torch.equal(torch.cat([part.targets for part in parts]), targets)
    assert parts[1].args[0].tolist() == [[4, 5], [6, 7]]
    assert parts[2].targets.data_ptr() == targets[4:].data_ptr()
    assert parts[0].kwargs == {}


def test_labels_along_another_axis_are_padded_there_and_not_counted() -> None:
    labels = torch.arange(12).view(4, 3)
    batch = Batch.of(({"labels": labels}, torch.zeros(3)), "cpu", {"labels": 1})
    padded = batch.cut(2, pads=True)[1]
    assert padded.kwargs["labels"].T.tolist() == [[2, 5, 8, 11], [-100] * 4]
    assert target_counts(batch, shifts=False) is None


def test_padding_leaves_labels_that_are_not_split() -> None:
    labels = torch.arange(6)
    batch = Batch.of(({"x": rows(3), "labels": labels}, torch.zeros(3)), "cpu", {"labels": None})
    batch.cut(2, pads=True)
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]


def test_positional_arguments_with_scalars_and_others() -> None:
    scalar = torch.tensor(0.5)
    parts = split_batch([[rows(4), scalar, "mode", None], None], 2)
    assert parts[1].args[0].tolist() == [[4, 5], [6, 7]]
    assert parts[1].args[1:] == (scalar, "mode", None)
    assert parts[1].targets is None


def test_keyword_arguments_and_nested_targets() -> None:
    # As the tokenizers of Transformers return them: a mapping that is no dict.
    inputs: Any = UserDict(input_ids=rows(4), use_cache=False, extra=UserDict(mask=rows(4)))
    targets = {"a": [rows(4), (torch.arange(4), None)], "w": torch.tensor(2.0)}
    parts = split_batch((inputs, targets), 2)
    assert parts[1].args == ()
    assert set(parts[1].kwargs) == {"input_ids", "use_cache", "extra"}
    assert parts[1].kwargs["extra"]["mask"].tolist() == [[4, 5], [6, 7]]
    assert parts[1].kwargs["use_cache"] is False
    assert parts[1].targets["a"][1][0].tolist() == [2, 3]
    assert parts[1].targets["w"] == 2.0


def test_not_divisible() -> None:
    assert [part.samples() for part in split_batch((rows(5), None), 3)] == [2, 2, 1]
    assert Batch.of(((rows(5), rows(1)), torch.arange(5)), "cpu").size() == 5
    assert split_batch((rows(5), None), 3)[2].args[0].tolist() == [[8, 9]]
    assert Batch.of((rows(0), None), "cpu").most_parts(2) == 1


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (rows(2), "the batch is a Tensor; it must be"),
        ((rows(2), rows(2), rows(2)), "the batch is a tuple of length 3; it must be"),
        ((3, rows(2)), "inputs is a int; a batch must be"),
        (None, "the batch is a NoneType"),
    ],
)
def test_what_is_no_batch(batch: Any, message: str) -> None:
    """Beside ``golden/mistakes/train_batch.txt``."""
    with pytest.raises(TypeError, match=message):
        split_batch(batch, 3)


def test_tensors_move_to_the_device() -> None:
    inputs, targets = UserDict(x=rows(2)), [torch.ones(1), "text"]
    moved = Batch.of((inputs, targets), "meta")
    assert moved.kwargs["x"].is_meta
    assert moved.targets[0].is_meta
    assert moved.targets[1] == "text"
    assert Batch.of((inputs, targets), "cpu").targets[0] is targets[0]


def test_arguments_are_cast_and_targets_are_not() -> None:
    batch = Batch.of((({"a": torch.ones(2), "n": torch.arange(2)},), torch.ones(2)), "cpu")
    cast = batch.cast(torch.bfloat16)
    assert cast.args[0]["a"].dtype == torch.bfloat16
    assert cast.args[0]["n"].dtype == torch.int64
    assert cast.targets.dtype == torch.float32
    assert batch.cast(None) is batch


# --- samples along other axes --------------------------------------------------------------------
IDS = torch.arange(24).reshape(4, 6) % 7


def axes_of(name: str, tensor: torch.Tensor, dims: Any = None) -> Any:
    batch = Batch.of(({"ids": IDS, name: tensor}, IDS), "cpu", dims)
    batch.check_totals()
    return batch.axes[1]


def test_the_only_axis_of_the_size_of_the_batch() -> None:
    assert axes_of("positions", torch.zeros(3, 4, 6, dtype=torch.int64)) == 1
    assert axes_of("mask", torch.zeros(4, 1, 4, 4)) == 0  # samples come first
    assert axes_of("ids_too", torch.zeros(4, 4, dtype=torch.int64)) == 0
    assert axes_of("scale", torch.tensor(2.0)) is None
    assert axes_of("flag", True) is None  # type: ignore[arg-type]
    assert axes_of("lengths", torch.tensor([3, 4, 5, 6])) == 0


def test_declared_axes() -> None:
    assert axes_of("mask", torch.zeros(1, 6, 1), {"mask": None}) is None
    assert axes_of("positions", torch.zeros(4, 4, 6, dtype=torch.int64), {"positions": 1}) == 1
    assert axes_of("ends", torch.tensor([6, 12, 18, 24]), {"ends": None}) is None
    parts = Batch.of(((IDS.t(), IDS), IDS), "cpu", {0: 1}).cut(2)
    assert parts[1].args[0].shape == (6, 2)
    assert torch.equal(parts[1].args[0].t(), parts[1].args[1])
    assert parts[0].samples() == 2
    assert [part.samples() for part in parts[0].cut(2)] == [1, 1]


def embeds(self: Any, ids: Any, positions: Any, mask: Any, scale: Any) -> Any:
    """Takes positions of three axes, a mask for all samples, and a number."""
    hidden = self.embedding(ids) + self.positions(positions).sum(0)
    for layer in self.layers:
        hidden = hidden + torch.tanh(layer(hidden)) * mask * scale
    return self.head(hidden)


def embedder() -> nn.Module:
    torch.manual_seed(0)
    parts = {"embedding": nn.Embedding(32, 8), "positions": nn.Embedding(32, 8)}
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    return module_of(embeds, **parts, layers=layers, head=nn.Linear(8, 32))


def token_loss(logits: Any, targets: Any) -> Any:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def inputs_of(samples: int, generator: torch.Generator, mask: torch.Tensor) -> dict[str, Any]:
    return {
        "ids": torch.randint(32, (samples, 6), generator=generator),
        "positions": torch.randint(32, (3, samples, 6), generator=generator),
        "mask": mask,
        "scale": torch.tensor(0.5),
    }


def start(target: str, layout: Any, inputs: Any, loss_fn: Any, **given: Any) -> tuple[Any, Alone]:
    """An engine of the model, and one process."""
    model, mesh = embedder(), slapo.init_mesh(*layout, device="cpu")
    alone = Alone(model, loss_fn, sgd)
    sch = slapo.create_schedule(model, group=mesh["tp"])
    if layout[0] > 1:
        sch.trace_until("", example_inputs=inputs)
        sch["layers.0"].cut_pipeline_stage()
    given = {"mesh": mesh, "loss_fn": loss_fn, "optimizer": sgd, **given}
    return slapo.build(sch, target, **given)[0], alone


def squares(logits: Any, targets: Any) -> Any:
    return nn.functional.mse_loss(logits, targets)


@pytest.mark.parametrize(
    ("target", "layout"),
    [
        ("torch", (1, 1, 1)),
        ("torch", (2, 1, 1)),
        ("deepspeed", (2, 1, 1)),
        ("megatron", (2, 1, 1)),
        pytest.param("deepspeed", (1, 1, 1), marks=pytest.mark.wide),
        pytest.param("megatron", (1, 1, 1), marks=pytest.mark.wide),
    ],
)
@on_ranks()
def test_samples_along_other_axes_and_the_last_batch_of_an_epoch(target: str, layout: Any) -> None:
    """The latter has samples that no number of micro-batches divides; targets may be counted."""
    generator = torch.Generator().manual_seed(1)
    counted = torch.randint(32, (5, 6), generator=generator)
    counted[0, 2:] = -100
    rest = torch.randn(5, 6, 32, generator=generator)
    for loss_fn, targets, parts, options in (
        (token_loss, counted[1:], 2, {"batch_dims": {"mask": None}}),
        (token_loss, counted, 2, {}),
        (token_loss, counted, 4, {}),
        (squares, rest, 3, {}),
    ):
        rows = 1 if options else 5
        mask = torch.rand(rows, 6, 1, generator=generator)
        inputs = inputs_of(len(targets), generator, mask)
        engine, alone = start(target, layout, inputs, loss_fn, micro_batches=parts, **options)
        batch = inputs, targets
        assert max(compare(engine, alone, [batch] * 3).values()) < 1e-5, parts
        evaluated = engine.eval_batch(iter([batch])).item()
        assert abs(evaluated - alone.evaluate(batch)[0]) < 1e-5, parts
