"""The command ``slapo train``: trains the model of a folder on a text, and writes a folder."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import torch

from slapo.cost.command import config_of
from slapo.cost.layout import Layout
from slapo.cost.machine import MACHINES
from slapo.cost.suggestions import quoted, suggest
from slapo.errors import SlapoError

#: The program that the command runs, which users can also keep and edit.
SCRIPT = Template('''\
"""Trains $folder on $data, on $ranks ranks.

    torchrun --standalone --nproc-per-node $ranks THIS_FILE
"""

import functools
import json
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import slapo

FOLDER, DATA = $folder, $data
OUT, RUN = $out, $run  # the trained folder, and the steps to resume from
STEPS, SAVE_EVERY = $steps, $save_every
SEQ, BATCH = $seq, $batch  # tokens of a sample, samples of a replica in a step
HELD_OUT = 0.05  # share of the text, at its end, for the evaluation


def tokenizer_of(folder):
    """The folder's tokenizer; None if it has none, and tokens are bytes."""
    has_one = any(Path(folder).glob("tokenizer*")) or (Path(folder) / "vocab.json").exists()
    return AutoTokenizer.from_pretrained(folder) if has_one else None


def read(path, tokenizer):
    """All tokens: of a text, or of the "text" of each line of JSON."""
    text = Path(path).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip()]
    texts = [json.loads(line)["text"] for line in lines] if path.endswith(".jsonl") else [text]
    if tokenizer is None:
        return torch.tensor([byte for each in texts for byte in (*each.encode(), 10)])
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    found = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for each in found for token in (*each, *end)])


