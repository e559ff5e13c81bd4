"""The module of one stage: its part of the graph, and the modules that this part calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from slapo.graph.trace.contract import CallContract
from slapo.graph.trace.module import TracedModule
from slapo.pipeline.inline import LIMITS, JoinedGraph
from slapo.pipeline.split import StageGraph


class Stage(TracedModule):
    """One stage of a pipeline.

    ``forward(*tensors)`` takes the tensors named by `received` and returns the tuple of those named
    by `sent`; the last stage returns what the model returns. Parameters have the names that they
    have in the model.

    Attributes
    ----------
    index : int
    received, sent : tuple of str
    """

    index: int
    received: tuple[str, ...]
    sent: tuple[str, ...]

    @property
    def _label(self) -> str:
        return f"stage {self.index}"


def make_stage(index: int, part: StageGraph, root: nn.Module, joined: JoinedGraph) -> Stage:
    """The stage that runs `part` of the graph of `root`, with the root's own modules and tensors.

    Parameters
    ----------
    index
        Number of the stage.
    part
        Its graph, with targets that are paths from `root`.
    root
        The traced model; its modules are shared, not copied.
    joined
        Contracts and limits of the containers that the graph was joined from.
    """
    skeleton = nn.Module()
    skeleton.training = root.training
    for node in part.graph.nodes:
        if node.op == "call_module":
            put(skeleton, str(node.target), root.get_submodule(str(node.target)))
        elif node.op == "get_attr":
            _put_attribute(skeleton, root, str(node.target), joined)
    stage = Stage.from_graph(skeleton, part.graph, _contract(joined.contracts))
    assert isinstance(stage, Stage), "from_graph makes an object of the class it is called on"
    stage.index, stage.received, stage.sent = index, part.received, part.sent
    return stage


def _contract(contracts: Mapping[str, CallContract]) -> CallContract:
    """What all graphs together demand of the modules' modes and dtype."""
    training = {c.training for c in contracts.values()} - {None}
    dtypes = {c.dtype for c in contracts.values()} - {None}
    inlined = [
        f"{path}.{name}" if path else name
        for path, contract in contracts.items()
        for name in contract.inlined
    ]
    return CallContract(
        training=training.pop() if len(training) == 1 else None,
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
        inlined=tuple(inlined),
    )


def put(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register `module` at `path` below `root`, with plain modules on the way."""
    owner, name = owner_at(root, path)
    owner._modules[name] = module


def owner_at(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that `path` lies in, made if it is missing, and the last part of the path."""
    *parts, name = path.split(".")
    for part in parts:
        below = root._modules.get(part)
        if below is None:
            below = nn.Module()
            below.training = root.training
            root._modules[part] = below
        root = below
    return root, name


def _put_attribute(skeleton: nn.Module, root: nn.Module, target: str, joined: JoinedGraph) -> None:
    path, _, name = target.rpartition(".")
    owner, _ = owner_at(skeleton, target)
    if name == LIMITS:
        owner.__dict__[name] = joined.limits[path]
        return
    source = root.get_submodule(path)
    if source is owner:
        return
    put_tensor(owner, source, name)


def put_tensor(owner: nn.Module, source: nn.Module, name: str) -> None:
    """Give `owner` the attribute `name` of `source`: the same parameter, buffer or object."""
    if name in source._parameters:
        owner._parameters[name] = source._parameters[name]
    elif name in source._buffers:
        owner._buffers[name] = source._buffers[name]
        if name in source._non_persistent_buffers_set:
            owner._non_persistent_buffers_set.add(name)
    elif name != "training":
        value: Any = getattr(source, name)
        assert not isinstance(value, Tensor), "tensors are parameters or buffers"
        owner.__dict__[name] = value
