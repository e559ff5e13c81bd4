"""Matched operations give way to calls of other modules and functions."""
