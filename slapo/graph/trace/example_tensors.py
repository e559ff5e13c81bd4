"""The arguments of a capture: tensors without content, whose sizes are free to vary."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slapo.graph.trace.call import BoundCall
from slapo.graph.trace.expressions import Size
from slapo.graph.trace.trees import hint, leaves, map_leaves, parts, rebuild


def module_device(root: nn.Module) -> torch.device | None:
    """The device of a module's first parameter or buffer."""
    first = next(itertools.chain(root.parameters(), root.buffers()), None)
    return None if first is None else first.device


@dataclass
class ExampleCall:
    """A call with example tensors in place of the user's.

    Each occurrence of a tensor is a tensor of its own: that two arguments are one object in the
    example says nothing of other calls.

    Attributes
    ----------
    call
        The call as its caller has split it.
    arguments
        Parameter -> value, defaults filled in, tensors replaced by examples.
    places
        id of an example tensor -> where it lies: parameter, then keys.
    pinned
        Sizes of 1 (or 0): torch treats them differently (they broadcast), so they stay numbers.
    """

    call: BoundCall
    arguments: dict[str, Any] = field(default_factory=dict)
    places: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    pinned: list[tuple[Size, int]] = field(default_factory=list)
    device: torch.device | None = None

    @classmethod
    def of(cls, root: nn.Module, call: BoundCall) -> ExampleCall:
        """The examples for a call of `root`.

        Sizes among the arguments become numbers, as Python values are built into a graph.
        """
        if any(isinstance(leaf, torch.SymInt) for leaf in leaves([call.args, call.kwargs])):
            args, kwargs = map_leaves(call.args, hint), map_leaves(call.kwargs, hint)
            call = BoundCall(call.signature, args, kwargs)
        example = cls(call, device=module_device(root))
        example.arguments = {k: example._made(v, (k,)) for k, v in call.arguments.items()}
        return example

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments."""
        return self.call.with_arguments(self.arguments)[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments."""
        return self.call.with_arguments(self.arguments)[1]

    def _made(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            tensor = self._tensor(value, path)
            self.places[id(tensor)] = path
            return tensor
        elements = parts(value)
        if elements is None:
            return value
        return rebuild(value, [self._made(part.value, (*path, part.key)) for part in elements])

    def _tensor(self, value: torch.Tensor, path: tuple[Any, ...]) -> torch.Tensor:
        """An empty tensor on the module's device.

        Of one that is fake already, out of a capture of the model above, sizes that are numbers
        stay so: they are the model's own.
        """
        sizes, strides = ([hint(n) for n in ns] for ns in (value.shape, value.stride()))
        tensor = torch.empty_strided(
            sizes, strides, dtype=value.dtype, device=self.device or value.device
        )
        tensor.requires_grad_(value.requires_grad)
        if not value.is_leaf:  # those the forward may write to
            tensor = tensor.clone()
        symbolic = any(isinstance(size, torch.SymInt) for size in value.shape)
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) if symbolic else int(size) > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
            elif not symbolic:
                self.pinned.append((Size(path, dim), int(size)))
        return tensor
