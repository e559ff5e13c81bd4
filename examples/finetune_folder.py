"""Fine-tune a causal language model from a folder on disk, and save a folder that loads again.

    torchrun --standalone --nproc-per-node 4 examples/finetune_folder.py --model FOLDER --tp 2 \\
        --text notes.txt book.txt --output tuned

The folder is what ``save_pretrained`` writes: ``config.json``, safetensors, and a tokenizer if
there is one; without, tokens are bytes. Layers and vocabulary are split over ``--tp`` ranks by the
recipe of the family, or by a draft; the other ranks are replicas that see
other text. Nothing is downloaded: without ``--text`` it reads the source of Python's own library.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Threads that spin while they wait take the cores from those they wait for, on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import slapo
from examples.text import BYTES, Batches, standard_library
from slapo.model_schedule import apply_schedule

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Share of the text, at its end, that is kept for the evaluation.
HELD_OUT = 0.1


def main() -> None:
    """What cannot be done with this folder or these sizes is one line."""
    args = parse()
    try:
        run(args)
        dist.barrier()  # the folder is written
        dist.destroy_process_group()
    except (OSError, ValueError, slapo.SlapoError) as error:
        raise SystemExit(f"finetune_folder.py: {error}") from error


def run(args: argparse.Namespace) -> None:
    """Load, schedule, build, train, save."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    check_launch(args, world_size)
    mesh = slapo.init_mesh(dp=world_size // args.tp, tp=args.tp, device=args.device)
    config = AutoConfig.from_pretrained(args.model)
    check_family(args.model, config)
    tokenizer = load_tokenizer(args.model)
    tokens = read_text(args.text, tokenizer, config)
    check_text(tokens, args.length, config)

    dtype = config.dtype
    with slapo.init_empty_weights():
        # In float32, which small steps of the optimizer need.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    slapo.set_random_seed(args.seed, mesh=mesh)
    sch = apply_schedule(model, "auto", mesh=mesh, ckpt_ratio=args.checkpoint_ratio)
    model.config.use_cache = False  # it is for generation
    # Each rank reads its slices only; nothing may be random.
    slapo.load_pretrained(sch, args.model, missing="error")
    engine, _ = slapo.build(
        sch,
        target="torch",
        mesh=mesh,
        loss_fn=lambda output, labels: output.loss,  # all windows are of one length
        optimizer=functools.partial(torch.optim.AdamW, lr=args.lr),
        clip_grad_norm=1.0,
        dtype=DTYPES[args.dtype],
        data_parallel=args.data_parallel,
    )
    train_text, held_out = split(tokens)
    draw = Batches(
        train_text, args.batch, args.length, False, args.seed + mesh.get_local_rank("dp")
    )
    evaluate = functools.partial(mean_loss, engine, held_out, args.batch, args.length)
    before = evaluate()
    train(engine, endless(draw), args.steps, before)
    after = evaluate()
    say(f"{config.model_type}: loss of text that it has not seen {before:.4f} -> {after:.4f}")
    slapo.save_pretrained(engine, args.output, dtype=dtype)
    if tokenizer is not None and dist.get_rank() == 0:
        tokenizer.save_pretrained(args.output)
    say(f"saved to {args.output}")


def say(text: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


# --- what would fail late, or deep in a library ---------------------------------------------------
def check_launch(args: argparse.Namespace, world_size: int) -> None:
    """Processes and folders."""
    if world_size % args.tp:
        raise ValueError(
            f"--tp {args.tp} does not divide the number of processes, which is {world_size}; start "
            f"{args.tp} or a multiple of it with torchrun --nproc-per-node"
        )
    if not (Path(args.model) / "config.json").is_file():
        raise ValueError(
            f"--model {args.model} is not a folder with a config.json; pass one that "
            "save_pretrained has written (names of a hub are not looked up)"
        )
    if Path(args.output).resolve() == Path(args.model).resolve():
        raise ValueError(f"--output {args.output} is the folder of the model; pass another one")
    Path(args.output).mkdir(parents=True, exist_ok=True)
    if any(Path(args.output).iterdir()):
        raise ValueError(f"--output {args.output} holds files already; pass a new folder")


def check_family(folder: str, config: Any) -> None:
    """Only a causal language model has the next token to learn."""
    wanted = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    found = getattr(config, "architectures", None) or [wanted]
    if wanted is None or wanted not in found:
        needed = "another family, such as Llama" if wanted is None else f"a {wanted}"
        raise ValueError(
            f"--model {folder} is the folder of a {found[0] or config.model_type}, and this trains "
            f"causal language models; pass one of {needed}"
        )


def check_text(tokens: Tensor, length: int, config: Any) -> None:
    """Enough of it, and no index beyond a table."""
    if length < 2:
        raise ValueError(f"--length {length} leaves no next token to learn; pass 2 or more")
    shortest = min(len(part) for part in split(tokens))
    if shortest <= length:
        raise ValueError(
            f"the text has {len(tokens)} tokens, {shortest} of them for the evaluation, which is "
            f"too few for windows of --length {length}; pass more text or a smaller length"
        )
    sizes = config.get_text_config()
    longest = getattr(sizes, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ValueError(f"--length {length} is more than the model's {longest} positions")
    if int(tokens.max()) >= sizes.vocab_size:
        raise ValueError(
            f"the tokenizer gives token {int(tokens.max())}, and the model's vocabulary has "
            f"{sizes.vocab_size}; the folder's tokenizer is that of another model"
        )


# --- text ----------------------------------------------------------------------------------------
def load_tokenizer(folder: str) -> Any:
    """That of the folder; None if it has none."""
    if any(Path(folder).glob("tokenizer*")) or (Path(folder) / "vocab.json").exists():
        return AutoTokenizer.from_pretrained(folder)
    return None


def read_text(files: list[str], tokenizer: Any, config: Any) -> Tensor:
    """Tokens of all files, one behind the other, of shape ``(tokens,)``."""
    if files:
        text = b"\n".join(Path(file).read_bytes() for file in files)
    else:
        text = bytes(standard_library(limit=500_000).tolist())
    if tokenizer is not None:
        found = tokenizer(text.decode(errors="replace"), add_special_tokens=False, verbose=False)
        return torch.tensor(found["input_ids"])
    vocabulary = config.get_text_config().vocab_size
    if vocabulary < BYTES:
        raise ValueError(
            f"the folder has no tokenizer, and a vocabulary of {vocabulary} tokens, too few for "
            f"{BYTES} bytes; put the tokenizer's files into the folder"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def split(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """For training, and for the evaluation."""
    size = int(len(tokens) * (1 - HELD_OUT))
    return tokens[:size], tokens[size:]


def endless(draw: Callable[[], dict[str, Tensor]]) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Batches as engines take them: inputs, and targets, which the model has here anyway."""
    while True:
        batch = draw()
        yield batch, batch["labels"]


# --- training ------------------------------------------------------------------------------------
def train(engine: Any, data: Iterator[Any], steps: int, before: float) -> None:
    """Some steps, with a bar on the first rank."""
    first = dist.get_rank() == 0
    bar = track(range(steps), "fine-tuning", console=Console(stderr=True), disable=not first)
    every = max(1, steps // 10)
    for step in bar:
        loss = engine.train_batch(data)
        if step % every == 0 or step == steps - 1:
            say(f"step {step}: loss {loss:.4f}")


def mean_loss(engine: Any, text: Tensor, batch: int, length: int) -> float:
    """Of some windows, the same on every rank and at every call."""
    draw = Batches(text, batch, length, masked=False, seed=0)
    data = endless(draw)
    return sum(float(engine.eval_batch(data)) for _ in range(4)) / 4


def count(text: str) -> int:
    """A number from 1 up, for argparse, which names the option."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 up")
    return number


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options, by default of the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="FOLDER", help="of from_pretrained")
    add("--text", nargs="*", default=[], metavar="FILE", help="to learn; else Python's source")
    add("--output", default="tuned", metavar="FOLDER", help="where the whole weights go")
    add("--tp", type=count, default=1, help="ranks that share every layer")
    add("--steps", type=count, default=50)
    add("--batch", type=count, default=4, help="windows per replica")
    add("--length", type=count, default=64, help="tokens per window")
    add("--lr", type=float, default=3e-4)
    add("--checkpoint-ratio", type=float, default=0.0, help="share of layers to recompute")
    add("--dtype", choices=sorted(DTYPES), default="float32", help="of the computation")
    add("--data-parallel", choices=("ddp", "fsdp"), default="ddp")
    add("--seed", type=int, default=2013)
    add("--device", default=None, help="cpu or cuda; the accelerator if there is one")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
