"""
Attention on one device
=======================

Written out, attention computes a matrix of scores for each head, and writes and reads it several
times. ``F.scaled_dot_product_attention`` does the same without ever having that matrix in memory.
This page finds the operations in a model that writes them out and puts the function in their place,
without a change of the model's code:

    python docs/gallery/attention_on_one_device.py
"""

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo

# %%
# A model
# -------
# Of an attention as it stands in textbooks; it could be anybody's.


class Attention(nn.Module):
    def __init__(self, hidden: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(0.1)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        query = self.split(self.query(hidden_states))
        key = self.split(self.key(hidden_states))
        value = self.split(self.value(hidden_states))
        scores = torch.matmul(query, key.transpose(-1, -2)) * 0.25
        if mask is not None:
            scores = scores + mask
        weights = self.dropout(F.softmax(scores, dim=-1))
        context = torch.matmul(weights, value)
        return self.out(context.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.attention = Attention(hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.norm(hidden_states + self.attention(hidden_states))


# %%
# Trace
# -----
# Only the attention has to show its operations; the rest of the model stays as it is. It is called
# without a mask here, so everything but ``hidden_states`` may keep its default.

torch.manual_seed(0)
sch = slapo.create_schedule(nn.Sequential(Layer(), Layer()))
attention = sch["0.attention"]
parameters = inspect.signature(attention.mod.forward).parameters.values()
constants = {p.name: p.default for p in parameters if p.name != "hidden_states"}
print("traced:", attention.trace(flatten=True, concrete_args=constants))
print(attention.mod.code)

# %%
# Find
# ----
# A pattern is a function: its arguments stand for any value, its operations for themselves. What
# matters is how values flow, so that the projections in between do not disturb, and
# ``F.dropout(x)`` is the module ``nn.Dropout`` too, whatever its rate.


def written_out(query, key, value):
    scores = torch.matmul(query, key.transpose(-1, -2)) * 0.25
    return torch.matmul(F.dropout(F.softmax(scores, dim=-1)), value)


matches = attention.find(written_out)
for match in matches:
    print("found:", [node.name for _, node in match])

# %%
# Replace
# -------
# One call takes the place of the operations found. Its arguments have the names of the pattern's,
# and that is how they are bound.


class FastAttention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rate = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=rate, scale=0.25)


# %%
# Verify
# ------
# Within ``Verify``, the model is compared with what it was when the block began: outputs and
# gradients. Dropout draws other numbers now, so we compare in eval mode, which is what ``Verify``
# does by itself.

example = torch.randn(3, 10, 64)
with slapo.Verify(sch, example):
    attention.replace(FastAttention(0.1), matches)
print(attention.mod.code)

# %%
# A mistake does not pass. For the second layer we forget the scale:


class Forgetful(FastAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rate = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=rate, scale=1.0)


other = sch["1.attention"]
other.trace(flatten=True, concrete_args=constants)
try:
    with slapo.Verify(sch, example):
        other.replace(Forgetful(0.1), other.find(written_out))
except slapo.VerificationError as error:
    print("refused:", error)
