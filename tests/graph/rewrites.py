"""Rewrites of one graph in one line, as tests write them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from slapo.graph.fuse.fusion import Fuse
from slapo.graph.rewrite.rules import Replace, carry_out


class Leaves(fx.Tracer):
    """Enters the root only, as ``trace(recursive=False)`` does."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def leaves_of(module: nn.Module) -> fx.GraphModule:
    """The graph of a module in which every child is a call."""
    return fx.GraphModule(module, Leaves().trace(module))


def layers(number: int) -> fx.GraphModule:
    """Layers without weights: matrix products, GELU and softmax."""

    def code(x: Any, m: Any) -> Any:
        for _ in range(number):
            h = F.gelu(torch.matmul(x, m) + 1.0)
            x = torch.softmax(h * 2 + m, -1) @ m + x
        return x

    return fx.symbolic_trace(code)


class Calls(nn.Module):
    """Applies one module to the input."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.mod = module

    def forward(self, x: Any) -> Any:
        return self.mod(x)


class SideBySide(nn.Module):
    """Applies modules to the same inputs."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        return tuple(part(*inputs) for part in self.parts)


def outcome(module: nn.Module, *inputs: torch.Tensor) -> list[Any]:
    """Outputs, gradients and buffers of a training step, in an order that no name decides."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    module.zero_grad()
    torch.manual_seed(5)
    out = module(*(x * 1 for x in leaves))  # which may be written to
    outs = list(out) if isinstance(out, tuple) else [out]
    total = sum(o.float().square().sum() for o in outs)
    if total.requires_grad:
        total.backward()
    grads = {p.data_ptr(): p.grad for p in module.parameters()}
    buffers = {b.data_ptr(): b.clone() for b in module.buffers()}
    held = [value for _, value in (*sorted(grads.items()), *sorted(buffers.items()))]
    return [*outs, *(x.grad for x in leaves), *held]


def replace_vertical(
    gm: fx.GraphModule,
    nodes: Collection[fx.Node],
    new: Any,
    name: str | None = None,
    concrete_args: Mapping[str, Any] | None = None,
    bindings: Mapping[str, Any] | None = None,
) -> fx.Node:
    rule = Replace(gm, [nodes], new, name, concrete_args, bindings=[bindings or {}])
    return carry_out(gm, rule)


def replace_horizontal(
    gm: fx.GraphModule,
    subgraphs: Sequence[Collection[fx.Node]],
    new: Any,
    name: str | None = None,
    concrete_args: Mapping[str, Any] | None = None,
) -> fx.Node:
    return carry_out(gm, Replace(gm, subgraphs, new, name, concrete_args))


def replace_node(
    gm: fx.GraphModule, node: fx.Node, fn: Any, concrete_args: Mapping[str, Any] | None = None
) -> fx.Node:
    return carry_out(gm, Replace(gm, [[node]], fn, None, concrete_args, same_call=True))


def fusion_of(gm: fx.GraphModule, nodes: Any, **how: Any) -> nn.Module:
    """The module that a fusion makes; the graph stays as it is."""
    made = Fuse(gm, nodes, **how).made
    assert made is not None
    return made


def fuse(gm: fx.GraphModule, nodes: Any, **how: Any) -> nn.Module:
    """The module that has taken the place of operations."""
    rule = Fuse(gm, nodes, **how)
    made = rule.made
    carry_out(gm, rule)
    assert made is not None
    return made
