"""What a study says: tables, findings and pictures, and how they are written down."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from asyncfed.checks import checked, shown
from asyncfed.errors import ScenarioError
from asyncfed.markup import text_table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Picture: TypeAlias = "Callable[[Path], object] | Figure"

_PUNCTUATION = "-_.,+=&%@"
_NUMBER = re.compile(r"[-+−]?[\d.][\d.,e+−±%() -]*|[–—-]?")  # also "0.93 ± 0.02", "12 (3)", "–" and nothing
_MOST_DECIMALS = 5


@checked
@dataclass(frozen=True, eq=False)
class SummaryTable:
    """A table with its title and what stands beneath it.

    An index that says something (it has a name, or holds no plain numbers) becomes the first columns of
    `frame`.
    """

    title: str
    frame: pd.DataFrame
    notes: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "frame", _flat(self.frame))
        object.__setattr__(self, "notes", (self.notes,) if isinstance(self.notes, str) else tuple(self.notes))

    @property
    def file(self) -> str:
        """What the table's CSV file is called."""
        return "-".join(re.findall(r"\w+", self.title.lower())) + ".csv"


@checked
@dataclass(frozen=True, eq=False)
class Summary:
    """What a study says.

    Parameters
    ----------
    tables
        In the order in which they are to be shown.
    findings
        Sentences, and whether each holds: `("PDBO-DA beats SGP on every network", True)`; None where there is
        no yes or no.
    pictures
        Name → a function that draws onto the path it is given (with `asyncfed.report.draw_curves`, say), or a
        matplotlib Figure.
    """

    tables: Sequence[SummaryTable] = ()
    findings: Sequence[tuple[str, bool | None]] = ()
    pictures: Mapping[str, Picture] = field(default_factory=dict)

    def __post_init__(self) -> None:
        files = [table.file for table in self.tables]
        for table in self.tables:
            if table.file == ".csv" or files.count(table.file) > 1:
                raise ScenarioError(
                    f"the table {table.title!r} would be written to {table.file}; "
                    "give every table a title of its own, with letters in it"
                )
        for name, picture in self.pictures.items():
            check_name("picture", name)
            if not callable(picture) and not hasattr(picture, "savefig"):
                raise ScenarioError(
                    f"the picture {name!r} is {shown(picture)}; it must be a function that draws onto a "
                    "path, or a matplotlib Figure"
                )


def check_name(what: str, name: object, slashes: bool = False) -> None:
    """Refuse what would not do as a file's name everywhere."""
    steps = name.split("/") if isinstance(name, str) and slashes else [name]
    for step in steps:
        plain = isinstance(step, str) and all(c.isalnum() or c in _PUNCTUATION for c in step)
        if not plain or not step or str(step).startswith("."):
            raise ScenarioError(
                f"a {what} cannot be called {name!r}; write letters, digits and {_PUNCTUATION}, no dot first"
                + (", with / between the steps of a path" if slashes else "")
            )


def write_summary(summary: Summary, heading: str, failed: Mapping[str, str], path: Path) -> None:
    """`summary.txt`, and each table as CSV in `tables/`."""
    (path / "tables").mkdir(exist_ok=True)
    for table in summary.tables:
        with whole(path / "tables" / table.file) as file:
            table.frame.to_csv(file, index=False)
    with whole(path / "summary.txt") as file:
        file.write_text(as_text(summary, heading, failed), encoding="utf-8")


