"""The published experiments as tables of points: command lines of ``python -m benchmark train``.

Sizes of models and machines are those of the evaluation of schedule languages (Chen et al.,
"Slapo", 2023): one V100 of 16 GB, a node with eight, several such nodes, and what each step of a
schedule brings. A batch is that of the whole job, so that every side computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmark.train_options import TrainOptions

#: GPUs of a node.
NODE = 8


@dataclass(frozen=True)
class Point:
    """A bar of a picture.

    Parameters
    ----------
    panel, group, side
        Where it stands: picture, place on its axis, color.
    options
        What runs.
    """

    panel: str
    group: str
    side: str
    options: TrainOptions

    def shrunk(self) -> Point:
        """The point at the size of a CPU."""
        return replace(self, options=self.options.shrunk())


@dataclass(frozen=True)
class Experiment:
    """Points that are compared.

    Parameters
    ----------
    about
        Its title.
    axis
        What groups are.
    points
        In the order in which they run.
    """

    about: str
    axis: str
    points: tuple[Point, ...]


def _options(impl: str, model: str, batch: int, gpus: int = 1, **more: Any) -> TrainOptions:
    """`batch` is that of the job."""
    made = TrainOptions(model=model, impl=impl, gpus=gpus, dtype="float16", device="cuda", **more)
    return replace(made, batch_size=max(1, batch // made.dp))


#: Model -> (batch of a job on one card, tokens, what of the recipe's kernels it has).
_MODELS = {
    "bert": (16, 512, "fused"),
    "roberta": (16, 512, "fused"),
    "albert": (16, 512, "fused"),
    "gpt_neo": (4, 1024, "fused"),
    "opt": (8, 1024, "fused"),
    "t5": (8, 512, "fused"),
    "wideresnet": (32, 512, "ops"),
}
_CHECKPOINTS = {"no checkpoints": 0.0, "all layers recomputed": 1.0}


# --- one card ------------------------------------------------------------------------------------
def _single_device() -> tuple[Point, ...]:
    points = []
    for panel, ratio in _CHECKPOINTS.items():
        for model, (batch, length, kernels) in _MODELS.items():
            given = {"seq_len": length, "checkpoint_ratio": ratio}
            for impl in ("eager", "compile"):
                points.append(Point(panel, model, impl, _options(impl, model, batch, **given)))
            ours = _options("slapo-torch", model, batch, kernels=kernels, **given)
            points.append(Point(panel, model, "slapo-torch", ours))
    return tuple(points)


# --- one node ------------------------------------------------------------------------------------
#: Side -> how it spreads a model over so many cards.
def _spread(gpus: int, pp: int = 1) -> dict[str, tuple[str, dict[str, Any]]]:
    tp = gpus // pp
    split = {"tp": tp, "pp": pp}
    return {
        "megatron": ("megatron", split),
        "deepspeed, ZeRO-3": ("deepspeed", {"zero": 3}),
        "slapo-megatron": ("slapo-megatron", split),
        "slapo-deepspeed, ZeRO-3": ("slapo-deepspeed", {"zero": 3}),
        "slapo-torch": ("slapo-torch", split),
    }


#: Beside GPT-2: batch of the job, tokens, and sides that only some models have.
_NODE_MODELS = {
    "bert": (128, 512, ("dtensor",)),
    "opt-2.7b": (32, 1024, ()),
    "t5": (64, 512, ()),
    "llama-1b": (32, 2048, ("dtensor", "tp_plan")),
}


def _single_node() -> tuple[Point, ...]:
    points = []
    for panel, ratio in _CHECKPOINTS.items():
        for gpus in (2, 4, 8) if ratio == 0 else (8,):
            for side, (impl, layout) in _spread(gpus).items():
                given = {"seq_len": 1024, "checkpoint_ratio": ratio, **layout}
                options = _options(impl, "gpt2-1.4b", 32, gpus, **given)
                points.append(Point(panel, f"gpt2-1.4b, {gpus}", side, options))
    for model, (batch, length, others) in _NODE_MODELS.items():
        for side, (impl, layout) in _node_sides(others).items():
            options = _options(impl, model, batch, NODE, seq_len=length, **layout)
            points.append(Point("no checkpoints", f"{model}, {NODE}", side, options))
    return tuple(points)


def _node_sides(others: tuple[str, ...]) -> dict[str, tuple[str, dict[str, Any]]]:
    sides: dict[str, tuple[str, dict[str, Any]]] = {
        "eager, DDP": ("eager", {}),
        "deepspeed, ZeRO-3": ("deepspeed", {"zero": 3}),
        "slapo-deepspeed, ZeRO-3": ("slapo-deepspeed", {"zero": 3}),
        "slapo-torch": ("slapo-torch", {"tp": NODE, "kernels": "fused"}),
    }
    return sides | {name: (name, {"tp": NODE}) for name in others}


# --- several nodes -------------------------------------------------------------------------------
def _multi_node() -> tuple[Point, ...]:
    points = []
    for nodes in (2, 4, 8):
        gpus = nodes * NODE
        for side, (impl, layout) in _spread(gpus, pp=nodes).items():
            parts = {"micro_batches": 16} if layout.get("pp", 1) > 1 else {}
            given = {"seq_len": 1024, "checkpoint_ratio": 1.0, **parts, **layout}
            options = _options(impl, "gpt2-10b", 128, gpus, **given)
            points.append(Point("gpt2-10b", f"{gpus} GPUs", side, options))
    return tuple(points)


# --- what each step of a schedule brings ---------------------------------------------------------
#: One after the other, each with what the ones before it have as far as both go together.
_STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "as it comes": ("eager", {}),
    "+ kernels": ("slapo-torch", {"kernels": "ops"}),
    "+ fusion": ("slapo-torch", {"kernels": "fused"}),
    "+ tensor parallel": ("slapo-torch", {"kernels": "fused", "tp": NODE}),
    "+ pipeline": ("slapo-torch", {"kernels": "ops", "tp": NODE // 2, "pp": 2}),
    "+ tuned": ("slapo-torch", {"kernels": "fused", "tp": 2, "checkpoint_ratio": 0.5}),
}


def _ablation() -> tuple[Point, ...]:
    points = []
    for model, batch, length in (("bert", 128, 512), ("gpt2", 64, 1024)):
        for step, (impl, given) in _STEPS.items():
            size = 2 * batch if step == "+ tuned" else batch
            options = _options(impl, model, size, NODE, seq_len=length, **given)
            points.append(Point(model, step, "throughput", options))
    return tuple(points)


EXPERIMENTS: dict[str, Experiment] = {
    "single_device": Experiment("One V100", "model", _single_device()),
    "single_node": Experiment("One node of eight V100", "model, GPUs", _single_node()),
    "multi_node": Experiment("Nodes of eight V100", "GPUs", _multi_node()),
    "ablation": Experiment("What each step brings, on eight V100", "step", _ablation()),
}
