"""From stages to a ``PipelineModule``. Imports DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from slapo.framework_dialect.deepspeed.groups import ranks_of_stages
from slapo.framework_dialect.deepspeed.package import quiet
from slapo.framework_dialect.deepspeed.pipe import LossFn, StagePipeline
from slapo.framework_dialect.deepspeed.wire import StageLayer
from slapo.framework_dialect.gradients import TiedGradients, new_tie_groups
from slapo.framework_dialect.runtime import Lowering


def make_pipeline(
    lowering: Lowering, topology: Any, loss_fn: LossFn, keeps_modes: bool = False
) -> StagePipeline:
    """This rank's stage as a ``PipelineModule``, tied parameters equal.

    Parameters
    ----------
    lowering
        With one stage of this rank.
    topology
        DeepSpeed's.
    loss_fn
        From the output of the last stage and the labels to the loss.
    keeps_modes
        Whether train and eval mode are the caller's business.
    """
    (stage,) = lowering.stages.values()
    ties = tied_parameters(lowering, topology)
    layer = StageLayer(stage, stage.index, lowering.n_stages)
    with quiet():
        pipeline = StagePipeline(layer, lowering.n_stages, topology, loss_fn, ties)
    pipeline.keeps_modes = keeps_modes
    tied = TiedGradients([[parameter] for parameter, _ in ties], [group for _, group in ties])
    tied.broadcast_values()
    return pipeline


def tied_parameters(
    lowering: Lowering, topology: Any
) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
    """This rank's parameters that other stages share, each with the ranks that hold it.

    A collective of the world.
    """
    columns = [ranks_of_stages(topology, tie.stages) for tie in lowering.ties]
    groups = iter(new_tie_groups([ranks for column in columns for ranks in column]))
    (stage,) = lowering.stages.values()
    found = []
    for tie, column in zip(lowering.ties, columns, strict=True):
        mine = [group for group in (next(groups) for _ in column) if group is not None]
        if stage.index in tie.stages:
            parameter = stage.get_parameter(dict(tie.members)[stage.index])
            found.append((parameter, mine[0]))
    return [(parameter, group) for parameter, group in found if parameter.requires_grad]
