"""From the batch of a data loader to micro-batches."""

from collections import UserDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import slapo
from slapo.framework_dialect.batches import Batch, target_counts  # noqa: F401
from tests.entries import Entries
from tests.graph.served import make as module_of
from tests.runtimes.alone import Alone, compare
from tests.runtimes.contract import sgd
from tests.runtimes.ranks import on_ranks


def split_batch(batch: Any, micro_batches: int) -> list[Batch]:
    return Batch.of(batch, "cpu").cut(micro_batches)


def rows(n: int) -> torch.Tensor:
    return torch.arange(2 * n).view(n, 2)


IDS = torch.arange(24).reshape(4, 6) % 7


def axes_of(name: str, value: Any, dims: Any = None) -> Any:
    """The axis of samples in an argument beside tokens."""
    batch = Batch.of(({"ids": IDS, name: value}, IDS), "cpu", dims)
    batch.check_totals()
    return batch.axes[1]


#: Calls of batches, and what they return.
ENTRIES = Entries("batches.txt", globals())


def plain(value: Any) -> Any:
    """Without tensors, and parts as what the model and the loss function get."""
    if isinstance(value, Batch):
        return plain([*value.args, *([value.kwargs] if value.kwargs else []), value.targets])
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("title", ENTRIES.titles)
def test_axes_and_parts(title: str, update_golden: bool) -> None:
    ENTRIES.check(title, lambda found: str(plain(found)), update_golden)


def test_parts_are_views() -> None:
    targets = torch.arange(6)
    parts = split_batch((rows(6), targets), 3)
    assert parts[2].targets.data_ptr() == targets[4:].data_ptr()


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
