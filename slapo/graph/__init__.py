"""Graphs of modules: tracing, patterns, matching, rewriting and fusion."""
