"""Patterns, and where a graph computes what a pattern computes."""
