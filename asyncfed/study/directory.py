"""A study on disk.

    study.json      which parts there are and how each stands, rewritten as the study goes
    <part>/         one ordinary run each
    summary.json    tables and findings, from the parts that are complete; summary.txt says the same to people
    tables/         every table as CSV
    pictures/       where asked for

study.json says how the study went, a part's own run.json how that part ended; where the two disagree (a kill
may come between them) run.json is right. A complete part is never removed, and used only where its scenario
is still the one it was run with.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from asyncfed.checks import PathLike, checked, shown
from asyncfed.errors import DivergenceError, RunExistsError, ScenarioError, TraceError, UnknownNameError
from asyncfed.markup import panel, text_table
from asyncfed.options import Options
from asyncfed.reading import read_object
from asyncfed.result import Result, load
from asyncfed.runtime.checkpoints import has_checkpoint
from asyncfed.runtime.directory import RunDirectory
from asyncfed.scenario import Scenario
from asyncfed.scenario_data import difference
from asyncfed.study.definition import Study
from asyncfed.study.summary import Summary, answer, check_name, from_data, table_markup

if TYPE_CHECKING:
    import pandas as pd

FORMAT, VERSION = "asyncfed-study", 1
_MOST_ROWS = 60  # of a table, shown in a notebook

State: TypeAlias = dict[str, str]
"""How a part stands: "status", and "error" and "kind" (of the error) where it failed."""

WAITING: State = {"status": "waiting"}
_FREE = {"address": None, "checkpoint_every": None, "max_recoveries": None}  # may be others when it goes on


class StudyResult:
    """What a study left behind: the results of its parts, and their summary.

    `parts` says how each part stands: `{"status": "complete"}`, or waiting, running, interrupted, or failed
    with an "error". `status` of the study is complete (every part is, or diverged), partial (some parts were
    not asked for), interrupted, failed, or running.
    """

    def __init__(self, path: Path, summary: Summary | None = None) -> None:
        self.path = path
        if summary is not None:
            self.summary = summary

    @property
    def manifest(self) -> dict[str, Any]:
        return _manifest(self.path)

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    @property
    def status(self) -> str:
        return str(self.manifest["status"])

    @property
    def complete(self) -> bool:
        return self.status == "complete"

    @property
    def parts(self) -> dict[str, State]:
        return dict(self.manifest["parts"])

    @cached_property
    def results(self) -> Mapping[str, Result]:
        """The complete parts by name, each opened when it is asked for."""
        return Results(self.path, [part for part, state in self.parts.items() if is_complete(state)])

    @cached_property
    def summary(self) -> Summary:
        """Tables and findings; empty where the study has not come so far. Pictures are files: `pictures`."""
        data = self._summary_data
        try:
            return from_data(data) if data else Summary()
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise TraceError(
                f"{self.path / 'summary.json'} is damaged ({type(error).__name__}: {error!s:.200}); "
                "run the study into the same directory again, no complete part is run twice"
            ) from error

    @property
    def summarised(self) -> list[str]:
        """The parts that the summary is of."""
        return self._listed("of")

    @property
    def pictures(self) -> list[Path]:
        """The pictures that were drawn."""
        return [self.path / "pictures" / name for name in self._listed("pictures")]

    def table(self, which: str | int = 0) -> pd.DataFrame:
        """A table of the summary, by its title or its place."""
        tables = self.summary.tables
        if isinstance(which, str):
            by_title = {table.title: table.frame for table in tables}
            if which not in by_title:
                raise UnknownNameError("table", which, by_title)
            return by_title[which]
        if not -len(tables) <= which < len(tables):
            raise ScenarioError(f"there is no table {which} in {self.path}; its summary has {len(tables)}")
        return tables[which].frame

    def report(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write one HTML file with tables, findings, pictures and the parts, by default `report.html` in its
        directory; returns its path.
        """
        from asyncfed.report.document import report

        return report(self.path, self.path / "report.html" if path is None else path)

    def __repr__(self) -> str:
        return f"<StudyResult {self.path} ({self.status})>"

    def _repr_html_(self) -> str:
        standing = Counter(state["status"] for state in self.parts.values())
        parts = ", ".join(f"{count} {status}" for status, count in standing.items())
        about = {"study": str(self.path), "status": self.status, "parts": parts}
        tables = "".join(table_markup(one, _MOST_ROWS) for one in self.summary.tables)
        found = self.summary.findings
        marks, words = [answer(holds).strip() for _, holds in found], [text for text, _ in found]
        findings = (
            text_table([("holds", marks, False), ("finding", words, False)], "Findings") if found else ""
        )
        return panel(self.name, about) + tables + findings

    @property
    def _summary_data(self) -> dict[str, Any]:
        return _read(self.path, "summary.json") if (self.path / "summary.json").exists() else {}

    def _listed(self, key: str) -> list[str]:
        names = self._summary_data.get(key, [])
        if not isinstance(names, list):
            raise TraceError(
                f"{self.path / 'summary.json'} is damaged: its {key!r} is {shown(names)}, no list"
            )
        for name in names:
            _check_name(self.path / "summary.json", name)
        return names


