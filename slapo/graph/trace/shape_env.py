"""The shape engine of a capture: it keeps every decision taken on symbolic sizes, and who took it.

An operation decides anew, from the sizes of the day, each time the graph runs; what Python decided
during the capture is settled for good. So the two must be told apart.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class Origin(Enum):
    """Whose code asks about a size."""

    OWN = "the Python code that is captured"
    OPERATION = "a torch operation of the captured code"
    SLICE = "an operation whose result depends on a bound, such as x[:, :n]"
    LEAF = "the Python code of a module that stays a call"
    LEAF_OPERATION = "a torch operation within such a module"


class Decision(NamedTuple):
    """An expression over sizes, the value it was taken to have, and who asked."""

    expression: sympy.Basic
    value: sympy.Basic
    origin: Origin


class CaptureShapeEnv(ShapeEnv):
    """A ``ShapeEnv`` that lists decisions, those that follow from "sizes are >= 2" included.

    ``ShapeEnv`` assumes that symbolic sizes are neither 0 nor 1 and keeps no guard for a question
    that this answers. The captured code may ask ``x.size(1) == 1``, though, and then the graph
    holds for other sizes only: so each question of that code is listed here.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "duck_shape": False, "specialize_zero_one": True})
        self.decisions: list[Decision] = []

    @property
    def hints(self) -> dict[sympy.Symbol, int]:
        """What each symbol was in the example."""
        return {symbol: int(value) for symbol, value in self.backed_var_to_val.items()}

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Decide as ``ShapeEnv`` does, and take note."""
        known = len(self.guards)
        value = super().evaluate_expr(orig_expr, *args, **kwargs)
        origin = _who_asks(sys._getframe(1))
        if origin in (Origin.OWN, Origin.LEAF) or len(self.guards) > known:
            self.decisions.append(Decision(orig_expr, sympy.sympify(value), origin))
        return value

    def follow(self, decisions: Iterable[Decision]) -> None:
        """Decide as another capture has, of a module that this one calls."""
        for decision in decisions:
            expression = decision.expression
            if isinstance(expression, sympy.Basic) and expression.free_symbols:
                if isinstance(expression, sympy.Eq) and decision.value == sympy.true:
                    super().evaluate_expr(expression, hint=True)
                self.decisions.append(decision)


_TORCH = str(Path(torch.__file__).parent)
_LEAF_CALLS = str(Path(__file__).parent / "leaf_calls.py")
#: Machinery of symbolic sizes, which asks for whoever stands above it.
_BETWEEN = tuple(
    f"{_TORCH}/{name}"
    for name in (
        "fx/experimental/",
        "utils/_sympy/",
        "utils/_stats.py",
        "utils/_traceback.py",
        "__init__.py",
        "_compile.py",
        "_dynamo/eval_frame.py",
    )
)
_DYNAMO = f"{_TORCH}/_dynamo/"
_SLICING = frozenset({"slice_forward", "slice", "narrow", "_slice", "select", "meta_select"})


#: How Python takes a symbolic number for a plain one; operations in C++ do not pass through these.
_CONVERSIONS = frozenset({"__bool__", "__int__", "__index__", "__float__"})


def _who_asks(frame: FrameType | None) -> Origin:
    """The origin of a question, from the frames that led to it, innermost first."""
    operation = slicing = converted = False
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if name.startswith(_BETWEEN):
            converted = converted or code.co_name in _CONVERSIONS
        elif name == _LEAF_CALLS:
            if slicing:
                return Origin.SLICE
            return Origin.LEAF if converted and not operation else Origin.LEAF_OPERATION
        elif name.startswith(_DYNAMO):
            if operation or _runs_tensors(code, frame):
                return Origin.SLICE if slicing or _slices(code, frame) else Origin.OPERATION
            return Origin.OWN
        elif name.startswith(_TORCH) and "/nn/modules/" not in name:
            operation = True
            slicing = slicing or code.co_name in _SLICING
        frame = frame.f_back
    return Origin.OWN


def _runs_tensors(code: CodeType, frame: FrameType) -> bool:
    """Whether dynamo is running a node on fake tensors, rather than asking by itself."""
    if code.co_name != "run_node":
        return False
    values = (frame.f_locals.get("args"), frame.f_locals.get("kwargs"))
    leaves = torch.utils._pytree.tree_leaves(values)
    return any(isinstance(value, torch.Tensor) for value in leaves)


def _slices(code: CodeType, frame: FrameType) -> bool:
    node = frame.f_locals.get("node") if code.co_name == "run_node" else None
    return getattr(getattr(node, "target", None), "__name__", "") == "getitem"
