"""The primitives of a mixed schedule, in the order of a seed."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.wrapper import innermost
from tests.check.mixed_models import Model
from tests.check.random_steps import Random
from tests.sharding.families import Region


@dataclass(frozen=True)
class Move:
    """One decision of a schedule."""

    #: the primitive
    kind: str
    #: where, and the like
    what: str
    #: its place in a sensible order
    phase: float
    #: carries it out; False if nothing came of it
    run: Callable[[slapo.Schedule], Any]

    def __str__(self) -> str:
        return f"{self.kind} {self.what}"


class Steps(Random):
    """The decisions of tensor parallelism, the statistics of norms among them."""

    def column(self, layer: slapo.Schedule, column: tuple[str, int, int], number: int) -> None:
        super().column(layer, column, number)
        node = layer[column[0]]
        for name in ("running_mean", "running_var"):
            present = getattr(node.mod, name, None) is not None
            if present and not self.other(f"{name} {node.path}", "whole"):
                node.shard(name, axis=0)

    def ends(self, sch: slapo.Schedule) -> None:
        """The table of tokens, and the head."""
        super(Random, self).vocabulary(sch)
        self.head(sch)


# --- tensor parallelism --------------------------------------------------------------------------
def tensor_parallel(sch: slapo.Schedule, steps: Steps) -> Iterator[Move]:
    """Each decision as a move."""
    for stack in steps.family.stacks:
        for number, layer in enumerate(sch.select(stack.layers)):
            for region in stack.regions:
                if steps.spreads or steps.choose.random() > 0.15:
                    yield from _region(steps, layer.path, region, number)
            if steps.spreads:
                yield _step(layer.path, "tokens", steps.tokens, stack, number)
        if steps.spreads:
            yield Move("tp", "together", 2, partial(steps.together, stack=stack))
    if steps.choose.random() < 0.7:  # one move: a head that is tied follows the table
        yield Move("tp", "vocabulary", 2, steps.ends)


def _step(path: str, what: str, method: Callable[..., Any], *args: Any) -> Move:
    return Move("tp", f"{path} {what}", 2, lambda sch: method(sch[path], *args))


def _region(steps: Steps, path: str, region: Region, number: int) -> Iterator[Move]:
    if steps.choose.random() < 0.3:
        whole = super(Random, steps).region
        yield _step(path, region.enter, whole, region, number)
        return
    yield _step(path, f"enter {region.enter}", steps.enter, region, number)
    for column in region.columns:
        yield _step(path, f"column {column[0]}", steps.column, column, number)
    for row in region.rows:
        yield _step(path, f"row {row[0]}", steps.row, row, number)
    for count in region.counts:
        yield _step(path, f"count {count}", steps.count, *count, number)
    for inner in region.inner:
        yield _step(path, f"inside {inner}", steps.whole_inside, inner, number)
    for forked in region.forked:
        yield _step(path, f"fork {forked}", steps.fork, forked, number)
    yield _step(path, f"bias of {region.enter}", _position_bias, region)


def _position_bias(layer: slapo.Schedule, region: Region) -> None:
    """Of T5's first layer: a column a head."""
    path = f"{region.enter}.relative_attention_bias"
    if path in layer:
        layer[path].shard("weight", axis=1)


