"""A process that runs parts of a study, one after the other, as it is told by `processes`.

Frames come on standard input and go to what was standard output; whatever code of a user's own prints goes to
standard error. When nobody is at the other end any more, the run ends where it can be resumed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import sys
import threading
import warnings
from typing import IO, Any

from asyncfed.errors import OneByOneWarning, RecoveredWarning, RunError, WaitingWarning

TOLD = (RecoveredWarning, WaitingWarning, OneByOneWarning)  # others were told when parts were checked
_LENGTH = 8  # bytes


def write_frame(file: IO[bytes], content: bytes) -> None:
    file.write(len(content).to_bytes(_LENGTH, "little") + content)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """None where nobody writes any more."""
    head = file.read(_LENGTH)
    if len(head) < _LENGTH:
        return None
    size = int.from_bytes(head, "little")
    content = file.read(size)
    return content if len(content) == size else None


def main() -> None:
    """Run what comes, and say how each ended."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, frames, busy), daemon=True).start()

    def tell(what: str, content: Any = None) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more
            write_frame(answers, pickle.dumps((what, content)))

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if isinstance(message, TOLD):
            tell("warning", message)

    warnings.showwarning = show
    for category in TOLD:
        warnings.simplefilter("always", category)
    while (frame := frames.get()) is not None:
        busy.set()
        try:
            job = pickle.loads(frame)  # of the process that started this one, through a pipe
            frame = b""  # a part's data may be most of the memory: there is one copy of it, and then none
            _run(job)
        except BaseException as error:
            tell("ended", _sendable(error))
            if not isinstance(error, Exception):
                break
        else:
            tell("ended")
        job = None
        busy.clear()


def _run(job: Any) -> None:
    import torch

    from asyncfed.registry import register
    from asyncfed.study.running import run_part

    torch.set_num_threads(job.threads)
    for kind, name, thing in job.things:
        register(kind, name)(thing)
    run_part(job.scenario, job.study, job.part, job.options)


def _listen(file: IO[bytes], frames: queue.SimpleQueue[bytes | None], busy: threading.Event) -> None:
    while (frame := read_frame(file)) is not None:
        frames.put(frame)
    frames.put(None)
    if busy.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _sendable(error: BaseException) -> BaseException:
    """The error, or its words where it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RunError(f"{type(error).__name__}: {error}")
    return error
