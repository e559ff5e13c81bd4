"""Weights: created on meta, materialized, tied, tagged, and carried through replacements."""
