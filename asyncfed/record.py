"""What a run writes while it goes: metrics and trace, in step.

A row of metrics says how many messages there were so far, so it goes to disk after the trace of them, and
both about once in a second: a kill costs no more than what was done since (and the wave that was under way),
and what is left belongs together. Rows that wait are few, and their order is their order. A checkpoint goes
to disk after both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncfed.runtime.directory import RunDirectory
from asyncfed.runtime.lock import Lock
from asyncfed.trace import TraceWriter

EVERY = 1.0  # seconds


class Record:
    """The metrics of a run beside the trace that `writer` writes."""

    def __init__(self, directory: RunDirectory, writer: TraceWriter, lock: Lock) -> None:
        self._directory, self._writer, self._lock = directory, writer, lock
        self._rows: list[dict[str, Any]] = []
        self._due = time.monotonic()

    def metrics(self, row: dict[str, Any]) -> None:
        """Take the row of an evaluation."""
        self._rows.append(row)
        self._writer.flush()
        self.keep_up()

    def keep_up(self) -> None:
        """Put all on disk if it is time; to be called often."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + EVERY
        self._lock.touch()
        rows, self._rows = self._rows, []
        self._writer.save(partial(self._append, rows))

    def checkpoint(self, write: Callable[[], object]) -> None:
        """Put all on disk, and then a checkpoint, in the writing thread."""
        rows, self._rows = self._rows, []

        def then() -> None:
            self._append(rows)
            self._directory.sync("scenario.json", "initial.safetensors", "metrics.jsonl")
            self._writer.sync()
            write()

        self._writer.save(then)

    def close(self) -> None:
        """Put all on disk; nothing comes after."""
        self._writer.close()
        self._append(self._rows)

    def _append(self, rows: list[dict[str, Any]]) -> None:
        if rows:
            self._directory.append("metrics.jsonl", *rows)
