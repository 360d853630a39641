"""Links, uplinks and downlinks that are offered more than they carry are named before a run."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import networkx as nx
import pytest

from asyncfed import Lockstep, Scenario, UnsoundWarning, VirtualTime
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP, FedAvg, Local, LocalSteps
from asyncfed.scenario import check
from topologies import fully_connected, star, stochastic_directed

CLIENTS = 4
BYTES = 2 * 4 + 8  # two numbers, and a push-sum weight in doubles
SCENARIO = Scenario(
    problem=quadratic(clients=CLIENTS, dimension=2, seed=1),
    topology=fully_connected(CLIENTS),
    protocol=SGP(steps=100, lr=0.1, batch=None),
    timing=VirtualTime(compute=0.5, bandwidth=20.0),
)


def _said(scenario: Scenario) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(scenario)
    assert all(warning.category is UnsoundWarning for warning in caught)
    return [text for text in (str(warning.message) for warning in caught) if " offers " in text]


def _with(timing: VirtualTime, **marks: float) -> Scenario:
    """Node 2 has these."""
    graph = SCENARIO.topology.copy()
    graph.nodes[2].update(marks)
    return replace(SCENARIO, topology=graph, timing=timing)


def test_a_link_is_named_with_what_it_is_offered_and_what_it_carries() -> None:
    """Two messages of 16 bytes per unit of time are 32, of which 20 get through."""
    (text,) = _said(SCENARIO)
    said = (
        f"SGP offers edge 0→1 {2 * BYTES} bytes per unit of time, and it carries 20 (12 such edges in all): "
        f"messages wait there ever longer, some {100 * (1 - 20 / (2 * BYTES)):.0f} in the end "
    )
    assert text.startswith(said)
    assert text.endswith("give it more bandwidth, let steps take longer, or make fewer")


def test_the_worst_link_is_named() -> None:
    graph = SCENARIO.topology.copy()
    graph.edges[1, 3]["bandwidth"] = 5.0
    (text,) = _said(replace(SCENARIO, topology=graph, timing=VirtualTime(compute=0.5)))
    assert text.startswith(f"SGP offers edge 1→3 {2 * BYTES} bytes per unit of time, and it carries 5 ")


@pytest.mark.parametrize("kind", ["uplink", "downlink"])
def test_what_a_node_shares_is_named(kind: str) -> None:
    (text,) = _said(_with(VirtualTime(compute=0.5), **{kind: 50.0}))
    assert text.startswith(
        f"SGP offers the {kind} of client 2 {3 * 2 * BYTES} bytes per unit of time, and it "
    )


@pytest.mark.parametrize(
    "scenario",
    [
        replace(SCENARIO, timing=VirtualTime(compute=0.5, bandwidth=2.0 * BYTES)),
        replace(SCENARIO, timing=VirtualTime(compute=0.5, bandwidth=20.0, horizon=10.0)),
        replace(SCENARIO, timing=VirtualTime(compute=0.9, bandwidth=20.0)),
        replace(SCENARIO, timing=Lockstep()),
        replace(SCENARIO, protocol=Local(steps=100, lr=0.1, batch=None)),
        replace(SCENARIO, topology=stochastic_directed(SCENARIO.topology, probability=0.5, seed=1)),
        replace(SCENARIO, topology=star(CLIENTS), protocol=FedAvg(100, LocalSteps(0.1, steps=1))),
        _with(VirtualTime(compute=0.5), uplink=3 * 2.0 * BYTES, downlink=math.inf),
    ],
    ids=["enough", "soon over", "slow", "lockstep", "silent", "seldom up", "a server", "a wide uplink"],
)
def test_who_is_offered_no_more_than_it_carries_is_not_named(scenario: Scenario) -> None:
    assert _said(scenario) == []


def test_more_numbers_in_doubles_are_more_bytes() -> None:
    enough = VirtualTime(compute=0.5, bandwidth=2.0 * BYTES)
    assert not _said(replace(SCENARIO, timing=enough))
    (text,) = _said(replace(SCENARIO, timing=enough, precision="float64"))
    assert text.startswith("SGP offers edge 0→1 48 bytes per unit of time, and it carries 32 ")


def test_links_that_are_up_at_their_own_times_are_nobodys_guess() -> None:
    graph = SCENARIO.topology.copy()
    nx.set_edge_attributes(graph, [(0.0, 5.0)], "schedule")
    assert _said(replace(SCENARIO, topology=graph)) == []
