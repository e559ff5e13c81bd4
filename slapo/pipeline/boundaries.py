"""Shapes, dtypes and gradients of the tensors that cross between stages.

Engines need them before the first micro-batch, to post receives and to send gradients back. One
run of every stage on fake tensors finds them: it computes nothing, draws no random numbers and does
not communicate. Only the resulting shapes are sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.graph.trace.hf import no_results_kept
from slapo.logger import only_from
from slapo.pipeline.stage import Stage
from slapo.random import tracker_kept
from slapo.scripting import compiled_kept

_TENSORS = ("_parameters", "_buffers")
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@dataclass(frozen=True)
class TensorMeta:
    """Metadata of a tensor that crosses a boundary."""

    #: its name in the stages
    name: str
    #: shape for one micro-batch
    shape: tuple[int, ...]
    dtype: torch.dtype
    #: true if a gradient comes back
    requires_grad: bool

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorMeta:
        """Return the metadata of a tensor."""
        return cls(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def tensor(
        self, device: torch.device | str, make: Callable[..., Tensor] = torch.empty
    ) -> Tensor:
        """Create a tensor with this metadata."""
        return make(self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


Boundary = tuple[TensorMeta, ...]


def describe_tensors(names: Sequence[str], tensors: Sequence[Tensor]) -> Boundary:
    """Metadata of the tensors that cross a boundary, such as the inputs of stage 0."""
    return tuple(TensorMeta.of(name, t) for name, t in zip(names, tensors, strict=True))


class ShapeProbe:
    """Determines the tensors that a stage sends from those that it receives.

    Create it before an engine wraps the stage. It keeps the present parameters and hooks, and its
    runs use these only: hooks of an engine would communicate.
    """

    def __init__(self, stage: Stage, device: torch.device, half: torch.dtype | None = None) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode  # takes half a second

        self.stage, self.device, self.half = stage, device, half
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes: dict[int, Tensor] = {}
        self._tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        for table in _tables(stage, _TENSORS):
            fake = {k: self._fake(t, fakes) for k, t in table.items()}
            self._tables.append((table, fake))
        self._tables += [(table, dict(table)) for table in _tables(stage, _HOOKS)]

    def _fake(self, tensor: Tensor | None, fakes: dict[int, Tensor]) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in fakes:
            fake: Tensor = self.mode.from_tensor(tensor)
            # Engines cast parameters to half precision, and leave buffers as they are.
            if self.half is not None and isinstance(tensor, nn.Parameter):
                fake = self._in_half(fake)
            fakes[id(tensor)] = fake
        return fakes[id(tensor)]

    def _in_half(self, fake: Tensor) -> Tensor:
        if not fake.is_floating_point():
            return fake
        with self.mode:
            return nn.Parameter(fake.detach().to(self.half), fake.requires_grad)

    def _zeros(self, value: Any, made: dict[int, Any]) -> Any:
        """Return zeros for a fake tensor; other table entries unchanged."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in made:
            zeros = torch.zeros(value.shape, dtype=value.dtype, device=self.device)
            made[id(value)] = zeros.requires_grad_(value.requires_grad)
        return made[id(value)]

    def run(self, received: Boundary, autocast: torch.dtype | None = None) -> Boundary:
        """Return the tensors that the stage sends; none for the last stage."""
        try:
            # torch logs failures there in red, but the run on real tensors may still succeed.
            quiet = only_from(logging.CRITICAL, "torch._subclasses.fake_tensor")
            with self._as_probed(), self.mode, quiet:
                sent = self._sent(received, autocast, torch.empty)
        except Exception:
            # Modules that depend on values (experts that select tokens) need real tensors.
            sent = self._run_for_real(received, autocast)
        wrong = [n for n, t in zip(self.stage.sent, sent, strict=True) if not isinstance(t, Tensor)]
        if wrong:
            raise SlapoError(
                f"stage {self.stage.index} would send {wrong}, which are not tensors; cut elsewhere"
            )
        return describe_tensors(self.stage.sent, sent)

    def _run_for_real(self, received: Boundary, autocast: torch.dtype | None) -> Sequence[Tensor]:
        """Run on zeros instead of parameters and buffers, which an engine may have sharded."""
        devices = [] if self.device.type == "cpu" else [self.device]
        try:
            with (
                self._as_probed(real=True),
                torch.random.fork_rng(devices, device_type=self.device.type),
            ):
                # Zeros are valid indices, too.
                return self._sent(received, autocast, torch.zeros)
        except Exception as error:
            shapes = {m.name: (m.shape, m.dtype) for m in received}
            raise SlapoError(
                f"stage {self.stage.index} fails on inputs of {shapes} with "
                f"{type(error).__name__}: {error}"
            ) from error

    def _sent(
        self, received: Boundary, autocast: torch.dtype | None, make: Callable[..., Tensor]
    ) -> Sequence[Any]:
        inputs = [meta.tensor(self.device, make) for meta in received]
        with torch.enable_grad(), autocasting(self.device, autocast):
            sent = self.stage(*inputs)
        return sent if self.stage.sent else ()

    @contextmanager
    def _as_probed(self, real: bool = False) -> Iterator[None]:
        """Context with fake tensors in the stage, without cached results or compiled code."""
        with (
            self._tensors_concealed(real),
            compiled_kept(self.stage),
            no_results_kept(),
            tracker_kept(),
            torch.compiler.set_stance("force_eager"),
        ):
            yield

    @contextmanager
    def _tensors_concealed(self, real: bool = False) -> Iterator[None]:
        present = [(table, dict(table)) for table, _ in self._tables]
        made: dict[int, Any] = {}
        # In place: wrappers share these tables with the modules that they wrap.
        for table, then in self._tables:
            stand_in = {k: self._zeros(v, made) for k, v in then.items()} if real else then
            _refill(table, stand_in)
        try:
            yield
        finally:
            for table, now in present:
                _refill(table, now)


