"""The shape engine of a recording: it keeps every decision taken on symbolic sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class Origin(Enum):
    """Whose code asks about a size."""

    OWN = "the Python code being recorded"
    OPERATION = "a torch operation of the recorded code"
    SLICE = "an operation whose result depends on a bound, such as x[:, :n]"
    LEAF = "the Python code of a module that stays a call"
    LEAF_OPERATION = "a torch operation within such a module"
    SETUP = "the recorder"


#: What an operation's origin becomes, from the origin of its caller.
WITHIN_OPERATION = {
    Origin.OWN: Origin.OPERATION,
    Origin.LEAF: Origin.LEAF_OPERATION,
}


class Decision(NamedTuple):
    """An expression over sizes, the value it was taken to have, and who asked."""

    expression: sympy.Basic
    value: sympy.Basic
    origin: Origin


class RecordingShapeEnv(ShapeEnv):
    """A ``ShapeEnv`` that lists decisions, those that follow from "sizes are >= 2" included.

    ``ShapeEnv`` assumes that symbolic sizes are neither 0 nor 1 and keeps no guard for a question
    that this answers. The code being recorded may ask ``x.size(1) == 1``, though, and then the
    graph holds for other sizes only: so each question of that code is listed here.
    """

    def __init__(self) -> None:
        super().__init__(
            allow_scalar_outputs=False,
            allow_dynamic_output_shape_ops=False,
            duck_shape=False,
            specialize_zero_one=True,
        )
        self.decisions: list[Decision] = []
        self.origin = Origin.SETUP

    @property
    def hints(self) -> dict[sympy.Symbol, int]:
        """What each symbol was in the example."""
        return {symbol: int(value) for symbol, value in self.backed_var_to_val.items()}

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Decide as ``ShapeEnv`` does, and take note."""
        known = len(self.guards)
        value = super().evaluate_expr(orig_expr, *args, **kwargs)
        if self.origin is Origin.OWN or len(self.guards) > known:
            self.decisions.append(Decision(orig_expr, sympy.sympify(value), self.origin))
        return value

    @contextmanager
    def asked_by(self, origin: Origin) -> Iterator[None]:
        """Within the block, decisions are taken for `origin`."""
        before, self.origin = self.origin, origin
        try:
            yield
        finally:
            self.origin = before

    def claim(self, start: int) -> None:
        """The decisions since number `start` steer Python after all: make them ``OWN``."""
        for i in range(start, len(self.decisions)):
            self.decisions[i] = self.decisions[i]._replace(origin=Origin.OWN)
