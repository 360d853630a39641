"""What the studies of FedNest and AggITD say of made-up courses: their sentences are computed."""

from __future__ import annotations

import itertools
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest

from asyncfed import Result
from scenarios import _server_methods, aggitd_cnn, aggitd_gossip, aggitd_table2, fednest_rates
from scenarios._server_methods import Level, compared


def test_levels_are_told_apart_by_their_noise() -> None:
    """A course of independent evaluations of deviation σ: the mean of its last ten has the error σ/√10, here
    to 30% (five standard errors of a deviation from twenty correlated changes, averaged over 50 courses).
    """
    noise = np.random.default_rng(0).normal(0.8, 0.02, (50, 100))
    errors = [Level.of(course).error for course in noise]
    assert np.mean(errors) == pytest.approx(0.02 / np.sqrt(10), rel=0.3)
    levels = [Level.of(course) for course in noise]
    apart = [a.above(b) is not None for a, b in itertools.combinations(levels, 2)]
    assert np.mean(apart) < 0.15
    assert Level(0.9, 0.01).above(Level(0.8, 0.01)) is True
    assert Level(0.8, 0.01).above(Level(0.9, 0.01)) is False
    assert Level(0.81, 0.01).above(Level(0.8, 0.01)) is None
    (close, none), (far, yes) = compared(
        "{0} over {1}",
        {"a": (Level(0.81, 0.01), Level(0.8, 0.01)), "b": (Level(0.9, 0.0), Level(0.8, 0.0))},
    )
    assert (none, yes) == (None, True)
    assert close == "a: 81.00 over 80.00 (too close to say)"
    assert far == "b: 90.00 over 80.00"


class _Course:
    """A result with these metrics only, of a run without a goal."""

    scenario_data: ClassVar[dict[str, None]] = {"until": None}

    def __init__(self, complete: bool = True, **columns: list[float]) -> None:
        self.metrics, self.complete = pd.DataFrame(columns), complete


def result_of(complete: bool = True, **columns: list[float]) -> Result:
    return _Course(complete, **columns)  # type: ignore[return-value]


def table_2_of(fednest: list[float], aggitd: list[float], direct: list[float]) -> dict[str, bool | None]:
    """What Table 2's study says of two seeds with these accuracies, iteration by iteration."""
    runs = {
        f"{partition}/tau={tau}/{method}/seed-{seed}": result_of(
            step=[rounds * k for k in range(len(course))],
            outer_step=list(range(len(course))),
            accuracy=[value + 0.005 * seed for value in course],
            bytes=[float(k) for k in range(len(course))],
        )
        for seed in range(2)
        for partition in ("iid", "non-iid")
        for tau in (1, 5)
        for method, rounds, course in (
            ("FedNest", 10, fednest), ("FBO-AggITD", 5, aggitd), ("direct-only", 4, direct),
        )
    }  # fmt: skip
    findings = aggitd_table2.summarise(runs, 0.9).findings
    chosen = {text: holds for text, holds in findings if text.startswith("iid, τ = 1")}
    words = (
        "needs fewer rounds",
        "twice as many",
        "ends higher",
        "equals FedNest",
        "changes nothing",
        "than AggITD",
    )
    return {word: next(holds for text, holds in chosen.items() if word in text) for word in words}


def test_findings_of_table_2_are_computed() -> None:
    """Equal courses: half the rounds. AggITD far behind in every iteration: none of it."""
    course = [0.1, 0.5, 0.91, 0.92]
    equal = table_2_of(course, course, course)
    assert equal == {
        "needs fewer rounds": True, "twice as many": True, "ends higher": False, "equals FedNest": True,
        "changes nothing": True, "than AggITD": True,
    }  # fmt: skip
    behind = table_2_of(course, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], [0.1, 0.2, 0.3, 0.4])
    assert behind == {
        "needs fewer rounds": False, "twice as many": None, "ends higher": False, "equals FedNest": False,
        "changes nothing": False, "than AggITD": None,
    }  # fmt: skip


def test_rounds_to_a_goal_are_those_of_the_first_evaluation_that_reaches_it() -> None:
    run = result_of(step=[0, 5, 10, 15], accuracy=[0.1, 0.8, 0.9, 0.85])
    assert _server_methods.rounds_to(run, 0.9) == 10
    assert _server_methods.rounds_to(run, 0.95) is None


def test_differences_are_at_the_same_outer_iteration() -> None:
    a = result_of(outer_step=[0, 1, 2, 3], accuracy=[0.0, 0.5, 0.7, 0.8])
    b = result_of(outer_step=[0, 2, 4], accuracy=[0.0, 0.6, 0.9])
    assert _server_methods.differences(a, b) == pytest.approx([0.1])


def test_noise_is_that_of_changes_and_not_of_a_trend() -> None:
    rising = result_of(accuracy=[0.01 * k for k in range(30)])
    jumping = result_of(accuracy=[0.5 + 0.1 * (k % 2) for k in range(30)])
    assert _server_methods.noise(rising) == pytest.approx(0.0, abs=1e-12)
    assert _server_methods.noise(jumping) == pytest.approx(0.1, rel=0.01)


def test_a_mean_with_a_missing_value_is_missing() -> None:
    assert _server_methods.average([1.0, 3.0]) == 2.0
    assert _server_methods.average([1.0, None]) is None
    assert _server_methods.average([]) is None


