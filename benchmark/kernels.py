"""Training steps of recipes beside Transformers as it comes, torch.compile, and two other ways to
split a model: time and peak memory.

Sides take steps in turn, so that what else runs on the machine disturbs all alike. A figure is a
median; peaks are of processes of their own, above what the model itself takes.

    python -m benchmark kernels [--quick] [--device cuda] [--rounds N]

With ``--device cuda`` models have the published sizes (BERT-large, GPT-2 medium, T5-base, a Llama
of 1.2 billion parameters) and run in bfloat16.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from benchmark import report
from benchmark.measure import Progress, Result, Target, on_ranks
from slapo.model_schedule import apply_schedule

#: Speed of ours against Transformers', and of ours over two ranks against the other ways.
FASTER, FASTER_ON_RANKS = 1.15, 1.3
#: Peak memory of ours above the model against Transformers'.
LESS_MEMORY = 0.6

Step = Callable[[], float]


@dataclass(frozen=True)
class Case:
    """A model to train.

    Parameters
    ----------
    key
        Of its recipe.
    cls, config
        Names in Transformers.
    settings
        Of the config.
    """

    key: str
    cls: str
    config: str
    settings: dict[str, Any]
    length: int = 512

    def build(self) -> nn.Module:
        """Random weights, the same at each call."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        model: nn.Module = getattr(transformers, self.cls)(config)
        return model.train()

    def inputs(self, batch: int, device: str) -> dict[str, Tensor]:
        """Random tokens without padding; each is its own label."""
        generator = torch.Generator().manual_seed(1)
        vocabulary = self.settings["vocab_size"]
        ids = torch.randint(3, vocabulary, (batch, self.length), generator=generator).to(device)
        return {"input_ids": ids, "labels": ids}


_OFF = {"use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_NONE = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _gpt2(hidden: int, layers: int, heads: int, vocabulary: int, length: int) -> Case:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": length}
    settings = {**sizes, "vocab_size": vocabulary, **_OFF, **_NONE}
    return Case("gpt2", "GPT2LMHeadModel", "GPT2Config", settings, length)


def _llama(
    hidden: int, wide: int, layers: int, heads: int, groups: int, vocabulary: int, length: int
) -> Case:
    settings = {
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
        "tie_word_embeddings": False,
        **_OFF,
    }
    return Case("llama", "LlamaForCausalLM", "LlamaConfig", settings, length)


CASES: dict[str, dict[str, Case]] = {
    "cpu": {
        "gpt2": _gpt2(512, 6, 8, 32000, 512),
        "llama": _llama(512, 1376, 6, 8, 8, 32000, 512),
    },
    "quick": {"gpt2": _gpt2(16, 1, 2, 64, 8), "llama": _llama(16, 32, 1, 2, 2, 64, 8)},
    "cuda": {
        "bert-large": Case(
            "bert",
            "BertForMaskedLM",
            "BertConfig",
            {
                "hidden_size": 1024,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "intermediate_size": 4096,
                "vocab_size": 30522,
                **_BERT,
            },
        ),
        "gpt2-medium": _gpt2(1024, 24, 16, 50257, 1024),
        "t5-base": Case(
            "t5",
            "T5ForConditionalGeneration",
            "T5Config",
            {
                "d_model": 768,
                "d_kv": 64,
                "d_ff": 3072,
                "num_layers": 12,
                "num_heads": 12,
                "vocab_size": 32128,
                "dropout_rate": 0.0,
                "use_cache": False,
                "decoder_start_token_id": 0,
            },
        ),
        "llama-1b": _llama(2048, 8192, 16, 32, 8, 128256, 2048),
    },
}


# --- sides ---------------------------------------------------------------------------------------
def _as_it_comes(case: Case, model: nn.Module) -> nn.Module:
    return model


def _compiled(case: Case, model: nn.Module) -> nn.Module:
    model.compile()
    return model


def _ours(case: Case, model: nn.Module, **options: Any) -> nn.Module:
    return slapo.build(apply_schedule(model, case.key, **options))[0]


@dataclass(frozen=True)
class Side:
    """A way to run a model, and whether the optimizer is one kernel."""

    make: Callable[[Case, nn.Module], nn.Module]
    fused_optimizer: bool = False


_NO = {"kernels": False, "attn_op_name": None}
SIDES: dict[str, Side] = {
    "hf": Side(_as_it_comes),
    "hf, fused AdamW": Side(_as_it_comes, True),
    "hf, torch.compile": Side(_compiled),
    "hf, torch.compile, fused AdamW": Side(_compiled, True),
    "ours, attention": Side(functools.partial(_ours, **{**_NO, "attn_op_name": "auto"})),
    "ours, kernels": Side(functools.partial(_ours, **{**_NO, "kernels": True})),
    "ours, fused loss": Side(functools.partial(_ours, **_NO, fused_loss=True)),
    "ours, compiled layers": Side(functools.partial(_ours, **_NO, compile=True)),
    "ours, all": Side(functools.partial(_ours, fused_loss=True), True),
    "ours, all, compiled layers": Side(
        functools.partial(_ours, fused_loss=True, compile=True), True
    ),
}
OURS = ("ours, all", "ours, all, compiled layers")


