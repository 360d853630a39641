"""The Ray backend against the local one, in steady state: packed into two actors, and one client in each of a
hundred.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time

import psutil

from asyncfed import Progress, Scenario, run
from benchmarks.problems import reference
from benchmarks.table import Row


def packed() -> list[Row]:
    local, _, _ = _steady(reference(steps=40), skip=8)
    ray, _, _ = _steady(reference(steps=40), skip=8, backend="ray", clients_per_actor=50)
    again, _, _ = _steady(reference(steps=40), skip=8)
    local = (local + again) / 2
    return [
        Row("MLP, n=100: local", f"{local * 1e3:.0f} ms/step"),
        Row("MLP, n=100: Ray, 2 actors", f"{ray * 1e3:.0f} ms/step"),
        Row("Ray packed in 2 / local", f"{ray / local:.2f}", "≤ 1.4", ray / local <= 1.4),
    ]


def many_actors() -> list[Row]:
    local, _, _ = _steady(reference(steps=20), skip=5)
    ray, startup, memory = _steady(reference(steps=24), skip=8, backend="ray", clients_per_actor=1)
    return [
        Row("100 actors: first step after", f"{startup:.0f} s"),
        Row("100 actors: memory in all, at most", f"{memory:.1f} GiB", "≤ 20 GiB", memory <= 20),
        Row("100 actors: step", f"{ray * 1e3:.0f} ms"),
        Row("100 actors / local", f"{ray / local:.1f}", "≤ 15", ray / local <= 15),
    ]


def _steady(scenario: Scenario, *, skip: int, **options: object) -> tuple[float, float, float]:
    """(seconds per step once it is going, seconds until the first step, most memory used, in GiB)."""
    at: list[float] = []
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory, _Memory() as memory:

        def note(progress: Progress) -> None:
            at.append(time.perf_counter())

        run(scenario, out=directory, progress=note, **options)  # type: ignore[arg-type]
    # On Ray the driver is a few waves ahead of the actors, always the same few, so its pace is theirs.
    paces = [later - earlier for earlier, later in zip(at[skip:], at[skip + 1 :], strict=False)]
    return statistics.median(paces), at[0] - started, memory.most


class _Memory:
    """Watches how much of the machine's memory is in use beyond what was at the start."""

    def __enter__(self) -> _Memory:
        self._before = psutil.virtual_memory().available
        self._least = self._before
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.5):
            self._least = min(self._least, psutil.virtual_memory().available)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def most(self) -> float:
        return float(self._before - self._least) / 2**30
