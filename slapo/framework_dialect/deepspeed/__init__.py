"""The runtime ``"deepspeed"``: ``deepspeed.initialize`` and its ``PipelineModule``.

DeepSpeed is imported on first use only: the import takes seconds, and the package is optional.
"""

from typing import Any

from slapo.late import attribute


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, {})