class _Timed(_Course):
    def __init__(self, wall_seconds: float, **columns: list[float]) -> None:
        super().__init__(complete=True, **columns)
        self.manifest = {"wall_seconds": wall_seconds}


def test_growth_is_a_power_of_the_inner_size_and_time_is_shared_out_evenly() -> None:
    """A cost of n² for n = 10, 20, 40 inner numbers, in five steps of two evaluations."""
    runs = {
        width: _Timed(0.5, step=[0.0, 5.0], bytes=[0.0, 5.0 * size**2], accuracy=[0.1, 0.6])
        for width, size in ((0, 10), (1, 20), (3, 40))
    }
    assert aggitd_gossip.exponent(runs, "bytes") == pytest.approx(2.0)  # type: ignore[arg-type]
    assert aggitd_gossip.exponent(runs, "seconds") == pytest.approx(0.0, abs=1e-12)  # type: ignore[arg-type]
    run: Result = runs[0]  # type: ignore[assignment]
    assert aggitd_gossip.seconds(run).tolist() == [0.0, 0.5]
    assert aggitd_gossip.each_step(run, "seconds") == pytest.approx(0.1)
    assert aggitd_gossip.seconds_to(run, 0.5) == 0.5
    assert aggitd_gossip.seconds_to(run, 0.7) is None


def search(ends: list[float], complete: bool = True) -> dict[str, bool | None]:
    """What `aggitd_cnn` says of FedNest with these accuracies at the end of four runs on non-iid clients, and
    of AggITD with 0.96.
    """
    runs = {
        f"non-iid/{kind}/{inner:g},{outer:g}": result_of(
            complete=complete or kind == aggitd_cnn.AGGITD,
            step=[0.0, 10.0, 20.0, 30.0],
            outer_step=[0.0, 1.0, 2.0, 3.0],
            accuracy=[0.1, 0.1, end, end],
            loss=[2.3] * 4,
            bytes=[0.0, 1.0, 2.0, 3.0],
        )
        for kind, accuracies in ((aggitd_cnn.AGGITD, [0.96]), ("FedNest", ends))
        for end, (inner, outer) in zip(accuracies, aggitd_cnn.PAIRS, strict=False)
    }
    findings = aggitd_cnn.summarise(runs).findings
    words = ("within a point", "at none of the 4", "at all 4", "is above FedNest at its best")
    return {word: next(holds for text, holds in findings if word in text) for word in words}


def test_findings_of_the_search_for_rates_are_computed() -> None:
    assert list(search([0.8, 0.5, 0.3, 0.15]).values()) == [True, True, False, True]
    assert list(search([0.8, 0.95, 0.3, 0.15]).values()) == [True, False, False, True]
    assert list(search([0.97, 0.15, 0.15, 0.15]).values()) == [True, False, False, False]
    assert list(search([0.15] * 4).values()) == [True, True, True, True]
    assert list(search([0.95] * 4, complete=False).values()) == [True, True, True, True]


@pytest.mark.parametrize(
    ("accuracies", "complete", "said"),
    [
        ([0.1, 0.3, 0.5, 0.5], False, "diverged"),
        ([0.1, 0.3, 0.5, 0.19], True, "at chance"),
        ([0.1, 0.3, 0.5, 0.52], True, "rising"),
        ([0.1, 0.3, 0.52, 0.5], True, "level"),
    ],
)
def test_what_became_of_a_run(accuracies: list[float], complete: bool, said: str) -> None:
    run = result_of(complete=complete, accuracy=accuracies)
    assert _server_methods.fate(run) == said
    assert _server_methods.rise(run) == pytest.approx(accuracies[3] - accuracies[2])


def rates_of(light: dict[float, list[float]], others: list[float]) -> dict[str, bool | None]:
    """What `fednest_rates` says of LFedNest with these courses by rate, and of the others with one."""
    runs = {
        f"lr={rate:g}/{kind}": result_of(
            complete=True,
            step=list(range(len(values))),
            outer_step=list(range(len(values))),
            accuracy=values,
            bytes=[0.0] * len(values),
        )
        for rate, own in light.items()
        for kind in fednest_rates.METHODS
        for values in [own if kind == "LFedNest" else others]
    }
    findings = fednest_rates.summarise(runs).findings
    words = (
        "the smaller the rate", "has more communications", "at the smallest rate", "at any larger rate",
        "lr=0.1: FedOut makes FedNest-SGD steadier than LFedNest", "FedNest (90.00) is above LFedNest (",
    )  # fmt: skip
    return {word: next(holds for text, holds in findings if word in text) for word in words}


def test_findings_about_learning_rates_are_computed() -> None:
    """A steady course, one that jumps, and one that has fallen."""
    steady = [0.1] + [0.9 + 1e-4 * (-1) ** k for k in range(30)]
    high = [0.1] + [0.9] * 30
    jumping = [0.1] + [0.5 + 0.3 * (k % 2) for k in range(30)]
    assert list(rates_of({0.1: jumping, 0.01: steady}, high).values()) == [True] * 6
    fallen = [0.1] + [0.95] * 10 + [0.9] * 30
    assert list(rates_of({0.1: steady, 0.01: fallen}, high).values()) == [
        False, True, False, False, True, None,
    ]  # fmt: skip
