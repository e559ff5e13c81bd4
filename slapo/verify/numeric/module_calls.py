"""What every module gave, in both models, call by call: where outputs and gradients part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slapo.graph.trace.module import uncalled_in
from slapo.sharding.groups import group_rank
from slapo.sharding.slicing import ShardSpec
from slapo.sharding.state import shards_of
from slapo.utils.outputs import tensors_in
from slapo.verify.numeric.tensors import difference, scale_of
from slapo.wrapper import innermost


@dataclass
class Call:
    """One call of a module.

    Parameters
    ----------
    path, index, module
        Which, and the how manieth of its calls.
    parent
        The call that it is part of.
    inputs, output
        Its floating point inputs, and its first output tensor.
    sent, gradient
        After a backward, what it sends back to each input, and the gradient of its output.
    needs_gradient
        Whether the output has one at all.
    after
        How many calls had ended when it began.
    parts
        Calls that it made.
    """

    path: str
    index: int
    module: nn.Module
    parent: Call | None
    inputs: list[Tensor] = field(default_factory=list)
    output: Tensor | None = None
    sent: dict[int, Tensor] = field(default_factory=dict)
    gradient: Tensor | None = None
    needs_gradient: bool = False
    after: int = 0
    parts: list[Call] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """The same for the same call of another model."""
        return self.path, self.index


@dataclass
class Run:
    """Calls of a model's modules in the order that they ended; `root` holds the outermost.

    Calls after the forward, those of checkpoints, are not counted: ``ended`` is true then.
    """

    calls: list[Call] = field(default_factory=list)
    ended: bool = False
    root: Call = field(default_factory=lambda: Call("", -1, nn.Identity(), None))

    def by_key(self) -> dict[tuple[str, int], Call]:
        """Calls by path and number."""
        return {call.key: call for call in self.calls}


def hookable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are called and take hooks: no compiled ones, none that a graph took in."""
    taken: set[str] = set()
    for path, module in model.named_modules():
        taken.update(f"{path}.{name}" if path else name for name in uncalled_in(innermost(module)))
        if path not in taken and not isinstance(module, torch.jit.ScriptModule):
            yield path, module


