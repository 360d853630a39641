"""A run of every case that several laws look at, with what a tap saw of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncfed import Result, Scenario, run
from asyncfed.rng import Streams
from asyncfed.runtime.block import Observation
from tests.helpers import files_of
from tests.laws.examples import Case, cases

every_case = pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)


@dataclass(frozen=True, eq=False)
class Seen:
    """A step of some nodes: of every variable, how many bytes the row of one node has."""

    clients: list[int]
    steps: list[int]
    read: dict[str, int]
    made: dict[str, int]


@dataclass(frozen=True, eq=False)
class Told:
    """A run and its steps, in the order in which they were made."""

    case: Case
    scenario: Scenario
    result: Result
    seen: list[Seen] = field(default_factory=list)

    @property
    def server(self) -> int | None:
        """The number of the server's node."""
        return None if self.scenario.protocol.server is None else self.scenario.clients

    def parts(self) -> list[Any]:
        """Its parts or rounds, one after another."""
        method, streams = self.scenario.protocol, Streams(self.scenario.seed)
        return [part for iteration in method.iterations(streams) for part in iteration]

    def same_as(self, other: Result, what: str) -> None:
        """The other run left the same bytes and ended with the same values."""
        mine, theirs = files_of(self.result.path), files_of(other.path)
        assert sorted(mine) == sorted(theirs), f"{self.case.name}: {what} left other files"
        differ = [name for name in mine if mine[name] != theirs[name]]
        assert not differ, f"{self.case.name}: {what} wrote other bytes into {', '.join(differ)}"
        assert self.result.final.keys() == other.final.keys(), f"{self.case.name}: {what} ended with others"
        for name, value in self.result.final.items():
            equal = torch.equal(value, other.final[name])
            assert equal, f"{self.case.name}: {what} ended with another {name!r}"


class Runs:
    """Makes each run once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, Told] = {}

    def __call__(self, case: Case) -> Told:
        if case.name not in self._known:
            seen: list[Seen] = []
            scenario = case.scenario
            out = self._directory / f"run {len(self._known)}"
            result = run(scenario, out=out, tap=lambda step: seen.append(_seen(step)))
            self._known[case.name] = Told(case, scenario, result, seen)
        return self._known[case.name]


def _seen(step: Observation) -> Seen:
    def sizes(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
        return {name: value.shape[1] * value.element_size() for name, value in tensors.items()}

    return Seen(step.clients.tolist(), step.steps.tolist(), sizes(step.absorbed), sizes(step.made.payload))
