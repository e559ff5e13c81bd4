"""
Quick start: a schedule for BERT
================================

A schedule says how a model runs, beside the model's definition: which operations become one kernel,
what is recomputed in the backward pass, what is spread over devices. This page takes BERT as
Transformers defines it through a first schedule, in one process and without a GPU:

    python docs/gallery/quick_start.py
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is made from its configuration

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertLMHeadModel

import slapo

# %%
# A model
# -------
# A small BERT, with weights drawn at random. Nothing below depends on its size. Dropout is off, so
# that two runs can be compared.

torch.manual_seed(0)
config = BertConfig(
    vocab_size=500,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=128,
    is_decoder=True,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertLMHeadModel(config)
tokens = torch.randint(0, 500, (4, 16))
batch = {"input_ids": tokens, "labels": tokens}
loss_before = model(**batch).loss.item()

# %%
# A schedule
# ----------
# ``create_schedule`` lays a tree of names over the model. The model is not copied: what is done to
# a node of the tree is done to the module of that name. Printing a node shows the names.

sch = slapo.create_schedule(model)
print(sch["bert.encoder.layer.0.intermediate"])

# %%
# Three primitives
# ----------------
# Each line below is one decision, and none of them touches the code of the model:
#
# - The addition of a bias and the GELU that follows read and write the same numbers. ``decompose``
#   takes the bias out of the linear layer, ``trace`` makes the operations of the module visible,
#   ``find`` looks for the two, and ``fuse`` compiles them to one kernel.
# - ``checkpoint`` keeps no activations of a layer: the backward pass computes them again. We do
#   that for every second layer.
#
# ``Verify`` stands around all that. When its block ends it runs the model and a copy taken at the
# beginning, and compares outputs and gradients. A schedule that changes what the model computes is
# an error which names the module.

layers = sch.select("bert.encoder.layer.*")
with slapo.Verify(sch, example_inputs=batch):
    for number, layer in enumerate(layers):
        up = layer["intermediate"]
        up["dense"].decompose()
        up.trace(flatten=True)
        up.fuse(up.find(lambda x, bias: F.gelu(x + bias)), name="BiasGeLU")
        if number % 2 == 0:
            layer.checkpoint()

# %%
# The tree has kept note of what was applied where:

print(sch["bert.encoder.layer.0"])

# %%
# A model again
# -------------
# ``build`` returns the model, ready for an ordinary training loop. Its parameters have the names
# that they always had, so a checkpoint of the one loads into the other.

model, _ = slapo.build(sch)
loss_after = model(**batch).loss.item()
print(f"loss of the model {loss_before:.4f}, of the scheduled model {loss_after:.4f}")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")

# %%
# From here: the same schedule with the layers spread over processes is the page on several devices,
# and ``help(sch.fuse)`` is the manual of each primitive.
