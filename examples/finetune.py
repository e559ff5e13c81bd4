"""Fine-tune a causal language model on a text: a Hugging Face folder in, a folder out.

torchrun --standalone --nproc-per-node 8 examples/finetune.py FOLDER notes.txt --tp 4
"""

import argparse
import functools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import slapo


def batches(folder, text, mesh, size=8, length=128):
    """Batches of windows of the text, different ones for each replica."""
    tokens = AutoTokenizer.from_pretrained(folder)(Path(text).read_text(), verbose=False)
    ids = torch.tensor(tokens["input_ids"], device=mesh.device_type)
    windows = ids[: len(ids) // length * length].view(-1, length)
    own = windows[mesh.get_local_rank("dp") :: mesh["dp"].size()]
    whole = own[: len(own) // size * size].split(size)
    return [({"input_ids": each, "labels": each, "use_cache": False}, each) for each in whole]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="config, weights and tokenizer")
    parser.add_argument("text", help="a text file")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share each layer")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    mesh = slapo.init_mesh(dp=int(os.environ["WORLD_SIZE"]) // args.tp, tp=args.tp)
    config = AutoConfig.from_pretrained(args.folder)
    dtype = config.dtype  # training updates float32 weights
    with slapo.init_empty_weights():  # no rank ever holds the whole model
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # The family's recipe, or a draft; half of the layers recompute their activations.
    sch = slapo.apply_schedule(model, "auto", mesh=mesh, ckpt_ratio=0.5)
    slapo.load_pretrained(sch, args.folder, missing="error")  # each rank reads its slices
    engine, _ = slapo.build(  # the first batch is checked before the first step
        sch,
        target="torch",
        mesh=mesh,
        loss_fn=lambda output, labels: output.loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        clip_grad_norm=1.0,  # of the gradient of the whole model
        dtype=torch.bfloat16,  # of the computation; the optimizer updates float32 weights
    )
    warmup = torch.optim.lr_scheduler.LinearLR(engine.optimizer, 0.1, total_iters=10)
    data = batches(args.folder, args.text, mesh)
    slapo.fit(engine, data, steps=args.steps, scheduler=warmup, save="run", save_every=10, log=log)
    slapo.save_pretrained(engine, "tuned", dtype=dtype, overwrite=True)  # the whole model
    dist.destroy_process_group()


def log(step, metrics):
    if step % 5 == 0:
        print(f"step {step}: loss {metrics['loss']:.2f}, gradient norm {metrics['grad_norm']:.2f}")


if __name__ == "__main__":
    main()
