"""Weights in at four tensor-parallel ranks, beside what others do; plans of saving at scale."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import slapo
from benchmark.measure import Progress, Result, Target, on_ranks, timed
from slapo.saving.plan import share_out
from slapo.weights.folders import Folder, Found, on_disk
from slapo.weights.pieces import Box, Pieced
from slapo.weights.provenance import Original, note_origins

RANKS = 4
ROUNDS = 3
MIB = 2**20

#: 2.3 GB in float32, and a size at which it runs at all.
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 10}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000}
LARGE = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def run(quick: bool, progress: Progress) -> Result:
    """Loading in fresh processes, the sides in turn; then plans in this one."""
    result = Result()
    with TemporaryDirectory() as scratch:
        _write(scratch, TINY if quick else SIZES)
        found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for number in range(1 if quick else ROUNDS):
            for side in SIDES:
                found[side].append(on_ranks(RANKS, _rank, (side, scratch), progress, PRELOADED))
                progress(f"{side}, round {number + 1}: {found[side][-1]}")
    for side, measured in found.items():
        middle = {name: median(each[name] for each in measured) for name in measured[0]}
        result.rows.append(
            {"what": f"load at tp {RANKS}", "side": side, **BLANK, **_rounded(middle)}
        )
    rows = {row["side"]: row for row in result.rows}
    for side in (side for side in SIDES if side.startswith("slapo")):
        ours, theirs = rows[side], rows["from_pretrained and a private copy"]
        over = ours["peak_mib"] - ours["share_mib"] - ours["largest_mib"]
        result.targets.append(Target(f"{side}: peak over share and a tensor", over, 60, "MiB"))
        ratio = ours["cpu_s"] / theirs["cpu_s"]
        result.targets.append(
            Target(f"{side}: CPU over from_pretrained and a private copy", ratio, 1.0)
        )
    stands, copies = _stands(quick, progress)
    for side, seconds in (("save(wait=False)", stands), ("a copy of the state", copies)):
        row = {"what": "training stands still", "side": side, **BLANK, "wall_s": round(seconds, 3)}
        result.rows.append(row)
    what = "training stands for save(wait=False), over a copy of the state"
    result.targets.append(Target(what, stands / copies, 1.0))
    for what, limit, act in (
        ("plan of a save, Llama 70B with AdamW on 256 ranks", 5.0, _plan),
        ("map of a Llama 70B folder", 2.0, _map),
    ):
        seconds = act(quick)
        progress(f"{what}: {seconds:.2f} s")
        row = {"what": what, "side": "slapo", **BLANK, "cpu_s": round(seconds, 3)}
        result.rows.append(row)
        result.targets.append(Target(what, seconds, limit, "s"))
    return result


BLANK = dict.fromkeys(("share_mib", "largest_mib", "read_mib", "peak_mib", "cpu_s", "wall_s"), "")
PRELOADED = (
    "transformers",
    "slapo.model_schedule",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "deepspeed",
)


def _rounded(found: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in found.items()}


def _config(sizes: dict[str, int]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**HEADS, **sizes}, tie_word_embeddings=False)


def _write(folder: str, sizes: dict[str, int]) -> None:
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(_config(sizes)).save_pretrained(folder, max_shard_size="500MB")
    gc.collect()


# --- sides of loading ----------------------------------------------------------------------------
def _ours(folder: str) -> tuple[nn.Module, int]:
    return _built(folder, {"tp": RANKS}, None)


def _ours_sharded(folder: str) -> tuple[nn.Module, int]:
    engine, read = _built(folder, {"dp": RANKS}, "torch", data_parallel="fsdp")
    return engine.module, read


def _ours_in_stages(folder: str) -> tuple[nn.Module, int]:
    cuts = {"pipeline_cuts": 2, "example_inputs": {"input_ids": torch.ones(2, 8, dtype=torch.long)}}
    mesh = {"pp": 2, "dp": RANKS // 2}
    given = {"data_parallel": "fsdp", "micro_batches": 2, "loss_fn": _mean}
    engine, read = _built(folder, mesh, "torch", cuts, **given)
    return engine.module, read


def _mean(output: Any, _: Any) -> torch.Tensor:
    loss: torch.Tensor = output.logits.mean()
    return loss


def _ours_by_deepspeed(folder: str) -> tuple[nn.Module, int]:
    engine, read = _built(folder, {"dp": RANKS}, "deepspeed", zero=3)
    return engine.module, read


def _built(
    folder: str,
    mesh: dict[str, int],
    target: str | None,
    cuts: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    made = slapo.init_mesh(device="cpu", **mesh)
    with slapo.init_empty_weights():
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    sch = slapo.apply_schedule(model, "llama", mesh=made, **cuts or {})
    found = slapo.load_pretrained(sch, folder)
    if target is not None:
        options["mesh"] = made
    built, _ = slapo.build(sch, target, check=False, **options)
    return built, found.bytes_read


def _whole(folder: str) -> tuple[nn.Module, int]:
    """All of it on each rank, in memory of its own, of which it keeps a part."""
    return _theirs(folder, torch.clone)


def _part(folder: str) -> tuple[nn.Module, int]:
    """A part of what the file is mapped to: the rest is not touched."""
    return _theirs(folder, lambda tensor: tensor)


def _theirs(folder: str, copy: Callable[[torch.Tensor], torch.Tensor]) -> tuple[nn.Module, int]:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rank, read = dist.get_rank(), sum(p.nbytes for p in model.parameters())
    for parameter in model.parameters():
        parameter.data = copy(parameter.data)
    for parameter in model.parameters():
        parts = parameter.data.chunk(RANKS) if parameter.dim() > 1 else (parameter.data,) * RANKS
        parameter.data = parts[rank].clone()
    return model, read


def _by_plan(folder: str) -> tuple[nn.Module, int]:
    """Transformers' own tensor parallelism."""
    from transformers import LlamaForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto")
    return model, 0


