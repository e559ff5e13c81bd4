"""
Debugging with ``Print``
========================

``print`` in the ``forward`` of a module shows nothing useful once the module is traced: it would
run while the graph is made, on stand-ins for tensors, and never again. ``slapo.op.Print`` is a
module that prints when the model runs, and stays in the graph:

    python docs/gallery/debugging_with_print.py
"""

import torch
from torch import Tensor, nn

import slapo
from slapo.op import Print

# %%
# In a model
# ----------
# ``Print`` takes a value and anything else to print before it, and returns the value. It may stand
# in the flow of data, or beside it: a call whose result is not used is kept, too. A forward
# may also make it on the spot, as in ``Print()(x, "mean", x.mean(), "of")``.


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.show = Print()

    def forward(self, x: Tensor) -> Tensor:
        self.show(x, "input:")
        x = self.show(self.linear(x), "after the linear layer:")
        return torch.relu(x)


torch.manual_seed(0)
sch = slapo.create_schedule(Model())
print("traced:", sch.trace())
print(sch.mod.code)

# %%
# The graph has two calls of ``show``, and each run prints the values of that run:

for scale in (1.0, 10.0):
    sch.mod(torch.full((1, 4), scale))

# %%
# In a model that is not yours
# ----------------------------
# A schedule puts it there. ``find`` gives the place, and a module that calls ``Print`` takes it.
# The code of the model stays as it is.


class Shown(nn.Module):
    """The activation, and what went into it."""

    def __init__(self) -> None:
        super().__init__()
        self.show = Print()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.show(x, "into the activation:"))


model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
sch = slapo.create_schedule(model)
sch.replace(Shown(), sch.find(lambda x: torch.relu(x)))
sch.mod(torch.ones(1, 4))

# %%
# ``Print`` passes values on, so the scheduled model computes what it did, as ``Verify`` confirms.
# Take the lines out again when you are done: a message for each step and rank is a lot.

with slapo.Verify(sch, torch.ones(3, 4)):
    sch["Shown_0"].replace(nn.ReLU())
print(sch)
