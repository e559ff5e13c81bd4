"""Model creation without memory; see :mod:`slapo.weights.meta`."""

from slapo.weights.meta import init_empty_weights

__all__ = ["init_empty_weights"]