def autocasting(device: torch.device, dtype: torch.dtype | None) -> Any:
    """Context of ``torch.autocast`` to `dtype`; None disables autocast."""
    if dtype is None and not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def _tables(module: nn.Module, names: Sequence[str]) -> list[dict[Any, Any]]:
    found = {}
    for m in module.modules():
        if isinstance(m, torch.jit.ScriptModule):
            continue  # its tables cannot be changed: it runs on its own tensors
        for name in names:
            table = m.__dict__.get(name)
            if table is not None:
                found[id(table)] = table
    return list(found.values())


def _refill(table: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    table.clear()
    table.update(content)


class Boundaries:
    """Tensors that cross between the stages, found once for each form of input.

    `stages` are those of this rank, by index; `rank_of` gives the rank of `group` for each index.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        n_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        rank_of: Callable[[int], int] = lambda index: index,
        half: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._n_stages, self._group, self._rank_of = n_stages, group, rank_of
        self._probes = {i: ShapeProbe(stage, device, half) for i, stage in stages.items()}
        self._autocast = autocast
        self._known: dict[Boundary, tuple[Boundary, ...]] = {}

    def of(self, inputs: Boundary) -> tuple[Boundary, ...]:
        """Return the tensors that each stage receives; a collective for inputs of a new form."""
        if inputs not in self._known:
            found = [inputs]
            for index in range(self._n_stages - 1):
                found.append(self._after(index, found[-1]))
            self._known[inputs] = tuple(found)
        return self._known[inputs]

    def _after(self, index: int, received: Boundary) -> Boundary:
        """Return the tensors that a stage sends, or raise its error on all ranks."""
        answer: list[Any] = [None]
        if index in self._probes:
            try:
                answer = [self._probes[index].run(received, self._autocast)]
            except SlapoError as error:
                # The other ranks wait for the shapes, and raise it too.
                answer = [error]
        if self._group is not None and self._group.size() > 1:
            source = self._rank_of(index)
            dist.broadcast_object_list(answer, group=self._group, group_src=source)
        if isinstance(answer[0], SlapoError):
            raise answer[0]
        sent: Boundary = answer[0]
        return sent
