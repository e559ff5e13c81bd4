"""Comparison of replicated parameters' gradients over the tensor-parallel ranks.

After a missing sync a gradient is partial and differs between ranks. The ranks compare a few
values per gradient in one small collective: products with fixed random vectors from both sides.
These differ on average as much as the gradients do, while norms of partial gradients can be equal.
"""

from __future__ import annotations

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

#: Random vectors per gradient.
_PRODUCTS = 4

#: Kernels with nondeterministic order, such as embeddings on GPUs, cause differences up to
#: `_TOLERANCE` of a gradient. Below `_ROUNDING` of the largest gradient, all digits are rounding.
_TOLERANCE, _ROUNDING = 2e-2, 1e-5


class GradientCheck:
    """Compares gradients of parameters that are replicated over the tensor-parallel ranks.

    Gradients of several backward passes accumulate.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._handle = handle_of(group)
        #: parameter name -> products, and the sum of the norms of the noted gradients
        self._digests: dict[str, Tensor] = {}
        self.parameters: dict[str, Parameter] = {}
        if group is not None and has_peers(group):
            self.parameters = {
                name: parameter
                for name, parameter in module.named_parameters()
                if parameter.requires_grad and not is_tensor_parallel(parameter)
            }
        # By position, so that all ranks draw the same vectors for a parameter.
        self._seeds = {name: seed for seed, name in enumerate(self.parameters)}

    @torch.no_grad()
    def note(self, name: str, gradient: Tensor | None) -> None:
        """Add a gradient of a parameter, or a part of it."""
        if gradient is None:
            return
        own = local_part(gradient).detach().float()
        matrix = own.reshape(-1, own.shape[-1]) if own.dim() > 1 else own.reshape(1, -1)
        generator = torch.Generator().manual_seed(self._seeds[name])
        left, right = (
            torch.randn(size, _PRODUCTS, generator=generator, dtype=own.dtype).to(own.device)
            for size in matrix.shape
        )
        # left' G right for each pair of vectors: costs two products with thin matrices, without a
        # copy of G.
        products = (left * (matrix @ right)).sum(0)
        digest = torch.cat([products, matrix.norm()[None]])
        self._digests[name] = self._digests.get(name, 0) + digest

    def compare(self) -> None:
        """Raise on every rank if a gradient differs. A collective."""
        names = list(self._seeds)
        if not names:
            return
        none = torch.zeros(_PRODUCTS + 1)
        # Read here, not in `note`, which would synchronize the host at every gradient.
        found = torch.stack([self._digests.pop(name, none).cpu().double() for name in names])
        # In a column of its own: NaN would hide the differences of all other parameters, too.
        is_finite = found.isfinite().all(1, keepdim=True)
        found = torch.cat([torch.where(is_finite, found, 0), is_finite.double()], 1)
        largest, smallest = extremes(found, self._handle.group)
        spread, norms = (largest - smallest)[:, :_PRODUCTS].amax(1), largest[:, _PRODUCTS]
        share = spread / norms.clamp(min=_ROUNDING * float(norms.max()) or 1)
        # The last parameters of the model are the first in the backward pass, closest to the fault.
        differs = (share > _TOLERANCE) | (largest[:, -1] != smallest[:, -1])
        wrong = [names[i] for i in differs.nonzero().flatten().tolist()][::-1]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise on_every_rank(
                PlacementError(
                    f"the gradients of {', '.join(map(repr, wrong[:3]))}{more}, which are "
                    "replicated, differ between tensor-parallel ranks; a sync is missing, which "
                    "slapo.check(sch, example_inputs) finds before build, or the ranks got "
                    "different batches",
                    wrong[0].rpartition(".")[0],
                )
            )


def compare_first_gradients(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Compare each replicated parameter's first gradient at the end of its backward pass."""
    if any(map(is_tensor_parallel, module.parameters())):
        _FirstGradients(module, group)


class _FirstGradients:
    """Hooks on the parameters that keep this object alive until each has had its gradient."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._check = GradientCheck(module, group)
        self._is_due = False
        self._handles = {
            name: parameter.register_hook(partial(self._note, name))
            for name, parameter in self._check.parameters.items()
        }
        self._check.parameters = {}  # otherwise their own hooks would keep them alive

    def _note(self, name: str, gradient: Tensor) -> None:
        self._handles.pop(name).remove()
        self._check.note(name, gradient)
        if not self._is_due:
            self._is_due = True
            # Private by name, but DDP and FSDP finish their gradients by it.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._compare)

    def _compare(self) -> None:
        self._is_due = False
        self._check.compare()
