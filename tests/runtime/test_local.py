"""The rules and small promises of the local backend and of `run`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncfed import Progress, Scenario, VirtualTime, load, run
from asyncfed.problems import classification, quadratic
from asyncfed.protocols import SGP, Local
from asyncfed.runtime.local import choose_device, worthwhile_threads
from topologies import edgeless, stochastic_directed


def test_small_work_gets_one_thread_and_large_work_all() -> None:
    assert worthwhile_threads(clients=100, batch=16, parameters=650, available=8) == 1
    assert worthwhile_threads(clients=100, batch=64, parameters=159_010, available=8) == 8


def test_the_number_of_threads_is_put_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        scenario = Scenario(
            problem=quadratic(clients=3),
            topology=stochastic_directed(3, seed=0),
            protocol=SGP(steps=2, lr=0.1, batch=None),
        )
        run(scenario, out=tmp_path / "run")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_auto_takes_the_gpu_where_there_is_one() -> None:
    assert choose_device("auto", cuda=True) == "cuda"
    assert choose_device("auto", cuda=False) == "cpu"
    assert choose_device("cuda:1", cuda=True) == "cuda:1"


def test_progress_reaches_the_end_by_steps_and_by_the_horizon(tmp_path: Path) -> None:
    seen: list[Progress] = []
    scenario = Scenario(
        problem=quadratic(clients=3),
        topology=stochastic_directed(3, seed=0),
        protocol=SGP(steps=10_000, lr=0.01, batch=None),
        timing=VirtualTime(compute=1.0, horizon=20.0),
    )
    run(scenario, out=tmp_path / "run", progress=seen.append)
    assert seen[-1].fraction == pytest.approx(0.95)  # the last step starts at 19
    assert [p.fraction for p in seen] == sorted(p.fraction for p in seen)
    assert seen[-1].steps_done == 60
    assert seen[-1].totals.sent > 0


def test_a_numbered_directory_is_made_where_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCFED_RUNS", str(tmp_path / "mine"))
    scenario = Scenario(
        problem=quadratic(clients=3),
        topology=stochastic_directed(3, seed=0),
        protocol=SGP(steps=2, lr=0.1, batch=None),
        name="my run",
    )
    assert [run(scenario).path.name for _ in range(2)] == ["my-run-0001", "my-run-0002"]


def test_metrics_are_what_the_final_models_say(tmp_path: Path) -> None:
    """Accuracy over all test samples, its 10th percentile, the distance from consensus: computed by hand."""
    problem = classification("digits", clients=5, seed=1)
    scenario = Scenario(
        problem=problem,
        topology=stochastic_directed(5, seed=0),
        protocol=SGP(steps=40, lr=0.3, batch=16),
        precision="float64",
    )
    result = run(scenario, out=tmp_path / "run", save_final=True)
    x = load(tmp_path / "run").final["inner"]
    assert torch.equal(x, result.final["inner"])
    rates, right = [], 0
    for client in range(5):
        samples, labels = problem.data.test.of(client)
        guess = (samples.double() @ x[client, :640].view(10, 64).T + x[client, 640:]).argmax(1)
        rates.append(float((guess == labels).double().mean()))
        right += int((guess == labels).sum())
    last = result.metrics.iloc[-1]
    assert last.accuracy == pytest.approx(right / problem.data.test.total)
    assert list(result.clients.accuracy) == pytest.approx(rates)
    assert last.accuracy_p10 == pytest.approx(float(torch.tensor(rates).double().quantile(0.1)))
    assert last.consensus == pytest.approx(float((x - x.mean(0)).square().sum(1).mean().sqrt()))
    totals = result.trace.totals()
    assert (last.messages, last.delivered, last.bytes) == (totals.sent, totals.delivered, totals.bytes)
    assert last.bytes == totals.sent * 8 * 651, "650 parameters and ω, in doubles"


def test_a_step_shows_when_it_has_ended_and_not_before(tmp_path: Path) -> None:
    """Client 0 takes 1 unit for a step and client 1 three; looked at four times in each unit."""
    timing = VirtualTime(compute=1.0, factors={1: 3.0}, horizon=6.0)
    scenario = Scenario(
        quadratic(clients=2), edgeless(2), Local(9, 0.1, batch=None), timing, evaluate_every=0.25
    )
    metrics = run(scenario, out=tmp_path / "run").metrics
    before = metrics[metrics.virtual_time < 6.0]
    ended = [(int(now) + int(now / 3)) / 2 for now in before.virtual_time]
    assert before.step.tolist() == ended
    same = before.groupby("step").loss.nunique()
    assert (same == 1).all()
    assert before.groupby("step").loss.first().is_monotonic_decreasing
