"""The study `async_server`, small: what it says comes from the runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from asyncfed import Study, StudyResult, run_study
from asyncfed.cli.scenarios import load_work
from scenarios import async_server
from scenarios.async_server import FEDASYNC, FEDAVG, FEDBUFF, METHODS, QUORUM, Interval, summarise

SMALL = ["dataset=digits", "clients=20", "model=mlp:8", "answers=80", "at_work=4", "size=2", "steps=4",
         "goal=0.3", "lr=0.3", "seeds=2"]  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    made = load_work("async_server", SMALL)
    assert isinstance(made, Study)
    return run_study(made, out=tmp_path_factory.mktemp("study") / "study")


def test_it_runs_small_and_says_what_the_runs_cost(small: StudyResult) -> None:
    assert small.status == "complete"
    assert [path.stat().st_size > 10_000 for path in small.pictures] == [True]
    costs, used, each = (table.frame.set_index(["data", "method"]) for table in small.summary.tables)
    assert list(costs.index) == [(data, method) for data in ("iid", "dirichlet") for method in METHODS]
    for data, method in costs.index:
        spent = []
        for seed in ("seed-0", "seed-1"):
            frame = small.results[f"{data}/{method}/{seed}"].metrics
            there = frame[frame["accuracy"] >= 0.3]
            assert len(there), "a goal that tells nothing"
            spent.append(there.iloc[0]["virtual_time"])
            cell = f"{spent[-1]:.3g} / {there.iloc[0]['bytes'] / 1e6:.3g}"
            assert each.loc[(data, method), seed] == cell
        error = np.std(spent, ddof=1) / np.sqrt(2)
        assert costs.loc[(data, method), "s to 30%"] == f"{np.mean(spent):.3g} ± {error:.2g}"
        assert used.loc[(data, method), "answers"] == "80"


def test_everybody_is_judged_after_as_many_answers(small: StudyResult) -> None:
    counts = {len(result.metrics) for result in small.results.values()}
    assert counts == {80 // 4 + 1}


def test_who_waits_has_nothing_stale_and_who_does_not_has(small: StudyResult) -> None:
    """A move makes those staler who are at work just then: three, for all places but one have been filled."""
    used = small.summary.tables[1].frame.set_index(["data", "method"])
    for method, moves, others in ((FEDAVG, 20, 0), (QUORUM, 40, 0), (FEDBUFF, 40, 3), (FEDASYNC, 80, 3)):
        stale = []
        for seed in ("seed-0", "seed-1"):
            rows = small.results[f"iid/{method}/{seed}"].trace.to_pandas()
            answers = rows[(rows["receiver"] == 20) & (rows["status"] == "delivered")]
            stale.append((answers["absorbed_step"] - answers["step"]).to_numpy(dtype=float))
            assert stale[-1].sum() <= others * moves
        together = np.concatenate(stale)
        assert used.loc[("iid", method), "stale, mean"] == f"{together.mean():.2f}"
        assert used.loc[("iid", method), "stale, most"] == f"{together.max():.0f}"
        assert (together.max() > 1) == (others > 0)


def test_a_quorum_hears_the_fast(small: StudyResult) -> None:
    used = small.summary.tables[1].frame.set_index(["data", "method"])
    share = {method: float(used.loc[("iid", method), "slower half, %"]) for method in METHODS}
    assert share[QUORUM] < min(share[method] for method in METHODS if method != QUORUM)


def test_who_does_not_wait_keeps_its_places_filled(small: StudyResult) -> None:
    """Four at most; not those of a quorum's clients who are left behind."""
    used = small.summary.tables[1].frame.set_index(["data", "method"])
    busy = {method: float(used.loc[("iid", method), "at work"]) for method in METHODS}
    assert busy[FEDAVG] < busy[FEDBUFF] <= 4
    assert busy[FEDAVG] < busy[FEDASYNC] <= 4
    assert busy[QUORUM] > busy[FEDBUFF]
    result = small.results[f"iid/{FEDAVG}/seed-0"]
    waited = result.trace.rounds()
    span = (waited["ended_at"] - waited["started_at"]).sum()
    works = result.trace.steps()
    works = works[works["client"] < 20]
    assert async_server.at_work(result) == pytest.approx((works.ended_at - works.started_at).sum() / span)


def test_with_parts_left_out_nothing_is_said_about_them(small: StudyResult) -> None:
    some = {name: result for name, result in small.results.items() if f"/{FEDBUFF}/" in name}
    made = summarise(some, 0.3)
    assert len(made.tables[0].frame) == 2
    assert list(made.findings) == []


class _Course:
    """A run of which only its metrics matter."""

    def __init__(self, seconds: Any, accuracy: Any) -> None:
        bytes_sent = 1e6 * np.arange(len(seconds))
        self.metrics = pd.DataFrame({"virtual_time": seconds, "bytes": bytes_sent, "accuracy": accuracy})


def test_ratios_are_within_seeds_and_carry_a_margin() -> None:
    """Seeds differ by a factor of ten, the methods by two to three in each."""
    rising = np.linspace(0, 1, 101)
    speeds = (1.0, 10.0, 3.0)
    runs: Any = {
        ("iid", FEDAVG): {f"seed-{k}": _Course(100 * s * rising, rising) for k, s in enumerate(speeds)},
        ("iid", FEDBUFF): {
            f"seed-{k}": _Course(100 * s / times * rising, rising)
            for k, (s, times) in enumerate(zip(speeds, (2.0, 2.5, 3.0), strict=True))
        },
    }
    logs = np.log([2.0, 2.5, 3.0])
    margin = 4.302653 * logs.std(ddof=1) / np.sqrt(3)  # Student's, two degrees of freedom
    low, mean, high = np.exp([logs.mean() - margin, logs.mean(), logs.mean() + margin])
    sooner, fewer, ends = async_server._findings(runs, 0.9)
    times = f"{mean:.2f}× ({low:.2f} to {high:.2f})"
    assert sooner == (f"iid: FedBuff comes sooner to 90% than FedAvg: {times}", True)
    assert fewer[1] is None
    assert ends[1] is None
    assert Interval.of(np.array([0.5])).above(0.0) is None  # one seed says nothing


def test_a_goal_that_was_missed_once_is_compared_with_nothing() -> None:
    rising = np.linspace(0, 1, 101)
    runs: Any = {
        ("iid", FEDAVG): {"seed-0": _Course(rising, rising), "seed-1": _Course(rising, rising / 2)},
        ("iid", FEDBUFF): {"seed-0": _Course(rising / 9, rising), "seed-1": _Course(rising / 9, rising)},
    }
    sooner, _, _ = async_server._findings(runs, 0.9)
    assert sooner[1] is None
    assert sooner[0].endswith("(not reached in every seed)")
