"""What the mistakes in ``tests/golden/mistakes`` may name; see :mod:`tests.test_mistakes`."""

import contextlib
import copy
import io
import json
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.pytorch_utils import Conv1D

import slapo
from slapo import Schedule, ScheduleRecord
from slapo.autotune.symbols import space_of_symbols
from slapo.command import main
from slapo.model_schedule.splits import words_of
from slapo.pipeline import generate_pipeline_partition
from slapo.sharding import reduce_from_group
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
    "functional": functional,
    "reduce_from_group": reduce_from_group,
    "dist": dist,
    "init_device_mesh": init_device_mesh,
    "nn": nn,
    "partition": generate_pipeline_partition,
    "slapo": slapo,
    "space_of_symbols": space_of_symbols,
    "apply_schedule": slapo.apply_schedule,
    "torch": torch,
    "transformers": transformers,
    "words_of": words_of,
}


def stack() -> Schedule:
    return slapo.create_schedule(Stack())


def one(module: nn.Module) -> Schedule:
    """A schedule of a model whose child "0" is the module."""
    return slapo.create_schedule(nn.Sequential(module))


def pair() -> tuple[nn.Module, Callable[[Schedule], Any], torch.Tensor]:
    """A model, a schedule of it, and inputs: of the commands that take such a function."""

    def schedule(sch: Schedule) -> None:
        sch["1"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
        sch["2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")

    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 40), nn.Linear(40, 16))
    return model, schedule, torch.ones(3, 5, 16)


#: A space to tune over, as a function and in a file.
SPACE = "def space(choose): return {'tp': choose('tp', [1, 2])}\n"


def tp(choose: Any) -> dict[str, Any]:
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


#: Sizes of Llama, and of models with the same names for them.
LLAMA: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def llama(
    heads: int = 4,
    kv_heads: int = 1,
    layers: int = 1,
    intermediate: int = 32,
    tied: bool = False,
    hidden: int = 16,
) -> nn.Module:
    changes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
    }
    config = transformers.LlamaConfig(**{**LLAMA, **changes})
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


class Exits(Exception):
    """A command has ended with an error."""


def command(line: str) -> None:
    """Run a command line of ``slapo``; its status and what it says of a mistake are raised."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                status = main(shlex.split(line))
            except SystemExit as error:  # argparse shows all options first
                status, said = error.code, io.StringIO(said.getvalue().splitlines()[-1])
    assert not out.getvalue()
    if status:
        raise Exits(f"{status}, {said.getvalue().strip()}")


def file(text: str, name: str = "script.py") -> Path:
    """A file with this text, in a folder of its own."""
    path = Path(tempfile.mkdtemp()) / name
    path.write_text(text)
    return path


def weights() -> Path:
    """A folder with a Llama in several files."""
    folder = Path(tempfile.mkdtemp()) / "llama"
    llama().save_pretrained(folder, max_shard_size="4KB")
    return folder


def ranks(size: int = 2, rank: int = 1) -> Any:
    """This process is one of several; the others do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    return dist.group.WORLD


#: Inputs whose gradient is checked.
X = torch.ones(3, 5, 4, requires_grad=True)


def sharded(inside: Callable[[Any], Any] = F.gelu, last: Any = None, group: Any = None) -> Schedule:
    """Two sharded layers around a function, on two ranks; `last` is there instead of a sync."""
    group = group or (dist.group.WORLD if dist.is_initialized() else ranks())
    ends = nn.Linear(4, 8), nn.Linear(8, 4, bias=last is None)
    model = nn.Sequential(nn.LayerNorm(4), ends[0], models.Computes(inside), ends[1])
    sch = slapo.create_schedule(model, group=group)
    sch["1"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
    sch["3"].shard("weight", axis=1)
    if last is None:
        return sch["3"].sync("fwd_post", "all_reduce").get_top_schedule()
    ends[1].register_forward_hook(lambda module, args, output: last(output))
    return sch


#: Inputs and targets of :func:`stack`.
X_AND_Y = (torch.ones(2, 4), torch.ones(2, 4))


def engine(sch: Schedule | None = None, **options: Any) -> Any:
    """Trains a schedule, or :func:`stack`, on one process."""
    mesh = slapo.init_mesh(device="cpu")
    given = {"loss_fn": F.mse_loss, "optimizer": torch.optim.AdamW, **options}
    return slapo.build(stack() if sch is None else sch, "torch", mesh=mesh, **given)[0]


def saved_step(edit: Callable[[Any], Any] = lambda manifest: 0) -> Path:
    """A step that an engine has saved, with a change of its manifest."""
    trained, run = engine(), Path(tempfile.mkdtemp())
    trained.train_batch(iter([X_AND_Y]))
    path: Path = trained.save(run).path
    manifest = json.loads((path / "checkpoint.json").read_text())
    edit(manifest)
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    return path


class Hooks:
    def hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output


def checkpoints(sch: Schedule) -> None:
    sch.select("layers.*").checkpoint()
