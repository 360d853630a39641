"""Files that are written whole or not at all, and what is said when a disk will not take them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from asyncfed.errors import StorageError

if TYPE_CHECKING:
    from torch import Tensor

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


def write_tensors(
    target: Path, tensors: dict[str, Tensor], marks: dict[str, str] | None = None, *, sync: bool = False
) -> None:
    """The same for tensors. They are put down in a folder of their own: safetensors has names of its own for
    what it has not finished, and a kill leaves these.
    """
    from safetensors.torch import save_file

    folder = target.with_name(f".{target.name}.part")
    remove_unfinished(folder)
    folder.mkdir()
    try:
        whole = folder / target.name
        save_file(tensors, whole, marks)
        if sync:
            synced(whole)
        os.replace(whole, target)
    finally:
        remove_unfinished(folder)


def remove_unfinished(folder: Path) -> None:
    """What a kill left of tensors that were being written; a link leads elsewhere, and stays."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)


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
