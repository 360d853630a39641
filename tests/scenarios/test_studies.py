"""Every study that comes along runs small, and what it says in its full setting where that is affordable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncfed import Study, run, run_study
from asyncfed.cli.scenarios import known_studies, load_work
from asyncfed.problems import Problem, personalized_classification
from asyncfed.protocols import PDBO, VRHGP, StepDecay
from scenarios import hgp_error, quickstart
from scenarios._personalization import BEGINNINGS, ROWS, parts, scaled

SMALL = {
    "quickstart": ["clients=8", "horizon=12", "rounds=1", "moves=10", "model=logistic"],
    "stragglers_compared": ["seeds=1", "clients=10", "horizon=10"],
    "hgp_error": ["seeds=1", "rounds=5", "steps=5", "dataset=digits", "samples=20"],
    "pdbo_emnist": [
        "network=all", "dataset=digits", "clients=6", "steps=6", "batch=8", "outer_steps=1", "rounds=2",
        "model=logistic", "limit=900", "extra_test=10", "epochs=4",
    ],
    "pdbo_cifar10": [
        "dataset=digits", "clients=6", "steps=6", "batch=8", "outer_steps=1", "rounds=2",
        "model=logistic",
    ],
    "pdbo_emnist_full": ["clients=2", "limit=400", "steps=1", "rounds=1", "outer_steps=1", "batch=4"],
    "pdbo_shakespeare": [
        "clients=3", "hidden=4", "length=5", "steps=2", "rounds=1", "outer_steps=1", "batch=4",
    ],
}  # fmt: skip
ONLY = {
    "pdbo_emnist_full": ["StoD/SGP", "StoD/PDBO-MTL&DA"]
}  # a CNN of 2.3 million parameters takes its time
NEEDS = {"pdbo_emnist_full": "EMNIST", "pdbo_shakespeare": "shakespeare"}
SHARED = Path(__file__).parents[3] / "shared" / "data"


def find_data(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "ASYNCFED_DATA" not in os.environ:
        monkeypatch.setenv("ASYNCFED_DATA", str(SHARED))
    if not (Path(os.environ["ASYNCFED_DATA"]) / folder).exists():
        pytest.skip(f"{folder} is not in ASYNCFED_DATA")


def made(name: str, *settings: str) -> Study:
    work = load_work(name, settings)
    assert isinstance(work, Study)
    return work


def test_all_of_them_are_here() -> None:
    elsewhere = {
        name
        for name in known_studies()
        if name.startswith(("aggitd_", "fednest_", "async_", "churn", "meta_"))
    }
    assert sorted({*SMALL, *elsewhere}) == sorted(known_studies())


@pytest.mark.parametrize("name", sorted(SMALL))
def test_it_runs_small(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS:
        find_data(NEEDS[name], monkeypatch)
    study = made(name, *SMALL[name])
    assert study.name == name
    only = ONLY.get(name)
    result = run_study(study, out=tmp_path / "study", only=only)
    assert result.status == ("complete" if only is None else "partial")
    assert len(result.table()) >= len(study.parts if only is None else only)
    assert all(path.stat().st_size > 10_000 for path in result.pictures)
    assert len(result.pictures) == (2 if name == "hgp_error" else 1)


def test_personalization_begins_with_the_rows_that_it_is_said_to_begin_with(tmp_path: Path) -> None:
    """λ = 0 weighs all labels alike, and all models: the same bytes, so that these rows need no runs."""

    def problem(personalize: str, outer_l2: Any) -> Problem:
        return personalized_classification("digits", clients=4, personalize=personalize, outer_l2=outer_l2)

    scale = scaled(4, 12, 8, 0.2, 1.0, 1, 0.25, 2, seed=0)
    made = parts(ROWS, ("StoD",), problem, scale)
    for row, longer in BEGINNINGS.items():
        alone, tuned = (run(made[f"StoD/{name}"](), out=tmp_path / name).metrics for name in (row, longer))
        begun = tuned[tuned["outer_step"] == 0].iloc[-1]
        for figure in ("accuracy", "accuracy_p10", "loss", "bytes"):
            assert begun[figure] == alone[figure].iloc[-1]


def test_on_fc_fedavg_is_what_fedavg_plus_has_before_its_tuning(tmp_path: Path) -> None:
    """Where PDBO-DA, which begins with it, was not asked for; the clients' 10th percentile, too."""
    study = made("pdbo_emnist", *SMALL["pdbo_emnist"], "network=FC")
    result = run_study(study, out=tmp_path / "study", only=["FC/FedAvg+"])
    part = result.results["FC/FedAvg+"]
    mean = 100 * part.metrics["accuracy_tuned_0"].iloc[-1]
    tenth = 100 * np.percentile(part.clients["accuracy_tuned_0"], 10)
    rows = result.table().set_index("method")["accuracy"]
    assert list(rows.index) == ["SGP", "FedAvg+"]
    assert rows["SGP"] == f"{mean:.1f} / {tenth:.1f}"


