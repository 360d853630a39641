"""The study of meta FL, small, on digits: what it says comes from the runs, whatever these say."""

from __future__ import annotations

import numpy as np
import pytest

from asyncfed import Result, Scenario, Study, StudyResult, run_study
from asyncfed.cli.scenarios import load_work
from asyncfed.data import DirichletOverClasses, OverlappingDirichlet
from asyncfed.protocols import MetaFL
from scenarios import meta_cifar10
from scenarios.meta_cifar10 import (
    EXACT,
    FEDAVG,
    FO,
    HF,
    PER_FEDAVG,
    at_round,
    evaluations,
    lead,
    majority_accuracy,
)

ASKED, TAU, NU, ROUNDS = 4, 2, 3, 6
SMALL = [
    "dataset=digits", "clients=8", "participation=0.5", f"rounds={ROUNDS}", f"tau={TAU}", "batch=10",
    "seeds=2", "model=mlp:6", "alpha=0.3", "beta=0.3",
]  # fmt: skip


def study(*settings: str) -> Study:
    made = load_work("meta_cifar10", [*SMALL, *settings])
    assert isinstance(made, Study)
    return made


def scenario_of(part: str, *settings: str) -> Scenario:
    made = study(*settings).parts[part]
    assert callable(made)
    return made()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    return run_study(study(), out=tmp_path_factory.mktemp("meta") / "study")


@pytest.fixture(scope="module")
def runs(small: StudyResult) -> dict[str, Result]:
    return {row: small.results[f"{row}/seed-0"] for row in meta_cifar10.ROWS}


def test_it_runs_small_and_says_something(small: StudyResult) -> None:
    assert small.status == "complete"
    assert len(small.results) == 10
    assert all(path.stat().st_size > 10_000 for path in small.pictures)
    assert len(small.pictures) == 1
    said = [words for words, _ in small.summary.findings]
    assert sum("rounds ν = 3, exact" in words for words in said) == 9
    assert sum(words.startswith("at equal gradient evaluations") for words in said) == 6
    assert not any("independent" in words for words in said)  # that was another dataset


def test_evaluations_are_those_of_the_table_of_the_method(runs: dict[str, Result]) -> None:
    """Of all asked, in a round: τ(ν + 1) gradients and τν products; 3ν + 1 gradients where they are
    differences.
    """
    counted = {FEDAVG: (1, 0), PER_FEDAVG: (2, 1), EXACT: (NU + 1, NU), FO: (NU + 1, 0), HF: (3 * NU + 1, 0)}
    for row, (gradients, products) in counted.items():
        for price in (1, 2):
            each = ASKED * TAU * (gradients + price * products)
            np.testing.assert_array_equal(evaluations(runs[row], price), each * np.arange(ROUNDS + 1))


def test_the_tables_hold_what_was_measured(small: StudyResult) -> None:
    by_rounds, by_two, by_one = (table.frame for table in small.summary.tables)
    ends = [100 * small.results[f"{EXACT}/seed-{seed}"].metrics["accuracy"].iloc[-1] for seed in (0, 1)]
    row = by_rounds.set_index("method").loc["ν = 3, exact"]
    assert row[f"after {ROUNDS}"] == f"{np.mean(ends):.1f} ({min(ends):.1f}–{max(ends):.1f})"
    assert list(by_rounds["method"])[-1] == "one's own majority class"
    first = small.results[f"{PER_FEDAVG}/seed-0"].metrics
    for table, price in ((by_two, 2), (by_one, 1)):
        budget = (first["gradients"] + price * first["hessian_products"]).iloc[2] / 1000
        found = table.set_index("method").loc["Per-FedAvg (ν = 1)", f"{budget:.3g}"]
        accuracies = [
            100 * small.results[f"{PER_FEDAVG}/seed-{seed}"].metrics["accuracy"].iloc[2] for seed in (0, 1)
        ]
        assert str(found).startswith(f"{np.mean(accuracies):.1f} (")