def step_of(case: Case, side: Side, batch: int, device: str) -> Step:
    """Forward, backward and optimizer; returns the loss."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = side.make(case, case.build().to(device, dtype))
    inputs = case.inputs(batch, device)
    given = {"fused": True} if side.fused_optimizer else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **given)

    def step() -> float:
        loss: Tensor = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # waits for an accelerator, too

    return step


# --- one process ---------------------------------------------------------------------------------
def measure_steps(
    cases: dict[str, Case],
    sides: Sequence[str],
    batches: Sequence[int],
    rounds: int,
    device: str,
    say: Progress,
) -> Result:
    """Time and peak memory of every side."""
    result = Result()
    clock = time.process_time if device == "cpu" else time.perf_counter
    for name, case in cases.items():
        for batch in batches:
            steps = {side: step_of(case, SIDES[side], batch, device) for side in sides}
            losses = {side: [step() for _ in range(2)] for side, step in steps.items()}
            _check_losses(losses)
            seconds: dict[str, list[float]] = {side: [] for side in steps}
            for turn in range(rounds):
                order = list(steps)
                for side in order[turn % len(order) :] + order[: turn % len(order)]:
                    start = clock()
                    steps[side]()
                    seconds[side].append(clock() - start)
                say(f"{name}, batch {batch}: round {turn + 1} of {rounds}")
            del steps
            gc.collect()
            peaks = {side: _peak(name, side, batch, device, cases) for side in sides}
            _report(result, name, batch, seconds, peaks, rounds)
            for row in result.rows[-len(sides) :]:
                say(
                    f"{name}, batch {batch}, {row['side']}: {row['speed']} x, {row['peak_mib']} MiB"
                )
    return result


def _check_losses(losses: dict[str, list[float]]) -> None:
    first = losses["hf"]
    for side, found in losses.items():
        if any(abs(a - b) > 2e-2 * abs(b) for a, b in zip(found, first, strict=True)):
            raise RuntimeError(
                f"{side} computes something else: losses {found}, Transformers {first}"
            )


def _report(
    result: Result,
    name: str,
    batch: int,
    seconds: dict[str, list[float]],
    peaks: dict[str, float],
    rounds: int,
) -> None:
    base = seconds["hf"]
    speeds = {}
    for side, found in seconds.items():
        speeds[side] = median(b / own for b, own in zip(base, found, strict=True))
        result.rows.append(
            {
                "model": name,
                "batch": batch,
                "side": side,
                "rounds": rounds,
                "seconds": round(median(found), 4),
                "speed": round(speeds[side], 3),
                "peak_mib": round(peaks[side]),
                "peak": round(peaks[side] / max(peaks["hf"], 1e-9), 3),
            }
        )
    best = max((side for side in OURS if side in speeds), key=lambda side: speeds[side])
    other = max((s for s in speeds if s.startswith("hf")), key=lambda side: speeds[side])
    where = f"{name}, batch {batch}"
    result.targets += [
        Target(f"{where}: time of {best} to hf's", 1 / speeds[best], 1 / FASTER),
        Target(f"{where}: time of {best} to {other}'s", speeds[other] / speeds[best], 1.0),
    ]
    if batch >= 4:
        value = peaks["ours, all"] / max(peaks["hf"], 1e-9)
        result.targets.append(Target(f"{where}: peak memory of ours to hf's", value, LESS_MEMORY))


def _peak(name: str, side: str, batch: int, device: str, cases: dict[str, Case]) -> float:
    """MiB above the model of a forward and backward pass, in a process of its own."""
    table = next(key for key, value in CASES.items() if value is cases)
    command = [sys.executable, "-m", "benchmark.kernels", table, name, side, str(batch), device]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def peak_of(case: Case, side: Side, batch: int, device: str) -> float:
    """As `_peak`, in this process."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = side.make(case, case.build().to(device, dtype))
    inputs = case.inputs(batch, device)
    model(**case.inputs(1, device)).loss.backward()  # what is compiled and made once
    model.zero_grad()
    gc.collect()
    before = _memory(device, reset=True)
    model(**inputs).loss.backward()
    return (_memory(device) - before) / 2**20


