"""Patterns, and the search for them in graphs."""
