"""From stages to a ``PipelineModule``. Imports DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slapo.framework_dialect.deepspeed.package import quiet
from slapo.framework_dialect.deepspeed.pipe import LossFn, StagePipeline
from slapo.framework_dialect.deepspeed.wire import StageLayer
from slapo.framework_dialect.runtime import Lowering
from slapo.framework_dialect.ties import SharedParameter


def make_pipeline(
    lowering: Lowering,
    topology: Any,
    loss_fn: LossFn,
    shared: Sequence[SharedParameter],
    keeps_modes: bool = False,
) -> StagePipeline:
    """This rank's stage as a ``PipelineModule``.

    Parameters
    ----------
    lowering
        With one stage of this rank.
    topology
        DeepSpeed's.
    loss_fn
        From the output of the last stage and the labels to the loss.
    shared
        Parameters of this rank that other stages hold too.
    keeps_modes
        Whether train and eval mode are the caller's business.
    """
    (stage,) = lowering.stages.values()
    layer = StageLayer(stage, stage.index, lowering.n_stages)
    with quiet():
        pipeline = StagePipeline(layer, lowering.n_stages, topology, loss_fn, shared)
    pipeline.keeps_modes = keeps_modes
    return pipeline
