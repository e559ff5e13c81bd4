"""A scheduled model in a loop of one's own with ``accelerate``.

    python examples/hf_accelerate.py
    torchrun --standalone --nproc-per-node 2 examples/hf_accelerate.py

The recipe changes how each process computes; Accelerator spreads batches over the processes, and
sees a model of Transformers: nothing in the loop is special. To split layers over processes as
well, take an engine of ``slapo.build`` instead of Accelerator: see ``finetune.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import slapo
from examples.text import VOCABULARY, Windows
from slapo.model_schedule import apply_schedule


def define(args: argparse.Namespace) -> GPT2LMHeadModel:
    """A small GPT-2."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=args.hidden,
        n_layer=args.layers,
        n_head=4,
        n_positions=args.length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        # As large models are trained; with dropout each way of computing draws its own masks.
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    )
    return GPT2LMHeadModel(config)


def schedule(model: GPT2LMHeadModel, args: argparse.Namespace) -> Any:
    """The recipe, for this process alone: the others are replicas."""
    # Without a group the ranks of a job would share every layer.
    group = slapo.init_mesh(dp=dist.get_world_size())["tp"] if dist.is_initialized() else None
    options = {"ckpt_ratio": args.checkpoint_ratio, "fused_loss": True}
    built, _ = slapo.build(apply_schedule(model, "gpt2", group=group, **options))
    return built


def main() -> None:
    """Train, and save a folder that ``from_pretrained`` reads."""
    args = parse()
    accelerator = Accelerator(
        # It finds an accelerator by itself; several processes on CPUs it has to be told.
        cpu=args.cpu or not torch.accelerator.is_available(),
        gradient_accumulation_steps=args.accumulate,
        mixed_precision=args.mixed_precision,
    )
    set_seed(2013)  # the same weights and order of samples everywhere
    model: Any = define(args)
    if not args.unscheduled:
        model = schedule(model, args)  # before prepare, which wraps it
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = DataLoader(Windows(args.length), args.batch, shuffle=True, drop_last=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    train(accelerator, model, optimizer, data, args)
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.output, is_main_process=accelerator.is_main_process
    )
    accelerator.print(f"saved to {args.output}")
    accelerator.end_training()


def train(
    accelerator: Accelerator, model: Any, optimizer: Any, data: Any, args: argparse.Namespace
) -> None:
    """Some steps of the optimizer, each on `accumulate` batches."""
    losses: list[torch.Tensor] = []  # of one step
    step = 0
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if accelerator.sync_gradients:
            mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
            accelerator.print(f"step {step}: loss {mean:.6f}, norm of the gradient {norm:.5f}")
            losses.clear()
            step += 1
        if step == args.steps:
            break


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--output", default="trained", metavar="FOLDER")
    add("--steps", type=int, default=30, help="of the optimizer; at most one pass")
    add("--batch", type=int, default=8, help="windows per process")
    add("--accumulate", type=int, default=2, help="batches per step")
    add("--length", type=int, default=128, help="tokens per window")
    add("--hidden", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--lr", type=float, default=1e-3)
    add("--mixed-precision", choices=("no", "bf16"), default="no")
    add("--checkpoint-ratio", type=float, default=0.5, help="share of layers to recompute")
    add("--unscheduled", action="store_true", help="the model as Transformers defines it")
    add("--cpu", action="store_true", help="also where there is an accelerator")
    return parser.parse_args()


if __name__ == "__main__":
    main()
