"""What goes wrong becomes one paragraph on stderr and an exit code; what is warned of, a line there."""

from __future__ import annotations

import errno
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec

import typer

from asyncfed.errors import (
    AsyncfedError,
    RecoveredWarning,
    RunError,
    RunStopped,
    ScenarioError,
    TraceError,
    UnsoundWarning,
    WaitingWarning,
)
from asyncfed.printable import printable

P = ParamSpec("P")

_OURS = (UnsoundWarning, WaitingWarning, RecoveredWarning)
BUG, BAD_INPUT, RUN_FAILED, UNREADABLE, INTERRUPTED = 1, 2, 3, 4, 130


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """A command whose errors are told, not thrown."""

    @functools.wraps(command)
    def telling(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with _warnings_told():
                command(*args, **kwargs)
            sys.stdout.flush()
        except typer.Exit:
            raise
        except RunStopped as stopped:
            _tell(f"interrupted: {stopped}")
            raise typer.Exit(128 + stopped.number) from None
        except KeyboardInterrupt:
            _tell("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except AsyncfedError as error:
            if _debugging():
                raise
            _tell(f"error: {error}")
            raise typer.Exit(_code(error)) from None
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader, such as `head`, has all it wanted
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit from None
            if _debugging():
                raise
            _tell(f"error: {error}")
            raise typer.Exit(BAD_INPUT) from None
        except Exception as error:
            if _debugging():
                raise
            _tell(
                f"unexpected {type(error).__name__}: {error}\n"
                "This is likely a bug in asyncfed, unless a file of yours raised it; ASYNCFED_DEBUG=1 shows "
                "where it happened."
            )
            raise typer.Exit(BUG) from None

    return telling


@contextmanager
def _warnings_told() -> Iterator[None]:
    """Each of our warnings as one line, once; those of others as Python shows them."""
    told = set[str]()
    shown = warnings.showwarning

    def tell(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, _OURS):
            shown(message, category, *where, **more)
        elif str(message) not in told:
            told.add(str(message))
            _tell(f"warning: {message}")

    with warnings.catch_warnings():
        for category in _OURS:
            warnings.simplefilter("always", category)
        warnings.showwarning = tell
        yield


def _code(error: AsyncfedError) -> int:
    match error:
        case ScenarioError():
            return BAD_INPUT
        case RunError():
            return RUN_FAILED
        case TraceError():
            return UNREADABLE
    return BUG


def _debugging() -> bool:
    return os.environ.get("ASYNCFED_DEBUG", "") not in ("", "0")


def _tell(text: str) -> None:
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except OSError:
        return  # nobody listens
