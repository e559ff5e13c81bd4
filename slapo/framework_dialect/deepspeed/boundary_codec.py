"""Encoding of tensors that cross a stage boundary under DeepSpeed's pipeline.

DeepSpeed expects a gradient back for every floating-point tensor that a stage sends. A mask or a
position table has none, so it travels as bytes. The sending stage decides which tensors do, and
sends this to the next stage with their shapes, once for each form of batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.pipeline import Stage
from slapo.pipeline.boundaries import Boundary, TensorMeta, describe_tensors


def pack(meta: TensorMeta, tensor: Tensor) -> Tensor:
    """Encode a tensor for sending: as bytes, unless a gradient comes back."""
    tensor = tensor.contiguous()
    return tensor if meta.requires_grad else tensor.detach().flatten().view(torch.uint8)


def unpack(meta: TensorMeta, tensor: Tensor) -> Tensor:
    """Undo `pack`."""
    return tensor if meta.requires_grad else tensor.view(meta.dtype).view(meta.shape)


def room_for(meta: TensorMeta, device: torch.device) -> Tensor:
    """Receive buffer for an encoded tensor."""
    if meta.requires_grad:
        return meta.tensor(device).detach()
    return torch.empty(meta.nbytes, dtype=torch.uint8, device=device)


class StageLayer(nn.Module):
    """A stage as a layer of ``PipelineModule``: takes and returns encoded tensors.

    `arriving` and `leaving` describe the boundaries before and after it; None until known.
    """

    def __init__(self, stage: Stage, n_stages: int) -> None:
        super().__init__()
        self.stage = stage
        self.is_last = stage.index == n_stages - 1
        self.forget()

    def forget(self) -> None:
        """Reset, so that boundaries may have another form."""
        self.arriving: Boundary | None = None
        self.leaving: Boundary | None = None

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Any:
        tensors = (inputs,) if isinstance(inputs, Tensor) else inputs
        if self.stage.index > 0:
            assert self.arriving is not None, "told before the tensors came"
            tensors = tuple(map(unpack, self.arriving, tensors))
        output = self.stage(*tensors)
        if self.is_last:
            return check_output(output)
        sent = describe_tensors(self.stage.sent, output)
        odd = [m for m in sent if m.requires_grad and not m.dtype.is_floating_point]
        if odd:
            raise SlapoError(
                f"{odd[0]} needs a gradient and crosses a stage boundary, but DeepSpeed sends "
                "only gradients of real numbers; cut the stage elsewhere"
            )
        if self.leaving is None:
            self.leaving = sent
        if sent != self.leaving:
            raise SlapoError(
                f"stage {self.stage.index} sends {sent}, but announced {self.leaving} to the "
                "next stage; give all micro-batches the same shapes and dtypes"
            )
        return tuple(map(pack, sent, output))


def check_output(output: Any) -> Any:
    """Return a model's output, in which DeepSpeed prepares the backward by hooks on tensors.

    Without them, bfloat16 gradients of one micro-batch would leak into the next.
    """
    if isinstance(output, (Tensor, tuple, list, dict)):
        return output
    raise SlapoError(
        f"the model returns a {type(output).__name__}, in which DeepSpeed finds no tensors; "
        "return a tensor, a tuple, a list or a dict"
    )
