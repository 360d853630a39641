"""The timing models as values: what they accept, what they refuse, how often they look."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest

from asyncfed.errors import ScenarioError
from asyncfed.network.distributions import Constant, Exponential, Table
from asyncfed.network.links import compile_network
from asyncfed.network.timing import Lockstep, VirtualTime


def ring(n: int = 4) -> nx.Graph:
    graph = nx.cycle_graph(n)
    nx.set_edge_attributes(graph, 1.0, "probability")
    return graph


def test_text_and_numbers_become_distributions() -> None:
    timing = VirtualTime(compute="exponential(2)", latency=0.5, factors=[1, 2.5])
    assert timing.compute == Exponential(2.0)
    assert timing.latency == Constant(0.5)
    assert timing.factors == (1.0, 2.5)
    assert timing.bandwidth == float("inf")
    assert VirtualTime(compute=1.0) == VirtualTime(compute=Constant(1.0), factors={})


def test_a_model_reads_the_topology_with_its_defaults() -> None:
    graph = ring()
    graph.edges[0, 1]["loss"] = 0.4
    network = VirtualTime(latency=2, bandwidth=10, loss=0.1).network(graph)
    assert sorted(set(network.loss.tolist())) == [0.1, 0.4]
    assert set(network.bandwidth.tolist()) == {10.0}
    assert network.latency == (Constant(2.0),)
    assert sorted(set(Lockstep(loss=0.2).network(graph).loss.tolist())) == [0.2, 0.4]


def test_about_twenty_looks_by_default() -> None:
    network = compile_network(ring())
    assert Lockstep().snapshot_interval(200, network) == 10
    assert Lockstep().snapshot_interval(5, network) == 1
    assert VirtualTime(compute="exponential(2)").snapshot_interval(100, network) == 10.0
    assert VirtualTime(horizon=40).snapshot_interval(100, network) == 2.0
    assert VirtualTime(factors={1: 10}).snapshot_interval(100, network) == 25.0
    assert VirtualTime(factors=[4] * network.n).snapshot_interval(100, network) == 20.0


@pytest.mark.parametrize(
    ("timing", "pace"),
    [
        (Lockstep(), [1.0, 1.0, 1.0]),
        (VirtualTime(), [1.0, 1.0, 1.0]),
        (VirtualTime("exponential(2)", factors={1: 4.0}), [0.5, 0.125, 0.5]),
        (VirtualTime("uniform(1, 3)", factors=[1, 0.5, 2]), [0.5, 1.0, 0.25]),
        (VirtualTime(Table(((1.0, 3.0), (5.0,), (1.0, 1.0))), factors={2: 10.0}), [0.5, 0.2, 0.1]),
    ],
)
def test_pace_is_the_mean_number_of_steps_per_unit_of_time(
    timing: Lockstep | VirtualTime, pace: list[float]
) -> None:
    assert timing.pace(compile_network(ring(3)), 3).tolist() == pace


def test_what_nodes_and_samples_add_to_the_factors() -> None:
    graph = ring(3)
    graph.nodes[1]["compute"] = 4.0
    network, samples = compile_network(graph), np.array([10.0, 10.0, 5.0])
    timing = VirtualTime(2.0, factors={2: 5.0})
    assert timing.pace(network, 3, samples).tolist() == [1 / 2, 1 / 8, 1 / 10]
    per_sample = replace(timing, per="sample")
    assert per_sample.pace(network, 3, samples).tolist() == [1 / 20, 1 / 80, 1 / 50]
    assert per_sample.snapshot_interval(100, network, samples) == 100 * 2.0 * 40 / 40
    assert Lockstep().pace(network, 3, samples).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"per": "epoch"}, "per is 'epoch'; it must be 'step' or 'sample'"),
        ({"compute": 0}, "a compute time of constant(0.0) must be above 0"),
        ({"compute": "uniform(0, 0)"}, "a compute time of uniform(0.0, 0.0) must be above 0"),
        ({"compute": "soon"}, "cannot read 'soon' as a duration"),
        ({"latency": -1}, "a duration is -1.0; it must be a number, at least 0, or one of"),
        ({"factors": {2: 0}}, "VirtualTime: factors[2] is 0; it must be a finite number above 0"),
        (
            {"factors": [1, float("nan")]},
            "VirtualTime: factors[1] is nan; it must be a finite number above 0",
        ),
        ({"bandwidth": 0}, "VirtualTime: bandwidth is 0; it must be a number above 0"),
        ({"loss": 1}, "VirtualTime: loss is 1; it must be a number in [0, 1)"),
        ({"loss": -0.5}, "VirtualTime: loss is -0.5; it must be a number in [0, 1)"),
        ({"horizon": "long"}, "VirtualTime: horizon is 'long'; it must be a finite number above 0 or None"),
        ({"loss": "much"}, "loss is 'much'; it must be a number"),
        ({"bandwidth": "wide"}, "bandwidth is 'wide'; it must be a number"),
        ({"factors": {None: 2}}, "VirtualTime: factors is {None: 2}; it must be a mapping from client"),
        ({"factors": {0: "slow"}}, "VirtualTime: factors[0] is 'slow'; it must be a finite number above 0"),
        ({"horizon": 0}, "VirtualTime: horizon is 0; it must be a finite number above 0 or None"),
        (
            {"horizon": float("nan")},
            "VirtualTime: horizon is nan; it must be a finite number above 0 or None",
        ),
        (
            {"horizon": float("inf")},
            "VirtualTime: horizon is inf; it must be a finite number above 0 or None",
        ),
    ],
)
def test_what_no_clock_can_do_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(named)):
        VirtualTime(**options)


def test_factors_and_tables_must_fit_the_clients() -> None:
    with pytest.raises(ScenarioError, match="a compute-time factor names client 4; the clients are 0 to 3"):
        VirtualTime(factors={4: 2.0}).network(ring())
    with pytest.raises(ScenarioError, match="the compute-time table has 1 rows, but there are 4 clients"):
        VirtualTime(compute=Table(((1.0,),))).network(ring())
    assert VirtualTime(compute=Table(((1.0,),) * 4)).network(ring()).n == 4


def test_a_list_of_factors_has_one_for_each_client() -> None:
    with pytest.raises(ScenarioError, match="2 compute-time factors are given for 4 clients"):
        VirtualTime(factors=[1, 2.5]).network(ring(4))
