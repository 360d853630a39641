"""Parts of a study side by side, each in a process of its own.

A scenario is built here, when its turn comes, and sent through a pipe, by value where it is made of functions
that no other process could import. Processes are used again. They do not hear the terminal's Ctrl-C; when
this one stops, for whatever reason, they are asked to stop where their runs can be resumed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncfed.errors import RunError
from asyncfed.homes import OURS
from asyncfed.options import Options
from asyncfed.registry import KINDS, registered
from asyncfed.scenario import Scenario
from asyncfed.study.worker import read_frame, write_frame

_PATIENCE = 60.0  # seconds for runs to come to where they can be resumed


@dataclass(frozen=True)
class Job:
    """All that a process must know to run a part; `things` of one's own are registered there, too."""

    scenario: Scenario
    study: Path
    part: str
    options: Options
    threads: int
    things: Sequence[tuple[str, str, Any]]


class _Worker:
    """A process, and what it does."""

    def __init__(self, answers: queue.SimpleQueue[tuple[_Worker, Any]], threads: int) -> None:
        self.part: str | None = None
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from asyncfed.study.worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,
        )
        threading.Thread(target=self._hear, args=(answers,), daemon=True).start()

    def give(self, part: str, job: bytes) -> None:
        self.part = part
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone, and that will be told
            write_frame(self._process.stdin, job)

    def stop(self) -> None:
        self._process.terminate()

    def close(self) -> None:
        """Let it end by itself, having nothing to do, or end it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(0.0 if self.part is not None else 10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _hear(self, answers: queue.SimpleQueue[tuple[_Worker, Any]]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            while (frame := read_frame(stdout)) is not None:
                answers.put((self, pickle.loads(frame)))
        code = self._process.wait()
        answers.put((self, ("gone", code)))


def in_processes(
    parts: Sequence[str],
    scenario: Callable[[str], Scenario],
    study: Path,
    options: Options,
    workers: int,
) -> Generator[tuple[str, BaseException | None]]:
    """Run parts; yields each as it ends, with its error where it failed. Whoever stops early closes it."""
    import cloudpickle
    import torch

    threads = max(1, torch.get_num_threads() // workers)
    waiting = deque(parts)
    answers: queue.SimpleQueue[tuple[_Worker, Any]] = queue.SimpleQueue()
    crew: list[_Worker] = []

    def employ(worker: _Worker) -> None:
        if waiting:
            part = waiting.popleft()
            job = Job(scenario(part), study, part, options, threads, _own_things())
            worker.give(part, cloudpickle.dumps(job))

    try:
        for _ in range(min(workers, len(parts))):
            crew.append(_Worker(answers, threads))
            employ(crew[-1])
        while any(worker.part is not None for worker in crew):
            worker, (what, content) = answers.get()
            part = worker.part
            if what == "warning":
                warnings.warn(content, stacklevel=3)
            elif part is not None:
                worker.part = None
                if what == "gone":
                    content = RunError(f"its process ended with {content}; it may have run out of memory")
                    if waiting:
                        crew.append(worker := _Worker(answers, threads))
                employ(worker)
                yield part, content
    finally:
        _stop(crew, answers)


def _stop(crew: Sequence[_Worker], answers: queue.SimpleQueue[tuple[_Worker, Any]]) -> None:
    """End all processes, those at work when their runs can be resumed."""
    try:
        for worker in crew:
            if worker.part is not None:
                worker.stop()
        until = time.monotonic() + _PATIENCE
        while any(worker.part is not None for worker in crew) and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                worker, (what, _) = answers.get(timeout=1.0)
                if what != "warning":
                    worker.part = None
    finally:
        for worker in crew:
            worker.close()


def _own_things() -> list[tuple[str, str, Any]]:
    """What is registered and did not come along."""
    return [
        (kind, name, thing)
        for kind in KINDS
        for name, thing in registered(kind).items()
        if thing.__module__.partition(".")[0] not in OURS
    ]
