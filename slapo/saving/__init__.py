"""Training checkpoints in Slapo's own format, resumed at any layout and on any engine."""
