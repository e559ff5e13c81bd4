"""Graphs of modules: tracers, patterns, matching, rewriting and fusion."""
