"""Traced modules that run captures, and whether they compute what the plain module does."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import slapo
from slapo.graph.trace.module import Traced, View, rewrite, trace_of
from slapo.graph.trace.nests import leaves, map_leaves


class Nothing:
    """A rewrite that changes nothing: with it, calls run captures and not the module's forward."""

    def apply(self, view: View) -> None:
        pass


class Tripled(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def make(forward: Callable[..., Any], **children: nn.Module) -> nn.Module:
    """A module with this forward, whose first argument is the module, and these children."""
    module: nn.Module = type("Made", (nn.Module,), {"forward": forward})()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def trace(module: nn.Module, *args: Any, given: Any = None, **options: Any) -> Any:
    """The module, traced with these inputs; flat, and by dynamo, unless said otherwise."""
    options = {"tracer": "huggingface", "flatten": True, **options}
    sch = slapo.create_schedule(module)
    assert sch.trace(example_inputs=args if given is None else given, **options)
    return sch.mod


def rewritten(module: nn.Module, *args: Any, **options: Any) -> Any:
    """The same, so that calls run captures."""
    traced = trace(module, *args, **options)
    rewrite(traced, Nothing())
    return traced


def scheduled(model: nn.Module, *paths: str, **options: Any) -> tuple[Any, Any]:
    """A schedule of a model in which these modules run captures, and a copy of the original."""
    plain = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    for path in paths or ("",):
        assert sch[path].trace(**{"tracer": "huggingface", **options})
        rewrite(sch[path].mod, Nothing())
    return sch, plain


def number_of_captures(module: nn.Module) -> int:
    """How many kinds of calls were captured."""
    return len(trace_of(module).known)


def assert_alike(
    module: nn.Module, plain: nn.Module, *args: Any, rtol: float = 0.0, **kwargs: Any
) -> Any:
    """Both give the same results and gradients, and leave the same buffers.

    Same kernels on the same numbers: equal, unless `rtol` says that sums have another order.
    """
    found = [_run(each, args, kwargs) for each in (module, plain)]
    (output, *ours), (expected, *theirs) = found
    assert type(output) is type(expected)
    ours_flat, theirs_flat = (list(leaves(each)) for each in (output, expected))
    for one, other in zip(ours_flat, theirs_flat, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)
            assert one.requires_grad == other.requires_grad
        else:
            assert (type(one), one) == (type(other), other)
    torch.testing.assert_close(ours, theirs, rtol=10 * rtol, atol=10 * rtol, equal_nan=True)
    assert (
        not isinstance(module, Traced) or not trace_of(module).rules or number_of_captures(module)
    )
    return output


def _run(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    module.zero_grad()
    made: dict[int, Tensor] = {}

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = copy.deepcopy(value.detach()).requires_grad_(value.requires_grad)
        return made[id(value)]

    given = [map_leaves(value, own) for value in args]
    named = {name: map_leaves(value, own) for name, value in kwargs.items()}
    torch.manual_seed(0)
    output = module(*given, **named)
    tensors = [each for each in leaves(output) if isinstance(each, Tensor) and each.requires_grad]
    if tensors:
        with torch.enable_grad():
            sum(each.abs().pow(2).mean() for each in tensors).backward()
    inputs = [each.grad for each in made.values()]
    state = dict(module.named_buffers())
    return output, inputs, {n: p.grad for n, p in module.named_parameters()}, state
