"""The checkpoints of a run, one file each: all that it needs to go on to the same bytes.

    checkpoints/00000012.safetensors    tensors by name; facts as JSON in the header

A file is written under another name, synced and renamed, so that a kill at any instant leaves whole files
only; the last two are kept. Reading one makes tensors and plain data, nothing else: no pickle, no names to
import.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from asyncfed.disk import remove_unfinished, storing, synced, write_tensors
from asyncfed.errors import TraceError
from asyncfed.reading import open_regular, parsed
from asyncfed.recall import Saved
from asyncfed.runtime.state import State, of_arrays

FORMAT, VERSION = "asyncfed-checkpoint", "1"
_KEPT = 2
_NAME = re.compile(r"(\d{8})\.safetensors")


class Checkpoints:
    """Those of the run in a directory."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "checkpoints"

    def write(self, state: State) -> None:
        """Another one; older ones than the last two go."""
        facts = json.dumps(state.facts, ensure_ascii=False, allow_nan=False)
        marks = {"format": FORMAT, "version": VERSION, "facts": facts}
        with storing(self._folder):
            self._folder.mkdir(exist_ok=True)
            there = self._files()
            number = int(there[-1].stem) + 1 if there else 1
            target = self._folder / f"{number:08d}.safetensors"
            write_tensors(target, state.tensors, marks, sync=True)
            synced(self._folder)
            for old in [*there, target][:-_KEPT]:
                old.unlink(missing_ok=True)

    def newest(self) -> State | None:
        """The newest that can be read; None where there is none."""
        error: TraceError | None = None
        for path in reversed(self._files()):
            try:
                return _read(path)
            except TraceError as problem:
                error = error or problem
        if error is not None:
            raise error
        return None

    def clear(self) -> None:
        """The run is complete: nobody needs them any more."""
        if self._folder.is_symlink() or not self._folder.is_dir():
            return
        with storing(self._folder):
            for path in self._files():
                path.unlink()
            for folder in self._folder.glob(".*.safetensors.part"):
                remove_unfinished(folder)
        with contextlib.suppress(OSError):  # somebody else's files stay
            self._folder.rmdir()

    def _files(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))


def has_checkpoint(run: Path) -> bool:
    """Whether there is one, readable or not."""
    return bool(Checkpoints(run)._files())


def _read(path: Path) -> State:
    try:
        open_regular(path).close()
        with safe_open(path, framework="pt") as file:
            marks = file.metadata() or {}
            if marks.get("format") != FORMAT or marks.get("version") != VERSION:
                raise TraceError(
                    f"{path} is not a checkpoint of this version (format {marks.get('format')!r}, version "
                    f"{marks.get('version')!r}; this asyncfed writes {VERSION!r})"
                )
            facts = parsed(marks.get("facts", "").encode())
            if not isinstance(facts, dict):
                raise TraceError(f"{path} is damaged: its facts are no mapping")
            return State({name: file.get_tensor(name) for name in file.keys()}, facts)  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, RuntimeError, TypeError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path} cannot be read as a checkpoint: {error}") from None


def as_state(saved: Saved) -> State:
    """What was put down as plain data and arrays, fit for a checkpoint."""
    return State(of_arrays({str(k): array for k, array in enumerate(saved.arrays)}), {"plain": saved.plain})


def as_saved(state: State) -> Saved:
    """The same the other way."""
    arrays: list[Any] = [np.array(state.array(str(k))) for k in range(len(state.tensors))]
    return Saved(state.facts["plain"], arrays)
