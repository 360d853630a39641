"""The studies of FedNest and AggITD, small: what they print comes from the runs, whatever these say."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from asyncfed import Study, StudyResult, run_study
from asyncfed.cli.scenarios import load_work
from scenarios import _server_methods, aggitd_table2, fednest_minimax

DIGITS = ["dataset=digits", "clients=6", "model=mlp:6", "batch=40"]
SMALL = {
    "aggitd_table2": [
        *DIGITS, "seeds=2", "rounds=40", "goal=0.2", "participation=0.5", "epochs=1", "inner_lr=0.3",
        "outer_lr=0.3",
    ],
    "aggitd_cnn": [
        "dataset=digits", "clients=6", "model=mlp:12,9", "batch=40", "pairs=((0.3, 0.5), (0.03, 0.05))",
        "participation=0.5", "rounds=30", "every=10", "judged=20", "epochs=1", "goal=0.2",
    ],
    "aggitd_cifar10": [
        "dataset=digits", "clients=6", "mlp=mlp:6", "cnn=mlp:8,6", "batch=40", "participation=0.5",
        "rounds=40", "epochs=1",
    ],
    "aggitd_gossip": [
        "dataset=digits", "clients=4", "samples=400", "widths=(2, 3)", "width=3", "iterations=6", "few=3",
        "epochs=1", "batch=40",
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
    "fednest_rates": [*DIGITS, "rates=(1.0, 0.1)", "participation=0.5", "rounds=20", "epochs=1"],
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
    for result in [small.results[part] for part in list(small.results)[:4]]:
        last = result.metrics.iloc[-1]
        if result.scenario.protocol.server is None:
            assert result.trace.edges()["bytes"].sum() == last["bytes"]
            continue
        rounds = result.trace.rounds()
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


@of("aggitd_gossip")
def test_a_message_of_gossip_has_full_matrices(small: StudyResult) -> None:
    """64 pixels, ten classes: 65 w outer and 10 (w + 1) inner numbers of four bytes each. Every one of four
    clients sends two messages a round.
    """
    table = first_table(small).set_index(["width", "method"])
    for width in (2, 3):
        x, y, run = 65 * width, 10 * (width + 1), small.results[f"width={width}/gossip"]
        numbers = 2 * x + 2 * y + x * y + 5 * y * y
        assert set(run.trace.to_pandas()["bytes"]) == {4 * numbers}
        line = table.loc[width, "gossip"]
        assert line["inner"] == y
        assert float(line["KB/message"]) == pytest.approx(4e-3 * numbers, rel=0.01)
        assert float(line["MB"]) == pytest.approx(8 * 4e-6 * numbers, rel=0.01)
        assert float(line["products"]) == 4 * y
    assert table.loc[(3, "gossip"), "steps"] == table.loc[(3, "FedNest"), "steps"] == 6


def test_evaluations_are_about_as_many_rounds_apart_for_every_method() -> None:
    for kind, rounds in _server_methods.ROUNDS.items():
        assert rounds == ROUNDS[kind]
        assert abs(_server_methods.iterations_in(kind, 40) * rounds - 40) <= rounds / 2
