"""Proof that a schedule does not change what a model computes."""

Verify = None
