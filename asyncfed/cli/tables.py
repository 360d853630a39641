"""How tables are printed and written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncfed.errors import ScenarioError
from asyncfed.printable import printable

if TYPE_CHECKING:
    import pandas as pd

WIDE = 200  # where no terminal says how wide it is: do not squeeze a table into 80 columns
METRIC_ROWS = 8
_METRIC_NAMES = {
    "virtual_time": "virtual time",
    "train_loss": "train loss",
    "loss": "test loss",
    "accuracy_p10": "p10",
}


def stdout() -> Console:
    return _console(stderr=False)


def stderr() -> Console:
    return _console(stderr=True)


class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)  # of all that is printed, cells of tables too

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "nobody reads any more")  # rich would end the process with 1


def _console(stderr: bool) -> Console:
    console = _Console(stderr=stderr, highlight=False, emoji=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDE
    return console


def print_pairs(console: Console, pairs: Mapping[str, str]) -> None:
    """Two columns, for people; long lines are left to the terminal, so that commands can be copied."""
    width = max(map(len, pairs), default=0)
    for name, text in pairs.items():
        indented = text.replace("\n", "\n" + " " * (width + 2))  # so that no line looks like another pair
        console.print(f"{name.ljust(width)}  {indented}", soft_wrap=True)


def print_metrics(console: Console, metrics: pd.DataFrame) -> None:
    """Some evaluations of a run, the first and the last among them."""
    if metrics.empty:
        console.print("no evaluation was recorded")
        return
    frame = metrics.dropna(axis=1, how="all").drop(columns=["delivered", "lost"], errors="ignore")
    if "phase" in frame and frame["phase"].nunique() == 1:
        frame = frame.drop(columns="phase")
    if "virtual_time" in frame and (frame["virtual_time"] == frame["step"]).all():
        frame = frame.drop(columns="virtual_time")
    frame = frame.assign(MB=frame["bytes"] / 1e6).drop(columns="bytes")
    count = min(METRIC_ROWS, len(frame))
    rows = sorted({round(place * (len(frame) - 1) / max(1, count - 1)) for place in range(count)})
    _print(console, _table(frame.iloc[rows].rename(columns=_METRIC_NAMES)))
    if len(rows) < len(frame):
        console.print(f"{len(rows)} of {len(frame)} evaluations")


def print_frame(console: Console, frame: pd.DataFrame, total: int, what: str, ending: str = "") -> None:
    """Rows, how many more there are, and (`ending`) why there are not more of them."""
    if total == 0:
        console.print(f"no {what}: {'nothing was recorded' if ending else 'nothing was sent'}")
    else:
        _print(console, _table(frame))
        console.print(f"{len(frame):,} of {total:,} {what}" if len(frame) < total else f"{total:,} {what}")
    if ending:
        console.print(ending, soft_wrap=True)


def print_columns(console: Console, columns: Iterable[tuple[str, Sequence[str], bool]]) -> None:
    """Columns of text: each a name, its cells, and whether they stand to the right."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    cells = []
    for name, texts, right in columns:
        table.add_column(name, justify="right" if right else "left", overflow="fold")
        cells.append(texts)
    for row in zip(*cells, strict=True):
        table.add_row(*row)
    _print(console, table)


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """The file appears whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        frame.to_csv(part, index=False)
        os.replace(part, path)
    except OSError as error:
        raise ScenarioError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if part.exists():
            part.unlink()


def _table(frame: pd.DataFrame) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in frame.columns:
        textual = frame[name].dtype.kind not in "iufb"
        table.add_column(str(name).replace("_", " "), justify="left" if textual else "right", overflow="fold")
    columns = [[_cell(str(name), value) for value in frame[name]] for name in frame.columns]
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    return table


def _cell(name: str, value: Any) -> str:
    import pandas as pd

    if value is None or value is pd.NA or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, float):
        if name == "MB":
            return f"{value:,.1f}"
        if name.startswith("accuracy") or name in ("p10", "delivery_rate", "up_rate"):
            return f"{value:.3f}"
        if value.is_integer() and abs(value) < 1e9:
            return f"{value:,.0f}"
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"
    if isinstance(value, str):
        return value
    large = name.startswith("bytes") or name in ("messages", "attempts", "sent", "delivered")
    return f"{int(value):,}" if large else str(value)


def _print(console: Console, table: Table) -> None:
    """Without the blanks that pad a table's rows to its width."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    console.file.write("\n".join(lines) + "\n")
