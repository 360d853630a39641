"""Reads files that anybody may have written: regular ones only, not too large, not too deep; nothing is run.

A run directory may come from somebody else, or be damaged. So a pipe or a device in place of a file is
refused before it is opened (it could wait for ever, or never end), what a file holds is bounded before memory
is taken for it, and JSON may have no more levels than the functions that walk through it can stand.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from asyncfed.errors import ScenarioError, TraceError

MEBI = 1 << 20
MOST_BYTES = 1024 * MEBI  # of a file that is read whole
_MOST_CONTAINERS = 4 * MEBI  # lists and objects: in memory each takes far more than the two bytes on disk
_MOST_LEVELS = 64

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading; an OSError says what stands there instead, at once."""
    _check_regular(path, os.stat(path).st_mode)
    flags = ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY")  # not all systems have each
    handle = os.open(path, os.O_RDONLY | sum(getattr(os, flag, 0) for flag in flags))
    try:
        _check_regular(path, os.fstat(handle).st_mode)  # it may have been exchanged meanwhile
    except OSError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def read_whole(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """All that a file holds when it is opened; an OSError where that is more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} are expected", str(path))
        return file.read(size)


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file, which is `what` ("a run's run.json"); FileNotFoundError where none is."""
    try:
        content = parsed(read_whole(path))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise TraceError(f"{path} cannot be read as {what}: {_reason(error)}") from None
    if not isinstance(content, dict):
        raise TraceError(f"{path} is not {what}")
    return content


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of lines that grows; a torn last line is not one."""
    try:
        content = read_whole(path)
        count = content.count(b"\n")
        if count > _MOST_CONTAINERS:
            raise ValueError(f"it has {count:,} lines, and at most {_MOST_CONTAINERS:,} are expected")
        lines = content.split(b"\n")[:-1]  # bytes, for the tear may go through a character
        rows = [parsed(line) for line in lines]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("a line of it is no JSON object")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise TraceError(
            f"{path} is damaged ({_reason(error)}); the trace beside it may still be whole"
        ) from None
    return rows


def parsed(text: bytes) -> Any:
    """JSON; a ValueError where it is none, or would take too much."""
    containers = text.count(b"[") + text.count(b"{")
    if containers > _MOST_CONTAINERS:
        raise ValueError(f"it has {containers:,} lists and objects, more than {_MOST_CONTAINERS:,}")
    try:
        content = json.loads(text.decode("utf-8"))
        if b"\\ud" in text.lower():  # halves of characters, which nothing can print or write again
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [content]
    for _ in range(_MOST_LEVELS):
        inside = [item.values() if isinstance(item, dict) else item for item in level if _holds(item)]
        if not inside:
            return content
        level = [item for items in inside for item in items if _holds(item)]
    raise ValueError(f"it is nested too deeply, in more than {_MOST_LEVELS} levels")


def is_whole(value: object, least: int = 0, most: int = (1 << 63) - 1) -> bool:
    """Whether a value is a whole number, and not True or False, in a range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object) -> bool:
    """Whether a value is a number that takes 8 bytes."""
    return isinstance(value, float) or is_whole(value, -(1 << 63))


def _holds(item: object) -> bool:
    return isinstance(item, (dict, list))


def _check_regular(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in _KINDS if test(mode)), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def csv_lines(path: str | os.PathLike[str], needed: str) -> list[tuple[int, list[str]]]:
    """Line numbers and fields of a file in CSV, without blanks around them and without empty lines; `needed`
    says what it must have, for messages.
    """
    try:
        with open_regular(path) as stream, io.TextIOWrapper(stream, "utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, [field.strip() for field in row]) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ScenarioError(f"cannot read {path}: {reason}; it must be a CSV file with {needed}") from None
    return [(line, row) for line, row in rows if any(row)]
