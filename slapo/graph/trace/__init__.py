"""Modules into graphs: symbolic tracing, capture of a run, and what a graph may be called with."""
