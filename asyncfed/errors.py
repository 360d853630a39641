"""Everything that can go wrong, in one tree.

A message names the value that was given, what is allowed, and what to do about it. Whose fault it is decides
the class: `ScenarioError` is the user's input (raised before anything runs), `RunError` is something that
happened while running (what was recorded so far stays readable), `TraceError` is a file that cannot be read
as what it claims to be.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

_LONGEST_NAME = 200


class AsyncfedError(Exception):
    """Base of every error that asyncfed raises on purpose."""


class ScenarioError(AsyncfedError, ValueError):
    """A scenario, or a part of it, that cannot be run as written."""


class TopologyError(ScenarioError):
    """A graph that breaks an assumption: probabilities, size, connectivity."""


class DataError(ScenarioError):
    """A dataset that is missing or a partition that cannot be made."""


class UnknownNameError(ScenarioError):
    """A name that is not among the known ones; the message suggests the nearest, and the remedy if given."""

    def __init__(self, what: str, name: str, known: Iterable[str], remedy: str = "") -> None:
        name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"
        choices = sorted(set(known))
        nearest = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        listing = ", ".join(choices) if choices else "(none)"
        text = (
            f"unknown {what} {name!r}{hint} Known: {listing}"
            if hint
            else f"unknown {what} {name!r}; known: {listing}"
        )
        super().__init__(f"{text}; {remedy}" if remedy else text)
        self.name = name
        self.nearest = nearest[0] if nearest else None


class RunExistsError(ScenarioError):
    """The output directory already holds a run."""


class RunError(AsyncfedError, RuntimeError):
    """Something that went wrong while running; the partial run stays readable."""


class DivergenceError(RunError):
    """A value stopped being finite: of a client, or of the server, which is the node `client` then."""

    def __init__(
        self,
        client: int,
        step: int,
        quantity: str,
        value: float,
        *,
        server: bool = False,
        cause: str = "",
        name: str = "",
    ) -> None:
        whose, data = f"client {name or client}", "its data"
        if server:
            whose, data = "the server", "what it began with"
        super().__init__(
            f"{quantity} of {whose} became {value} at step {step}; "
            + (cause or f"lower the learning rate, or look at {data}")
        )
        self.client, self.step, self.quantity, self.value = client, step, quantity, value
        self.server, self.cause, self.client_name = server, cause, name

    def called(self, names: Callable[[int], str]) -> DivergenceError:
        """The same with the client's name."""
        return DivergenceError(
            self.client, self.step, self.quantity, self.value,
            server=self.server, cause=self.cause, name=names(self.client),
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(type(self), server=self.server, cause=self.cause, name=self.client_name)
        return made, (self.client, self.step, self.quantity, self.value)


class SeriesDivergesError(DivergenceError):
    """The terms of a hypergradient's series grow instead of shrinking."""

    def __init__(self, method: str, start: float, largest: float, lr: float) -> None:
        RunError.__init__(
            self,
            f"{method}: the largest ‖u‖ of a client grew from {start:.3g} to {largest:.3g}, so the series "
            f"that makes the hypergradient diverges; lower the inner step size (lr is {lr:g}; or give the "
            "method an lr of its own), add weight decay or a convex term to the inner loss, use fewer "
            "rounds, or let more inner steps (or expectations='exact') tell p̄ and δ̄ better",
        )
        self.method, self.start, self.largest, self.lr = method, start, largest, lr

    def called(self, names: Callable[[int], str]) -> DivergenceError:
        return self  # it is nobody's own

    def __reduce__(self) -> tuple[type[SeriesDivergesError], tuple[str, float, float, float]]:
        return type(self), (self.method, self.start, self.largest, self.lr)


class QuorumError(RunError):
    """A server's round did not get the answers it needs, however often it asked."""

    def __init__(
        self, phase: str, kind: str, number: int, answers: int, needed: int, asked: int, attempts: int
    ) -> None:
        times = "once" if attempts == 1 else f"{attempts} times"
        super().__init__(
            f"round {number} ({phase}, {kind}) got {answers} of the {needed} answers it needs, though "
            f"the server asked {asked} clients {times}; lower the quorum, raise the participation, the "
            "deadline or attempts, or give the links a higher probability"
        )
        self.arguments = (phase, kind, number, answers, needed, asked, attempts)

    def __reduce__(self) -> tuple[type[QuorumError], tuple[str, str, int, int, int, int, int]]:
        return type(self), self.arguments


class CallbackError(RunError):
    """A callback of `run` failed; the run ended there, and can be resumed without it."""


class StorageError(RunError):
    """What a run writes could not be written: the disk is full, read-only, or gone."""


class RunStopped(KeyboardInterrupt):
    """A signal stopped the run: Ctrl-C, or whatever else asks a process to end."""

    def __init__(self, number: int) -> None:
        self.number = number
        name = signal.Signals(number).name
        super().__init__("stopped by the user" if name == "SIGINT" else f"stopped by {name}")


class ActorLostError(RunError):
    """A Ray actor died and its clients with it."""


class OneByOneWarning(UserWarning):
    """Clients whose networks cannot be computed together."""


class RecoveredWarning(UserWarning):
    """Something went wrong while running, and the run goes on."""


class UnsoundWarning(UserWarning):
    """A method that the network gives no right to its answer."""


class CallbackWarning(UserWarning):
    """A callback that failed while a run was ending anyhow."""


class WaitingWarning(UserWarning):
    """A run that waits for what others hold."""


class TraceError(AsyncfedError, ValueError):
    """A run directory or a trace file that is truncated, foreign or of another version."""
