"""Files that are written whole or not at all, and what is said when a disk will not take them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from asyncfed.errors import StorageError

_CANNOT = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)  # file systems that sync nothing


def synced(path: Path) -> None:
    """Have the system put a file, or the names in a directory, on disk before we go on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    finally:
        os.close(handle)


def write_whole(target: Path, write: Callable[[Path], object], *, sync: bool = False) -> None:
    """Have a file written under another name and put in its place: a kill at any instant leaves the old one
    or the new one. With `sync`, so does a power failure, for some milliseconds more.
    """
    part = target.with_name(f".{target.name}.part")
    try:
        write(part)
        if sync:
            synced(part)
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


@contextlib.contextmanager
def storing(where: Path) -> Iterator[None]:
    """A disk that is full, read-only or gone ends a run with words that say so."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # who writes tensors has errors of its own
        why = getattr(error, "strerror", None) or error
        raise StorageError(
            f"cannot write to {where}: {why}; what was recorded before stays readable. "
            "Make room, or the directory writable again, and go on with `asyncfed resume`"
        ) from error