@contextmanager
def recorded(model: nn.Module) -> Iterator[Run]:
    """Note what every module call takes, gives and sends back while the block runs."""
    run = Run()
    counts: dict[str, int] = {}
    open_calls = [run.root]

    def begin(path: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if run.ended:
                return None
            counts[path] = counts.get(path, -1) + 1
            call = Call(path, counts[path], module, open_calls[-1], after=len(run.calls))
            open_calls[-1].parts.append(call)
            open_calls.append(call)
            return pytree.tree_map_only(Tensor, lambda t: _enter(call, t), (args, kwargs))

        return hook

    def end(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if run.ended:
                return
            call = run.root
            while len(open_calls) > 1:
                call = open_calls.pop()
                if call.path == path:
                    break
            tensor = next((t for _, t in tensors_in(output)), None)
            run.calls.append(call)
            if tensor is None:
                return
            call.output = tensor.detach().clone()
            call.needs_gradient = tensor.requires_grad
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: _keep_gradient(call, grad))

        return hook

    with ExitStack() as stack:
        for path, module in hookable(model):
            pre = module.register_forward_pre_hook(begin(path), prepend=True, with_kwargs=True)
            stack.callback(pre.remove)
            stack.callback(module.register_forward_hook(end(path)).remove)
        yield run


def _enter(call: Call, tensor: Tensor) -> Tensor:
    """An input seen by this call alone, so that its gradient is what the call sends back."""
    if not tensor.is_floating_point():
        return tensor
    number = len(call.inputs)
    call.inputs.append(tensor.detach().clone())
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    own = tensor.view_as(tensor)
    own.register_hook(lambda grad: call.sent.__setitem__(number, grad.detach().clone()))
    return own


def _keep_gradient(call: Call, grad: Tensor) -> None:
    call.gradient = grad.detach().clone()


@contextmanager
def shapes_noted(model: nn.Module) -> Iterator[dict[str, list[tuple[int, ...]]]]:
    """Shapes of what every module gives in its first call, in the order that these ended."""
    found: dict[str, list[tuple[int, ...]]] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if path not in found:
                found[path] = [tuple(tensor.shape) for _, tensor in tensors_in(output)]

        return hook

    with ExitStack() as stack:
        for path, module in hookable(model):
            stack.callback(module.register_forward_hook(note(path)).remove)
        yield found


def amount(error: float, limit: float, mine: Tensor, target: Tensor) -> str:
    """By how much a tensor differs, behind the name of where it does."""
    if mine.shape != target.shape:
        return f": its shape is {tuple(mine.shape)}, the original's {tuple(target.shape)}"
    if math.isinf(error) and target.is_floating_point():
        counts = [int((~t.isfinite()).sum()) for t in (mine, target)]
        return f": {counts[0]} of its numbers are NaN or infinite, of the original's {counts[1]}"
    return f", by {error:.3g} where {limit:.3g} is allowed"


@dataclass(frozen=True)
class Verdict:
    """How a tensor of a call compares with the original's.

    Parameters
    ----------
    known
        Whether the parts of the ranks could be put together.
    differs
        Whether they are another tensor.
    amount
        By how much, in words.
    factor
        What makes the ranks' tensors equal the original: ``"sum"`` of them all, or one
        ``"share"`` of a rank; empty for neither.
    """

    known: bool = False
    differs: bool = False
    amount: str = ""
    factor: str = ""


class Comparison:
    """Compares tensors of two runs, parts of all ranks put together; collectives of all of them.

    Parameters
    ----------
    group
        Ranks of the scheduled model.
    rtol
        Tensor -> tolerance.
    any_rank, largest
        Whether a condition holds on any rank; the largest of the ranks' numbers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rtol: Callable[[Tensor], float],
        any_rank: Callable[[bool], bool],
        largest: Callable[[float], float],
    ) -> None:
        self.group, self.rtol, self.any_rank, self.largest = group, rtol, any_rank, largest
        self.world_size = dist.get_world_size(group) if group is not None else 1

    def compare(
        self,
        module: nn.Module,
        mine: Tensor | None,
        target: Tensor | None,
        partial: bool = False,
    ) -> Verdict:
        """One tensor of a call of `module`.

        Parameters
        ----------
        partial
            The ranks hold summands.
        """
        if self.any_rank(mine is None or target is None):
            return Verdict()
        assert mine is not None, "looked at above"
        assert target is not None, "looked at above"
        alike = mine.shape == target.shape
        summed = self._sum(mine) if partial and alike else mine
        whole = summed if alike else self._put_together(module, mine, target)
        if self.any_rank(whole is None):
            return Verdict()
        assert whole is not None, "looked at above"
        error, limit = self._error(whole, target)
        if not self.any_rank(error > limit):
            return Verdict(known=True)
        factor = self._factor(mine, target)
        return Verdict(True, True, amount(self.largest(error), limit, whole, target), factor)

    def _error(self, mine: Tensor, target: Tensor) -> tuple[float, float]:
        return difference(mine, target), self.rtol(target) * scale_of(target)

    def _factor(self, mine: Tensor, target: Tensor) -> str:
        alike = mine.shape == target.shape and mine.is_floating_point()
        if self.world_size == 1 or self.any_rank(not alike):
            return ""
        for name, other in (("sum", self._sum(mine)), ("share", mine / self.world_size)):
            error, limit = self._error(other, target)
            if not self.any_rank(error > max(limit, 1e-6 * scale_of(target))):
                return name
        return ""

    def _sum(self, tensor: Tensor) -> Tensor:
        if self.world_size == 1:
            return tensor
        tensor = tensor.contiguous().clone()
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def _put_together(self, module: nn.Module, tensor: Tensor, target: Tensor) -> Tensor | None:
        """The tensor of all ranks together; None when it is not known how to put it together."""
        if self.world_size == 1:
            return tensor  # nothing explains another shape
        spec = self._cut(module, tensor, target)
        if self.any_rank(spec is None):
            return None
        assert spec is not None, "looked at above"
        return spec.gather(tensor, self.group)

    def _cut(self, module: nn.Module, tensor: Tensor, target: Tensor) -> ShardSpec | None:
        """How the whole is cut in slices such as that of this rank."""
        pairs = zip(tensor.shape, target.shape, strict=False)
        axes = [axis for axis, (mine, whole) in enumerate(pairs) if mine != whole]
        if tensor.dim() != target.dim() or len(axes) != 1:
            return None
        (axis,) = axes
        known = shards_of(innermost(module)).values()
        specs = [spec for spec in known if len(spec.blocks) > 1 or spec.copies > 1]
        blocks = specs[0].blocks if specs else (target.shape[axis],)
        if sum(blocks) != target.shape[axis]:
            return None
        copies = specs[0].copies if specs else 1
        rank = group_rank(self.group)
        spec = ShardSpec(axis, target.shape, blocks, rank, self.world_size, copies)
        return spec if spec.local_shape == tensor.shape else None
