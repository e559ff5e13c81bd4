"""A scheduled model, or its stage, as Megatron-Core's schedules call it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from slapo.framework_dialect.batches import Batch
from slapo.framework_dialect.megatron.boundary_codec import BufferLayout, pack, unpack
from slapo.framework_dialect.megatron.load import megatron_core


class ModelChunk(nn.Module):
    """What a ``model_provider`` of Megatron-Core returns: the part of the model on this rank.

    Parameters
    ----------
    part
        The model, or a stage of it.
    index, n_stages
        Which stage it is.

    Attributes
    ----------
    arriving, leaving : BufferLayout or None
        What the boundaries before and after it carry.
    anchor : Tensor or None
        What the loss has to hang on; see :func:`.boundary_codec.unpack`.
    """

    # Megatron-Core asks for it. Other parameters than its embedding and output layer may be tied
    # too, so ties are summed elsewhere.
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
        """Take what the schedule received; None in the first stage."""
        self._received = received[0] if isinstance(received, list) else received

    def forward(self, batch: Batch) -> Any:
        """The model's output in the last stage; before it, a buffer to send.

        Parameters
        ----------
        batch
            The micro-batch; in the first stage of several, its arguments are the stage's.
        """
        output = self._run(batch)
        if self.post_process:
            return output
        assert self.leaving is not None, "told before the schedule ran"
        return pack(self.leaving, output, self.anchor)

    def _run(self, batch: Batch) -> Any:
        if self.pre_process:
            return self.part(*batch.args, **batch.kwargs)
        assert self.arriving is not None, "told before the schedule ran"
        assert self._received is not None, "the schedule receives first"
        tensors, self.anchor = unpack(self.arriving, self._received)
        self._received = None
        return self.part(*tensors)
