"""A scheduled model, or one of its stages, as Megatron-Core's schedules call it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from slapo.framework_dialect.batches import Batch
from slapo.framework_dialect.boundary_codec import BufferLayout, pack, unpack
from slapo.framework_dialect.megatron.load import megatron_core


class ModelChunk(nn.Module):
    """The part of the model on this rank, as a ``model_provider`` of Megatron-Core returns it.

    `arriving` and `leaving` are the layouts of the boundaries before and after it. The loss has to
    depend on `anchor`, see `unpack`.
    """

    # Read by Megatron-Core. Ties are summed elsewhere, since other parameters than its embedding
    # and output layer may be tied too.
    share_embeddings_and_output_weights = False

    def __init__(self, part: nn.Module, index: int, n_stages: int) -> None:
        super().__init__()
        self.part = part
        self.model_type = megatron_core().enums.ModelType.encoder_or_decoder
        self.pre_process, self.post_process = index == 0, index == n_stages - 1
        self.arriving: BufferLayout | None = None
        self.leaving: BufferLayout | None = None
        self.anchor: Tensor | None = None
        self._received: Tensor | None = None

    def set_input_tensor(self, received: Any) -> None:
        """Store the tensor received by the schedule; None in the first stage."""
        self._received = received[0] if isinstance(received, list) else received

    def forward(self, batch: Batch) -> Any:
        """Return the model's output in the last stage, and a buffer to send in the others."""
        if self.pre_process:
            output = self.part(*batch.args, **batch.kwargs)
        else:
            assert self.arriving is not None, "set before the schedule runs"
            assert self._received is not None, "the schedule receives first"
            tensors, self.anchor = unpack(self.arriving, self._received)
            self._received = None
            output = self.part(*tensors)
        if self.post_process:
            return output
        assert self.leaving is not None, "set before the schedule runs"
        return pack(self.leaving, output, self.anchor)
