"""Comparisons on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncfed.cli.tables import print_columns, print_pairs, stdout, write_csv
from asyncfed.comparison import Comparison, compare
from asyncfed.errors import ScenarioError
from asyncfed.study.summary import text_columns

if TYPE_CHECKING:
    from rich.console import Console

_FEW = 4  # rows that stand side by side


def print_comparison(
    paths: Sequence[Path],
    metrics: Sequence[str | None],
    at: Sequence[str],
    *,
    sort: bool,
    csv: Path | None,
    picture: Path | None,
) -> None:
    """Say what differs, and what each metric came to."""
    found = compare(*paths, at=_points(at))
    tables = {found.checked_metric(metric): found.table(metric, sort=sort) for metric in metrics}
    if csv is not None:
        write_csv(found.values, csv)
    drawn = None if picture is None else found.picture(picture, metrics[0])
    console = stdout()
    _print_differences(console, found)
    for metric, table in tables.items():
        console.print(metric.replace("_", " "), style="bold")
        print_columns(console, text_columns(table))
    for note in found.notes:
        console.print(note, soft_wrap=True)
    files = {"table": csv, "picture": drawn}
    print_pairs(console, {what: str(path) for what, path in files.items() if path is not None})


def _print_differences(console: Console, found: Comparison) -> None:
    frame = found.differences
    if frame.empty:
        if len(found.rows) > 1:
            console.print("no setting differs: these are the same runs", soft_wrap=True)
        return
    console.print("what differs", style="bold")
    if len(found.rows) > _FEW:
        frame = frame.set_index("setting").T.rename_axis("run").reset_index()
    print_columns(console, text_columns(frame))


def _points(texts: Sequence[str]) -> dict[str, list[float]]:
    points: dict[str, list[float]] = {}
    for text in texts:
        axis, equals, number = text.partition("=")
        try:
            points.setdefault(axis.strip(), []).append(float(number))
        except ValueError:
            equals = ""
        if not equals:
            raise ScenarioError(f"--at {text!r} must look like step=100 or bytes=1e6")
    return points
