"""What a network does to push-sum is named before a run, and where a run fails of it, instead of the learning
rate.
"""

from __future__ import annotations

import json
import math
import pickle
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from asyncfed import DivergenceError, Lockstep, Scenario, UnsoundWarning, VirtualTime, load, run
from asyncfed.network import DrawnPresence, GivenPresence, Presence, Table, Timing
from asyncfed.problems import bilevel_quadratic, quadratic
from asyncfed.protocols import CDBO, DSGD, HGP, SGP, FedAvg, Local, LocalSteps, PushDIGing, PushPull
from asyncfed.protocols.part import Method
from asyncfed.protocols.soundness import LATE, SMALL, UNEVEN, small_weight
from asyncfed.scenario import check
from topologies import fully_connected, star, stochastic_directed

CLIENTS = 6
SCENARIO = Scenario(
    problem=quadratic(clients=CLIENTS, dimension=2, seed=1),
    topology=fully_connected(CLIENTS),
    protocol=SGP(steps=60, lr=0.1, batch=None),
)


@dataclass(frozen=True)
class LosingLockstep(Lockstep):
    """What is lost stays lost."""

    running_sums: bool | None = False


@dataclass(frozen=True)
class LosingTime(VirtualTime):
    running_sums: bool | None = False


def _said(scenario: Scenario) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(scenario)
    assert all(warning.category is UnsoundWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def _diverges(scenario: Scenario, out: Path, **options: str) -> DivergenceError:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsoundWarning)
        with pytest.raises(DivergenceError) as caught:
            run(scenario, out=out, **options)  # type: ignore[arg-type]
    return caught.value


# --- before a run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("timing", [LosingLockstep(loss=0.01), LosingTime(loss=0.01)])
def test_losses_that_nobody_makes_up_for_are_named(timing: Timing) -> None:
    (said,) = _said(replace(SCENARIO, timing=timing))
    assert said.startswith("SGP on links that lose messages (0→1 loses 0.01 of them): ")
    assert "leave running_sums on" in said
    for sound in (
        replace(timing, loss=0.0),
        replace(timing, running_sums=None),  # type: ignore[call-arg]
        replace(timing, running_sums=True),  # type: ignore[call-arg]
    ):
        assert not _said(replace(SCENARIO, timing=sound))


@pytest.mark.parametrize("timing", [Lockstep(), VirtualTime()])
def test_clients_that_crash_or_leave_are_named_where_that_makes_an_answer_wrong(timing: Timing) -> None:
    def said(method: Method, presence: Presence) -> list[str]:
        scenario = replace(SCENARIO, protocol=method, timing=replace(timing, presence=presence))
        return [text.split(":")[0] for text in _said(scenario)]

    comes_and_goes = {"there": "exponential(9)", "away": "exponential(1)"}
    crash, pause = (DrawnPresence(**comes_and_goes, absence=absence) for absence in ("crash", "pause"))
    leaves = {0: [(0.0, 5.0)], 1: [(2.0, 3.0), (4.0, 5.0)], 2: [(3.0, math.inf)], 3: []}
    handed, lost = GivenPresence(leaves), GivenPresence(leaves, leaving="lost")
    again = GivenPresence({0: [(0.0, 5.0)]}, period=8.0, leaving="lost")
    for method in (SGP(5, 0.1), PushDIGing(5, 0.1), PushPull(5, 0.1)):
        name = type(method).__name__
        assert said(method, crash) == [f"{name} with clients that crash"]
        assert said(method, pause) == said(method, again) == []
        assert said(method, lost) == [
            f"{name} with clients that leave for good with all they hold (client 0, 1)"
        ]
        tracked = [f"{name} with clients that leave for good (client 0, 1)"] if name != "SGP" else []
        assert said(method, handed) == tracked


