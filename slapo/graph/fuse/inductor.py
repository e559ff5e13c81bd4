"""A module compiled by ``torch.compile`` that can be copied and pickled, under its old names."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from slapo.graph.fuse.sequential import instance_of

_STATE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class CompiledModule(nn.Module):
    """Base class of the modules that a fusion by inductor makes.

    ``torch.compile(module)`` would put ``_orig_mod`` into the names of all state, and
    ``module.compile()`` is lost by a copy and cannot be pickled; so the code is generated from
    the graph when the module is made, copied or loaded, and compiled when it is first called.
    """

    _slapo_graph: fx.Graph

    def forward(self, *inputs: Any) -> Any:
        """Run the compiled code on the inputs of the subgraph in order of first use."""
        return self.__dict__["_slapo_code"](*inputs)

    def _compile_late(self) -> None:
        code = fx.GraphModule(self, self._slapo_graph)
        run = MethodType(type(code).forward, self)
        self.__dict__["_slapo_code"] = torch.compile(run, backend="inductor")

    def __reduce__(self) -> tuple[Any, ...]:
        return instance_of, (CompiledModule, type(self).__name__), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_slapo_code"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._compile_late()


def compile_late(module: fx.GraphModule, name: str) -> CompiledModule:
    """Make a module, of a class with this name, that inductor compiles when it is first called.

    It has the submodules, parameters and buffers of `module`.

    >>> compile_late(fx.symbolic_trace(lambda x: x * 2), "Double")
    Double()
    """
    compiled = instance_of(CompiledModule, name)
    for slot in _STATE:
        compiled.__dict__[slot] = module.__dict__[slot].copy()
    compiled.training = module.training
    compiled._slapo_graph = module.graph
    compiled._compile_late()
    return compiled
