"""Small tensors by their values, such as example inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slapo.history import describe
from slapo.node import Node
from slapo.record.callables import Unnamed
from slapo.record.kept import Decode, Part, encode

#: Elements of a tensor that a record holds; of more than that the file would be no text to read.
MOST = 16_384


@dataclass(frozen=True, eq=False)
class Values(Part):
    """A tensor: a copy of it that nobody changes."""

    tag = "tensor"
    tensor: Tensor
    #: the kind of its device; the index is another one on each rank
    device: str

    @property
    def text(self) -> str:
        """With its shape."""
        return describe(self.tensor)

    def encode(self) -> Any:
        """Shape, dtype, kind of device, and the values in one list; none of a tensor on meta."""
        tensor = self.tensor
        values = None if tensor.is_meta else encode(tensor.flatten().tolist())
        return [list(tensor.shape), encode(tensor.dtype), self.device, values]

    @classmethod
    def decode(cls, data: Any, decode: Decode) -> Values:
        """The tensor again, on CPU until it is asked for."""
        shape, dtype, device, values = data
        dtype = decode(dtype)
        if values is None:
            return cls(torch.empty(shape, dtype=dtype, device="meta"), device)
        return cls(torch.tensor(decode(values), dtype=dtype).reshape(shape), device)

    def revive(self, node: Node) -> Tensor:
        """A copy, which the primitive may do with as it likes."""
        return self.tensor.clone().to(self.device)


def keep_tensor(value: Tensor) -> Part:
    """The values of a small plain tensor."""
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_complex():
        why = f"a {type(value).__name__} that no text holds; pass a plain tensor"
        return Unnamed(describe(value), why)
    if value.numel() > MOST:
        why = f"a tensor of {value.numel()} elements, and a record holds {MOST}; pass a smaller one"
        return Unnamed(describe(value), why)
    return Values(value.detach().clone(), value.device.type)
