"""Asked to stop: a run ends where it can be gone on with.

The first Ctrl-C (or SIGTERM, SIGHUP) lets the loop come to a place where the run can be put down; the second
stops at once. Outside of the loop, and in threads other than the main one, signals do what they always do.
Where Ray was started by this process, it has a handler of its own for SIGTERM, which ends its processes and
then this one: while a run goes, ours stands in its place.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from asyncfed.errors import RunStopped

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_PATIENCE = 5.0  # seconds to wait for a place to rest


class Stopping:
    """Whether somebody has asked the run to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.gentle = False  # whether the loop is at work, and will look
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def take_over(self) -> None:
        """Handle the signals that nobody handles, and those that Ray does."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.default_int_handler) or _of_ray(handler):
                self._before[number] = signal.signal(number, self.ask)

    def give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ask(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals."""
        if self.signal is not None or not self.gentle:
            raise RunStopped(number)
        self.signal, self._since = number, time.monotonic()
        if sys.stderr is not None and sys.stderr.isatty():
            print("\nstopping after this step; once more stops at once", file=sys.stderr, flush=True)

    @property
    def impatient(self) -> bool:
        """Whether it has been asked for so long ago that no better place is waited for."""
        return self.signal is not None and time.monotonic() - self._since > _PATIENCE


@contextmanager
def stopping() -> Iterator[Stopping]:
    """While it lasts, signals that nobody else handles ask the run to stop."""
    asked = Stopping()
    asked.take_over()
    try:
        yield asked
    finally:
        asked.give_back()


def _of_ray(handler: Any) -> bool:
    return str(getattr(handler, "__module__", "")).startswith("ray.")