def test_rows_that_diverge_are_said_to(tmp_path: Path) -> None:
    """Ensembles at a senseless rate: their rows have no figures, and nothing is compared with them."""
    study = made("pdbo_cifar10", *SMALL["pdbo_cifar10"], "lr_mtl=1e30")
    result = run_study(study, out=tmp_path / "study")
    table = result.table().set_index("method")["accuracy"]
    assert {method for method, figures in table.items() if figures == "diverged"} == {
        "PDBO-MTL&DA", "PDBO-MTL", "SGP-MTL", "Local-MTL"
    }  # fmt: skip
    assert (
        "StoD: PDBO-MTL&DA ≥ PDBO-MTL: PDBO-MTL&DA and PDBO-MTL diverged",
        None,
    ) in result.summary.findings
    assert any(words.startswith("StoD: PDBO-DA (") for words, _ in result.summary.findings)


def test_the_quickstart_shows_what_it_promises(tmp_path: Path) -> None:
    """On a seed that it was not made with; docs/results.md has ten."""
    result = run_study(quickstart.study(seed=5), out=tmp_path / "study", pictures=False)
    assert len(result.table()) == 4
    assert [holds for _, holds in result.summary.findings] == [True] * 3
    assert sum(part.manifest["wall_seconds"] for part in result.results.values()) < 60


def test_shakespeare_has_the_sizes_and_rates_that_were_fixed_beforehand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_data("shakespeare", monkeypatch)
    study = made("pdbo_shakespeare")
    for part, rate in (("StoD/PDBO-DA", 0.2), ("StoD/PDBO-MTL&DA", 1.0)):
        scenario = study.parts[part]()
        method = scenario.protocol
        assert isinstance(method, PDBO)
        inner = method.inner
        assert (inner.steps, inner.batch, inner.weight_decay) == (600, 32, 1e-3)
        assert inner.lr == StepDecay(rate, at=(500, 550))
        assert (method.outer_steps, method.draws) == (8, "repeated")
        assert method.hypergradient == VRHGP(20, 0.9, 0.1, sampling="joint", lr=0.01 * rate)
        samples, following = scenario.problem.data.train.of(0)
        assert scenario.problem.clients == 20
        assert samples.shape == following.shape == (len(samples), 40)
        weights = scenario.problem.init_inner(torch.Generator())
        assert isinstance(weights, dict)
        assert weights["lstm.weight_hh_l1"].shape[-2:] == (256, 64)
    last = made("pdbo_shakespeare", "positions=last").parts["StoD/Local"]().problem
    assert last.data.train.of(0)[1].ndim == 1


def test_variance_reduction_as_in_figure_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting of Fig. 2 in full, five seeds of data, network and links: at M = 500 the error ‖v − truth‖
    of VR-HGP with (0.9, 0.1) is below HGP's in at least four, and the smallest of the five on average.
    """
    find_data("MNIST", monkeypatch)
    last = []
    for seed in range(5):
        scenario = hgp_error.scenario("StoD", seed, rounds=500, steps=500, lr=0.5, dataset="mnist")
        result = run(scenario, out=tmp_path / str(seed))
        last.append(hgp_error.errors(result)[0][:, -1])
    errors = np.array(last)
    hgp, reduced = hgp_error.PAIRS.index((1.0, 0.0)), hgp_error.PAIRS.index((0.9, 0.1))
    assert (errors[:, reduced] < errors[:, hgp]).sum() >= 4
    assert errors.mean(0).argmin() == reduced


def test_figure_1_compares_the_coefficients() -> None:
    """By hand for (0.9, 0.1): at η_A = 0 nothing but α is left, μ_{1,0}/μ_{α,β} = √((1 + α)/(1 − α)); at ½
    1 − β + βη is 0.95.
    """
    zero, half = hgp_error.advantage(0.9, 0.1, np.array([1e-9, 0.5]))
    assert zero == pytest.approx(19**0.5)
    inner = (1 + 0.855) / (1 - 0.855) * 0.0025 / (1 - 0.95**2)
    assert half == pytest.approx((16 / 3 / (8 / 19 * (1 + inner))) ** 0.5)
    summary = hgp_error.figure_1()
    table = summary.tables[0].frame.set_index("(α, β)")
    assert float(table.loc["(1, 0)", "η_A = 0.5"]) == pytest.approx((16 / 3) ** 0.5, abs=1e-3)
    assert len(table) == 6
    assert [holds for _, holds in summary.findings] == [True, True]
    assert "at least 3.07 times (at η_A = 0.564)" in summary.findings[0][0]


def test_the_coefficient_of_theorem_1() -> None:
    """By hand: μ_{1,0}(½) = √(8 · ½ / ¾), and μ_{½,½}(½) with 1 − β + βη = ¾."""
    assert hgp_error.coefficient(1.0, 0.0, 0.5) == pytest.approx((16 / 3) ** 0.5)
    inner = (1 + 3 / 8) / (1 - 3 / 8) * (1 / 16) / (1 - 9 / 16)
    assert hgp_error.coefficient(0.5, 0.5, 0.5) == pytest.approx((8 / 3 * (1 + inner)) ** 0.5)
