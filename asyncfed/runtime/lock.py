"""Who is at work on a run: one process at a time.

The lock is a file `run.lock` in the run's directory that holds the process's number and machine, is locked in
the eyes of the system for as long as the process lives, and is touched now and then. So a process that was
killed holds nothing up, on the same machine at once; of a process on another machine, whose locks the file
system may not show us, the lock counts as long as it was touched lately.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncfed.disk import storing
from asyncfed.errors import RunExistsError

NAME = "run.lock"
_STALE = 120.0  # seconds
_GLANCE = 0.3  # seconds: somebody who only looks holds it for an instant
_PLAINLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class Lock:
    """Held by this process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def touch(self) -> None:
        """Say that we are still here."""
        with contextlib.suppress(OSError):
            os.utime(self._path)


@contextlib.contextmanager
def locked(run: Path) -> Iterator[Lock]:
    """Be the only process at work on a run."""
    path = run / NAME
    with storing(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _PLAINLY, 0o644)
    try:
        holder = _holder(path)
        if (
            not _take(handle, seconds=_GLANCE)
            or _elsewhere_at_work(path, holder)
            or not _same_file(handle, path)
        ):
            where = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
            raise RunExistsError(
                f"{where} is at work on the run in {run}; wait for it, or stop it first (if there is no such "
                f"process any more, try again in {_STALE / 60:g} minutes)"
            )
        mine = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        os.ftruncate(handle, 0)
        os.pwrite(handle, mine.encode(), 0)
        try:
            yield Lock(path)
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
    finally:
        os.close(handle)


def at_work(run: Path) -> bool:
    """Whether some process holds the lock of a run."""
    path = run / NAME
    try:
        handle = os.open(path, os.O_RDONLY | _PLAINLY)
    except OSError:
        return False
    try:
        if _elsewhere_at_work(path, _holder(path)):
            return True
        return not _take(handle)
    finally:
        os.close(handle)


def _take(handle: int, seconds: float = 0.0) -> bool:
    """Whether the lock is ours now, or within some time; where the system has none, it is."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
        except OSError:  # some network file systems lock nothing
            return True
        else:
            return True


def _same_file(handle: int, path: Path) -> bool:
    """Whether the file that we hold is still the one with that name: its last holder takes it away."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


def _holder(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(4096) or b"{}")
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _elsewhere_at_work(path: Path, holder: dict[str, Any]) -> bool:
    host = holder.get("host")
    if host is None or host == socket.gethostname():
        return False
    try:
        return time.time() - path.stat().st_mtime < _STALE
    except OSError:
        return False