def test_a_lead_is_taken_where_both_have_computed_as_much(runs: dict[str, Result]) -> None:
    """First-order against exact, which costs two and a half times as much: step by step, by hand."""
    exact, fo = (100 * runs[row].metrics["accuracy"].to_numpy() for row in (EXACT, FO))
    cost = {row: ASKED * TAU * each for row, each in ((EXACT, 10), (FO, 4))}

    def at(curve: np.ndarray, rounds: float) -> float:
        below = min(int(rounds), ROUNDS - 1)
        return float(curve[below] + (rounds - below) * (curve[below + 1] - curve[below]))

    budgets = np.linspace(0, ROUNDS * cost[FO], 200)
    ahead = [at(fo, budget / cost[FO]) - at(exact, budget / cost[EXACT]) for budget in budgets]
    assert lead(runs[FO], runs[EXACT], 2) == pytest.approx(np.mean(ahead))
    assert lead(runs[FO], runs[FO], 1) == 0
    assert np.isnan(at_round(runs[FO], ROUNDS + 1))


def test_the_ceiling_is_the_share_of_each_clients_most_frequent_class() -> None:
    problem = scenario_of("FO/seed-1", "samples=60").problem
    right = 0
    for client in range(8):
        train, test = (split.of(client)[1].tolist() for split in (problem.data.train, problem.data.test))
        assert (len(train), len(test)) == (48, 12)
        favourite = max(sorted(set(train)), key=train.count)
        right += test.count(favourite)
    assert majority_accuracy(problem) == right / (8 * 12)
    assert right / (8 * 12) > 0.8  # Dirichlet(0.01): nearly one class each


def test_rows_differ_in_the_method_alone() -> None:
    methods = {row: scenario_of(f"{row}/seed-0").protocol for row in meta_cifar10.ROWS}
    for row, (nu, variant) in {
        FEDAVG: (0, "exact"), PER_FEDAVG: (1, "exact"), EXACT: (3, "exact"), FO: (3, "fo"), HF: (3, "hf"),
    }.items():  # fmt: skip
        method = methods[row]
        assert isinstance(method, MetaFL)
        assert (method.nu, method.variant, method.tuning, method.tau) == (nu, variant, 3, TAU)
        assert method.delta == (0.1 if row == HF else None)


def test_other_readings_are_settings() -> None:
    usual = scenario_of("FO/seed-0").problem.recipe
    other = scenario_of(
        "FO/seed-0", "pixels=unit", "split=disjoint", "model=mlp:6:tanh", "concentration=0.5"
    ).problem.recipe
    assert usual is not None
    assert other is not None
    assert usual.arguments["partition"]["type"] == OverlappingDirichlet.__name__
    assert usual.arguments["pixels"] == "normalised"
    partition = other.arguments["partition"]
    assert (partition["type"], partition["alpha"], partition["samples"]) == (
        DirichletOverClasses.__name__, 0.5, 35,
    )  # fmt: skip
    assert (other.arguments["pixels"], other.arguments["model"]) == ("unit", "mlp:6:tanh")


def test_its_sentences_follow_from_the_runs(small: StudyResult) -> None:
    """With parts left out nothing is said about them, and nothing fails."""
    work, everything = study(), dict(small.results)
    again = work.summarise(everything)
    assert list(again.findings) == list(small.summary.findings)
    alone = work.summarise({name: run for name, run in everything.items() if name.startswith(FO)})
    assert len(alone.tables[0].frame) == 2
    assert ["majority class" in words for words, _ in alone.findings] == [True]


def test_numbers_of_the_independent_implementation_stand_beside_ours(small: StudyResult) -> None:
    """Where the setting is theirs; here its table is made of other runs, to see that it is compared."""
    runs = {row: {0: small.results[f"{row}/seed-0"]} for row in (FEDAVG, EXACT)}
    low, high = (at_round(small.results[f"{FEDAVG}/seed-0"], ROUNDS) + shift for shift in (-3, 3))
    same = [(round(low), round(high))] * 3
    summary = meta_cifar10.summarise(
        runs, {0: 0.9}, NU, ROUNDS, {FEDAVG: same, EXACT: [(200, 201)] * 3, FO: same}
    )
    said = {words.split(" after")[0]: holds for words, holds in summary.findings if "independent" in words}
    assert said[meta_cifar10.label(EXACT, NU)] is False
    assert set(said) == {meta_cifar10.label(EXACT, NU), meta_cifar10.label(FEDAVG, NU)}
    assert summary.tables[0].frame["theirs"].iloc[1] == "200–201 / 200–201 / 200–201"
