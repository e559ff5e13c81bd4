"""Weights: created on meta, materialised, tied, tagged, and carried through replacements."""
