"""Rules of users' operations, and of kernels that torch does not see."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from slapo.verify.placement.call import (
    RULES,
    Call,
    Rule,
    by_rule,
    qualified_name,
    tensors_in,
)
from slapo.verify.placement.mode import PlaceMode
from slapo.verify.placement.place import NoRule, PlacementViolation, place_of, put_place
from slapo.verify.placement.sizes import OperationLog

#: Attribute of a function's context: True if any input was not replicated.
_SAW_PARTS = "_slapo_saw_parts"

#: Autograd functions with their rules for forward and backward.
_FUNCTIONS: dict[type[torch.autograd.Function], tuple[Rule, Rule]] = {}
#: Functions whose rules also run on replicated inputs, because their group may contradict these.
ASKED_OF_WHOLES: set[type[torch.autograd.Function]] = set()


def register_place_rule(operation: Any, rule: Rule, backward: Rule | None = None) -> None:
    """Register the placements of an operation's results, for :func:`slapo.check`.

    Required for ``torch.library`` operations, and for autograd functions around your own kernels,
    if they get slices or partial sums. Results of replicated tensors are always replicated.

    Parameters
    ----------
    operation
        ``torch.ops.mylib.gelu``, one of its overloads, or its name, ``"mylib::gelu"``. Or a
        subclass of ``torch.autograd.Function``; the check then skips the operations in its two
        methods.
    rule
        Function of a :class:`.call.Call`, whose ``places`` are the placements of its tensors. It
        returns one of them, or a placement of ``torch.distributed.tensor`` such as ``Shard(0)``:
        one for each returned tensor, or one for all. Or it raises ``call.misfit(why)``.
        :func:`.call.independent_along` makes a rule for operations that work slice by slice along
        some dimensions.
    backward
        Rule for the backward of an autograd function; the call's tensors are the incoming
        gradients. A ``torch.library`` operation has a separate operation for its backward.

    Raises
    ------
    TypeError
        If an autograd function has no backward rule, or another operation has one.

    Examples
    --------
    >>> from slapo.verify.placement.call import independent_along
    >>> class Double(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return 2 * x
    ...     @staticmethod
    ...     def backward(ctx, grad):
    ...         return 2 * grad
    >>> by_batch = independent_along(0)
    >>> register_place_rule(Double, by_batch, backward=by_batch)
    """
    is_function = isinstance(operation, type) and issubclass(operation, torch.autograd.Function)
    if is_function != (backward is not None):
        raise TypeError(
            "register_place_rule: a subclass of torch.autograd.Function needs backward=, the rule "
            f"of its gradient, and other operations do not take it; got {operation!r}"
        )
    if is_function and backward is not None:
        _FUNCTIONS[operation] = (rule, backward)
        return
    name = operation if isinstance(operation, str) else qualified_name(operation)
    RULES[name.removeprefix("aten::")] = rule


@contextmanager
def rules_of_functions(mode: OperationLog) -> Iterator[None]:
    """Apply the rules of autograd functions within the block, and detect Triton kernels."""
    with ExitStack() as stack:
        for cls, (forward, backward) in _FUNCTIONS.items():
            for name, rule in (("forward", forward), ("backward", backward)):
                _wrap(cls, name, functools.partial(_ruled, mode, cls, name, rule), stack)
            if cls.setup_context is not torch.autograd.Function.setup_context:
                _wrap(cls, "setup_context", _marking, stack)
        _watch_kernels(mode, stack)
        yield


def _wrap(cls: type, name: str, wrapper: Callable[..., Any], stack: ExitStack) -> None:
    """Replace a static method by a wrapped one, until the stack is closed."""
    original = inspect.getattr_static(cls, name)
    function = original.__func__ if isinstance(original, staticmethod) else original
    setattr(cls, name, staticmethod(wrapper(function)))
    stack.callback(setattr, cls, name, original)


def _ruled(
    mode: OperationLog, cls: type, name: str, rule: Rule, function: Callable[..., Any]
) -> Callable[..., Any]:
    shown = cls.__name__ if name == "forward" else f"the backward of {cls.__name__}"

    def run(*args: Any) -> Any:
        tensors = [value for value in args if isinstance(value, Tensor)]
        places = [place_of(tensor) for tensor in tensors]
        with mode.unseen():
            result = function(*args)
        if not isinstance(mode, PlaceMode):
            return result
        outs = tensors_in(result)
        call = Call(None, shown, args, {}, tensors, outs, places, mode.rank, mode.ranks)
        saw_parts = not all(place.is_plain for place in places)
        if name == "forward":
            _mark(args[0], saw_parts)
        # A gradient may arrive replicated at a function whose saved inputs are slices: ask its rule
        # too.
        if saw_parts or cls in ASKED_OF_WHOLES or getattr(args[0], _SAW_PARTS, False):
            try:
                for place in places:
                    if place.order:
                        raise PlacementViolation(f"no rule covers a tensor that is {place}")
                found = by_rule(rule, call)
            except PlacementViolation as misfit:
                raise mode.stop(shown, tensors, places, misfit) from None
            for out, place in zip(outs, found, strict=False):
                put_place(out, mode.with_origin(call, place))
        return result

    return run


def _marking(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(ctx: Any, inputs: Any, output: Any) -> None:
        function(ctx, inputs, output)
        _mark(ctx, not all(place_of(tensor).is_plain for tensor in tensors_in(inputs)))

    return run


def _mark(ctx: Any, saw_parts: bool) -> None:
    """Record for the backward pass if inputs were sharded; its gradients may be replicated."""
    # With a separate `setup_context`, the first argument of `forward` is no context; see
    # `_marking`. Noted here and not derived from the saved tensors in the backward pass, because
    # under a checkpoint only the function itself may read these, and only once.
    if isinstance(ctx, torch.autograd.function.FunctionCtx):
        setattr(ctx, _SAW_PARTS, saw_parts)


def _watch_kernels(mode: OperationLog, stack: ExitStack) -> None:
    """Detect Triton kernels, which write into tensors without an operation of torch."""
    jit = sys.modules.get("triton.runtime.jit")
    kernel: Any = getattr(jit, "JITFunction", None)
    if kernel is None:
        return
    launch = kernel.run

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        places = [place_of(tensor) for tensor in tensors]
        name = getattr(self, "__name__", "a kernel of Triton")
        is_plain = all(place.is_plain for place in places)
        if isinstance(mode, PlaceMode) and not (mode.quiet or is_plain):
            why = (
                "a Triton kernel without a rule: pass the autograd function or the "
                "torch.library operation around it to slapo.register_place_rule"
            )
            raise mode.stop(name, tensors, places, NoRule(why))
        # On fake tensors, results have shapes only.
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return launch(self, *args, **kwargs)
        return None

    kernel.run = watched
    stack.callback(setattr, kernel, "run", launch)
