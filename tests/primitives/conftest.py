"""Fixtures of the tests of primitives."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def pair() -> Iterator[None]:
    """This process is rank 1 of a group of two whose collectives do nothing."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()