@checked
def load_study(path: PathLike) -> StudyResult:
    """Open a study again, finished or not."""
    folder = Path(path)
    if not os.path.exists(folder):
        raise TraceError(f"there is no study at {folder}; give the directory that a study printed at its end")
    manifest = _read(folder, "study.json")
    if manifest.get("format") != FORMAT:
        raise TraceError(f"{folder / 'study.json'} is not the study.json of an asyncfed study")
    if manifest.get("version") != VERSION:
        raise TraceError(
            f"{folder} was written in version {manifest.get('version')!s:.40} of the study format; "
            f"this asyncfed reads version {VERSION}"
        )
    _manifest(folder)
    return StudyResult(folder)


class Results(Mapping[str, Result]):
    """The results of some parts; none is opened before it is asked for."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._path, self._names = path, tuple(names)
        self._opened: dict[str, Result] = {}

    def __getitem__(self, name: str) -> Result:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._opened:
            self._opened[name] = load(self._path / name)
        return self._opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Ledger:
    """Keeps study.json while the study runs."""

    def __init__(self, directory: RunDirectory, study: Study, parts: dict[str, State]) -> None:
        self.parts = parts
        self._directory, self._study = directory, study
        self._write("running")

    def mark(self, part: str, status: str, error: BaseException | None = None) -> None:
        self.parts[part] = {"status": status, **_told(error)}
        self._write("running")

    def close(self, status: str, error: BaseException | None = None) -> None:
        for part, state in self.parts.items():
            if state["status"] == "running":  # stopped there, perhaps just after its end
                ended = run_status(self._directory.path / part) == "complete"
                self.parts[part] = {"status": "complete"} if ended else {"status": status, **_told(error)}
        self._write(status, error)

    def _write(self, status: str, error: BaseException | None = None) -> None:
        about = {"name": self._study.name, "note": self._study.note, "status": status, **_told(error)}
        self._directory.write(
            "study.json", {"format": FORMAT, "version": VERSION, **about, "parts": self.parts}
        )


def is_complete(state: State) -> bool:
    return state["status"] == "complete"


def is_done(state: State) -> bool:
    """Nothing new would come of running it again."""
    return is_complete(state) or state.get("kind") == DivergenceError.__name__


def recorded_parts(study: Study, path: Path) -> dict[str, State]:
    """What study.json says of the parts, where this is the study that the directory holds."""
    if not (path / "study.json").exists():
        return {}
    old = load_study(path)
    if old.name != study.name:
        raise RunExistsError(f"{path} already holds the study {old.name!r}; give another directory")
    others = [part for part in old.parts if part not in study.parts]
    if others:
        raise RunExistsError(
            f"{path} holds parts that this study does not have ({', '.join(others)}); "
            "give another directory, or the settings that the study was begun with"
        )
    return old.parts


def standing(folder: Path, recorded: State | None, scenario: Scenario) -> State:
    """How a part stands; waiting, where it is to be run (again)."""
    status = run_status(folder)
    if status is None:
        return WAITING
    if recorded is None:
        raise RunExistsError(f"{folder} already holds a run, and not of this study; give another directory")
    if status == "complete":
        change = difference(load(folder).scenario_data, scenario)
        if change:
            raise RunExistsError(
                f"{folder} was run with other settings: {change}; "
                "give another directory, or the settings that the study was begun with"
            )
        return {"status": "complete"}
    if is_complete(recorded):
        raise TraceError(
            f"{folder} was complete, but its run.json does not say so any more; "
            "remove that directory if the part is to be run again"
        )
    if is_done(recorded) and status == "failed" and not difference(load(folder).scenario_data, scenario):
        return recorded
    return WAITING


def run_status(folder: Path) -> str | None:
    """How the run in a directory ended; "unreadable" for what is left of one, None where none is."""
    if not (folder / "run.json").exists() and not (folder / "trace").exists():
        return None
    try:
        return load(folder).status
    except (TraceError, KeyError):
        return "unreadable"


def interrupted(folder: Path, options: Options) -> bool:
    """Whether a part was stopped after a checkpoint, and was run as it would be now."""
    if run_status(folder) in (None, "complete", "unreadable") or not has_checkpoint(folder):
        return False
    told = load(folder).manifest.get("options")
    return isinstance(told, dict) and told | _FREE == options.as_dict() | _FREE


def discard(study: Path, part: str) -> None:
    """Free the place of a part that did not come to its end; nothing outside of the study is removed."""
    folder = study / part
    if run_status(folder) in (None, "complete"):
        return
    for place in list(folder.relative_to(study).parents)[:-1]:
        if (study / place).is_symlink():
            raise RunExistsError(
                f"the part {part!r} is to be run again, but {study / place} is a link, and nothing is "
                "removed through one; remove the link, or give another directory"
            )
    if folder.is_symlink():
        folder.unlink()
        return
    aside = folder.with_name(f".{folder.name}.discarded")
    if aside.is_symlink() or aside.is_file():
        aside.unlink()
    elif aside.exists():
        shutil.rmtree(aside)
    os.replace(folder, aside)  # at once, so that nothing half removed is taken for a run
    shutil.rmtree(aside)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Only one process at a time works on a study, where the system can tell."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems lock no directories
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunExistsError(
                    f"another process is running the study in {path}; wait for it, or give another directory"
                ) from None
        yield
    finally:
        os.close(handle)


def _told(error: BaseException | None) -> State:
    if error is None:
        return {}
    kind = DivergenceError if isinstance(error, DivergenceError) else type(error)
    words = "stopped by the user" if isinstance(error, KeyboardInterrupt) else str(error)
    return {"error": words, "kind": kind.__name__}


def _manifest(folder: Path) -> dict[str, Any]:
    """What study.json says, where it says what every study.json does."""
    manifest, path = _read(folder, "study.json"), folder / "study.json"
    for key in ("name", "note", "status", "error"):
        if not isinstance(manifest.get(key, None if key == "status" else ""), str):
            raise TraceError(f"{path} is damaged: its {key!r} is {shown(manifest.get(key))}; it must be text")
    parts = manifest.get("parts")
    if not isinstance(parts, dict):
        raise TraceError(f"{path} is damaged: its 'parts' is {shown(parts)}; it must be an object")
    for part, state in parts.items():
        _check_name(path, part)
        texts = isinstance(state, dict) and all(isinstance(value, str) for value in state.values())
        if not texts or "status" not in state:
            raise TraceError(
                f"{path} is damaged: the part {part!r} is {shown(state)}; it must have a status, as text"
            )
    return {"name": folder.name, "note": "", **manifest}


def _check_name(path: Path, name: object) -> None:
    """Refuse a name that would lead out of the study."""
    try:
        check_name("part", name, slashes=True)
    except ScenarioError as error:
        raise TraceError(f"{path} is damaged: {error}") from None


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        return read_object(folder / name, f"a study's {name}")
    except FileNotFoundError:
        raise TraceError(f"{folder} is not a study: it has no {name}") from None