# --- modules instead of equal ones --------------------------------------------------------
class Rms(nn.Module):
    """Divides by the root of the mean square, as Transformers' norms without a mean."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "NewGELUActivation": lambda: nn.GELU(approximate="tanh"),
    "GELUActivation": nn.GELU,
    "SiLUActivation": nn.SiLU,
    "SiLU": nn.SiLU,
    "ReLU": nn.ReLU,
}


def equal_to(module: nn.Module) -> nn.Module | None:
    """A module that computes the same, whose values are still to be set; None for no idea."""
    name = type(module).__name__
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name]()
    if name.endswith("RMSNorm") or name == "T5LayerNorm":
        return Rms(module.weight.numel(), module.variance_epsilon)
    if isinstance(module, nn.LayerNorm):
        return nn.LayerNorm(module.normalized_shape, module.eps)
    if type(module) is nn.Linear:
        sizes = module.weight.shape
        return nn.Linear(sizes[1], sizes[0], bias=module.bias is not None)
    if type(module) is nn.BatchNorm2d:
        return nn.BatchNorm2d(module.num_features)
    return None


def replace_module(sch: slapo.Schedule, path: str, on_meta: bool) -> None:
    """By an equal module, which takes the values over."""
    old = innermost(sch[path].mod)
    with slapo.init_empty_weights(on_meta):
        new = equal_to(old)
    if new is None:
        raise ValueError(f"nothing is equal to what is at {path} by now")
    if not on_meta:
        new.load_state_dict(old.state_dict())
    sch[path].replace(new)


# --- operations ----------------------------------------------------------------------------------
Function = Callable[..., Any]
#: What is looked for, and may be replaced by a function of the same.
_SAME: tuple[Function, ...] = (
    lambda x, bias: F.gelu(x + bias),
    lambda x, bias: F.relu(x + bias),
    lambda x, bias: F.silu(x + bias),
    lambda x: F.gelu(x),
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: F.silu(x),
    lambda x: F.relu(x),
    lambda x, y: F.silu(x) * y,
)
#: What is looked for, and a function of the same values, or None.
PATTERNS: tuple[tuple[Function, Function | None], ...] = (
    *((pattern, pattern) for pattern in _SAME),
    (lambda x: F.gelu(slapo.call_module(r"fc1|dense|c_fc", x)), None),
    (lambda x: F.relu(slapo.call_module("norm", x)), None),
    # Nothing is dropped.
    (lambda x, y: slapo.call_module(r".*drop.*", x) + y, lambda x, y: x + y),
)


def _matches(node: slapo.Schedule, order: list[int]) -> tuple[int, Any]:
    """The first pattern, in some order, that there is in the node, and a match."""
    for number in order:
        found = node.find(PATTERNS[number][0])
        if found:
            return number, found[0]
    raise ValueError("no pattern is there")


def fuse(sch: slapo.Schedule, path: str, order: list[int], compiler: str | None) -> None:
    _, found = _matches(sch[path], order)
    sch[path].fuse(found, compiler=compiler)


def replace_operations(sch: slapo.Schedule, path: str, order: list[int]) -> None:
    number, found = _matches(sch[path], [n for n in order if PATTERNS[n][1] is not None])
    sch[path].replace(PATTERNS[number][1], found)


def checkpoint_operations(sch: slapo.Schedule, path: str, order: list[int]) -> None:
    _, found = _matches(sch[path], order)
    sch[path].checkpoint(found)


# --- a choice of them ----------------------------------------------------------------------------
def other_primitives(
    sch: slapo.Schedule, choose: random.Random, count: int, tracer: str
) -> Iterator[Move]:
    """Primitives that change nothing of what is computed, at any places where they may be."""
    others = _Others(sch, choose, tracer)
    kinds = {name: (weight, make) for name, weight, make in others.kinds() if weight}
    weights = [weight for weight, _ in kinds.values()]
    for kind in choose.choices(list(kinds), weights, k=count):
        order = choose.sample(range(len(PATTERNS)), len(PATTERNS))
        inside, path = choose.choice(others.insides), choose.choice(others.paths)
        yield from kinds[kind][1](inside, path, order)


Maker = Callable[[str, str, list[int]], Iterator[Move]]


class _Others:
    """Makes moves of one kind each, of a module with parts, any module, and an order of patterns.

    `tracer` may be passed besides ``"pytorch"``.
    """

    def __init__(self, sch: slapo.Schedule, choose: random.Random, tracer: str) -> None:
        self.choose, self.tracer = choose, tracer
        self.paths = [path for path, _ in sch.named_schedules() if path]
        modules = {path: sch[path].mod for path in self.paths}
        self.linears = [
            p for p, m in modules.items() if type(m) is nn.Linear and m.bias is not None
        ]
        self.equals = [path for path, module in modules.items() if equal_to(module) is not None]
        parents = [path for path in self.paths if sch[path].child]
        self.insides = [p for p in parents if _is_cheap(modules[p]) or choose.random() < 0.01]
        self.tensors = [
            (p, n) for p, m in modules.items() for n, t in m._parameters.items() if t is not None
        ]

    def kinds(self) -> list[tuple[str, int, Maker]]:
        """Name, weight, and what makes the moves."""
        return [
            ("decompose", 2 if self.linears else 0, self.decompose),
            ("replace", 3, self.replace),
            ("fuse", 3, self.fuse),
            ("replace operations", 2, self.replace_operations),
            ("checkpoint", 2, self.checkpoint),
            ("checkpoint operations", 2, self.checkpoint_operations),
            ("trace", 2, self.trace),
            ("fork_rng", 1, self.fork_rng),
            ("annotate", 1, self.annotate),
        ]

    def decompose(self, inside: str, path: str, order: list[int]) -> Iterator[Move]:
        path = self.choose.choice(self.linears)
        yield Move("decompose", path, 0, partial(_call, path=path, method="decompose"))
        around = path.rpartition(".")[0]
        if around in self.insides and self.choose.random() < 0.7:  # so that something is to fuse
            yield from self.fuse(around, path, order, phase=1)

    def replace(self, inside: str, path: str, order: list[int]) -> Iterator[Move]:
        path, on_meta = self.choose.choice(self.equals), self.choose.random() < 0.3
        run = partial(replace_module, path=path, on_meta=on_meta)
        yield Move("replace", f"{path}{' on meta' * on_meta}", 1, run)

    def fuse(self, inside: str, path: str, order: list[int], phase: float = 3) -> Iterator[Move]:
        compiler = self.choose.choice(("TorchScript", None))
        run = partial(fuse, path=inside, order=order, compiler=compiler)
        yield Move("fuse", f"{inside} {compiler}", phase, run)

    def replace_operations(self, inside: str, path: str, order: list[int]) -> Iterator[Move]:
        run = partial(replace_operations, path=inside, order=order)
        yield Move("replace operations", inside, 3, run)

    def checkpoint(self, inside: str, path: str, order: list[int]) -> Iterator[Move]:
        reentrant = self.choose.random() < 0.2
        run = partial(_call, path=path, method="checkpoint", use_reentrant=reentrant)
        yield Move("checkpoint", f"{path}{' reentrant' * reentrant}", 4, run)

    def checkpoint_operations(self, inside: str, path: str, order: list[int]) -> Iterator[Move]:
        run = partial(checkpoint_operations, path=inside, order=order)
        yield Move("checkpoint operations", inside, 3, run)

    def trace(self, inside: str, path: str, order: list[int]) -> Iterator[Move]:
        flat = self.choose.random() < 0.3
        tracer = self.choose.choice(("pytorch", self.tracer))
        run = partial(_call, path=inside, method="trace", flatten=flat, tracer=tracer)
        yield Move("trace", f"{inside} {tracer}{' flat' * flat}", 3, run)

    def fork_rng(self, inside: str, path: str, order: list[int]) -> Iterator[Move]:
        yield Move("fork_rng", path, 2, partial(_call, path=path, method="fork_rng"))

    def annotate(self, inside: str, path: str, order: list[int]) -> Iterator[Move]:
        path, name = self.choose.choice(self.tensors)
        given = {"param_name": name, "key": "mine", "value": 3}
        run = partial(_call, path=path, method="annotate", **given)
        yield Move("annotate", f"{path} {name}", 2, run)


#: Of Transformers; those of BERT, and T5's layers.
_BY_PROXIES = ("Output", "Intermediate", "Transform", "LayerFF", "LayerCrossAttention")


def _is_cheap(module: nn.Module) -> bool:
    """Whether proxies trace it; else the whole model is captured, which takes 20 s and more."""
    name = type(module).__name__
    ours = type(module).__module__.startswith("tests")
    return ours or "MLP" in name or name.endswith(_BY_PROXIES)


def _call(sch: slapo.Schedule, path: str, method: str, **kwargs: Any) -> Any:
    return getattr(sch[path], method)(**kwargs)


def cut(sch: slapo.Schedule, model: Model, ends: tuple[str, ...], tracer: str, inputs: Any) -> Any:
    """Trace down to the layers, and end stages after some."""
    traced = sch.trace_until(
        model.containers,
        tracer=tracer,
        concrete_args=dict(model.constants),
        example_inputs=inputs,
    )
    for end in ends if traced else ():
        sch[end].cut_pipeline_stage()
    return traced
