"""The explorer on the command line: served until it is interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from asyncfed.cli.browser import show
from asyncfed.cli.tables import stdout
from asyncfed.explorer import ExplorerServer, opened


def serve(paths: Sequence[Path], port: int, *, browser: bool) -> None:
    """Print where the explorer is, open it where there is a display, and answer until Ctrl-C."""
    server = ExplorerServer(opened(paths), port)
    console = stdout()
    console.print(f"exploring {', '.join(run.name for run in server.runs)}; Ctrl-C ends it", soft_wrap=True)
    console.print(server.url, soft_wrap=True)
    console.file.flush()
    if browser:
        show(server.url)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
