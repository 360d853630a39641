"""The explorer on the command line: served until it is interrupted."""

from __future__ import annotations

import contextlib
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from asyncfed.cli.tables import stdout
from asyncfed.explorer import ExplorerServer, opened


def serve(paths: Sequence[Path], port: int, *, browser: bool) -> None:
    """Print where the explorer is, open it where there is a display, and answer until Ctrl-C."""
    server = ExplorerServer(opened(paths), port)
    console = stdout()
    console.print(f"exploring {', '.join(run.name for run in server.runs)}; Ctrl-C ends it", soft_wrap=True)
    console.print(server.url, soft_wrap=True)
    console.file.flush()
    if browser and _display():
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(server.url)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


def _display() -> bool:
    """Whether a browser would have a window: without one, some take over the terminal."""
    shown = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in shown)
