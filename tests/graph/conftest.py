"""Fixtures of the tests of graphs."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from slapo.verify.placement.offline import fake_world


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A group of two processes, of which this one runs alone."""
    with fake_world(2, 0):
        yield
