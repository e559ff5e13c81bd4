"""The module of one stage: its part of the graph, and the modules that this part calls."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from slapo.errors import SlapoError
from slapo.graph.trace.module import code_of
from slapo.graph.trace.nodes import graph_of, rows_of
from slapo.pipeline.split import StageGraph


class Kind(NamedTuple):
    """Kind of calls that one graph serves: the mode, and batches of one sample."""

    training: bool
    of_one: bool = False


class Stage(fx.GraphModule):
    """One stage of a pipeline.

    ``forward(*tensors)`` takes the tensors named by `received` and returns the tuple of those named
    by `sent`; the last stage returns the output of the model. Parameters keep their names in the
    model. There are graphs for training and evaluation. If the model distinguishes batches of one
    sample, each mode has a second graph for these.

    Parameters
    ----------
    index
        Index of the stage.
    parts
        Kind of calls -> graph, with targets that are paths from the root.
    captured_on
        Device constant in the graphs; a call replaces it by the device of its tensors.
    """

    _lineno_map = None  # torch.compile reads it from a GraphModule

    def __new__(cls, *args: Any, **kwargs: Any) -> Stage:
        """Create an object without state; fx would create a class for each."""
        return object.__new__(cls)

    def __init__(
        self, index: int, parts: Mapping[Kind, StageGraph], captured_on: torch.device | None
    ) -> None:
        nn.Module.__init__(self)
        self.captured_on = captured_on
        # All graphs receive and send tensors of the same names, see _check_alike.
        part = next(iter(parts.values()))
        self.index, self.received, self.sent = index, part.received, part.sent
        self.__dict__["_graphs"] = {kind: each.graph for kind, each in parts.items()}
        #: (tensor, dimension) by which a batch of one sample is detected
        self.batch_axis = next(
            (axis_of_one(part, p) for kind, p in parts.items() if kind.of_one), None
        )
        self.__dict__["_codes"] = {}

    @property  # type: ignore[misc]
    def graph(self) -> fx.Graph:
        """Graph for the present mode."""
        return self._graph_for(False)

    def _graph_for(self, of_one: bool) -> fx.Graph:
        graphs: dict[Kind, fx.Graph] = self.__dict__["_graphs"]
        found = graphs.get(Kind(self.training, of_one), graphs.get(Kind(self.training)))
        if found is None:
            was, now = ("eval", "train") if self.training else ("train", "eval")
            raise SlapoError(
                f"stage {self.index} was captured in {was} mode only; call .{was}() on it, or "
                f"make the model's forward do the same in {now} mode"
            )
        return found

    @property
    def _graph(self) -> fx.Graph:  # type: ignore[override]
        return self.graph

    @property
    def code(self) -> str:
        """Source code of the graph."""
        return str(self.graph.python_code("self").src)

    def recompile(self) -> fx.graph.PythonCode:
        """Regenerate the code after a manual change of the graph."""
        self.__dict__["_codes"].clear()
        return self.graph.python_code("self")

    def forward(self, *tensors: Tensor) -> Any:
        """Run this stage's part of the model."""
        of_one = (
            self.batch_axis is not None
            and tensors[self.batch_axis[0]].size(self.batch_axis[1]) == 1
        )
        codes, kind = self.__dict__["_codes"], (self.training, of_one, tensors[0].device)
        if kind not in codes:
            graph = self._graph_for(of_one)
            codes[kind] = code_of(_on_device(graph, self.captured_on, tensors[0].device))
        return codes[kind](self, *tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> Stage:
        new = memo[id(self)] = object.__new__(type(self))
        state = {**self.__dict__, "_codes": {}}
        graphs = state.pop("_graphs")
        new.__dict__.update(copy.deepcopy(state, memo))
        new.__dict__["_graphs"] = {mode: copy.deepcopy(graph) for mode, graph in graphs.items()}
        return new

    def __copy__(self) -> Stage:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        # fx would pickle the code of one graph, and trace it again on unpickling.
        rows = {mode: rows_of(graph) for mode, graph in self.__dict__["_graphs"].items()}
        return _empty, (), {**self.__dict__, "_codes": {}, "_graphs": rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        graphs = {mode: graph_of(rows) for mode, rows in state["_graphs"].items()}
        self.__dict__.update({**state, "_graphs": graphs})

    __repr__ = nn.Module.__repr__


def _empty() -> Stage:
    return object.__new__(Stage)


def axis_of_one(many: StageGraph, one: StageGraph) -> tuple[int, int] | None:
    """Return the received tensor and dimension of size 1 only if the batch has one sample."""
    for index, (large, small) in enumerate(zip(many.ones, one.ones, strict=True)):
        for dim, (any_size, single) in enumerate(zip(large, small, strict=False)):
            if single and not any_size:
                return index, dim
    return None


def _on_device(graph: fx.Graph, built_in: torch.device | None, device: torch.device) -> fx.Graph:
    """Return the graph with its device constant replaced."""
    if built_in is None or built_in == device:
        return graph
    new = {built_in: device, built_in.type: device.type}

    def other(value: Any) -> Any:
        return new.get(value, value) if isinstance(value, (torch.device, str)) else value

    graph = copy.deepcopy(graph)
    for node in graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), other)
    return graph


def make_stage(
    index: int,
    parts: Mapping[Kind, StageGraph],
    root: nn.Module,
    captured_on: torch.device | None = None,
) -> Stage:
    """Create the stage of graphs of `root`, with the root's own modules and tensors."""
    stage = Stage(index, parts, captured_on)
    stage.training = root.training
    for part in parts.values():
        for node in part.graph.nodes:
            if node.op == "call_module":
                put(stage, str(node.target), root.get_submodule(str(node.target)))
    # After the modules: the stage already has the tensors of those that it calls.
    for part in parts.values():
        for node in part.graph.find_nodes(op="get_attr"):
            path, _, name = str(node.target).rpartition(".")
            owner, _ = owner_at(stage, str(node.target))
            source = root.get_submodule(path)
            if source is not owner:
                put_tensor(owner, source, name)
    return stage


def put(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register `module` at `path` below `root`, with plain modules in between."""
    owner, name = owner_at(root, path)
    owner._modules[name] = module


def owner_at(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module that contains `path`, created if missing, and the last part of the path."""
    *parts, name = path.split(".")
    for part in parts:
        below = root._modules.get(part)
        if below is None:
            below = nn.Module()
            below.training = root.training
            root._modules[part] = below
        root = below
    return root, name


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
        if isinstance(value, Tensor):  # a plain attribute, or a tensor from outside the model
            owner.register_buffer(name, value, persistent=False)
        else:
            owner.__dict__[name] = value