def test_estimates_that_multiply_rounds_are_named_where_clients_come_and_go() -> None:
    method = CDBO(SGP(2, 0.1), HGP(2, sampling="joint", expectations="exact"), outer_steps=3)
    scenario = replace(SCENARIO, problem=bilevel_quadratic(clients=CLIENTS, seed=1), protocol=method)
    assert not _said(scenario)
    for absence, parts in (("pause", set()), ("crash", {"SGP", "Backward", "OuterPush"})):
        presence = DrawnPresence("exponential(9)", "exponential(1)", absence=absence)  # type: ignore[arg-type]
        said = _said(replace(scenario, timing=Lockstep(presence=presence)))
        assert [text for text in said if "and here they come and go with the clients" in text]
        assert {text.split()[0] for text in said if "clients that crash:" in text} == parts


def test_every_part_that_loses_is_named_once() -> None:
    method = CDBO(SGP(2, 0.1), HGP(2, sampling="joint", expectations="exact"), outer_steps=3)
    links = stochastic_directed(CLIENTS, probability=0.9, seed=1)
    scenario = replace(SCENARIO, problem=bilevel_quadratic(clients=CLIENTS, seed=1), topology=links)
    said = _said(replace(scenario, protocol=method, timing=LosingLockstep(loss=0.1)))
    assert [text.split()[0] for text in said] == ["SGP", "OuterPush"], "HGP weighs by what arrives"


def test_a_method_that_sends_nothing_is_not_named() -> None:
    assert not _said(replace(SCENARIO, protocol=Local(3, 0.1), timing=LosingTime(loss=0.1, latency=9.0)))


def _uneven(factor: float) -> VirtualTime:
    return VirtualTime(factors={4: factor})


@pytest.mark.parametrize("method", [SGP(3, 0.1), DSGD(3, 0.1), PushDIGing(3, 0.1)])
def test_paces_far_apart_are_named_with_the_slowest(method: Method) -> None:
    scenario = replace(SCENARIO, protocol=method)
    assert not _said(replace(scenario, timing=_uneven(0.9 * UNEVEN)))
    (said,) = _said(replace(scenario, timing=_uneven(UNEVEN + 7)))
    assert said.startswith(f"{type(method).__name__} at paces that differ 10-fold (client 4 is the slowest)")
    assert "PushPull" in said


@pytest.mark.parametrize("method", [SGP(3, 0.1), PushDIGing(3, 0.1)])
def test_messages_long_under_way_are_named(method: Method) -> None:
    """By the steps that are made meanwhile, not by the hour."""
    scenario = replace(SCENARIO, protocol=method)
    for step in (0.01, 1.0):
        paces = f"uniform({0.5 * step}, {1.5 * step})"
        timing = VirtualTime(compute=paces, latency=f"exponential({0.9 * LATE * step})")
        assert not _said(replace(scenario, timing=timing))
        (said,) = _said(replace(scenario, timing=replace(timing, latency=1.1 * LATE * step)))
        (said,) = _said(replace(scenario, timing=VirtualTime(compute=step, latency=10 * step)))
        assert said.startswith(f"{type(method).__name__} with messages that take as long as 10 steps: ")


def test_step_times_that_scatter_are_named() -> None:
    for compute in ("exponential(3.0)", "lognormal(1.0, 1.0)", Table((*((1.0,),) * 5, (0.1, 0.1, 1.0, 1.0)))):
        (said,) = _said(replace(SCENARIO, timing=VirtualTime(compute=compute)))
        assert said.startswith("SGP with step times that scatter ")
    for compute in ("lognormal(1.0, 0.4)", "uniform(0.5, 1.5)", Table(((0.5, 1.0),) * 6)):
        assert not _said(replace(SCENARIO, timing=VirtualTime(compute=compute)))


def test_any_latency_is_a_step_where_all_step_together() -> None:
    """What is sent at the end of a step comes when the next has begun."""
    (said,) = _said(replace(SCENARIO, timing=VirtualTime(compute=1.0, latency=0.01)))
    assert "as long as 1 step" in said


