"""The one module where the fault most likely is, from what all modules took, gave and sent back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from slapo.sharding.state import layout_of, shards_of, syncs_of
from slapo.verify.locate import Call, Comparison, Run, Verdict
from slapo.wrapper import innermost


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
    """

    def __init__(self, wanted: Run, given: Run, comparison: Comparison) -> None:
        self.expected, self.given, self.comparison = wanted.by_key(), given, comparison

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
                f'sch["{partial.path}"].sync("fwd_post", "all_reduce") there, or to what is '
                f"around it; {_differing(call)}{found.amount}",
                call.path,
            )
        inside = [c for c in new if _is_part(c, call)]
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
                    " holds several blocks, as of query, key and value, and is split as if it were "
                    f"one: shard it with blocks=; {_differing(call)}{found.amount}",
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
                wide = len(sizes) > 1 and sizes[spec.axis] % sizes[1 - spec.axis] == 0
                several = wide and sizes[spec.axis] // sizes[1 - spec.axis] in (2, 3)
                if several and len(spec.blocks) == 1 and spec.axis in (0, 1) and not call.parts:
                    return call
        return None

    # --- gradients ---------------------------------------------------------------------------
    def gradient(self, parameters: Collection[str]) -> Guess | None:
        """Where gradients part; `parameters` are those whose gradients differ."""
        current, verdict = self.given.root, Verdict()
        while True:
            found = self._senders(current)
            if not found:
                break
            sharded = {c.path for c, _ in found if shards_of(innermost(c.module))}
            if current.parent is not None and len(sharded) > 1:
                break
            current, verdict = found[-1]
            if _completes_gradient(current.module):
                break
        if current.parent is None or (current.path == "" and not verdict.differs):
            return None
        how = (
            " sends back another gradient than the original's"
            f"{verdict.amount}{_hint(verdict, back=True, path=current.path)}"
        )
        return _at(current, how)

    def _senders(self, parent: Call) -> list[tuple[Call, Verdict]]:
        """Parts of a call that get the right gradient and send back a wrong one."""
        found = []
        for call in parent.parts:
            target = self.expected.get(call.key)
            if target is None:
                continue
            got = self._compare(call, call.gradient, target.gradient)
            sent = [
                self._compare(call, call.sent.get(k), target.sent.get(k))
                for k in range(min(len(call.inputs), len(target.inputs)))
            ]
            wrong = [v for v in sent if v.differs]
            if wrong and not got.differs:
                found.append((call, wrong[0]))
        return found

    def _compare(self, call: Call, mine: object, target: object, partial: bool = False) -> Verdict:
        return self.comparison.compare(call.module, mine, target, partial)  # type: ignore[arg-type]


def _gives_partial(call: Call) -> bool:
    placement = layout_of(innermost(call.module)).output
    return placement is not None and placement.kind == "partial"


def _completes_gradient(module: nn.Module) -> bool:
    """Whether syncs on the module sum what it sends back."""
    return any(
        sync.mode == "bwd_post" or (sync.mode == "fwd_pre" and sync.op == "all_gather")
        for sync in syncs_of(innermost(module))
    )


def _is_part(call: Call, of: Call) -> bool:
    parent = call.parent
    while parent is not None and parent is not of:
        parent = parent.parent
    return parent is of


def _differing(call: Call) -> str:
    return f"the first output that differs is that of {call.path!r} ({_kind(call.module)})"


def _hint(found: Verdict, back: bool = False, path: str = "") -> str:
    """What the ranks' tensors together say."""
    if found.factor == "sum":
        mode = "bwd_post" if back else "fwd_post"
        where = f'sch["{path}"]' if path else "it"
        add = f'.sync("{mode}", "all_reduce")'
        return (
            f"; those of the ranks add up to it: {where}{add} is missing"
            if back
            else (f"; the ranks' add up to it, so a {add[1:]} is missing")
        )
    if found.factor == "share":
        return "; it is as many times too large as there are ranks: one sum is too many"
    return ""


def _at(call: Call, why: str, seen: str | None = None) -> Guess:
    return Guess(call.path, call.module, why, seen)


def _kind(module: nn.Module) -> str:
    return type(innermost(module)).__name__
