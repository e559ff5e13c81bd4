"""Tensor parallelism: slices of parameters, layouts of activations, collectives."""
