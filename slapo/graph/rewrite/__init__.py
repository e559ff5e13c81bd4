"""Replacement of matched operations by calls of other modules and functions."""
