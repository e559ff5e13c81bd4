"""Stand-ins for a model's tensors: the check needs no weights and changes none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo.node import Numbers
from slapo.pipeline.pipelined import unstaged
from slapo.sharding.state import sharding_of
from slapo.sharding.sync_hooks import LocalSize
from slapo.sharding.tags import apply_tags, new_parameter
from slapo.verify.placement.place import WHOLE, Origin, Place, of_spec, put_place, sliced
from slapo.weights.slots import Slot, compiled_parameters, exchanged, slots
from slapo.wrapper import innermost, with_wrapped

#: Models with up to this many bytes of weights run on real values, and take the branches that
#: depend on values. Larger ones run on fake tensors.
REAL_BYTES = 128 * 2**20


class FakeParameters:
    """Creates stand-ins for tensors, real or fake.

    Parameters get the dtype `half` if it is given, as in engines that compute with copies.
    """

    def __init__(self, model: nn.Module, half: torch.dtype | None = None) -> None:
        self._half = half
        tensors = [*model.parameters(), *model.buffers()]
        shapes = [torch.Size(getattr(t, "orig_shape", t.shape)) for t in tensors]
        whole = sum(s.numel() * t.element_size() for s, t in zip(shapes, tensors, strict=True))
        self.fake = None if whole <= REAL_BYTES else FakeTensorMode(allow_non_fake_inputs=True)
        devices = {t.device for t in tensors if not t.is_meta}
        self.device = next(iter(devices)) if len(devices) == 1 else torch.device("cpu")
        self._generator = torch.Generator().manual_seed(1)

    def mode(self) -> Any:
        """The context to run in."""
        return nullcontext() if self.fake is None else self.fake

    def like(self, tensor: Tensor, shape: torch.Size) -> Tensor:
        """A tensor of the same type, possibly with another shape."""
        device, dtype = self.device if tensor.is_meta else tensor.device, tensor.dtype
        if self._half is not None and isinstance(tensor, nn.Parameter) and dtype.is_floating_point:
            dtype = self._half
        if self.fake is not None:
            with self.fake:
                return torch.empty(shape, dtype=dtype, device=device)
        # A DTensor (as FSDP2 makes of parameters) would bring its own collectives into the run.
        is_here = not tensor.is_meta and not hasattr(tensor, "device_mesh")
        if is_here and shape == tensor.shape:
            return tensor.detach().to(dtype, copy=True)
        # Zero is a valid index into any table.
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=device)
        numbers = torch.empty(shape, dtype=torch.float32).uniform_(
            0.1, 1, generator=self._generator
        )
        return numbers.to(device, dtype)

    def given(self, tensor: Tensor) -> Tensor:
        """A stand-in for a user's input, with the same ``requires_grad``."""
        if self.fake is not None:
            copy = self.like(tensor, tensor.shape)
        elif tensor.is_meta:
            copy = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.device)
        else:
            copy = tensor.detach().to(self.device, copy=True)
        return copy.requires_grad_(tensor.requires_grad)


@contextmanager
def standing_in(
    model: nn.Module,
    stand_ins: FakeParameters,
    group: dist.ProcessGroup | None,
    whole: bool = False,
) -> Iterator[dict[str, tuple[Tensor, Place]]]:
    """Put stand-ins into a model for the duration of the block."""
    named: dict[str, tuple[Tensor, Place]] = {}

    def made(slot: Slot) -> Tensor:
        name = unstaged(model, slot.name)
        old, place = slot.tensor, _place(slot, name)
        shape = slot.full_shape if whole else old.shape
        new = stand_ins.like(old, shape)
        if isinstance(old, nn.Parameter):
            with stand_ins.mode():
                new = new_parameter(new, old)
            if not whole:
                apply_tags(new, {}, group)
            named[name] = new, place
        put_place(new, WHOLE if whole else place)
        return new

    for name, param in compiled_parameters(model).items():
        named[name] = param, WHOLE
        put_place(param, WHOLE)
    with exchanged(slots(model), made):
        yield named


def _place(slot: Slot, name: str) -> Place:
    spec, shape = slot.spec, slot.tensor.shape
    if spec is None:  # tensors sharded by their author have the attribute orig_shape
        whole = getattr(slot.tensor, "orig_shape", shape)
        axes = [axis for axis, size in enumerate(shape) if size != whole[axis]]
        return sliced(axes[0]) if len(axes) == 1 else WHOLE
    if spec.world_size == 1:
        return WHOLE
    return replace(of_spec(spec), origin=Origin("shard", name.rpartition(".")[0]))


@contextmanager
def as_before(model: nn.Module, numbers: Numbers) -> Iterator[None]:
    """Restore the sizes that modules and configs had before scheduling, within the block."""
    before: list[tuple[Any, dict[str, Any]]] = [
        (holder, own) for ref, own in numbers if (holder := ref()) is not None
    ]
    for outer in model.modules():
        state = sharding_of(innermost(outer))
        if state is not None:
            before.append((innermost(outer), state.sizes))
        shares = (each for each in with_wrapped(outer) if isinstance(each, LocalSize))
        before.extend((each, {"ranks": 1}) for each in shares)
    with ExitStack() as stack:
        for holder, own in before:
            now = holder if isinstance(holder, dict) else holder.__dict__
            for name, value in own.items():
                if name in now and now[name] is not value:
                    stack.callback(now.__setitem__, name, now[name])
                    now[name] = value
        yield