class Windows:
    """Batches of windows of the text in a random order, other ones for each replica."""

    def __init__(self, tokens, replica, replicas, device):
        if len(tokens) < SEQ:
            raise ValueError(f"{len(tokens)} tokens do not fill a sample of {SEQ}; pass more text")
        self.windows = tokens[: len(tokens) // SEQ * SEQ].view(-1, SEQ)
        self.device = device
        self.replica, self.replicas = replica, replicas

    def __iter__(self):
        generator, size = torch.Generator().manual_seed(0), BATCH * self.replicas
        while True:
            chosen = torch.randint(len(self.windows), (size,), generator=generator)
            own = self.windows[chosen[self.replica :: self.replicas]].to(self.device)
            yield {"input_ids": own, "labels": own, "use_cache": False}, own


def main():
    mesh = slapo.init_mesh(dp=$dp, tp=$tp)
    slapo.set_random_seed(2013, mesh=mesh)
    config, tokenizer = AutoConfig.from_pretrained(FOLDER), tokenizer_of(FOLDER)
    dtype = config.dtype  # of the folder; training updates float32 weights
    with slapo.init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    sch = slapo.apply_schedule(model, "$key", mesh=mesh$options)
    slapo.load_pretrained(sch, FOLDER, missing="error")  # each rank reads its slices
    engine, _ = slapo.build(
        sch,
        target="torch",
        mesh=mesh,
        data_parallel="$data_parallel",
        micro_batches=$micro_batches,
        loss_fn=lambda output, labels: output.loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=$lr),
        clip_grad_norm=1.0,
        dtype=$dtype,
    )
    warm = max(1, STEPS // 20)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        engine.optimizer, lambda step: min(1.0, (step + 1) / warm, (STEPS - step) / (0.2 * STEPS))
    )
    tokens = read(DATA, tokenizer)
    if int(tokens.max()) >= config.get_text_config().vocab_size:
        raise ValueError("the text has tokens that the model lacks; use the model's own tokenizer")
    held_out = max(SEQ, int(HELD_OUT * len(tokens)))
    where = mesh.get_local_rank("dp"), mesh["dp"].size(), mesh.device_type
    unseen = iter(Windows(tokens[-held_out:], *where))

    def log(step, metrics):
        print(f"step {step}: " + ", ".join(f"{n} {v:.4g}" for n, v in metrics.items()), flush=True)

    slapo.fit(
        engine,
        Windows(tokens[:-held_out], *where),
        steps=STEPS,
        eval_data=[next(unseen) for _ in range(4)],
        eval_every=max(1, STEPS // 5),
        scheduler=scheduler,
        save=RUN,
        save_every=SAVE_EVERY,
        log=log,
        log_every=max(1, STEPS // 20),
    )
    if engine.step_count == STEPS:
        slapo.save_pretrained(engine, OUT, dtype=dtype, overwrite=True)
        if tokenizer is not None and dist.get_rank() == 0:
            tokenizer.save_pretrained(OUT)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
''')


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the status is that of the job, 1 if no layout fits, 2 for wrong usage."""
    given = _parser().parse_args(arguments)
    try:
        script = script_of(given)
    except (SlapoError, ValueError, TypeError, KeyError, OSError) as error:
        # The text of a KeyError has quotes around it; the first argument of an OSError is a number.
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"slapo train: {text}", file=sys.stderr)
        return 1 if isinstance(error, SlapoError) else 2
    if given.print_script:
        print(script, end="")
        return 0
    run = Path(_run_of(given))
    run.mkdir(parents=True, exist_ok=True)
    path = run / "train.py"
    path.write_text(script)
    ranks = str(_devices(given))
    # By this Python: a torchrun on the PATH may belong to another environment.
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    print(f"slapo train: torchrun --nproc-per-node {ranks} {path}", file=sys.stderr, flush=True)
    job = subprocess.Popen([sys.executable, *launch, str(path)])
    while True:
        try:
            return job.wait()
        except KeyboardInterrupt:  # the job gets the signal as well, saves and ends
            continue


def script_of(given: argparse.Namespace) -> str:
    """Return the program for a folder, a text and the available devices."""
    _check_files(given)
    config = config_of(given.folder)
    _check_model(given, config)
    gpus, on_gpu = _devices(given), torch.cuda.is_available()
    sizes = config.get_text_config()
    seq = given.seq or min(1024, getattr(sizes, "max_position_embeddings", None) or 1024)
    layout, options = _layout(given, config, gpus, seq, on_gpu)
    said = "".join(f", {name}={quoted(value)}" for name, value in options.items())
    return SCRIPT.substitute(
        folder=quoted(given.folder),
        data=quoted(given.data),
        out=quoted(given.out),
        run=quoted(_run_of(given)),
        ranks=gpus,
        steps=given.steps,
        save_every=max(1, given.steps // 4),
        seq=seq,
        batch=layout.batch,
        dp=layout.dp,
        tp=layout.tp,
        key="auto",
        options=said,
        data_parallel=layout.data_parallel,
        micro_batches=layout.micro_batches,
        lr=given.lr,
        dtype="torch.bfloat16" if on_gpu else "torch.float32",
    )


def _run_of(given: argparse.Namespace) -> str:
    return given.run or f"{given.out}-run"


def _devices(given: argparse.Namespace) -> int:
    """Number of devices, or of processes without a GPU: as requested, or all."""
    count: int = given.gpus or torch.cuda.device_count() or 1
    if count < 1:
        raise ValueError(f"--gpus is {count}; pass 1 or more")
    if torch.cuda.is_available() and count > torch.cuda.device_count():
        raise ValueError(f"--gpus is {count}, but this machine has {torch.cuda.device_count()}")
    return count


def _check_files(given: argparse.Namespace) -> None:
    """Refuse paths that would fail later, on each of the ranks."""
    data, out = Path(given.data), Path(given.out)
    if not (Path(given.folder) / "config.json").is_file():
        raise ValueError(
            f"{given.folder} is not a folder with a config.json; pass one written by "
            "save_pretrained (hub names are not looked up)"
        )
    if not data.is_file():
        raise ValueError(f"--data {data} is not a file; pass a text file or a .jsonl file")
    if out.is_file():
        raise ValueError(f"--out {out} is a file; pass a new folder")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out} already holds files; pass a new folder")
    if given.steps < 1:
        raise ValueError(f"--steps is {given.steps}; pass 1 or more")


def _check_model(given: argparse.Namespace, config: Any) -> None:
    """Refuse models that are not causal language models, and samples longer than they support."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    wanted = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    found = getattr(config, "architectures", None) or [wanted]
    if wanted is None or wanted not in found:
        raise ValueError(
            f"{given.folder} holds a {found[0] or config.model_type}, but slapo train takes causal "
            f"language models; pass a folder of {wanted or 'another family, such as Llama'}"
        )
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or 2**62
    if given.seq is not None and not 2 <= given.seq <= longest:
        raise ValueError(f"--seq is {given.seq}; pass 2 or more, and at most {longest}")


def _layout(
    given: argparse.Namespace, config: Any, gpus: int, seq: int, on_gpu: bool
) -> tuple[Layout, dict[str, Any]]:
    """Return the fastest layout of PyTorch's engine that fits, and its schedule options."""
    name = torch.cuda.get_device_name().lower() if on_gpu else "cpu"
    machine = next((each for each in MACHINES if each.partition("-")[0] in name), "a100-80gb")
    found = suggest(
        config,
        machine=machine,
        gpus=gpus,
        seq_len=seq,
        batch=given.batch or max(8, gpus),
        dtype=torch.bfloat16 if on_gpu else torch.float32,
    )
    # The fastest one comes first.
    for each in found.fitting:
        layout = each.dry_run.layout
        if layout.target == "torch" and layout.pp == 1 and given.tp in (None, layout.tp):
            return layout, each.options
    asked = f" with --tp {given.tp}" if given.tp else ""
    raise SlapoError(
        f"no layout of {gpus} x {machine} without stages fits{asked}; see slapo suggest "
        f"{given.folder}\n{found.advice}".rstrip()
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slapo train",
        description="Train a causal language model from a Hugging Face folder on a text: "
        "suggest a layout, schedule and check the model, start the ranks, save, resume, and write "
        "a folder. The same command resumes a stopped run.",
    )
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="config, weights, tokenizer, as by save_pretrained")
    add("--data", required=True, help='a text file, or FILE.jsonl with a "text" in each line')
    add("--gpus", type=int, help="devices, or processes without a GPU; by default all")
    add("--steps", type=int, default=100, help="training steps (%(default)s)")
    add("--out", default="tuned", help="folder for the trained model (%(default)s)")
    add("--run", help="folder for steps to resume from; by default OUT-run")
    add("--seq", type=int, help="tokens per sample; by default at most 1024")
    add("--batch", type=int, help="samples per step, over all replicas; by default 8 or more")
    add("--lr", type=float, default=3e-5, help="learning rate of AdamW (%(default)s)")
    add("--tp", type=int, help="ranks that shard each layer; default: the fastest layout")
    add("--print-script", action="store_true", help="print the Python program and exit")
    return parser
