"""Shows how far a study is: which part is running, and how far that is."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from asyncfed.watching import NotebookBar, Watcher, in_notebook, watcher

if TYPE_CHECKING:
    from rich.console import Console

    from asyncfed.study.running import StudyProgress


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
                if not progress.alone:
                    return
                shown = NotebookBar() if in_notebook() else watcher(self._console)
                self._watch = self._run.enter_context(shown)
            case "kept":
                self._say(f"{place}: {'diverged' if progress.error else 'complete'} already")
            case "complete":
                if not progress.alone:
                    self._say(f"{place}: complete")
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
