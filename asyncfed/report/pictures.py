"""Draws a result: how it learned, what the network did, and how the clients differ.

Every picture is drawn from the run directory alone, so a run that was interrupted or is from last year can be
drawn as well.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from asyncfed.report.clients import draw_clients
from asyncfed.report.learning import draw_learning
from asyncfed.report.network import draw_network

if TYPE_CHECKING:
    from asyncfed.result import Result


def pictures(result: Result, directory: str | os.PathLike[str] | None = None) -> list[Path]:
    """Draw `learning.png`, `network.png` and `clients.png`, by default beside the run; returns their paths.

    A picture of which nothing was recorded (a run stopped before its end has no final clients) is left out.
    """
    folder = result.path / "pictures" if directory is None else Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    title = title_of(result)
    drawings = {"learning.png": draw_learning, "network.png": draw_network, "clients.png": draw_clients}
    drawn = (draw(result, title, folder / name) for name, draw in drawings.items())
    return [path for path in drawn if path is not None]


def title_of(result: Result) -> str:
    """What was run, in a line."""
    manifest = result.manifest
    ending = "" if result.complete else f" ({result.status})"
    return f"{manifest['scenario']}, {manifest['clients']} clients, seed {manifest['seed']}{ending}"
