"""Fixtures of the tests of primitives."""

from collections.abc import Iterator

import pytest

from slapo.verify.placement.offline import fake_world


@pytest.fixture
def pair() -> Iterator[None]:
    """This process is rank 1 of a group of two whose collectives do nothing."""
    with fake_world(2, 1):
        yield