def _memory(device: str, reset: bool = False) -> float:
    """Bytes: what is in use now, with `reset`; else the peak since then."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
            return float(torch.cuda.memory_allocated())
        return float(torch.cuda.max_memory_allocated())
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    key = "VmRSS" if reset else "VmHWM"
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(key))
    return 1024.0 * float(line.split()[1])


# --- two ranks -----------------------------------------------------------------------------------
def measure_ranks(case: Case, batch: int, rounds: int, say: Progress) -> Result:
    """Steps over two ranks: ours, DTensor's styles, Transformers' own plan."""
    with tempfile.TemporaryDirectory() as folder:
        case.build().save_pretrained(folder)  # type: ignore[operator]
        found = on_ranks(2, _rank, (case, batch, rounds, folder), say)
    result = Result()
    for side, seconds in found.items():
        pairs = zip(seconds, found["ours"], strict=True)
        ratio = median(other / own for other, own in pairs)
        result.rows.append(
            {
                "model": case.key,
                "batch": batch,
                "side": side,
                "ranks": 2,
                "rounds": rounds,
                "seconds": round(median(seconds), 4),
                "ours_faster_by": round(ratio, 3),
            }
        )
        if side != "ours":
            what = f"{case.key}, batch {batch}, two ranks: time of ours to {side}'s"
            result.targets.append(Target(what, 1 / ratio, 1 / FASTER_ON_RANKS))
    return result


def _rank(
    rank: int, case: Case, batch: int, rounds: int, folder: str, store: str, pipe: Any
) -> None:
    os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    models = {
        "ours": _ours(case, case.build(), group=dist.group.WORLD),
        "DTensor": _styles(case.build()),
    }
    if importlib.util.find_spec("accelerate") is not None:  # which its loader asks for
        models["transformers"] = _plan(case, folder)
    elif rank == 0:
        pipe.send("transformers' own plan is left out: it needs the package accelerate")
    inputs = case.inputs(batch, "cpu")
    optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-4) for name, m in models.items()}

    def step(name: str) -> float:
        start = time.perf_counter()
        loss: Any = models[name](**inputs).loss
        loss.backward()
        optimizers[name].step()
        optimizers[name].zero_grad()
        value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        losses.setdefault(name, []).append(value.item())
        return time.perf_counter() - start

    losses: dict[str, list[float]] = {}
    for name in models:
        step(name), step(name)
    _check_losses({"hf": losses["DTensor"], **losses})
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds):
        for name in models:
            dist.barrier()
            seconds[name].append(step(name))
        if rank == 0:
            pipe.send(f"two ranks, {case.key}: round {turn + 1} of {rounds}")
    if rank == 0:
        pipe.send(seconds)
    dist.barrier()
    dist.destroy_process_group()


def _styles(model: Any) -> nn.Module:
    """PyTorch's own styles on Llama."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns += ("mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {path: ColwiseParallel() for path in columns}
    plan |= {path: RowwiseParallel() for path in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    whole = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, whole)
    return model  # type: ignore[no-any-return]


def _plan(case: Case, folder: str) -> nn.Module:
    """Transformers' own tensor parallelism."""
    import transformers
    from transformers.distributed import DistributedConfig

    cls = getattr(transformers, case.cls)
    model: nn.Module = cls.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    return model.train()


# --- command -------------------------------------------------------------------------------------
def main(arguments: Sequence[str]) -> None:
    """Run what ``python -m benchmark kernels`` is followed by."""
    parser = argparse.ArgumentParser("python -m benchmark kernels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny models, few sides, one round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=7, help="of each side (%(default)s)")
    parser.add_argument(
        "--results", type=Path, default=report.RESULTS, help="folder to write to (%(default)s)"
    )
    options = parser.parse_args(arguments)
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", flush=True)

    with _quiet(options.device):
        results = _measure(options, say)
    command = shlex.join(["python", "-m", "benchmark", "kernels", *arguments])
    for name, result in results.items():
        suffix = "_cuda" if options.device == "cuda" else ""
        for path in report.write(f"{name}{suffix}", result, command, options.results):
            say(f"wrote {path}")
        for target in result.targets:
            print(target)


@contextmanager
def _quiet(device: str) -> Iterator[None]:
    """Without the log, and on a CPU on one thread; the process is another's too."""
    disabled, threads = logging.root.manager.disable, torch.get_num_threads()
    logging.disable(logging.WARNING)
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        logging.disable(disabled)
        torch.set_num_threads(threads)


def _measure(options: argparse.Namespace, say: Progress) -> dict[str, Result]:
    cases = CASES["quick" if options.quick else options.device]
    rounds = 1 if options.quick else options.rounds
    sides = ("hf", "ours, all") if options.quick else tuple(SIDES)
    batches = (4,) if options.quick else (1, 4)
    steps = measure_steps(cases, sides, batches, rounds, options.device, say)
    results = {"kernels": steps}
    if options.device == "cpu":
        ranks = [measure_ranks(cases["llama"], batch, rounds, say) for batch in batches]
        rows = [row for each in ranks for row in each.rows]
        targets = [target for each in ranks for target in each.targets]
        results["kernels_ranks"] = Result(rows, targets)
    return results


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    table, model_name, side_name, size, where = sys.argv[1:]
    print(json.dumps(peak_of(CASES[table][model_name], SIDES[side_name], int(size), where)))
