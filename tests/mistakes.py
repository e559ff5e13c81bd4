"""What the mistakes in ``tests/golden/mistakes`` may name; see :mod:`tests.test_mistakes`."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.pytorch_utils import Conv1D

import slapo
from slapo import Schedule, ScheduleRecord
from slapo.pipeline import generate_pipeline_partition
from slapo.weights.provenance import Source
from tests.primitives import models
from tests.primitives.models import Stack

#: Modules and classes of others.
OTHERS: dict[str, Any] = {
    **{name: value for name, value in vars(models).items() if name[0].isupper()},
    "Conv1D": Conv1D,
    "F": F,
    "FakeStore": FakeStore,
    "ScheduleRecord": ScheduleRecord,
    "Source": Source,
    "copy": copy,
    "dist": dist,
    "init_device_mesh": init_device_mesh,
    "nn": nn,
    "partition": generate_pipeline_partition,
    "slapo": slapo,
    "torch": torch,
}


def stack() -> Schedule:
    return slapo.create_schedule(Stack())


def one(module: nn.Module) -> Schedule:
    """A schedule of a model whose child "0" is the module."""
    return slapo.create_schedule(nn.Sequential(module))


def trained(model: nn.Module | None = None, **options: Any) -> Any:
    """An engine of PyTorch in this process."""
    given = {"loss_fn": F.mse_loss, "optimizer": functools.partial(torch.optim.SGD, lr=0.1)}
    mesh, sch = slapo.init_mesh(device="cpu"), slapo.create_schedule(model or Stack())
    return slapo.build(sch, "torch", mesh=mesh, **{**given, **options})[0]


def x_and_y() -> Any:
    """A batch for it."""
    return iter([(torch.ones(2, 4), torch.zeros(2, 4))])


def tp(choose: Any) -> dict[str, Any]:
    """A space to tune over."""
    return {"tp": choose("tp", [1, 2])}


def gelu(x: Any) -> Any:
    return F.gelu(x)


def gpt2(heads: int = 3) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=12,
        n_head=heads,
        vocab_size=32,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def llama(
    heads: int = 4, kv_heads: int = 1, layers: int = 1, intermediate: int = 32, tied: bool = False
) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=32,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


class Scale(nn.Module):
    """Has a parameter, and nothing that would initialize it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def saved(schedule: Callable[[Schedule], Any], edit: Callable[[Any], Any] = lambda data: 0) -> Path:
    """The file of a schedule of :class:`Stack`, with a change."""
    sch = stack()
    schedule(sch)
    path = Path(tempfile.mkdtemp()) / "schedule.json"
    sch.record.save(path)
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    return path


def weights() -> Path:
    """A folder with a Llama in several files."""
    folder = Path(tempfile.mkdtemp()) / "llama"
    llama().save_pretrained(folder, max_shard_size="4KB")
    return folder


class Hooks:
    def hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output


def checkpoints(sch: Schedule) -> None:
    sch.select("layers.*").checkpoint()
