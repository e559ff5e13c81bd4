"""Inputs, outputs and gradients of every module in two runs, and the first difference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slapo.graph.trace.module import uncalled_in
from slapo.sharding.groups import group_rank
from slapo.sharding.slicing import ShardSpec
from slapo.sharding.state import layout_of, shards_of, syncs_of
from slapo.utils.outputs import tensors_in
from slapo.verify.numeric.harness import difference, scale_of
from slapo.verify.numeric.run import PairedRun
from slapo.verify.placement.paths import calls_followed
from slapo.wrapper import innermost


@dataclass
class Call:
    """One call of a module."""

    path: str
    #: index among the calls of this module
    index: int
    module: nn.Module
    #: the enclosing call
    parent: Call | None
    #: floating point inputs, and the first output tensor
    inputs: list[Tensor] = field(default_factory=list)
    output: Tensor | None = None
    #: after a backward pass: the gradients of its inputs by index, and of its output
    sent: dict[int, Tensor] = field(default_factory=dict)
    gradient: Tensor | None = None
    needs_gradient: bool = False
    #: nested calls
    parts: list[Call] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """Key that identifies the same call in another model."""
        return self.path, self.index


@dataclass
class Run:
    """Calls of a model's modules, in the order in which they ended."""

    calls: list[Call] = field(default_factory=list)
    #: set before the backward pass, so that recomputed calls do not count
    ended: bool = False
    #: holds the outermost calls
    root: Call = field(default_factory=lambda: Call("", -1, nn.Identity(), None))


