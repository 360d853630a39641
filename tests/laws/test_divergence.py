"""A run whose values stop being finite says whose, when and which, before anybody else has absorbed them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncfed import Scenario, load, run
from asyncfed.errors import DivergenceError
from asyncfed.protocols import Buffered
from tests.laws.changed import with_method, with_samples
from tests.laws.examples import Case, cases, two_levels
from tests.laws.runs import every_case
from topologies import star

CULPRIT = 1  # not 0, who is named where nobody looks
MARK = 4096.5  # a finite number, as all of a problem's data are, of which its losses make none

nested = pytest.mark.parametrize(
    "case",
    [case for case in cases() if case.example.protocol.needs_outer and case.example.problem is None],
    ids=lambda case: case.name,
)


def _fails(scenario: Scenario, out: Path, **options: Any) -> DivergenceError:
    with pytest.raises(DivergenceError) as caught:
        run(scenario, out=out, **options)
    assert load(out).status == "failed"
    return caught.value


def _everyone_answers(case: Case) -> Scenario:
    """Where there is a server: else the culprit might never be heard."""
    everyone = {"participation": 1.0, "quorum": 1.0, "size": 1.0, "at_work": 1.0}
    everyone |= {"max_staleness": 0, "too_stale": "wait"}
    scenario = case.scenario
    if isinstance(scenario.protocol.server, Buffered):  # others may answer twice where its answer gets lost
        timing = dataclasses.replace(scenario.timing, loss=0.0)
        scenario = dataclasses.replace(scenario, topology=star(scenario.clients), timing=timing)
    return with_method(scenario, lambda name, value: everyone.get(name, value))


def _unreadable(scenario: Scenario) -> Scenario:
    """The same, with losses that are no number where a sample holds the mark; metrics are."""

    def spoilt(loss: Any) -> Any:
        def read(*variables_and_batch: Any) -> Tensor:
            *variables, batch = variables_and_batch
            seen = tuple(torch.where(tensor == MARK, torch.nan, tensor) for tensor in batch)
            found: Tensor = loss(*variables, seen)
            return found

        return read

    problem = scenario.problem
    assert problem.stages is None
    losses = {"inner_loss": spoilt(problem.inner_loss), "outer_loss": spoilt(problem.outer_loss)}
    if problem.mixture is not None:
        losses["mixture"] = dataclasses.replace(problem.mixture, losses=spoilt(problem.mixture.losses))
    return dataclasses.replace(scenario, problem=dataclasses.replace(problem, **losses))


def _names(error: DivergenceError, case: Case, client: int) -> None:
    assert type(error) is DivergenceError, f"{case.name} says: {error}"
    said = f"{error.quantity} of client {client} became {error.value} at step {error.step}; "
    assert str(error).startswith(said), f"{case.name} says: {error}"
    assert error.client == client, case.name


@every_case
def test_a_client_whose_loss_is_no_number_is_named(case: Case, tmp_path: Path) -> None:
    def marked(samples: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.fill_(MARK) for tensor in samples)

    scenario = _unreadable(with_samples(_everyone_answers(case), CULPRIT, marked))
    error = _fails(scenario, tmp_path / "run")
    _names(error, case, CULPRIT)
    if case.example.protocol.server is None:
        assert error.step == 0, f"{case.name} says: {error}"


@nested
def test_a_client_whose_outer_loss_is_no_number_is_named(case: Case, tmp_path: Path) -> None:
    """The last two tensors of a sample are for the outer loss alone: first where it meets the inner variable,
    then where it meets the outer one only.
    """
    assert case.example.problem is None, "so that the samples are known to be those of two_levels"
    assert len(two_levels(1).data.train.tensors) == 5
    for place in (3, 4):

        def marked(samples: tuple[Tensor, ...], place: int = place) -> tuple[Tensor, ...]:
            samples[place].fill_(MARK)
            return samples

        scenario = _unreadable(with_samples(_everyone_answers(case), CULPRIT, marked))
        error = _fails(scenario, tmp_path / f"run {place}")
        _names(error, case, CULPRIT)


@every_case
def test_a_start_that_is_no_number_is_named(case: Case, tmp_path: Path) -> None:
    """Of a client, or of the server."""
    scenario = case.scenario
    peers = scenario.protocol.server is None
    inner = torch.ones(scenario.clients if peers else 1, 3, dtype=torch.float64)
    inner[CULPRIT if peers else 0] = torch.inf
    error = _fails(scenario, tmp_path / "run", initial={"inner": inner})
    if peers:
        _names(error, case, CULPRIT)
    else:
        assert str(error).startswith("y of the server became inf at step 0; "), f"{case.name} says: {error}"
    assert error.step == 0, case.name


CALLED_OTHERWISE = {"MetaFL": "beta", "PerFedAvg": "beta"}  # learning rates with the paper's letter


@every_case
def test_an_enormous_learning_rate_is_blamed(case: Case, tmp_path: Path) -> None:
    """Which of them is first does not matter, and a series that diverges may say so in its own words."""

    def enormous(name: str, value: Any) -> Any:
        rate = name == "lr" or name.endswith("_lr") or name == CALLED_OTHERWISE.get(case.method)
        return 1e200 if rate and value is not None else value

    scenario = with_method(case.scenario, enormous)
    error = _fails(scenario, tmp_path / "run")
    if type(error) is DivergenceError:
        assert 0 <= error.client < scenario.clients, f"{case.name} says: {error}"
        _names(error, case, error.client)
    assert "learning rate" in str(error) or "step size" in str(error), f"{case.name} says: {error}"
