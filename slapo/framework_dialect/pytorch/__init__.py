"""Target ``"torch"``: PyTorch's own pipelines, DDP and FSDP2."""
