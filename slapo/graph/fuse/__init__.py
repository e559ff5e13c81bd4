"""Fusion of matched operations into one compiled module."""
