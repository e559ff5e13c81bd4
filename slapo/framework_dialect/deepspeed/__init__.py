"""The runtime ``"deepspeed"``: ``deepspeed.initialize`` and its ``PipelineModule``.

Nothing here imports DeepSpeed before it is used: that takes seconds, and it may be absent.
"""