def test_what_divides_by_nothing_is_not_named() -> None:
    bad = VirtualTime(factors={0: 50.0}, latency=20.0)
    assert not _said(replace(SCENARIO, protocol=PushPull(3, 0.1), timing=bad))
    served = FedAvg(2, LocalSteps(0.1, steps=1))
    assert not _said(replace(SCENARIO, protocol=served, topology=star(CLIENTS), timing=bad))


def test_a_run_keeps_what_was_warned_of(tmp_path: Path) -> None:
    scenario = replace(SCENARIO, protocol=SGP(2, 0.01), timing=_uneven(10.0))
    with pytest.warns(UnsoundWarning, match="differ 10-fold") as told:
        result = run(scenario, out=tmp_path / "run")
    assert told[0].filename == __file__, "the line that ran it is named"
    (kept,) = json.loads((tmp_path / "run" / "run.json").read_text())["warnings"]
    assert load(tmp_path / "run").warnings == result.warnings == [kept] == [str(told[0].message)]
    sound = run(replace(scenario, timing=VirtualTime()), out=tmp_path / "sound")
    assert sound.warnings == []
    assert "warnings" not in sound.manifest


def test_who_turns_warnings_into_errors_runs_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UnsoundWarning):
            run(replace(SCENARIO, timing=_uneven(10.0)), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- when it fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(
            replace(
                SCENARIO, protocol=SGP(steps=1500, lr=1e-12, batch=None), timing=LosingLockstep(loss=0.2)
            ),
            id="loss 0.2, lr 1e-12",
        ),
        pytest.param(replace(SCENARIO, timing=VirtualTime(latency=30.0)), id="latency 30"),
        pytest.param(
            replace(
                SCENARIO,
                protocol=PushDIGing(steps=60, lr=0.1, batch=None),
                timing=VirtualTime(latency=30.0),
            ),
            id="PushDIGing, latency 30",
        ),
        pytest.param(
            replace(
                SCENARIO,
                protocol=SGP(steps=400, lr=0.1, batch=None),
                timing=VirtualTime(factors={0: 300.0}),
            ),
            id="300 times slower",
        ),
    ],
)
def test_a_small_weight_is_named_instead_of_the_learning_rate(scenario: Scenario, tmp_path: Path) -> None:
    error = _diverges(scenario, tmp_path / "run")
    said = f"of client {error.client} became {error.value} at step {error.step}; its push-sum weight ω is "
    assert said in str(error)
    weight = float(str(error).split("ω is ")[1].split()[0])
    assert 0 <= weight < SMALL
    assert "lower the learning rate, or" not in str(error)
    assert load(tmp_path / "run").manifest["error"] == str(error)


def test_a_learning_rate_too_large_is_still_named_as_such(tmp_path: Path) -> None:
    error = _diverges(replace(SCENARIO, protocol=SGP(300, lr=1e4, batch=None)), tmp_path / "run")
    assert error.cause == ""
    assert "lower the learning rate, or look at its data" in str(error)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_the_cause_comes_from_an_actor_too(tmp_path: Path) -> None:
    scenario = replace(SCENARIO, timing=VirtualTime(latency=30.0))
    here = _diverges(scenario, tmp_path / "here")
    there = _diverges(scenario, tmp_path / "there", backend="ray")
    assert str(there) == str(here)
    again = pickle.loads(pickle.dumps(there))
    assert (str(again), again.cause, again.step) == (str(here), here.cause, here.step)


@pytest.mark.parametrize("weight", [0.0, 1e-9, float("nan"), float("inf"), -1.0])
def test_a_weight_that_is_no_weight_explains(weight: float) -> None:
    said = small_weight(torch.tensor([[1.0], [weight]], dtype=torch.float64), 1)
    assert said is not None
    assert said.startswith(f"its push-sum weight ω is {weight:.2g} where the mean is 1")
    assert ("times the learning rate" in said) == (weight == 1e-9)
    assert small_weight(torch.tensor([[SMALL], [weight]]), 0) is None
