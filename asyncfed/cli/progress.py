"""Shows how far a run or study is: a bar on a terminal, a plain line every tenth of the way elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from asyncfed.cli.printable import printable
from asyncfed.description import duration

if TYPE_CHECKING:
    from rich.console import Console

    from asyncfed.runner import Progress
    from asyncfed.study import StudyProgress

BETWEEN_UPDATES = 0.1  # seconds
LINES = 10


class Watcher(Protocol):
    """What `run` calls after every wave; open while the run goes."""

    def __call__(self, progress: Progress) -> None: ...

    def __enter__(self) -> Watcher: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def watcher(console: Console) -> Watcher:
    return Bar(console) if console.is_terminal else Lines()


class Bar:
    """One line that is drawn again at most ten times a second."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.fields[phase]}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[text]}", markup=False),
        )
        self._bar = RichProgress(*columns, console=console, transient=True, refresh_per_second=10)
        self._task = self._bar.add_task("", total=None, phase="starting", text="")
        self._next = 0.0
        self._note = ""

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now < self._next and progress.fraction < 1:
            return
        self._next = now + BETWEEN_UPDATES
        if progress.note and progress.note != self._note:
            self._note = progress.note
            self._bar.console.print(progress.note, markup=False, highlight=False)
        self._bar.update(
            self._task,
            completed=progress.fraction,
            total=1.0,
            phase=printable(progress.phase),
            text=_words(progress),
        )

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class Lines:
    """About ten plain lines on stderr in a whole run."""

    def __init__(self) -> None:
        self._lines = 0
        self._note = ""

    def __call__(self, progress: Progress) -> None:
        if progress.note and progress.note != self._note:
            self._note = progress.note
            self._print(progress.note)
        passed = int(LINES * progress.fraction)
        if passed > self._lines:
            self._lines = passed
            self._print(f"{progress.phase}  {_words(progress)}")

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def _print(self, text: str) -> None:
        try:
            print(printable(text), file=sys.stderr, flush=True)
        except OSError:
            return  # nobody listens; the run goes on


class StudyWatcher:
    """Says which part of a study is running, and shows each as a run is shown."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._run = contextlib.ExitStack()
        self._watch: Watcher | None = None

    def __call__(self, progress: StudyProgress) -> None:
        if progress.run is not None:
            if self._watch is not None:
                self._watch(progress.run)
            return
        self._run.close()
        place = f"part {progress.number} of {progress.total}: {progress.part}"
        match progress.status:
            case "checking":
                if self._console.is_terminal:
                    self._run.enter_context(self._console.status(f"checking {place}"))
            case "running":
                self._say(place)
                self._watch = self._run.enter_context(watcher(self._console))
            case "kept":
                self._say(f"{place}: {'diverged' if progress.error else 'complete'} already")
            case "failed":
                self._say(f"{place}: failed: {progress.error}")

    def __enter__(self) -> StudyWatcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.close()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody listens; the study goes on
            self._console.print(text, soft_wrap=True)


def _words(progress: Progress) -> str:
    done, planned = progress.steps_done / progress.clients, progress.steps_planned // progress.clients
    if progress.horizon is None:
        words = [f"step {done:.0f}/{planned}"]
    else:
        words = [f"time {progress.virtual_time:.0f}/{progress.horizon:.0f}", f"step {done:.0f}"]
    if progress.loss is not None:
        words.append(f"loss {progress.loss:.4g}")
    if progress.elapsed > 0:
        words.append(f"{progress.totals.sent / progress.elapsed:,.0f} messages/s")
    if progress.fraction > 0:
        left = progress.elapsed * (1 - progress.fraction) / progress.fraction
        words.append(f"{duration(left)} left")
    return "  ".join(words)
