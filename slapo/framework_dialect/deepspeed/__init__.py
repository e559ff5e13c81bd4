"""The runtime ``"deepspeed"``: ``deepspeed.initialize`` and its ``PipelineModule``.

Nothing here imports DeepSpeed before it is used: that takes seconds, and it may be absent.
"""

from typing import Any

from slapo.late import attribute


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, {})
