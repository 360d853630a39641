"""Compute times per sample: how long steps and rounds take, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncfed import Result, Scenario, ScenarioError, VirtualTime, run
from asyncfed.data import client_data_from_lists
from asyncfed.problems import Problem, bilevel_quadratic
from asyncfed.protocols import (
    SGP,
    AggITD,
    FedAvg,
    FedAvgS,
    FedNest,
    LFedNestNonAlt,
    LocalSteps,
    Neumann,
    Scaffold,
)
from asyncfed.protocols.rounds import Round
from asyncfed.rng import Streams
from topologies import ring, star

PER_SAMPLE = VirtualTime(compute=0.5, per="sample")


def uneven() -> Problem:
    """Clients with 1, 2, 3 and 4 samples."""
    return Problem(
        name="numbers",
        data=client_data_from_lists([(torch.full((i + 1, 1), 1.0 * i),) for i in range(4)]),
        inner_loss=lambda y, x, batch: 0.5 * ((y - batch[0]) ** 2).sum(-1).mean(),
        init_inner=lambda generator: torch.zeros(1),
    )  # fmt: skip


def durations(result: Result) -> dict[int, list[float]]:
    """By client, in the order of its steps; the server left out."""
    steps = result.trace.steps().sort_values(["client", "started_at"])
    steps = steps[steps.client < 4]
    steps["takes"] = steps.ended_at - steps.started_at
    return {int(client): own.takes.round(9).tolist() for client, own in steps.groupby("client")}


def served(protocol: Any, out: Path, problem: Problem | None = None, timing: Any = PER_SAMPLE) -> Result:
    return run(Scenario(problem or uneven(), star(4), protocol, timing=timing), out=out)


@pytest.mark.parametrize(("batch", "samples"), [(3, [3, 3, 3, 3]), (None, [1, 2, 3, 4])])
def test_a_step_among_peers_takes_as_long_as_its_minibatch_or_all_samples_are(
    batch: int | None, samples: list[int], tmp_path: Path
) -> None:
    """Client 2 is slower by its node, client 1 by the timing."""
    graph = ring(4)
    graph.nodes[2]["compute"] = 10.0
    timing = replace(PER_SAMPLE, factors={1: 3.0})
    result = run(Scenario(uneven(), graph, SGP(5, 0.01, batch=batch), timing=timing), out=tmp_path / "r")
    slower = [1.0, 3.0, 10.0, 1.0]
    expected = {i: [0.5 * slower[i] * samples[i]] * 5 for i in range(4)}
    assert durations(result) == expected


@given(st.integers(1, 30), st.none() | st.integers(1, 12), st.none() | st.integers(1, 3), st.integers(1, 9))
def test_local_steps_go_over_what_their_minibatches_hold(
    size: int, batch: int | None, epochs: int | None, steps: int
) -> None:
    local = LocalSteps(0.1, None if epochs else steps, epochs, batch)
    made, total, left = 0, 0, 0
    while made < (10**6 if epochs else steps) and not (epochs and left == 0 and total == epochs * size):
        left = left or size  # a new epoch
        taken = size if batch is None else min(batch, left)
        total, left, made = total + taken, left - taken, made + 1
    sizes, clients = np.array([size]), np.array([0])
    assert local.counts(sizes, clients).tolist() == [made]
    assert local.samples(sizes, clients).tolist() == [total]


def test_a_servers_round_takes_as_long_as_the_samples_its_clients_go_over(tmp_path: Path) -> None:
    """Two epochs in minibatches of 3; then 3 steps in minibatches of 2: 1+1+1, 2+2+2, 2+1+2 and 2+2+2."""
    two_epochs = durations(served(FedAvg(2, LocalSteps(0.1, epochs=2, batch=3)), tmp_path / "epochs"))
    assert two_epochs == {i: [0.5 * 2 * (i + 1)] * 2 for i in range(4)}
    steps = durations(served(FedAvg(1, LocalSteps(0.1, steps=3, batch=2)), tmp_path / "steps"))
    assert steps == {0: [1.5], 1: [3.0], 2: [2.5], 3: [3.0]}
    whole = durations(served(Scaffold(1, LocalSteps(0.1, steps=2), option="I"), tmp_path / "scaffold"))
    assert whole == {i: [0.5 * 3 * (i + 1)] for i in range(4)}
    by_step = VirtualTime(compute=0.5)
    assert durations(served(FedAvg(1, LocalSteps(0.1, steps=3)), tmp_path / "by_step", timing=by_step)) == {
        i: [1.5] for i in range(4)
    }


SERIES = Neumann(terms=2, scale=0.2, products="fixed")
INNER, OUTER = LocalSteps(0.01, steps=2, batch=5), LocalSteps(0.01, steps=3, batch=4)


@pytest.mark.parametrize(
    ("protocol", "samples"),
    [
        # q, two inner steps of 5 and 3; p and its products; h from both losses; three outer steps of 4
        (FedNest(1, INNER, OUTER, neumann=SERIES, batch=6), [6, 8, 6, 6, 6, 12, 12]),
        # q and r together; two inner steps; z; h; three outer steps
        (AggITD(1, INNER, OUTER, inner_rounds=1, scale=0.2, batch=6), [12, 8, 6, 12, 12]),
        (FedAvgS(1, INNER, LocalSteps(0.01, steps=2, batch=4)), [2 * (5 + 4)]),
        (LFedNestNonAlt(1, INNER, OUTER, neumann=SERIES), [8 + 3 * (4 + 4)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rounds_of_bilevel_methods_by_hand(protocol: Any, samples: list[int], tmp_path: Path) -> None:
    problem = bilevel_quadratic(clients=4, dimension=3, outer_dimension=2, noise=0.3, samples=8)
    found = durations(served(protocol, tmp_path / "r", problem))
    assert found == {i: [0.5 * count for count in samples] for i in range(4)}


class Silent(Round):
    """A round that does not say how many samples it goes over."""

    phase = kind = "inner"
    reads = ("x", "y")
    answers = ("y",)


class SilentFedAvg(FedAvg):
    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        return (Silent(),)


def test_a_round_that_does_not_say_how_many_samples_it_goes_over_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="Silent does not say how many samples it goes over; write its"):
        served(SilentFedAvg(1, LocalSteps(0.1)), tmp_path / "r")
