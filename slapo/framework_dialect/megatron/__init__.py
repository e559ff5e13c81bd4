"""The target ``"megatron"``: Megatron-Core's process groups, schedules, DDP and optimizers."""
