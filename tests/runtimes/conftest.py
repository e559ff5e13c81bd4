"""Fixtures of the tests of runtimes."""

import pytest

from tests.runtimes.ranks import RUNTIMES


@pytest.fixture(params=sorted(RUNTIMES))
def target(request: pytest.FixtureRequest) -> str:
    """Every runtime whose package is there."""
    name: str = request.param
    pytest.importorskip(RUNTIMES[name])
    return name
