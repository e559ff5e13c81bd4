"""The one module where the fault most likely is, from what all modules took, gave and sent back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slapo.history import spelled
from slapo.sharding.state import layout_of, shards_of, syncs_of
from slapo.verify.numeric.module_calls import Call, Comparison, Run, Verdict
from slapo.wrapper import innermost

_TOO_LARGE = "; it is as many times too large as there are ranks: one sum is too many"


@dataclass(frozen=True)
class Guess:
    """Where the fault most likely is.

    Parameters
    ----------
    path, module
        The scheduled module.
    why
        The rest of a sentence that begins with its path.
    seen
        Path of the module whose numbers differ, where that is another one.
    """

    path: str
    module: nn.Module
    why: str
    seen: str | None = None

    def __str__(self) -> str:
        return f"{self.path!r} ({_kind(self.module)}){self.why}"


class Blame:
    """Reads two recorded runs.

    Parameters
    ----------
    wanted, given
        Of the original and of the scheduled model.
    comparison
        How tensors are compared.
    prefix
        Path of the model in the schedule.
    """

    def __init__(self, wanted: Run, given: Run, comparison: Comparison, prefix: str = "") -> None:
        self.expected, self.given, self.comparison = wanted.by_key(), given, comparison
        self.prefix = prefix

    # --- outputs -----------------------------------------------------------------------------
    def output(self) -> Guess | None:
        """Where outputs part."""
        partial: Call | None = None
        new: list[Call] = []
        for call in self.given.calls:
            target = self.expected.get(call.key)
            if target is None:
                new.append(call)
                continue
            is_partial = _gives_partial(call)
            found = self._compare(call, call.output, target.output, is_partial)
            if found.differs:
                return self._of_output(call, target, found, partial, new)
            if found.known and target.output is not None and call.output is not None:
                whole = call.output.shape == target.output.shape
                partial = call if is_partial else None if whole else partial
                new.clear()
        return None

    def _of_output(
        self, call: Call, target: Call, found: Verdict, partial: Call | None, new: Sequence[Call]
    ) -> Guess:
        """The cause of the first output that differs."""
        if partial is not None:
            return _at(
                partial,
                " gives a partial sum that is used as if it were whole: add "
                f'{self._node(partial.path)}.sync("fwd_post", "all_reduce"), or one to what is '
                f"around it; {_differing(call)}{found.amount}",
                call.path,
            )
        is_new = not isinstance(innermost(call.module), type(innermost(target.module)))
        inside = [] if is_new else [c for c in new if _is_part(c, call)]
        fed_wrong = not inside and self._fed_wrong(call, target)
        culprits = inside or (list(new) if fed_wrong else [])
        if culprits:
            first = min(culprits, key=lambda c: len(c.path.split(".")))
            return _at(
                first,
                f" was put in and gives other numbers than what it replaced: {_differing(call)}"
                f"{found.amount}",
                call.path,
            )
        if fed_wrong and call.parent is not None and call.parent.parent is not None:
            packed = self._packed_whole(call.parent, call)
            if packed is not None:
                return _at(
                    packed,
                    " is as wide as several layers, of query, key and value perhaps, and is not "
                    "split in as many blocks: shard it with blocks=; "
                    f"{_differing(call)}{found.amount}",
                    call.path,
                )
            return _at(
                call.parent,
                f" computes something else from its parts than before: what it gives to "
                f"{call.path!r} differs, which then differs{found.amount.removeprefix(',')}",
                call.path,
            )
        return _at(call, f"{found.amount}{_hint(found)}")

    def _fed_wrong(self, call: Call, target: Call) -> bool:
        """Whether inputs of a call differ already."""
        if len(call.inputs) != len(target.inputs):
            return False
        pairs = zip(call.inputs, target.inputs, strict=True)
        verdicts = [self._compare(call, mine, theirs) for mine, theirs in pairs]
        return any(v.differs for v in verdicts)

    def _packed_whole(self, parent: Call, before: Call) -> Call | None:
        """A layer of three times its width, or so, that is split as one block."""
        for call in parent.parts:
            if call is before:
                break
            for spec in shards_of(innermost(call.module)).values():
                sizes = spec.full_shape
                wide = len(sizes) == 2 and sizes[spec.axis] % sizes[1 - spec.axis] == 0
                several = sizes[spec.axis] // sizes[1 - spec.axis] if wide else 1
                if several in (2, 3) and len(spec.blocks) != several and not call.parts:
                    return call
        return None

    # --- gradients ---------------------------------------------------------------------------
    def gradient(self) -> Guess | None:
        """Where gradients part: the innermost that gets the right one and sends back another."""
        current, verdict = self.given.root, Verdict()
        while True:
            cut = self._cut_off(current)
            if cut:
                current, verdict = cut[0], Verdict(amount=": none goes through it")
                continue
            found = self._senders(current)
            sharded = {c.path for c, _ in found if shards_of(innermost(c.module))}
            if not found or (current.parent is not None and len(sharded) > 1):
                break
            current, verdict = found[-1]
            if _completes_gradient(current.module):
                break
        if current is self.given.root:
            return None
        why = f"{verdict.amount}{self._missing_sum(verdict, current.path)}"
        return _at(current, f", which sends back another gradient than the original's{why}")

    def _cut_off(self, parent: Call) -> list[Call]:
        """Parts of a call whose output needs no gradient where the original's does."""
        found = []
        for call in parent.parts:
            target = self.expected.get(call.key)
            has = target is not None and target.gradient is not None
            if self.comparison.any_rank(has and call.gradient is None and not call.needs_gradient):
                found.append(call)
        return found

    def _senders(self, parent: Call) -> list[tuple[Call, Verdict]]:
        """Parts of a call that get the right gradient and send back a wrong one."""
        found: list[tuple[Call, Verdict]] = []
        for call in parent.parts:
            target = self.expected.get(call.key)
            if target is None or not target.sent:  # a new one, or of inputs without gradients
                found.extend(self._senders(call))
                continue
            if self._compare(call, call.gradient, target.gradient).differs:
                continue
            sent = [
                self._compare(call, call.sent.get(k), target.sent.get(k))
                for k in range(min(len(call.inputs), len(target.inputs)))
            ]
            wrong = [
                v
                for tensor, v in zip(call.inputs, sent, strict=False)
                if v.differs and not (v.factor == "sum" and self._is_summed(call, tensor))
            ]
            if wrong:
                found.append((call, wrong[0]))
        return found

    def _is_summed(self, call: Call, tensor: Tensor) -> bool:
        """Whether the module that gave an input to a call sums its gradient over the ranks."""
        givers = [c for c in self.given.calls if c.output is not None and same(c.output, tensor)]
        # Or that before it, where the code in between changes what is passed on.
        before = [c for c in self.given.calls[: call.after] if not c.parts]
        return any(_sums_behind(c.module) for c in (*givers, *before[-1:]))

    def gets_it_right(self, path: str) -> bool:
        """Whether every call of a module gets the gradient of its output that the original gets."""
        calls = [c for c in self.given.calls if c.path == path and c.key in self.expected]
        verdicts = [self._compare(c, c.gradient, self.expected[c.key].gradient) for c in calls]
        return bool(verdicts) and all(
            v.known and (not v.differs or (v.factor == "sum" and _sums_behind(c.module)))
            for c, v in zip(calls, verdicts, strict=True)
        )

    def _missing_sum(self, found: Verdict, path: str) -> str:
        """What the ranks' gradients together say."""
        if found.factor == "sum":
            add = f'{self._node(path)}.sync("bwd_post", "all_reduce")'
            return f"; those of the ranks add up to it: {add} is missing"
        return _TOO_LARGE if found.factor == "share" else ""

    def _node(self, path: str) -> str:
        return spelled(".".join(filter(None, (self.prefix, path))))

    def _compare(self, call: Call, mine: object, target: object, partial: bool = False) -> Verdict:
        return self.comparison.compare(call.module, mine, target, partial)  # type: ignore[arg-type]


