"""
An MLP on several devices
=========================

Two linear layers that are too large for one device are split over two: each device has half of the
weights and computes half of the work. The script starts its two processes itself, on GPUs where
there are any and on the CPU where there are none:

    python docs/gallery/mlp_on_several_devices.py

``torchrun --nproc-per-node 2 docs/gallery/mlp_on_several_devices.py`` does the same.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo

# %%
# A model
# -------
# It knows nothing of devices.


class MLP(nn.Module):
    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.linear1 = nn.Linear(hidden, 4 * hidden)
        self.linear2 = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(F.relu(self.linear1(x)))


# %%
# How to split it
# ---------------
# ``nn.Linear`` keeps its weight as ``(out_features, in_features)``.
#
# - The first layer is split by output features, axis 0. Each device then computes some features of
#   the activation, from the whole input. In the backward pass it knows only its own part of the
#   input's gradient, so the parts are summed there: ``sync("bwd_post", "all_reduce")``.
# - The second layer is split by input features, axis 1: those that each device has just computed.
#   Its output is one term of a sum, and ``sync("fwd_post", "all_reduce")`` adds up the terms. The
#   bias stays whole and is added once, after that.
#
# One sum in each direction is all that the devices tell each other. Without either of them
# ``Verify`` fails: leave a line out and see.


def schedule(sch: slapo.Schedule, example: Tensor) -> None:
    with slapo.Verify(sch, example):
        sch["linear1"].shard("weight", axis=0).shard("bias", axis=0)
        sch["linear1"].sync("bwd_post", "all_reduce")
        sch["linear2"].shard("weight", axis=1)
        sch["linear2"].sync("fwd_post", "all_reduce")


# %%
# What each process does
# ----------------------
# ``slapo.env.setup`` joins the processes to a group, of which the schedule makes use by itself. All
# of them draw the same weights and see the same batch, as the seeds are equal.


def train(rank: int, args: argparse.Namespace) -> None:
    slapo.env.setup(rank, args.world_size)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = MLP().to(device)
    inputs = torch.randn(8, 64, device=device)
    whole = sum(p.numel() for p in model.parameters())

    sch = slapo.create_schedule(model)
    schedule(sch, inputs)
    model, _ = slapo.build(sch)
    if rank == 0:
        print(sch)
        print(f"{sum(p.numel() for p in model.parameters())} of {whole} parameters on each device")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(args.steps):
        loss = F.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    slapo.env.cleanup()


# %%
# Start
# -----
# ``slapo.env.execute`` calls ``train(rank, args)`` in ``args.world_size`` processes. Each of them
# imports this file, so the call stands where only the first one comes.

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    slapo.env.execute(train, parser.parse_args())
