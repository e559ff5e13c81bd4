"""Fine-tune a Llama: every layer split over `tp` ranks, batches over the rest."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import slapo


def load(folder=None):
    if folder is not None:
        with slapo.init_empty_weights():  # build reads it, each rank its slices
            return LlamaForCausalLM.from_pretrained(folder, use_cache=False)
    torch.manual_seed(0)  # every rank starts with the same weights, and keeps its slices
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, use_cache=False, **sizes, **heads))


def parallelize(sch):
    for layer in sch.select("model.layers.*"):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            layer[name].shard("weight", axis=0)  # by heads
        layer["self_attn.o_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            layer[name].shard("weight", axis=0)
        layer["mlp.down_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        for name in ("self_attn", "mlp"):  # what all of its columns send back, summed once
            layer[name].sync("bwd_post", "all_reduce")
        layer.checkpoint()


def loss_of(output, tokens):
    logits = output.logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batches(mesh, vocabulary, samples=0):  # yours go here: other ones for each replica
    number = samples // 8 + mesh.get_local_rank("dp")
    while True:
        generator = torch.Generator().manual_seed(number)
        start = torch.randint(vocabulary, (8, 1), generator=generator)
        tokens = ((start + torch.arange(64)) % vocabulary).to(mesh.device_type)
        yield {"input_ids": tokens}, tokens
        number += mesh["dp"].size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder of a Llama, as save_pretrained writes it")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share every layer")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--run", help="folder to save steps in, and to resume from")
    args = parser.parse_args()

    mesh = slapo.init_mesh(dp=int(os.environ["WORLD_SIZE"]) // args.tp, tp=args.tp)
    model = load(args.model)
    slapo.set_random_seed(2013, mesh=mesh)
    sch = slapo.create_schedule(model, mesh=mesh)
    example = next(batches(mesh, model.config.vocab_size))[0]
    with slapo.Verify(sch, example, enable=args.model is None):  # with a small model, once
        parallelize(sch)
    engine, _ = slapo.build(
        sch,
        target="torch",
        mesh=mesh,
        loss_fn=loss_of,
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-4),
        micro_batches=2,
        clip_grad_norm=1.0,  # of the whole model's gradient
        dtype=torch.bfloat16,  # of the computation; the optimizer works on float32
    )
    samples = 0
    if args.run and slapo.checkpoints(args.run):
        samples = engine.load(args.run).samples  # at another layout, too
    data = batches(mesh, model.config.vocab_size, samples)
    for step in range(engine.step_count, args.steps):
        loss = engine.train_batch(data)
        if args.run and engine.step_count % 5 == 0:
            engine.save(args.run, keep=2)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.3f}, norm of the gradient {engine.grad_norm:.2f}")
    slapo.save_pretrained(engine, "tuned")  # whole, under the model's own names
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