def same(one: Tensor, other: Tensor) -> bool:
    """Whether tensors hold the same numbers."""
    return one.shape == other.shape and torch.equal(one, other)


def _gives_partial(call: Call) -> bool:
    placement = layout_of(innermost(call.module)).output
    return placement is not None and placement.kind == "partial"


def _completes_gradient(module: nn.Module) -> bool:
    """Whether syncs on the module sum what it sends back."""
    return any(
        sync.mode == "bwd_post" or (sync.mode == "fwd_pre" and sync.op == "all_gather")
        for sync in syncs_of(innermost(module))
    )


def _sums_behind(module: nn.Module) -> bool:
    """Whether a sync on the module's output sums the gradient that comes back to it."""
    syncs = syncs_of(innermost(module))
    return any(sync.mode == "fwd_post" and sync.completes_gradient for sync in syncs)


def _is_part(call: Call, of: Call) -> bool:
    parent = call.parent
    while parent is not None and parent is not of:
        parent = parent.parent
    return parent is of


def _differing(call: Call) -> str:
    return f"the first output that differs is that of {call.path!r} ({_kind(call.module)})"


def _hint(found: Verdict) -> str:
    """What the ranks' outputs together say."""
    if found.factor == "sum":
        return "; those of the ranks add up to it: a sync that sums them is missing"
    return _TOO_LARGE if found.factor == "share" else ""


def _at(call: Call, why: str, seen: str | None = None) -> Guess:
    return Guess(call.path, call.module, why, seen)


def _kind(module: nn.Module) -> str:
    return type(innermost(module)).__name__
