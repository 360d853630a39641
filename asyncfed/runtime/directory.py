"""A run on disk.

    run.json        what this is and how it ended: running, complete, interrupted or failed; where it ran,
                    for how long, and what was warned of before
    scenario.json   the scenario as data, with versions and seed
    metrics.jsonl   one line per evaluation, appended as the run goes
    clients.jsonl   one line per client, at the end
    trace/          messages and steps, in Parquet chunks
    final.safetensors     the final variables of all clients, where asked for
    initial.safetensors   what it began with, where that was given
    checkpoints/    what it needs to go on, as long as it is not complete
    run.lock        who is at work on it

Files that are rewritten are replaced whole; files that grow are read up to the last whole line. A kill at any
instant leaves a readable run. Everything but run.json is a function of the scenario (and of the packing, in
the last bits of sums).
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from asyncfed.checks import shown
from asyncfed.disk import storing, synced, write_tensors, write_whole
from asyncfed.errors import RunExistsError, ScenarioError, TraceError
from asyncfed.reading import is_number, is_whole, open_regular, read_object, read_rows, read_whole

FORMAT, VERSION = "asyncfed-run", 1

_PLACES = {"actors": (0, 1 << 22), "threads": (1, 1 << 12)}

_MANIFEST: dict[str, tuple[Callable[[Any], bool], str]] = {
    "status": (lambda value: isinstance(value, str), "text"),
    "error": (lambda value: isinstance(value, str), "text"),
    "clients": (lambda value: is_whole(value, 1), "a whole number of at least 1"),
    "nodes": (lambda value: is_whole(value, 1), "a whole number of at least 1"),
    "warnings": (lambda value: _texts(value), "a list of texts"),
    "steps": (is_whole, "a count"),
    "totals": (lambda value: isinstance(value, dict) and all(map(is_whole, value.values())), "counts"),
    "wall_seconds": (lambda value: is_number(value) and math.isfinite(value), "a number"),
    "placement": (lambda value: _placed(value), "an object, whose actors and threads are few"),
    "resumed": (lambda value: is_whole(value), "a whole number"),
    "recoveries": (lambda value: isinstance(value, list), "a list"),
}
"""What of run.json is read again, and what it must be where it is there."""


class RunDirectory:
    """Reads and writes the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, out: str | os.PathLike[str] | None, name: str) -> RunDirectory:
        """A new, empty run directory: the one given, or a numbered one under `runs/`."""
        if out is None:
            return cls(_next_numbered(Path(os.environ.get("ASYNCFED_RUNS", "runs")), name))
        path = Path(out)
        with _writable(path):
            path.mkdir(parents=True, exist_ok=True)
        if (path / "run.json").exists() or (path / "trace").exists():
            raise RunExistsError(
                f"{path} already holds a run; give another directory, or remove that one first"
                + (
                    f". It is not complete: `asyncfed resume {path}` goes on with it"
                    if unfinished(path)
                    else ""
                )
            )
        return cls(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """An existing run, whole or partial."""
        directory = cls(Path(path))
        if not os.path.exists(path):
            raise TraceError(
                f"there is no run at {directory.path}; give the directory that a run printed at its end"
            )
        manifest = directory.manifest()
        if manifest.get("format") != FORMAT:
            raise TraceError(f"{directory.path / 'run.json'} is not the run.json of an asyncfed run")
        if manifest.get("version") != VERSION:
            raise TraceError(
                f"{directory.path} was written in version {manifest.get('version')!s:.40} of the run format; "
                f"this asyncfed reads version {VERSION}"
            )
        if "status" not in manifest:
            raise TraceError(f"{directory.path / 'run.json'} lacks the status of its run; it was changed")
        return directory

    @property
    def trace(self) -> Path:
        return self.path / "trace"

    def manifest(self) -> dict[str, Any]:
        manifest = self._read("run.json")
        for key, (allowed, what) in _MANIFEST.items():
            if key in manifest and not allowed(manifest[key]):
                raise TraceError(
                    f"{self.path / 'run.json'} is damaged: its {key!r} is {shown(manifest[key])}; "
                    f"it must be {what}"
                )
        return manifest

    def scenario(self) -> dict[str, Any]:
        return self._read("scenario.json")

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors in a file of this run; FileNotFoundError where there is none."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.path / name
        try:
            open_regular(path).close()
            tensors: dict[str, Tensor] = load_file(path)
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError, RuntimeError, TypeError, ValueError, LookupError) as error:
            raise TraceError(
                f"{path} cannot be read as the {path.stem} variables of a run ({error!s:.200}); "
                "it is truncated or damaged"
            ) from error
        return tensors

    def write_manifest(self, **content: Any) -> None:
        self.write("run.json", {"format": FORMAT, "version": VERSION, **content})

    def write(self, name: str, content: dict[str, Any]) -> None:
        text = json.dumps(plain_json(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        self._write(name, lambda part: part.write_text(text, encoding="utf-8"))

    def write_rows(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        """All rows of a file at once."""
        self._write(name, lambda part: part.write_text(_lines(rows), encoding="utf-8"))

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        own = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        with storing(self.path):
            write_tensors(self.path / name, own)

    def append(self, name: str, *rows: dict[str, Any]) -> None:
        with storing(self.path), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(_lines(rows))

    def sync(self, *names: str) -> None:
        """Have the system put files on disk before we go on, those that there are."""
        with storing(self.path):
            for name in names:
                if (self.path / name).exists():
                    synced(self.path / name)

    def keep_rows(self, name: str, count: int) -> None:
        """Cut a growing file after so many rows."""
        path = self.path / name
        if not path.exists():
            if count:
                raise TraceError(f"{path} is missing; the run cannot be resumed, start it anew")
            return
        lines = read_whole(path).split(b"\n")[:-1]
        if not 0 <= count <= len(lines):
            raise TraceError(
                f"{path} holds {len(lines)} rows and the checkpoint counts {count}; the run cannot be "
                "resumed, start it anew"
            )
        whole = b"".join(line + b"\n" for line in lines[:count])
        self._write(name, lambda part: part.write_bytes(whole))

    def remove(self, *names: str) -> None:
        """Take files away that a run writes at its end."""
        with storing(self.path):
            for name in names:
                (self.path / name).unlink(missing_ok=True)

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        with storing(self.path):
            write_whole(self.path / name, write)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a growing file; a torn last line is not one."""
        return read_rows(self.path / name)

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return read_object(self.path / name, f"a run's {name}")
        except FileNotFoundError:
            raise TraceError(f"{self.path} is not a run: it has no {name}") from None


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _placed(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(value.get(key) is None or is_whole(value[key], *range_) for key, range_ in _PLACES.items())


def unfinished(path: Path) -> bool:
    """Whether a directory holds a run that could be gone on with."""
    try:
        return RunDirectory.open(path).manifest().get("status") != "complete"
    except TraceError:
        return False


def _next_numbered(root: Path, name: str) -> Path:
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    number = 1
    with _writable(root):
        root.mkdir(parents=True, exist_ok=True)
        while True:  # mkdir decides, so that two runs started at once do not share a directory
            path = root / f"{safe}-{number:04d}"
            try:
                path.mkdir()
            except FileExistsError:
                number += 1
                continue
            return path


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Refuse a directory that cannot be made, or not written to, before anything is run."""
    try:
        yield
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or str(error)  # a ValueError is of a NUL in its name
        why = "it is a file" if isinstance(error, FileExistsError) else told
        raise ScenarioError(
            f"the output {shown(str(path))} cannot be written to: {why}; give a directory of your own"
        ) from error


def _lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(plain_json(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def plain_json(value: Any) -> Any:
    """JSON has no NaN; a value that is not there is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    return value
