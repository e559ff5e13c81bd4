"""A scheduled model inside Transformers' ``Trainer``, which needs nothing special for it.

    python examples/hf_trainer.py
    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py    # replicas, by Trainer's DDP

The recipe changes how the model computes: its kernels, what it computes again in the backward pass,
and a head that computes the loss by pieces, so that logits never exist in training (an
evaluation has them, for ``compute_metrics``). The model stays one of
Transformers, and parameters keep their names: what Trainer saves is read by ``from_pretrained`` of
the class, without Slapo. Recipes never rename; a schedule of your own that fuses layers does
(``FusedQKV`` makes one weight of three), and its checkpoints are for the scheduled model then.
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
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import slapo
from examples.text import VOCABULARY, Windows
from slapo.model_schedule import apply_schedule


def define(hidden: int, layers: int, length: int) -> LlamaForCausalLM:
    """A small Llama; the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def schedule(model: LlamaForCausalLM, args: argparse.Namespace) -> Any:
    """The recipe, for this process alone: Trainer spreads batches over the others."""
    # Without a group the ranks of a job would share every layer.
    group = slapo.init_mesh(dp=dist.get_world_size())["tp"] if dist.is_initialized() else None
    sch = apply_schedule(
        model,
        "llama",
        group=group,
        ckpt_ratio=args.checkpoint_ratio,
        fused_loss=True,
        compile=args.compile,
    )
    built, _ = slapo.build(sch)
    return built


def main() -> None:
    """Train, save, and read the checkpoint without Slapo."""
    args = parse()
    # First of all: they start torch.distributed, which the schedule asks for its ranks.
    arguments = TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=args.lr,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        gradient_accumulation_steps=args.accumulate,
        # Trainer finds an accelerator by itself; several processes on CPUs it has to be told.
        use_cpu=args.cpu,
        dataloader_pin_memory=not args.cpu,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        seed=2013,
    )
    model = define(args.hidden, args.layers, args.length)
    if not args.unscheduled:
        model = schedule(model, args)
    set_seed(arguments.seed)
    trainer = Trainer(model=model, args=arguments, train_dataset=Windows(args.length))
    trainer.train()
    trainer.save_model()
    trainer.save_state()  # trainer_state.json has all losses
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}")
        compare(model, args.output)
    if dist.is_initialized():
        dist.destroy_process_group()


def compare(model: Any, folder: str) -> None:
    """Show that the checkpoint is that of an ordinary Llama."""
    state = model.state_dict()
    plain = LlamaForCausalLM.from_pretrained(folder).state_dict()
    equal = plain.keys() == state.keys() and all(
        torch.equal(plain[name], state[name].cpu()) for name in plain
    )
    print(f"{folder} has the weights of a {LlamaForCausalLM.__name__}: {equal}")


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--output", default="trained", metavar="FOLDER")
    add("--steps", type=int, default=30)
    add("--batch", type=int, default=8, help="windows per process")
    add("--accumulate", type=int, default=1, help="batches per step")
    add("--length", type=int, default=128, help="tokens per window")
    add("--hidden", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--lr", type=float, default=1e-3)
    add("--checkpoint-ratio", type=float, default=0.5, help="share of layers to recompute")
    add("--compile", action="store_true", help="each layer by torch.compile")
    add("--unscheduled", action="store_true", help="the model as Transformers defines it")
    add("--cpu", action="store_true", help="also where there is an accelerator")
    args = parser.parse_args()
    args.cpu = args.cpu or not torch.accelerator.is_available()
    return args


if __name__ == "__main__":
    main()
