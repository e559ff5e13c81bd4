"""Example inputs as fake tensors whose sizes are symbols."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from slapo.graph.trace.recorder.expressions import Size
from slapo.graph.trace.recorder.shape_env import RecordingShapeEnv
from slapo.graph.trace.trees import parts, rebuild


class RecordingMode(FakeTensorMode):
    """The fake mode of one or several recordings, and what these have learnt about leaves.

    Real tensors, such as parameters, are let in and made fake on first use.
    """

    def __init__(self) -> None:
        super().__init__(shape_env=RecordingShapeEnv(), allow_non_fake_inputs=True)
        self.templates: dict[Any, Any] = {}


def new_fake_mode() -> RecordingMode:
    """A mode for recordings."""
    return RecordingMode()


@contextmanager
def fresh_shape_env(fake_mode: FakeTensorMode) -> Iterator[RecordingShapeEnv]:
    """Within the block `fake_mode` knows no sizes but those of this recording.

    So its guards speak of its own inputs only, and equal recordings name equal sizes equally.
    """
    before = fake_mode.shape_env
    shape_env = fake_mode.shape_env = RecordingShapeEnv()
    try:
        yield shape_env
    finally:
        fake_mode.shape_env = before


def module_device(module: nn.Module) -> torch.device | None:
    """The device of a module's first parameter or buffer."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return None


class FakeInputs:
    """Makes the arguments of a recording fake.

    Every size above 1 becomes a symbol of its own, so that a batch of 3 and 3 channels stay apart.
    A size of 1 (or 0) is kept as a number, because torch treats it differently (it broadcasts),
    and becomes a guard. Of tensors that are fake already (inputs of a child, out of an earlier
    recording) known sizes stay numbers, equal symbols stay equal.

    Parameters
    ----------
    fake_mode
        The mode of the recording; use the object outside of ``with fake_mode``.
    device
        Where the module lives; inputs are moved there.
    """

    def __init__(self, fake_mode: FakeTensorMode, device: torch.device | None) -> None:
        assert isinstance(fake_mode.shape_env, RecordingShapeEnv)
        self.sizes: dict[sympy.Symbol, Size] = {}
        self.pinned: list[tuple[Size, int]] = []
        self._mode = fake_mode
        self._env = fake_mode.shape_env
        self._device = device
        self._renamed: dict[sympy.Expr, torch.SymInt] = {}

    def make(self, value: Any, path: tuple[Any, ...]) -> Any:
        """`value` with its tensors made fake; `path` says which argument it is."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        elements = parts(value)
        if elements is None:
            return value
        return rebuild(value, [self.make(part.value, (*path, part.key)) for part in elements])

    def _tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> torch.Tensor:
        known = isinstance(tensor, FakeTensor)
        symbolic = [
            isinstance(size, torch.SymInt) and not size.node.expr.is_number if known else size > 1
            for size in tensor.shape
        ]
        example = self._example(tensor)
        dynamic = [DimDynamic.DYNAMIC if s else DimDynamic.STATIC for s in symbolic]
        fake = self._mode.from_tensor(
            example,
            static_shapes=False,
            source=ConstantSource(f"input_{len(self._env.source_to_var)}_{len(self.sizes)}"),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic),
        )
        for dim, is_symbol in enumerate(symbolic):
            size = fake.shape[dim]
            if not is_symbol:
                if not known:
                    self.pinned.append((Size(path, dim), int(size)))
                continue
            assert isinstance(size, torch.SymInt), "the sizes of an input are not symbolic"
            self.sizes[size.node.expr] = Size(path, dim)
            if known:
                self._keep_equal(tensor.shape[dim], size)
        return fake

    def _keep_equal(self, before: Any, now: torch.SymInt) -> None:
        """Sizes that were one symbol in the earlier recording are one in this."""
        other = self._renamed.setdefault(before.node.expr, now)
        if other is not now:
            torch._check(other == now)

    def _example(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty tensor of the same layout: its content never matters."""
        sizes = [_number(size) for size in tensor.shape]
        strides = [_number(stride) for stride in tensor.stride()]
        device = self._device or tensor.device
        example = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=device)
        return example.requires_grad_(tensor.requires_grad)


def _number(size: Any) -> int:
    """A size of the example; for a symbol the number that stood in for it."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
