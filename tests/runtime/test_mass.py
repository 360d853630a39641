"""Push-sum mass, at every instant: what clients hold, plus what is on its way, plus what was lost, is what
there was at the start.

The numbers come from a tap on the real run (what every step absorbed and emitted); what is where at an
instant comes from the trace alone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfed import Lockstep, Scenario, VirtualTime
from asyncfed.network.presence import GivenPresence
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP
from tests.helpers import Steps, run_tapped
from topologies import stochastic_directed, stochastic_undirected


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    n = draw(st.integers(2, 6))
    seed = draw(st.integers(0, 10_000))
    base = nx.gnp_random_graph(n, draw(st.sampled_from([0.3, 0.6, 1.0])), seed=seed)
    nx.add_path(base, range(n))
    kind = draw(st.sampled_from([stochastic_directed, stochastic_undirected]))
    topology = kind(base, probability=(0.2, 1.0), seed=seed)
    loss = draw(st.sampled_from([0.0, 0.2]))
    timing = draw(
        st.sampled_from(
            [
                Lockstep(loss=loss),
                Lockstep(loss=loss, running_sums=False),
                VirtualTime(loss=loss),
                VirtualTime(loss=loss, presence=GivenPresence({1: [(1.25, 4), (6.5, 60)]})),
                VirtualTime(
                    compute="exponential(1.0)", latency="exponential(2.0)", loss=loss, factors={0: 5.0}
                ),
                VirtualTime(
                    compute="lognormal(1.0, 1.0)", latency=0.5, bandwidth=100.0, loss=loss, horizon=9.0
                ),
            ]
        )
    )
    order = draw(st.sampled_from(["4a", "4b"]))
    return Scenario(
        problem=quadratic(clients=n, dimension=2, seed=seed),
        topology=topology,
        protocol=SGP(steps=draw(st.integers(1, 12)), lr=0.01, order=order, batch=None),  # type: ignore[arg-type]
        timing=timing,
        seed=seed,
        precision="float64",
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(scenarios())
def test_mass_is_conserved_at_every_event_messages_in_flight_included(scenario: Scenario) -> None:
    with tempfile.TemporaryDirectory() as directory:
        result, steps = run_tapped(scenario, Path(directory) / "run")
        messages = result.trace.to_pandas()
        times = result.trace.steps()
        n = scenario.clients
        start = {
            key: value * n for key, value in steps.absorbed[0, 0].items()
        }  # all begin with the same z, and ω = 1
        final = result.final
        for now in [*times.ended_at.unique(), times.ended_at.max() + 1e9]:
            held = _held(now, messages, times, steps, n)
            moved = _gradients(now, times, steps, scenario.protocol.order)  # type: ignore[attr-defined]
            torch.testing.assert_close(held["omega"], start["omega"], rtol=0, atol=1e-10)
            torch.testing.assert_close(held["z"], start["z"] + moved, rtol=0, atol=1e-10)

        lost = messages[messages.status == "lost"]
        in_flight = messages[messages.status == "in_flight"]
        gone = sum(row.weight * steps.payload[row.sender, row.step]["omega"] for row in lost.itertuples())
        on_the_way = sum(
            row.weight * steps.payload[row.sender, row.step]["omega"] for row in in_flight.itertuples()
        )
        total = final["omega"].sum(0) + gone + on_the_way
        torch.testing.assert_close(total, torch.full((1,), float(n), dtype=torch.float64), rtol=0, atol=1e-10)


def _held(now: float, messages: object, times: object, steps: Steps, n: int) -> dict[str, torch.Tensor]:
    """Everything there is at the instant: each client's share of its last payload and its residue, what has
    arrived since its last start, what is on its way, what was lost before.
    """
    total = {"omega": torch.zeros(1, dtype=torch.float64), "z": torch.zeros(2, dtype=torch.float64)}
    done = times[times.ended_at <= now]  # type: ignore[index]
    last = done.groupby("client").step.max().to_dict()
    sent = messages[messages.sent_at.le(now) & messages.status.ne("link_down")]  # type: ignore[attr-defined]
    given = sent.groupby(["sender", "step"]).weight.sum()
    for client in range(n):
        step = last.get(client)
        for key in total:
            if step is None:
                total[key] += steps.absorbed[0, 0][key]  # as all begin
                continue
            kept = 1.0 - float(given.get((client, step), 0.0))
            total[key] += kept * steps.payload[client, step][key]
            if key in steps.residue[client, step]:
                total[key] += steps.residue[client, step][key]
    for row in sent.itertuples():
        # A delivered message counts for as long as the step that absorbs it is not done; the others for ever.
        absorbed = None if row.status not in ("delivered", "carried") else (row.receiver, row.absorbed_step)
        if (
            absorbed is not None
            and absorbed in steps.absorbed
            and last.get(row.receiver, -1) >= row.absorbed_step
        ):
            continue
        for key in total:
            total[key] += row.weight * steps.payload[row.sender, row.step][key]
    return total


def _gradients(now: float, times: object, steps: Steps, order: str) -> torch.Tensor:
    total = torch.zeros(2, dtype=torch.float64)
    for row in times[times.ended_at <= now].itertuples():  # type: ignore[index]
        key = (row.client, row.step)
        total += (
            steps.residue[key]["z"] if order == "4b" else steps.payload[key]["z"] - steps.absorbed[key]["z"]
        )
    return total


def test_without_loss_the_weights_average_one(tmp_path: Path) -> None:
    scenario = Scenario(
        problem=quadratic(clients=8, dimension=2),
        topology=stochastic_directed(8, seed=3),
        protocol=SGP(steps=40, lr=0.01, batch=None),
        precision="float64",
    )
    result, steps = run_tapped(scenario, tmp_path / "run")
    for t in range(40):
        assert float(steps.stacked("omega", t, 8).sum()) == pytest.approx(8, abs=1e-12)
    assert float(result.final["omega"].sum()) == pytest.approx(8, abs=1e-12)
    assert np.ptp(result.final["omega"].numpy()) > 0.1, "on directed links the weights really differ"
