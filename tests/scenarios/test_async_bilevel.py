"""The study `async_bilevel`, small: what it says comes from the runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from asyncfed import Study, StudyResult, run_study
from asyncfed.cli.scenarios import load_work
from scenarios.async_bilevel import AGGITD, BUFFERED, METHODS, PEERS, SIMFBO, summarise

SMALL = [
    "dataset=digits", "clients=5", "samples=60", "model=mlp:6", "rounds=10", "goal=0.2", "inner_lr=0.3",
    "outer_lr=0.3", "epochs=1", "simfbo_batch=10", "tau=2", "seeds=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    made = load_work("async_bilevel", SMALL)
    assert isinstance(made, Study)
    return run_study(made, out=tmp_path_factory.mktemp("study") / "study")


def test_it_runs_small_and_says_what_the_runs_cost(small: StudyResult) -> None:
    assert small.status == "complete"
    assert [path.stat().st_size > 10_000 for path in small.pictures] == [True]
    table = small.summary.tables[0].frame.set_index("method")
    assert list(table.index) == list(METHODS)
    assert list(table["iterations"]) == ["1", "2", "10", "20", "2"]
    for method in METHODS:
        runs = [small.results[f"{method}/seed-{seed}"] for seed in range(1 if method == PEERS else 2)]
        spent = np.mean([result.trace.to_pandas()["bytes"].sum() for result in runs])
        assert table.loc[method, "GB in all"] == f"{spent / 1e9:.3g}"
        seconds = np.mean([result.metrics["virtual_time"].iloc[-1] for result in runs])
        assert table.loc[method, "s in all"] == f"{seconds:.3g}"
    assert small.summary.findings == summarise(small.results, 0.2).findings


def test_with_a_buffer_as_many_are_at_work(small: StudyResult) -> None:
    """Three of five are asked; with a buffer three are at work, and it moves on half of them."""
    waits, moves = (small.results[f"{method}/seed-0"].scenario for method in (SIMFBO, BUFFERED))
    asked = small.results[f"{SIMFBO}/seed-0"].trace.rounds()["asked"]
    assert set(asked) == {3}
    server = moves.protocol.server
    assert (server.places(5), server.needed(5)) == (3, 1)
    assert moves.protocol.server_rates == waits.protocol.server_rates
    seconds = [small.results[f"{one}/seed-0"].metrics["virtual_time"].iloc[-1] for one in (SIMFBO, BUFFERED)]
    assert seconds[1] < seconds[0]


def test_with_parts_left_out_nothing_is_said_about_them(small: StudyResult) -> None:
    some = {name: result for name, result in small.results.items() if name.startswith(f"{SIMFBO}/")}
    made = summarise(some)
    assert len(made.tables[0].frame) == 1
    assert list(made.findings) == []


def test_without_a_server_local_steps_take_the_same_time(small: StudyResult) -> None:
    """Of everybody's slowest: an iteration's means and its local steps, of a client of that pace."""
    scenario = small.results[f"{PEERS}/seed-0"].scenario
    slowest = max(scenario.timing.factors)
    rounds = 5 * scenario.protocol.mean_rounds
    local = scenario.protocol.inner.steps - 1 + scenario.protocol.outer.steps - 1
    seconds = float(small.results[f"{PEERS}/seed-0"].metrics["virtual_time"].iloc[-1])
    assert seconds == pytest.approx(2 * slowest * (rounds + local), rel=0.02)


class _Course:
    """A run of which only its metrics matter."""

    def __init__(self, seconds: Any, accuracy: Any) -> None:
        self.metrics = pd.DataFrame(
            {
                "virtual_time": seconds,
                "bytes": 1e6 * np.asarray(seconds),
                "accuracy": accuracy,
                "outer_step": range(len(seconds)),
            }
        )


def test_methods_are_compared_where_both_have_spent_the_same() -> None:
    """One is judged ten times as often and goes on for longer: what counts is the same stretch of both."""
    noise = np.random.default_rng(0).normal(0, 0.002, 400)
    often = np.linspace(0, 40, 400)
    seldom = np.linspace(0, 20, 40)
    rising, level = often / 50 + noise, 0.3 + noise[:40]
    runs: Any = {f"{SIMFBO}/seed-0": _Course(often, rising), f"{AGGITD}/seed-0": _Course(seldom, level)}
    findings = summarise(runs, 0.35).findings
    assert [holds for _, holds in findings] == [True, True]
    assert findings[0][0] == "after 20 s: SimFBO is above FBO-AggITD: 33.37 against 30.00"  # 1/3, and 0.3
    equal: Any = {f"{SIMFBO}/seed-0": _Course(often, 0.3 + noise), f"{AGGITD}/seed-0": _Course(seldom, level)}
    assert [holds for _, holds in summarise(equal, 0.35).findings] == [None, None]
    table = summarise(runs, 0.35).tables[0].frame.set_index("method")
    assert float(table.loc[SIMFBO, "s to 35%"]) == pytest.approx(17.5, abs=0.3)
    assert table.loc[AGGITD, "s to 35%"] == "–"
