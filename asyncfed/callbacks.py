"""Functions of one's own that a run calls as it goes: to log, to draw, to stop it (by raising).

A callback derives from `Callback` and overrides what it wants to hear of. What it is handed is its own, to
keep or to change: a run writes the same bytes whoever listens. Whatever it raises ends the run, which says so
(`CallbackError`), stays readable and can be resumed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from asyncfed.checks import Words
from asyncfed.errors import CallbackError, CallbackWarning, UnknownNameError
from asyncfed.trace import Totals

if TYPE_CHECKING:
    from asyncfed.result import Result
    from asyncfed.scenario import Scenario


@dataclass(frozen=True)
class RunStart:
    """What is about to be run, and where."""

    path: Path
    scenario: Scenario
    data: dict[str, Any]  # the scenario as plain data
    clients: tuple[str, ...]  # what they are called, by their numbers
    resumed: int  # how often the run was gone on with
    evaluations: int  # that were recorded before


@dataclass(frozen=True)
class EvaluationReport:
    """What an evaluation found: a row of `Result.metrics`, and of every client what `Result.clients` has."""

    number: int  # of the evaluation, from 0
    metrics: dict[str, Any]
    clients: list[dict[str, Any]]
    final: bool


@dataclass(frozen=True)
class PhaseStart:
    """A phase of the method ("inner", "hypergradient", …) begins."""

    phase: str
    steps_done: int  # of all clients together
    virtual_time: float


@dataclass(frozen=True)
class MessageSummary:
    """What was sent, at every evaluation: in all, and since the one before (or since the run was resumed)."""

    virtual_time: float
    totals: Totals
    since: Totals


class Callback:
    """Does nothing; override what is wanted."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in vars(cls):
            if name.startswith("on_") and name not in _EVENTS:
                raise UnknownNameError(f"event of a callback ({cls.__name__}):", name, _EVENTS)

    def on_start(self, start: RunStart) -> None:
        """Before the first step, or the first since a run is gone on with."""

    def on_evaluation(self, report: EvaluationReport) -> None:
        """After each evaluation; of those that are repeated after the loss of an actor, once."""

    def on_phase(self, phase: PhaseStart) -> None:
        """When the phase changes."""

    def on_message_summary(self, summary: MessageSummary) -> None:
        """After each evaluation."""

    def on_end(self, result: Result) -> None:
        """When the run is complete."""

    def on_error(self, error: BaseException) -> None:
        """When it ends otherwise: with an error, or interrupted. What was recorded can be read."""


_EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


Told = Sequence[Annotated[Callback, Words("an object whose class derives from asyncfed.Callback")]]
"""Callbacks, as `run` takes them."""


class Callbacks:
    """All callbacks of a run."""

    def __init__(self, callbacks: Sequence[Callback], path: Path) -> None:
        self._callbacks, self._path = callbacks, path

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def tell(self, event: str, *made: Any) -> None:
        """Call each with what its own copy `made` of the event makes; whatever one raises ends the run."""
        for one in self._callbacks:
            try:
                getattr(one, event)(*(make() for make in made))
            except Exception as error:
                raise CallbackError(
                    f"{self._failed(one, event, error)}; what was recorded is in {self._path}: read it with "
                    "load, go on with resume (without this callback, or with one that is mended)"
                ) from error

    def tell_error(self, problem: BaseException) -> None:
        """That the run ended with an error; whoever fails now is told of, beside that."""
        for one in self._callbacks:
            try:
                one.on_error(problem)
            except Exception as error:
                warnings.warn(CallbackWarning(self._failed(one, "on_error", error)), stacklevel=2)

    def _failed(self, one: Callback, event: str, error: Exception) -> str:
        return f"the callback {type(one).__name__} failed in {event} ({type(error).__name__}: {error!s:.500})"
