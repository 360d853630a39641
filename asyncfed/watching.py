"""Shows how far a run is: a bar on a terminal or in a notebook, elsewhere a line every tenth of the way.

Without being asked, `run` shows it only where somebody looks: nothing appears in a batch job or a pipe.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from asyncfed.checks import Words
from asyncfed.printable import duration, printable

if TYPE_CHECKING:
    from rich.console import Console

    from asyncfed.execution import Progress

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
    """What shows a run on a console."""
    return Bar(console) if console.is_terminal else Lines()


@contextlib.contextmanager
def watching(
    progress: bool | Callable[[Any], None] | None,
    shown: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Iterator[Callable[[Any], None] | None]:
    """What a run is to tell: the `progress` of `run`, open while it goes. `shown` is what shows it, if not a
    bar of one run.
    """
    if not shows(progress):
        yield None if isinstance(progress, bool) else progress
        return
    with (shown or bar)() as opened:
        yield opened


def bar() -> Watcher:
    """What shows one run where we are."""
    return NotebookBar() if in_notebook() else watcher(errors_console())


def shows(progress: object) -> bool:
    """Whether we show it ourselves: where it is asked for, or somebody looks and nothing else was said."""
    if progress is None:
        return in_notebook() or bool(sys.stderr is not None and sys.stderr.isatty())
    return progress is True


Watched = Annotated[
    bool | Callable[[Any], None] | None,
    Words(
        "True to show it, False not to, None to show it where somebody looks, or a function that is called "
        "with it"
    ),
]


def in_notebook() -> bool:
    """Whether what is displayed goes to a notebook."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def errors_console() -> Console:
    """Plain text on stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, emoji=False, markup=False)


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


class NotebookBar:
    """A bar below the cell, drawn again at most ten times a second, which goes when the run ends well."""

    def __init__(self) -> None:
        self._next = 0.0
        self._display: Any = None

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now < self._next and progress.fraction < 1:
            return
        self._next = now + BETWEEN_UPDATES
        note = f"<br>{html.escape(progress.note)}" if progress.note else ""
        self._show(
            f"{html.escape(progress.phase)} <progress max='1' value='{progress.fraction:.4f}'></progress> "
            f"{html.escape(_words(progress))}{note}"
        )

    def __enter__(self) -> NotebookBar:
        self._show("starting <progress max='1'></progress>")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._show("")

    def _show(self, text: str) -> None:
        notebook: Any = importlib.import_module("IPython.display")
        if self._display is None:
            self._display = notebook.display(notebook.HTML(text), display_id=True)
        else:
            self._display.update(notebook.HTML(text))


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
