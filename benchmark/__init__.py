"""How fast slapo schedules, finds, runs and imports. See ``python -m benchmark --help``."""
