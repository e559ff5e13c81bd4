"""Segments and parameters of each pipeline stage of the full model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from slapo.cost.models import ReducedModel
from slapo.cost.runs import HeldParameter, Place, Run, Segment


@dataclass(frozen=True)
class Step:
    """A segment of the full model, with the figures of a run."""

    place: Place
    run: Run
    #: Parameters whose gradients its backward allocates.
    owned: tuple[HeldParameter, ...] = ()

    @property
    def forward(self) -> Segment:
        """Forward segment of a micro-batch."""
        return self.run.first.forward[self.place]

    def backward(self, first: bool) -> Segment:
        """Return the backward segment of a step's first micro-batch, or of a later one."""
        passed = self.run.first if first else self.run.again
        return passed.backward[self.place]


@dataclass
class StageParts:
    """A pipeline stage of the full model."""

    #: Its segments in forward order.
    steps: list[Step] = field(default_factory=list)
    #: Its parameters; those of layers have their names in the full model.
    held: dict[str, HeldParameter] = field(default_factory=dict)
    #: Parameter -> place of its layer, for parameters of layers.
    layer_of: dict[str, Place] = field(default_factory=dict)
    #: The segments that end the preceding stage and this one.
    received: Segment | None = None
    sent: Segment | None = None
    #: Groups of names that share a parameter in the model and are all in this stage.
    together: list[frozenset[str]] = field(default_factory=list)


def divide(
    small: ReducedModel, runs: dict[bool, Run], again: set[str], ends: Sequence[int]
) -> list[StageParts]:
    """Divide the full model into stages.

    `runs` maps False to a run of plain layers and True to one of recomputing layers, `again` has
    the paths of the latter. `ends` has the indices of the layers that end a stage, except the last.
    """
    stages = [StageParts()]
    ended = set(ends)
    for step, number, layer in _steps(small, runs, again):
        stage = stages[-1]
        found = _held(small, step, layer)
        # The first segment that reads a parameter owns it, so that its gradient counts once.
        new = tuple(held for name, held in found.items() if name not in stage.held)
        stage.steps.append(replace(step, owned=new))
        stage.held.update(found)
        if layer:
            inside = (name for name in found if name.startswith(f"{layer}."))
            stage.layer_of.update(dict.fromkeys(inside, step.place))
        if number in ended:
            stage.sent = step.forward
            stages.append(StageParts(received=step.forward))
    plain = next(iter(runs.values()))
    named = {name for stage in stages for name in stage.held}
    lists = tuple(f"{stack.path}." for stack in small.stacks)
    for name, held in plain.held.items():  # no operator reads these
        if name not in named and not (plain.regular and name.startswith(lists)):
            stages[-1].held[name] = held
    for stage in stages:
        for group in small.ties:
            names = sorted(group & set(stage.held))
            if len(names) > 1:
                stage.together.append(frozenset(names))
    return stages


def _steps(
    small: ReducedModel, runs: dict[bool, Run], again: set[str]
) -> Iterator[tuple[Step, int, str]]:
    """Yield the segments of the full model, each with the index and the path of its layer."""
    plain = next(iter(runs.values()))
    if not plain.regular:
        yield Step(("after",), plain), -1, ""
        return
    count = 0
    for number, stack in enumerate(small.stacks):
        yield Step(("before", number), plain), -1, ""
        for layer, place in enumerate(stack.stand_ins):
            path = f"{stack.path}.{layer}"
            run = runs.get(path in again, plain)
            yield Step(("layer", number, place), run), count, path
            count += 1
    yield Step(("after",), plain), -1, ""


def _held(small: ReducedModel, step: Step, layer: str) -> dict[str, HeldParameter]:
    """Return the parameters that a segment reads, and all of its layer."""
    found = {}
    own = ""
    if layer:
        stack = small.stacks[step.place[1]]
        own = f"{stack.path}.{step.place[2]}."
        for name, held in step.run.held.items():
            if name.startswith(own):
                found[f"{layer}.{name[len(own) :]}"] = held
    lists = tuple(f"{stack.path}." for stack in small.stacks)
    for name in step.forward.parameters:
        if not step.run.regular or not name.startswith(lists):
            found[name] = step.run.held[name]
    return found
