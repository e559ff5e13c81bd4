"""Signals that ask a loop to stop."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Seconds within which further signals count as the same request: a launcher forwards signals that
#: a terminal has already sent to its ranks.
_SAME_REQUEST = 5.0


class NotedSignals:
    """Context that records Ctrl-C and SIGTERM; a later signal acts as it did before."""

    def __init__(self) -> None:
        self.number = 0  #: number of the signal; 0 if there was none
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> NotedSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._note) for each in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, frame: Any) -> None:
        if not self.number:
            self.number, self._at = number, time.monotonic()
        elif time.monotonic() - self._at > _SAME_REQUEST:
            self.__exit__()
            signal.raise_signal(number)
