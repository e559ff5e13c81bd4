"""A comparison of the gradients that each tensor-parallel rank computes for a replicated parameter.

After a missing sync the gradient is partial, and differs from rank to rank. The ranks compare a few
values per gradient in one small collective: products with fixed random vectors from both sides.
These differ on average as much as the gradients do; the norms of partial gradients can be alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from slapo.agreement import extremes, has_peers, on_every_rank
from slapo.errors import PlacementError
from slapo.sharding.groups import handle_of
from slapo.sharding.slicing import local_part
from slapo.sharding.tags import is_tensor_parallel

#: Random vectors for each gradient.
_PRODUCTS = 4

#: Kernels that add in any order, as those of embeddings on GPUs do, leave differences up to this
#: part of a gradient; what is this part of the largest gradient is rounding in all of its digits.
_TOLERANCE, _ROUNDING = 2e-2, 1e-5


class GradientCheck:
    """Compares gradients of the parameters that are replicated over the tensor-parallel ranks.

    Gradients of several backward passes are added up.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._handle = handle_of(group)
        #: for each its products, and the norms of what was noted
        self._digests: dict[str, Tensor] = {}
        self.parameters: dict[str, Parameter] = {}
        if group is not None and has_peers(group):
            self.parameters = dict(_replicated(module))
        self._seeds = {name: seed for seed, name in enumerate(self.parameters)}

    @torch.no_grad()
    def note(self, name: str, gradient: Tensor | None) -> None:
        """Take a gradient, or a part of it, of a parameter."""
        if gradient is None:
            return
        own = local_part(gradient).detach().float()
        matrix = own.reshape(-1, own.shape[-1]) if own.dim() > 1 else own.reshape(1, -1)
        generator = torch.Generator().manual_seed(self._seeds[name])
        left, right = (
            torch.randn(size, _PRODUCTS, generator=generator).to(own.device)
            for size in matrix.shape
        )
        products = (left * (matrix @ right)).sum(0)
        digest = torch.cat([products, matrix.norm()[None]])
        self._digests[name] = self._digests.get(name, 0) + digest

    def compare(self) -> None:
        """Raise on every rank where a gradient differs. A collective."""
        names = list(self._seeds)
        if not names:
            return
        none = torch.zeros(_PRODUCTS + 1)
        # Read here, not in `note`: that would make the host wait at every gradient.
        found = torch.stack([self._digests.pop(name, none).cpu().double() for name in names])
        largest, smallest = extremes(found, self._handle.group)
        spread, norms = (largest - smallest)[:, :-1].amax(1), largest[:, -1]
        share = spread / norms.clamp(min=_ROUNDING * float(norms.max()) or 1)
        # The last of the model are the first of the backward pass, next to the fault.
        wrong = [names[i] for i in (share > _TOLERANCE).nonzero().flatten().tolist()][::-1]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise on_every_rank(
                PlacementError(
                    f"the gradients of {', '.join(map(repr, wrong[:3]))}{more} differ between the "
                    "tensor-parallel ranks, each of which holds these parameters whole. A sync is "
                    "missing, which slapo.check(sch, example_inputs) names before build; or the "
                    "ranks got different batches",
                    wrong[0].rpartition(".")[0],
                )
            )


def _replicated(module: nn.Module) -> Iterator[tuple[str, Parameter]]:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not is_tensor_parallel(parameter):
            yield name, parameter


def compare_first_gradients(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Compare each replicated parameter's first gradient at the end of the backward it comes in."""
    if any(map(is_tensor_parallel, module.parameters())):
        _FirstGradients(module, group)


class _FirstGradients:
    """Hooks on the parameters, which keep it until each has had its gradient."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._check = GradientCheck(module, group)
        self._is_due = False
        self._handles = {
            name: parameter.register_hook(partial(self._note, name))
            for name, parameter in self._check.parameters.items()
        }
        self._check.parameters = {}  # or they would be kept by their own hooks

    def _note(self, name: str, gradient: Tensor) -> None:
        self._handles.pop(name).remove()
        self._check.note(name, gradient)
        if not self._is_due:
            self._is_due = True
            # By its name private; DDP and FSDP complete gradients by it.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._compare)

    def _compare(self) -> None:
        self._is_due = False
        self._check.compare()
