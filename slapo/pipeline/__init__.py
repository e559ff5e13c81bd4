"""Pipeline stages of a traced model."""

from slapo.pipeline.partition import generate_pipeline_partition
from slapo.pipeline.pipelined import PipelinedModule
from slapo.pipeline.stage import Stage
from slapo.pipeline.ties import StageTie, analyze_tie_weights

__all__ = [
    "PipelinedModule",
    "Stage",
    "StageTie",
    "analyze_tie_weights",
    "generate_pipeline_partition",
]
