"""Logging that does not repeat messages on every rank."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    _LoggerAdapter = logging.LoggerAdapter[logging.Logger]
    _StreamHandler = logging.StreamHandler[Any]
else:
    # Python 3.10 has no type parameters for these at run time.
    _LoggerAdapter = logging.LoggerAdapter
    _StreamHandler = logging.StreamHandler

_FORMAT = "[%(asctime)s][%(levelname)s][%(name)s] %(message)s"


class RankLogger(_LoggerAdapter):
    """A logger whose methods take ``ranks``: the global ranks that log, rank 0 by default.

    ``ranks`` is a rank, a collection of ranks, or None for all. A process without
    ``torch.distributed`` is rank 0.

    Examples
    --------
    >>> logger = get_logger("slapo")
    >>> logger.info("only on rank 1", ranks=1)
    >>> logger.debug("on ranks %d and %d", 0, 3, ranks=[0, 3])
    """

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Move ``ranks`` into the record, where the logger's filter reads it."""
        if not _has_output(self.logger):  # at the first message, not at import
            is_ours = self.logger.name.startswith("slapo.")
            (logging.getLogger("slapo") if is_ours else self.logger).addHandler(_FallbackHandler())
        ranks = kwargs.pop("ranks", 0)
        return msg, {**kwargs, "extra": {**(kwargs.get("extra") or {}), "ranks": ranks}}


def get_logger(name: str = "slapo", level: int | str | None = None) -> RankLogger:
    """Return the logger of that name.

    Messages go to standard error, unless the application has configured logging; then its
    handlers receive them.

    Parameters
    ----------
    name : str
        ``"slapo"``, or ``"slapo.<part>"`` for a part of it, which inherits level and output.
    level : int or str, optional
        Messages below this level are dropped. None keeps the present level, initially INFO.

    Returns
    -------
    RankLogger

    Examples
    --------
    >>> get_logger("slapo", level="WARNING").info("too quiet to be heard")
    >>> get_logger("slapo", level="INFO").isEnabledFor(logging.INFO)
    True
    """
    logger = logging.getLogger(name)
    if not _has_level(logger):
        logger.setLevel(logging.INFO)
    if level is not None:
        logger.setLevel(level)
    # Added to each logger, since filters are not inherited by children. Adding it again has no
    # effect.
    logger.addFilter(_on_chosen_rank)
    return RankLogger(logger, {})


@contextmanager
def only_from(level: int, name: str = "slapo") -> Iterator[None]:
    """Raise the level of a logger inside the block, for example while a model is only tried."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(max(before, level))
    try:
        yield
    finally:
        logger.setLevel(before)


class _FallbackHandler(_StreamHandler):
    """Writes to standard error as long as the root logger has no handlers."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        # A root logger with handlers also gets the record, which would then be shown twice.
        if logging.getLogger().hasHandlers():
            return
        # Looked up late: the stream may have been redirected since.
        self.setStream(sys.stderr)
        super().emit(record)


def _has_output(logger: logging.Logger | None) -> bool:
    """Return whether this logger, or one that its records propagate to, has our handler."""
    while logger is not None:
        if any(isinstance(handler, _FallbackHandler) for handler in logger.handlers):
            return True
        logger = logger.parent
    return False


def _has_level(logger: logging.Logger) -> bool:
    """Return whether this logger, or an ancestor other than the root, has a level of its own."""
    while logger.parent is not None:
        if logger.level != logging.NOTSET:
            return True
        logger = logger.parent
    return False


def _on_chosen_rank(record: logging.LogRecord) -> bool:
    """Return whether this process is among the ranks of the record."""
    ranks: int | Collection[int] | None = getattr(record, "ranks", None)
    if ranks is None:
        return True
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return rank == ranks if isinstance(ranks, int) else rank in ranks
