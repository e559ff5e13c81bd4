"""Marks for tests of what some releases of torch, Transformers and Triton cannot do."""

from importlib.metadata import PackageNotFoundError, version

import pytest
import torch


def release(package: str) -> tuple[int, ...]:
    """Such as ``(2, 13)``; empty where the package is not installed."""
    try:
        return tuple(int(part) for part in version(package).split(".")[:2])
    except PackageNotFoundError:
        return ()


TORCH = release("torch")

guards_classes = pytest.mark.skipif(
    TORCH < (2, 12), reason="dynamo of this release does not look at attributes of classes again"
)
asks_no_device = pytest.mark.skipif(
    torch.version.cuda is not None, reason="dynamo of a CUDA build asks for the current stream"
)
interprets_loops = pytest.mark.skipif(
    () < release("triton") < (3, 7), reason="this interpreter takes no bounds of loops from memory"
)
t5_takes_attention = pytest.mark.skipif(
    release("transformers") < (5, 20), reason="T5 of this release computes attention by itself"
)
