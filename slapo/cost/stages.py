"""The segments and parameters of each pipeline stage of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from slapo.cost.models import ReducedModel
from slapo.cost.runs import HeldParameter, Place, Run, Segment


@dataclass(frozen=True)
class Step:
    """A segment of the whole model, whose figures are those of a run."""

    place: Place
    run: Run
    #: Parameters whose gradients its backward makes.
    owned: tuple[HeldParameter, ...] = ()

    @property
    def forward(self) -> Segment:
        """The forward of a micro-batch."""
        return self.run.first.forward[self.place]

    def backward(self, first: bool) -> Segment:
        """Return the backward of the first micro-batch of a step, or of a later one."""
        passed = self.run.first if first else self.run.again
        return passed.backward[self.place]


@dataclass
class StageParts:
    """A stage of the whole model."""

    #: Its segments in the order of the forward.
    steps: list[Step] = field(default_factory=list)
    #: Its parameters; those of layers are named as in the whole model.
    held: dict[str, HeldParameter] = field(default_factory=dict)
    #: The places of the layers that parameters belong to, if to any.
    layer_of: dict[str, Place] = field(default_factory=dict)
    #: The segments that end the stage before, and this one.
    received: Segment | None = None
    sent: Segment | None = None
    #: Names of parameters that are one in the model, and all in this stage.
    together: list[frozenset[str]] = field(default_factory=list)


def divide(
    small: ReducedModel, runs: dict[bool, Run], again: set[str], ends: Sequence[int]
) -> list[StageParts]:
    """Divide the whole model into stages.

    `runs` has a run of layers as they are and one of layers that recompute activations, `again` the
    paths of the latter, and `ends` the numbers of the layers that end a stage, but for the last.
    """
    stages = [StageParts()]
    ended = set(ends)
    for step, number, layer in _steps(small, runs, again):
        stage = stages[-1]
        found = _held(small, step, layer)
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
    for name, held in plain.held.items():  # which no operator reads
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
    """Yield segments of the whole model, each with the number and the path of its layer."""
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
    """Return the parameters that a segment reads; those of a layer wherever they are read."""
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