def _by_accelerate(folder: str) -> tuple[nn.Module, int]:
    """Into a model on meta, whole on each rank."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import LlamaConfig, LlamaForCausalLM

    with init_empty_weights():
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})
    return model, sum(p.nbytes for p in model.parameters())


SIDES: dict[str, Callable[[str], tuple[nn.Module, int]]] = {
    "slapo": _ours,
    "slapo, FSDP2": _ours_sharded,
    "slapo, FSDP2 in two stages": _ours_in_stages,
    "slapo, ZeRO 3": _ours_by_deepspeed,
    "from_pretrained and a private copy": _whole,
    "from_pretrained and a copy of a part": _part,
    "from_pretrained, tp_plan": _by_plan,
    "accelerate": _by_accelerate,
}


def _rank(rank: int, side: str, folder: str, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    dist.barrier()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    gc.collect()
    gc.freeze()  # or a search through all that torch has imported falls into some of the runs
    cpu = time.process_time()
    model, read = SIDES[side](folder)
    here = {
        "share_mib": sum(_local(p).nbytes for p in model.parameters()) / MIB,
        "largest_mib": max(_elements(p) * p.element_size() for p in model.parameters()) / MIB,
        "read_mib": read / MIB,
        "peak_mib": (_memory("VmHWM") - before) / MIB,
        "cpu_s": time.process_time() - cpu,
    }
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, here)
    if rank == 0:
        pipe.send({name: max(each[name] for each in everyone) for name in here})
    dist.barrier()
    dist.destroy_process_group()


def _local(parameter: Any) -> torch.Tensor:
    share = parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()
    found: torch.Tensor = getattr(parameter, "ds_tensor", share)
    return found


def _elements(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _memory(name: str) -> int:
    """Bytes that the kernel counts for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


# --- saving beside training ----------------------------------------------------------------------
def _stands(quick: bool, progress: Progress) -> tuple[float, float]:
    """Seconds of a step without saving that a save beside training takes, and a copy."""
    from transformers import LlamaForCausalLM

    mesh = slapo.init_mesh(device="cpu")
    model = LlamaForCausalLM(_config(TINY if quick else {**SIZES, "num_hidden_layers": 2}))
    engine, _ = slapo.build(
        slapo.create_schedule(model, group=mesh["tp"]),
        "torch",
        mesh=mesh,
        loss_fn=_mean,
        optimizer=torch.optim.AdamW,
    )
    inputs = {"input_ids": torch.ones(1, 8, dtype=torch.long)}
    engine.train_batch(iter([(inputs, None)]))
    found: dict[str, list[float]] = {"save": [], "copy": []}
    with TemporaryDirectory() as run:
        for _ in range(1 if quick else 5):
            began = time.perf_counter()
            saving = engine.save(run, wait=False, keep=1)
            found["save"].append(time.perf_counter() - began)
            saving.result()
            engine.train_batch(iter([(inputs, None)]))
            began = time.perf_counter()
            copies = [p.detach().clone() for p in model.parameters()]
            for state in engine.optimizer.state.values():
                copies += [t.clone() for t in state.values() if isinstance(t, torch.Tensor)]
            found["copy"].append(time.perf_counter() - began)
            del copies
            progress(f"save(wait=False) and a copy: {found}")
    # The least of each: whatever is written in between slows the next one down.
    return min(found["save"]), min(found["copy"])


# --- plans ---------------------------------------------------------------------------------------
def _original(quick: bool) -> Original:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        return note_origins(LlamaForCausalLM(_config(TINY if quick else LARGE)))


def _map(quick: bool) -> float:
    """CPU seconds from names in a folder to those in the model, and back."""
    original = _original(quick)
    leaves = {n: Pieced.leaf(n, *tensor) for n, tensor in original.tensors.items()}

    class Made(Folder):
        def __init__(self) -> None:
            self.path = Path()

        def leaves(self) -> dict[str, Pieced]:
            return leaves

        def config(self) -> dict[str, Any]:
            return {}

    def both() -> None:
        Found(Made(), original)
        on_disk(original, {})

    return timed(both)[0].cpu


def _plan(quick: bool) -> float:
    """CPU seconds of each rank: FSDP2 over 32 replicas of slices for 8 ranks."""
    shapes = {name: tuple(shape) for name, (shape, _) in _original(quick).tensors.items()}
    offers = [
        {
            (slot, name): (torch.float32, (_box(name, shape, tp, dp),))
            for name, shape in shapes.items()
            for slot in ("", "exp_avg", "exp_avg_sq")
        }
        for dp in range(32)
        for tp in range(8)
    ]
    return timed(lambda: share_out(offers, shapes))[0].cpu


def _box(name: str, shape: tuple[int, ...], tp: int, dp: int) -> Box:
    box = [(0, size) for size in shape]
    if len(shape) > 1:
        axis = int("o_proj" in name or "down_proj" in name)
        size = shape[axis] // 8
        box[axis] = (tp * size, tp * size + size)
    start, stop = box[0]
    size = -(-(stop - start) // 32)
    box[0] = (min(stop, start + dp * size), min(stop, start + dp * size + size))
    return tuple(box)
