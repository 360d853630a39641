"""Pages in the user's browser, where there is a display."""

from __future__ import annotations

import contextlib
import os
import sys
import webbrowser
from typing import TYPE_CHECKING

from asyncfed.cli.tables import print_pairs, stdout

if TYPE_CHECKING:
    from asyncfed.result import Result
    from asyncfed.study import StudyResult


def show(address: str) -> None:
    """Open it, if a browser would have a window: without one, some take over the terminal."""
    shown = ("DISPLAY", "WAYLAND_DISPLAY")
    if sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in shown):
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(address)


def write_report(result: Result | StudyResult) -> None:
    """One HTML file, said where and shown."""
    path = result.report()
    print_pairs(stdout(), {"report": str(path)})
    show(path.resolve().as_uri())
