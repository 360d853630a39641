"""`export`: one run in the format of another program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from asyncfed.checks import PathLike, checked
from asyncfed.disk import write_whole
from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.exporting.chrome import write_chrome
from asyncfed.exporting.graphs import write_gexf, write_graphml
from asyncfed.exporting.perfetto import write_perfetto
from asyncfed.exporting.tables import write_messages, write_parquet, write_steps
from asyncfed.result import Result, load


class Format(NamedTuple):
    """The files that an export is made of, by name, and what it is good for."""

    files: dict[str, Callable[[Result, Path], None]]
    words: str


FORMATS = {
    "perfetto": Format({"trace.pftrace": write_perfetto}, "a timeline for ui.perfetto.dev, with flows"),
    "chrome": Format({"trace.json": write_chrome}, "the same as JSON, for chrome://tracing and others"),
    "csv": Format({"messages.csv": write_messages, "steps.csv": write_steps}, "two tables, in a folder"),
    "graphml": Format({"network.graphml": write_graphml}, "the network, with what was measured"),
    "gexf": Format({"network.gexf": write_gexf}, "the same for Gephi"),
    "parquet": Format({"messages.parquet": write_parquet}, "all messages, in one file and in order"),
}


@checked
def export(run: Result | PathLike, to: str, out: PathLike | None = None) -> list[Path]:
    """Write a run in the format of another program; returns the files.

    Parameters
    ----------
    run
        A result, or the directory of a run. Of one that did not end, what was recorded is written.
    to
        "perfetto", "chrome", "csv", "graphml", "gexf" or "parquet".
    out
        The file (of "csv": the folder for two) to write; by default in `export/` inside of the run.
    """
    if to not in FORMATS:
        raise UnknownNameError("format", str(to), FORMATS)
    result = run if isinstance(run, Result) else load(run)
    files = FORMATS[to].files
    if out is not None and len(files) == 1:
        if Path(out).is_dir():
            raise ScenarioError(f"the output {out} is a directory; give a file for {to}")
        targets = [Path(out)]
    else:
        folder = result.path / "export" if out is None else Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        targets = [folder / name for name in files]
    for target, write in zip(targets, files.values(), strict=True):
        write_whole(target, partial(write, result))
    return targets
