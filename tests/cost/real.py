"""Real steps of small models, and the bytes that were alive at their worst moment."""

import gc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import slapo
from benchmark.dry_run import Case
from slapo.cost import Meter, dryrun
from slapo.cost.models import for_training
from slapo.model_schedule import apply_schedule
from tests.graph import zoo  # noqa: F401 - skips without transformers, and stays offline

VOCABULARY, LENGTH, BATCH = 2048, 64, 8


def config_of(key: str, layers: int = 4, hidden: int = 128) -> Any:
    """Config of a family, with dropout where it has some."""
    return Case(key, layers, hidden, BATCH, LENGTH, vocabulary=VOCABULARY).config()


def token_loss(output: Any, labels: Tensor) -> Tensor:
    """Of all tokens; engines compute it from logits."""
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def predict(key: str, mesh: dict[str, int], batch: int = BATCH, **changes: Any) -> Any:
    """The dry run of what :func:`peak` measures."""
    dtype = changes.pop("dtype", None)
    return dryrun(
        key,
        config_of(key),
        machine="cpu",
        mesh=mesh,
        batch=batch,
        seq_len=LENGTH,
        loss_fn=token_loss,
        dtype=dtype,
        **changes,
    )


def make_engine(key: str, mesh: dict[str, int], changes: dict[str, Any]) -> Any:
    """The engine, with its model and inputs."""
    torch.manual_seed(0)
    model = for_training(config_of(key)).train()
    given: dict[str, Any] = {name: changes.pop(name) for name in ENGINE if name in changes}
    if "schedule" in given:
        given["pipeline_schedule"] = given.pop("schedule")
    if "zero" in given:
        sizes = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), given.pop("bucket"))
        given["config"] = {"zero_optimization": {"stage": given.pop("zero"), **sizes}}
    devices = slapo.init_mesh(**mesh, device="cpu")
    slapo.set_random_seed(1, mesh=devices)
    stages = {"pipeline_cuts": mesh["pp"]} if mesh.get("pp", 1) > 1 else {}
    sch = apply_schedule(model, key, group=devices.get_group("tp"), **stages, **changes)
    engine, _ = slapo.build(
        sch,
        mesh=devices,
        loss_fn=token_loss,
        optimizer=torch.optim.AdamW,
        **{"target": "torch", **given},
    )
    return engine


#: Options of the engine rather than of the recipe.
ENGINE = ("target", "schedule", "data_parallel", "zero", "bucket", "micro_batches", "dtype")


def batches(key: str, batch: int) -> Any:
    """The same batch again and again."""
    labels = torch.zeros(batch, LENGTH, dtype=torch.long)
    given = {"input_ids": labels.clone(), "attention_mask": torch.ones_like(labels)}
    if key == "t5":
        given["decoder_input_ids"] = given["input_ids"].clone()
    while True:
        yield given, labels


class Resizing(Meter):
    """Sees storages that are emptied and filled again, as FSDP2 does with whole parameters."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._look()
        return out

    def _look(self) -> None:
        for key, (size, ref) in list(self._sizes.items()):  # threads of gloo add some
            storage = ref()
            if storage is not None and storage.nbytes() != size:
                self._sizes[key] = storage.nbytes(), ref
                self.alive += storage.nbytes() - size
        self.peak = max(self.peak, self.alive)


def peak(key: str, mesh: dict[str, int], changes: dict[str, Any], batch: int = BATCH) -> int:
    """Bytes alive at the worst moment of a later step, from the making of the engine on.

    A thread of gloo may let go of a tensor late on a busy machine: the least of several steps.
    """
    kind = Resizing if {"data_parallel", "dtype"} & set(changes) else Meter
    peaks = []
    with kind(kernels=False) as meter:
        engine = make_engine(key, mesh, dict(changes))
        data = batches(key, batch)
        engine.train_batch(data)
        for _ in range(3):
            gc.collect()
            meter.peak = meter.alive
            engine.train_batch(data)
            peaks.append(meter.peak)
    return min(peaks)