def _followed(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are called: not compiled, and not inlined into a graph."""
    taken: set[str] = set()
    for path, module in model.named_modules():
        taken.update(f"{path}.{name}" if path else name for name in uncalled_in(innermost(module)))
        if path not in taken and not isinstance(module, torch.jit.ScriptModule):
            yield path, module


@contextmanager
def recorded(model: nn.Module) -> Iterator[Run]:
    """Record inputs, outputs and gradients of every module call within the block."""
    run = Run()
    counts: Counter[str] = Counter()
    names = {id(module): path for path, module in _followed(model)}
    open_calls = [run.root]

    def follow(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        path = names.get(id(module))
        if path is None or run.ended:
            return call(module, *args, **kwargs)
        here = Call(path, counts[path], module, open_calls[-1])
        counts[path] += 1
        open_calls[-1].parts.append(here)
        args, kwargs = pytree.tree_map_only(Tensor, partial(_enter, here), (args, kwargs))
        open_calls.append(here)
        try:
            output = call(module, *args, **kwargs)
        finally:
            open_calls.pop()
        run.calls.append(here)
        tensor = next((t for _, t in tensors_in(output)), None)
        if tensor is not None:
            here.output = tensor.detach().clone()
            here.needs_gradient = tensor.requires_grad
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: setattr(here, "gradient", grad.detach().clone()))
        return output

    with calls_followed(follow):
        yield run


def _enter(call: Call, tensor: Tensor) -> Tensor:
    """Copy of an input for this call alone, so that its gradient is the call's own."""
    if not tensor.is_floating_point():
        return tensor
    number = len(call.inputs)
    call.inputs.append(tensor.detach().clone())
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    # A hook on the tensor itself would get the sum of the gradients of all its uses.
    own = tensor.view_as(tensor)
    own.register_hook(lambda grad: call.sent.__setitem__(number, grad.detach().clone()))
    return own


def amount(error: float, limit: float, mine: Tensor, target: Tensor) -> str:
    """Describe how much a tensor differs; continues a sentence."""
    if mine.shape != target.shape:
        return f": its shape is {tuple(mine.shape)}, the original's {tuple(target.shape)}"
    if math.isinf(error) and target.is_floating_point():
        counts = [int((~t.isfinite()).sum()) for t in (mine, target)]
        return f": {counts[0]} of its values are NaN or infinite, {counts[1]} in the original"
    return f", by {error:.3g} where {limit:.3g} is allowed"


class Comparison:
    """Compares the recorded runs of both models; every method is a collective of all ranks."""

    def __init__(self, trial: PairedRun, wanted: Run, given: Run) -> None:
        self.trial, self.sch = trial, trial.sides.sch
        self.any_rank = trial.sides.any_rank
        self.expected, self.given = {call.key: call for call in wanted.calls}, given

    def output(self) -> tuple[Call, str, str] | None:
        """The call at fault for a different output, the amount, and the path where it shows."""
        # Calls end innermost first, so the first call that differs is the innermost one at fault,
        # unless it was fed wrong values. Calls without a counterpart (modules of a replacement)
        # cannot be compared: they stay suspects until a later call agrees with the original.
        new: list[Call] = []
        for call in self.given.calls:
            target = self.expected.get(call.key)
            if target is None:
                new.append(call)
                continue
            found = self._compare(call, call.output, target.output)
            if found:
                return self._cause(call, target, found, new)
            if target.output is not None and call.output is not None:
                new.clear()
        return None

    def _cause(
        self, call: Call, target: Call, found: str, new: Sequence[Call]
    ) -> tuple[Call, str, str]:
        """The call at fault: a new module, or the parent if its own operations differ."""
        is_new = not isinstance(innermost(call.module), type(innermost(target.module)))
        inside = [] if is_new else [each for each in new if _is_part(each, call)]
        pairs = zip(call.inputs, target.inputs, strict=False)
        alike = len(call.inputs) == len(target.inputs)
        fed_wrong = not inside and alike and any(bool(self._compare(call, *p)) for p in pairs)
        culprits = inside or (list(new) if fed_wrong else [])
        if culprits:
            first = min(culprits, key=lambda c: len(c.path.split(".")))
            return first, f": the result of the part that it replaces differs{found}", call.path
        if fed_wrong and call.parent is not None and call.parent.parent is not None:
            return call.parent, f": its input to {call.path!r} differs{found}", call.path
        return call, found, call.path

    def gradient(self) -> tuple[Call, str] | None:
        """The innermost call with a correct output gradient and a wrong input gradient."""
        # Descend from the root: among the calls made by the current one, the backward pass reaches
        # the last first, so the last call that gets a right gradient and returns a wrong one is at
        # fault, or something in it is. Stop where no such call exists.
        current, found = self.given.root, ""
        while True:
            cut = [call for call in current.parts if self._is_cut_off(call)]
            if cut:
                current, found = cut[0], ": no gradient passes through it"
                continue
            senders = self._senders(current)
            sharded = {call.path for call, _ in senders if shards_of(innermost(call.module))}
            # Shards of one region each return a summand of its gradient.
            if not senders or (current.parent is not None and len(sharded) > 1):
                break
            current, found = senders[-1]
            # Below this module gradients of inputs are summands by design; only the module's own
            # can be compared.
            if any(sync.mode == "bwd_post" for sync in syncs_of(innermost(current.module))):
                break
        return None if current is self.given.root else (current, found)

    def _is_cut_off(self, call: Call) -> bool:
        """Return True if the output requires no gradient, unlike the original's."""
        target = self.expected.get(call.key)
        has = target is not None and target.gradient is not None
        return self.any_rank(has and call.gradient is None and not call.needs_gradient)

    def _senders(self, parent: Call) -> list[tuple[Call, str]]:
        """Nested calls with a correct output gradient and a wrong input gradient."""
        found: list[tuple[Call, str]] = []
        for call in parent.parts:
            target = self.expected.get(call.key)
            if target is None or not target.sent:  # a new module, or inputs without gradients
                found.extend(self._senders(call))
            elif not self._compare(call, call.gradient, target.gradient):
                count = min(len(call.inputs), len(target.inputs))
                sent = [
                    self._compare(call, call.sent.get(k), target.sent.get(k)) for k in range(count)
                ]
                found.extend((call, wrong) for wrong in list(filter(None, sent))[:1])
        return found

    def _compare(self, call: Call, mine: Tensor | None, target: Tensor | None) -> str:
        """Describe how much a tensor of a call differs; empty if equal or unknown."""
        placement = layout_of(innermost(call.module)).output
        # A row-parallel layer's output before its sum is right and unequal.
        partial = mine is call.output and placement is not None and placement.kind == "partial"
        whole = None if mine is None or target is None or partial else mine
        # All ranks take the same branch, since `gather` below is a collective.
        if self.any_rank(whole is None):
            return ""
        assert whole is not None, "looked at above"
        assert target is not None, "looked at above"
        if whole.shape != target.shape and self.sch.world_size > 1:
            spec = self._cut(call.module, whole, target)
            if self.any_rank(spec is None):
                return ""
            assert spec is not None, "looked at above"
            whole = spec.gather(whole, self.sch.group)
        error, limit = difference(whole, target), self.trial.rtol(target) * scale_of(target)
        if not self.any_rank(error > limit):
            return ""
        return amount(self.trial.sides.largest(error), limit, whole, target)

    def _cut(self, module: nn.Module, tensor: Tensor, target: Tensor) -> ShardSpec | None:
        """Spec of the slice that this rank holds of `target`; None if ambiguous."""
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
        rank = group_rank(self.sch.group)
        spec = ShardSpec(axis, target.shape, blocks, rank, self.sch.world_size, copies)
        return spec if spec.local_shape == tensor.shape else None


def _is_part(call: Call, of: Call) -> bool:
    parent = call.parent
    while parent is not None and parent is not of:
        parent = parent.parent
    return parent is of
