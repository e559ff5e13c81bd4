"""The logger: which ranks log, where to, and never twice."""

import logging
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from slapo.logger import get_logger
from tests.runtimes.ranks import on_ranks


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A logger that no other test has touched."""
    name = f"test_logger.{request.node.name}"
    yield name
    logging.getLogger(name).handlers.clear()


def test_a_message_appears_once(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # An application that has not configured logging.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for _ in range(3):
        get_logger(name).info("hello %d", 1)
    get_logger(f"{name}.part").warning("from a part")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("] ")[2] for line in lines] == ["hello 1"] * 3 + ["from a part"]


def test_an_application_that_logs_gets_records_that_name_the_caller(
    name: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    get_logger(name).info("one way")
    get_logger(name).log(logging.INFO, "the other way")
    assert caplog.messages == ["one way", "the other way"]
    assert {record.filename for record in caplog.records} == {"test_logger.py"}
    assert caplog.records[0].funcName.startswith("test_an_application_that_logs")
    assert capsys.readouterr().err == ""


def test_the_level_stays_until_it_is_given(name: str) -> None:
    assert get_logger(name).getEffectiveLevel() == logging.INFO
    get_logger(name, level="DEBUG")
    assert get_logger(name).getEffectiveLevel() == logging.DEBUG
    assert get_logger(name, level=logging.ERROR).getEffectiveLevel() == logging.ERROR


@pytest.mark.parametrize(
    ("ranks", "logged"), [(0, True), (1, False), (None, True), ([0, 2], True), ({1, 2}, False)]
)
def test_a_single_process_is_rank_0(
    name: str, caplog: pytest.LogCaptureFixture, ranks: object, logged: bool
) -> None:
    get_logger(name).info("hello", ranks=ranks)
    assert bool(caplog.records) == logged


@on_ranks(3)
def test_only_the_given_ranks_log() -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    logger = get_logger("slapo")
    logger.info("first")
    logger.info("last", ranks=2)
    logger.warning("some", ranks=[0, 2])
    logger.error("all", ranks=None)
    expected = [["first", "some", "all"], ["all"], ["last", "some", "all"]]
    assert messages == expected[dist.get_rank()]
