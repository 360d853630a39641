"""Parts among peers without a barrier between them: everybody goes on when it is through itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncfed import Scenario, ScenarioError, VirtualTime, run
from asyncfed.problems import bilevel_quadratic
from asyncfed.protocols import PDBO, SGP, VRHGP, FedAvg, LocalSteps
from topologies import star, stochastic_directed


def scenario(timing: VirtualTime) -> Scenario:
    return Scenario(
        problem=bilevel_quadratic(clients=5, seed=1),
        topology=stochastic_directed(5, seed=2),
        protocol=PDBO(SGP(8, 0.02, batch=None), VRHGP(6, sampling="joint"), outer_steps=3, outer_lr=0.05),
        timing=timing,
        precision="float64",
        seed=4,
    )


def test_at_equal_paces_nobody_waits_anyway(tmp_path: Path) -> None:
    finals = []
    for barrier in (True, False):
        result = run(scenario(VirtualTime(barrier=barrier)), out=tmp_path / str(barrier))
        finals.append(result)
    waiting, free = finals
    assert waiting.trace.to_arrow().equals(free.trace.to_arrow())
    for name, value in waiting.final.items():
        assert torch.equal(value, free.final[name]), name


def test_everybody_begins_a_part_when_it_has_ended_the_one_before(tmp_path: Path) -> None:
    timing = VirtualTime("uniform(0.8, 1.2)", factors={3: 2.0}, latency=0.1)
    waiting = run(scenario(timing), out=tmp_path / "waiting")
    free = run(scenario(replace(timing, barrier=False)), out=tmp_path / "free")
    for result, meet in ((waiting, True), (free, False)):
        steps = result.trace.steps().sort_values(["client", "started_at", "step"])
        before = steps.groupby("client")["ended_at"].shift()
        gaps = (steps["started_at"] - before).dropna()
        assert (gaps >= 0).all()
        assert (gaps > 0).any() == meet
    ends = [result.trace.steps().groupby("client")["ended_at"].max() for result in (waiting, free)]
    assert (ends[1] <= ends[0]).all()
    assert ends[1][0] < ends[0][0] - 10, "who is fast is through earlier"
    status = free.trace.to_pandas()["status"].value_counts()
    assert status["late"] > 0, "what comes to one who is through"
    assert status["delivered"] > status["late"]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_without_a_barrier_packed_actors_say_the_same(tmp_path: Path) -> None:
    timing = VirtualTime("uniform(0.8, 1.2)", factors={3: 2.0}, latency=0.1, barrier=False)
    here = run(scenario(timing), out=tmp_path / "here")
    there = run(scenario(timing), backend="ray", clients_per_actor=2, out=tmp_path / "there")
    assert here.trace.to_arrow().equals(there.trace.to_arrow())
    torch.testing.assert_close(here.final["outer"], there.final["outer"], rtol=0, atol=1e-10)


def test_looks_in_between_and_servers_are_refused(tmp_path: Path) -> None:
    timing = VirtualTime(barrier=False)
    with pytest.raises(
        ScenarioError, match="judged when all are through, so evaluate_every=2 has no meaning"
    ):
        run(replace(scenario(timing), evaluate_every=2), out=tmp_path / "looks")
    served = replace(
        scenario(timing), topology=star(5), protocol=FedAvg(2, LocalSteps(0.1, steps=1)), evaluate_every=None
    )
    with pytest.raises(ScenarioError, match="a Buffered server does not wait"):
        run(served, out=tmp_path / "served")
    with pytest.raises(ScenarioError, match="barrier is 'no'; it must be True or False"):
        VirtualTime(barrier="no")  # type: ignore[arg-type]