def draw(pictures: Mapping[str, Picture], folder: Path) -> None:
    """Every picture as `<name>.png`."""
    folder.mkdir(exist_ok=True)
    for name, picture in pictures.items():
        with whole(folder / f"{name}.png") as file:
            (picture if callable(picture) else picture.savefig)(file)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to; the file appears under its own name when all is written."""
    part = path.with_name(f".{path.name}")
    yield part
    os.replace(part, path)


def to_data(summary: Summary) -> dict[str, Any]:
    """Tables and findings as plain data."""
    return {
        "tables": [
            {
                "title": table.title,
                "columns": list(table.frame.columns),
                "rows": [list(row) for row in zip(*_values(table.frame), strict=True)],
                "notes": list(table.notes),
            }
            for table in summary.tables
        ],
        "findings": [[text, None if holds is None else bool(holds)] for text, holds in summary.findings],
    }


def from_data(data: Mapping[str, Any]) -> Summary:
    """What `to_data` wrote down."""
    import pandas as pd

    return Summary(
        tables=[
            SummaryTable(each["title"], pd.DataFrame(each["rows"], columns=each["columns"]), each["notes"])
            for each in data["tables"]
        ],
        findings=[(text, holds) for text, holds in data["findings"]],
    )


def as_text(summary: Summary, heading: str, failed: Mapping[str, str]) -> str:
    """A summary as plain text, with the parts that failed."""
    blocks = [heading]
    for table in summary.tables:
        columns = []
        for name, texts, right in text_columns(table.frame):
            width = max(map(len, (name, *texts)))
            columns.append([text.rjust(width) if right else text.ljust(width) for text in (name, *texts)])
        rows = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
        blocks.append("\n".join([table.title, "", *rows, *([""] if table.notes else []), *table.notes]))
    blocks.append("\n".join(f"{answer(holds)}  {text}" for text, holds in summary.findings))
    blocks.append("\n".join(f"failed  {part}: {error}" for part, error in failed.items()))
    return "\n\n".join(filter(None, blocks)) + "\n"


def answer(holds: bool | None) -> str:
    """How a finding is marked, three characters wide."""
    return "  –" if holds is None else "yes" if holds else " no"


def text_columns(frame: pd.DataFrame) -> list[tuple[str, list[str], bool]]:
    """Each column as name, cells, and whether it stands to the right; its numbers share their decimals."""
    columns = []
    for name, values in zip(frame.columns, _values(frame), strict=True):
        form = _number_format([value for value in values if isinstance(value, float)])
        texts = [_cell(value, form) for value in values]
        columns.append((str(name), texts, all(_NUMBER.fullmatch(text) for text in texts)))
    return columns


def table_markup(one: SummaryTable, most: int | None = None) -> str:
    """A table as HTML with its notes: all rows, or the first so many."""
    left = 0 if most is None else max(len(one.frame) - most, 0)
    notes = [*([f"{left:,} more rows"] if left else []), *one.notes]
    rows = one.frame if most is None else one.frame.head(most)
    return text_table(text_columns(rows), one.title) + "".join(f"<p>{escape(words)}</p>" for words in notes)


def _number_format(values: Sequence[float]) -> str:
    """One in which the largest shows four digits and the smallest two, where that takes few decimals."""
    if all(value.is_integer() for value in values if math.isfinite(value)):
        return ",.0f"
    sizes = [math.floor(math.log10(abs(value))) for value in values if value and math.isfinite(value)]
    decimals = max(0, 3 - max(sizes), 1 - min(sizes))
    return ".2e" if decimals > _MOST_DECIMALS or max(sizes) > 7 else f",.{decimals}f"


def _cell(value: object, form: str) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return "" if math.isnan(value) else format(value, form)
    return str(value)


def _values(frame: pd.DataFrame) -> list[list[Any]]:
    """The cells, column by column, as numbers, text or None."""
    import pandas as pd

    def plain(value: Any) -> Any:
        value = value.item() if hasattr(value, "item") else value
        known = value is None or isinstance(value, (bool, int, float, str))
        return value if known else None if value is pd.NA else str(value)

    return [[plain(value) for value in frame.iloc[:, place]] for place in range(frame.shape[1])]


def _flat(frame: pd.DataFrame) -> pd.DataFrame:
    """With what the index says in columns, and one line of column names."""
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise ScenarioError(f"a table of a summary is {shown(frame)}; it must be a pandas DataFrame")
    index = frame.index
    if index.nlevels == 1 and index.name is None:
        counted = pd.api.types.is_integer_dtype(index.dtype)
        flat = frame.reset_index(drop=True) if counted else frame.rename_axis("").reset_index()
    else:
        flat = frame.reset_index()
    return flat.set_axis([_heading(name) for name in flat.columns], axis=1)


def _heading(name: object) -> str:
    steps = name if isinstance(name, tuple) else (name,)
    return " ".join(str(step) for step in steps if str(step))
