"""Settings and fixtures of the whole test suite."""

import os
import random
from collections.abc import Callable
from typing import Any

# Before torch is imported, and inherited by every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# What a test compares with is on the CPU; those marked "gpu" are run with the devices named.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from multiprocessing import forkserver

import pytest
import torch
import torch.distributed as dist

from tests.distributed import context
from tests.wide import is_wide


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files again instead of comparing with them",
    )


class _NoProcessGroup:
    """Examples in docstrings leave the group of one process that ``init_mesh`` has started.

    A plugin of its own, as hooks and fixtures of this file do not reach the examples of ``slapo/``.
    """

    def pytest_runtest_setup(self) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_NoProcessGroup())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.accelerator.is_available():
        pytest.skip("needs an accelerator")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_wide(item.nodeid):
            item.add_marker(pytest.mark.wide)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server that ranks are forked from with all that they need, whoever forks first."""
    if "PYTEST_XDIST_WORKER" in os.environ and not session.config.option.collectonly:
        context()
        forkserver.ensure_running()


def pytest_collectstart() -> None:
    """Same numbers in every run for what modules draw when they are imported."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Same numbers in every run, whichever tests ran before."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether this run writes golden files instead of comparing with them."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A primitive that fails after what it is told to do."""
    import slapo
    from slapo.primitives import base

    class Fails(slapo.Primitive):
        @staticmethod
        def name() -> str:
            return "fails"

        @staticmethod
        def apply(sch: Any, act: Callable[[Any], None]) -> None:
            act(sch)
            raise ValueError("no")

    monkeypatch.setitem(base._REGISTRY, "fails", Fails)
