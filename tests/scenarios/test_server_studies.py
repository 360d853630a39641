"""The studies of FedNest and AggITD, small: what they print comes from the runs, whatever these say."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest

from asyncfed import Result, Study, StudyResult, run_study
from asyncfed.cli.scenarios import load_work
from scenarios import _server_methods, aggitd_table2, fednest_minimax
from scenarios._server_methods import Level, compared

DIGITS = ["dataset=digits", "clients=6", "model=mlp:6", "batch=40"]
SMALL = {
    "aggitd_table2": [
        *DIGITS, "seeds=2", "rounds=40", "goal=0.2", "participation=0.5", "epochs=1", "inner_lr=0.3",
        "outer_lr=0.3",
    ],
    "aggitd_indirect": [
        "dataset=digits", "largest=100", "clients=6", "model=mlp:6", "decay_clients=4", "loss_iterations=2",
        "decay_iterations=2", "participation=0.5",
    ],
    "aggitd_participation": [*DIGITS, "ratios=(0.34, 1.0)", "rounds=20", "epochs=1"],
    "aggitd_sgd": [*DIGITS, "participation=0.5", "rounds=20", "epochs=1"],
    "fednest_hyperrep": [*DIGITS, "participation=0.5", "rounds=20", "iterations=4", "epochs=1"],
    "fednest_loss_tuning": [
        *DIGITS, "largest=150", "ratio=0.1", "participation=0.5", "iterations=2", "central_steps=2",
        "epochs=1",
    ],
    "fednest_minimax": ["clients=8", "dimension=2", "rounds=40", "participation=0.5"],
}  # fmt: skip
ROUNDS = {  # of one outer iteration, by method
    "FBO-AggITD": 5,
    "FBO-AggITD-SGD": 4,
    "FedNest": 10,
    "FedNest-SGD": 9,
    "direct-only": 4,
    "LFedNest": 2,
    "LFedNest-SVRG": 3,
    "LFedNest-NonAlt": 1,
}


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StudyResult]:
    """Filled as they are asked for, each once."""
    return {}


@pytest.fixture
def small(
    request: pytest.FixtureRequest, studies: dict[str, StudyResult], tmp_path_factory: pytest.TempPathFactory
) -> StudyResult:
    name = request.param
    if name not in studies:
        made = load_work(name, SMALL[name])
        assert isinstance(made, Study)
        studies[name] = run_study(made, out=tmp_path_factory.mktemp(name) / "study")
    return studies[name]


each = pytest.mark.parametrize("small", sorted(SMALL), indirect=True)


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("small", [name], indirect=True)


def first_table(result: StudyResult) -> pd.DataFrame:
    return result.summary.tables[0].frame


@each
def test_it_runs_small_and_says_something(small: StudyResult) -> None:
    assert small.status == "complete"
    assert small.summary.findings
    assert small.pictures
    assert all(path.stat().st_size > 10_000 for path in small.pictures)


@each
def test_rounds_and_bytes_are_those_of_the_trace(small: StudyResult) -> None:
    for part in list(small.results)[:4]:
        result = small.results[part]
        rounds = result.trace.rounds()
        last = result.metrics.iloc[-1]
        assert result.trace.communication_rounds() == last["step"]
        assert rounds["bytes_down"].sum() + rounds["bytes_up"].sum() == last["bytes"]


@each
def test_its_sentences_follow_from_the_runs(small: StudyResult) -> None:
    """With parts left out nothing is said about them, and nothing fails."""
    work = load_work(small.name, SMALL[small.name])
    assert isinstance(work, Study)
    everything = dict(small.results)
    again = work.summarise(everything)
    assert list(again.findings) == list(small.summary.findings)
    one = dict(list(everything.items())[:1])
    assert len(work.summarise(one).tables[0].frame) == 1
    assert len(work.summarise(one).findings) < len(again.findings)


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


@of("aggitd_sgd")
def test_rounds_of_an_iteration_are_the_papers(small: StudyResult) -> None:
    table = first_table(small).set_index(["data", "method"])
    for (_, method), cell in table["rounds/iteration"].items():
        if method in ROUNDS:
            assert float(cell) == ROUNDS[method]


@of("fednest_hyperrep")
def test_rounds_of_an_iteration_are_those_of_fednests_table_2(small: StudyResult) -> None:
    for _, line in first_table(small).iterrows():
        assert float(line["rounds/iteration"]) == ROUNDS[line["method"].split(",")[0]]


@of("aggitd_table2")
def test_table_2_has_the_papers_cells_and_ours(small: StudyResult) -> None:
    table = first_table(small)
    assert len(table) == len(aggitd_table2.PAPER) + 2
    cells = {(line["data"], line["τ"], line["method"]): line for _, line in table.iterrows()}
    for cell, (rounds, accuracy) in aggitd_table2.PAPER.items():
        assert cells[cell]["paper"] == str(rounds)
        assert float(cells[cell]["paper's"]) == accuracy
        run = small.results[f"{cell[0]}/tau={cell[1]}/{cell[2]}/seed-0"]
        assert float(cells[cell]["final"]) == pytest.approx(100 * run.metrics["accuracy"].iloc[-1], abs=0.01)


@of("aggitd_table2")
def test_the_first_seed_goes_on_to_the_end_and_the_others_to_their_goal(small: StudyResult) -> None:
    for name, result in small.results.items():
        first = name.endswith("seed-0")
        assert result.scenario_data["until"] == (
            None if first else {"accuracy": {"type": "AtLeast", "value": 0.2}}
        )
        if not first and result.metrics["step"].iloc[-1] < 30:
            assert result.metrics["accuracy"].iloc[-1] >= 0.2


@of("fednest_loss_tuning")
def test_without_tuning_the_outer_variable_stays(small: StudyResult, tmp_path: Path) -> None:
    """All of its hypergradient is indirect."""
    from asyncfed import run

    result = run(small.results["iid/untuned"].scenario, out=tmp_path / "run")
    assert not result.final["outer"].any()
    tuned = run(small.results["iid/FedNest"].scenario, out=tmp_path / "tuned")
    assert tuned.final["outer"].any()


def test_minimax_with_its_own_numbers(tmp_path: Path) -> None:
    """LFedNest has no floor on the paper's problem, and one where clients have curvatures of their own;
    FedNest converges linearly on both.
    """
    work = load_work("fednest_minimax", ["clients=10", "dimension=3", "rounds=320"])
    assert isinstance(work, Study)
    only = [name for name in work.parts if not name.startswith("some-clients")]
    runs = run_study(work, out=tmp_path / "study", only=only, pictures=False).results
    floors = {name: fednest_minimax.floor_of(runs[name]) for name in only}
    assert {name for name, floor in floors.items() if floor is None} == {
        "same-curvature/FedNest", "same-curvature/LFedNest", "own-curvature/FedNest",
    }  # fmt: skip
    for variant in ("same-curvature", "own-curvature"):
        rate, straight = fednest_minimax.rate_of(runs[f"{variant}/FedNest"])
        assert straight > 0.99
        assert rate == pytest.approx(0.9 ** (5 / 4), abs=0.02)  # five local steps in four rounds


class _Course:
    """A result with these metrics only, of a run without a goal."""

    scenario_data: ClassVar[dict[str, None]] = {"until": None}

    def __init__(self, **columns: list[float]) -> None:
        self.metrics = pd.DataFrame(columns)


def result_of(**columns: list[float]) -> Result:
    return _Course(**columns)  # type: ignore[return-value]


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
