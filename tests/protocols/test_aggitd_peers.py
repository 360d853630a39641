"""AggITD without a server is AggITD with everybody asked, up to the error of its means."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

from asyncfed import Result, Scenario, ScenarioError, VirtualTime, run
from asyncfed.errors import TopologyError
from asyncfed.network import Uniform
from asyncfed.problems import bilevel_quadratic
from asyncfed.protocols import AggITD, LocalSteps, PeerAggITD
from asyncfed.scenario import check
from tests.protocols.served import serve
from topologies import fully_connected, stochastic_directed, with_links

N = 2
AGGITD = AggITD(
    3,
    LocalSteps(0.2, steps=(1, 3, 2, 4), batch=3),
    LocalSteps(0.1, steps=(2, 1, 3, 1), batch=4),
    inner_rounds=N,
    scale=0.3,
    batch=3,
)
PROBLEM = bilevel_quadratic(clients=4, noise=0.4, samples=5, curved=True, seed=2)
LINKS = stochastic_directed(4, probability=(0.4, 0.8), seed=3)


def peer(method: AggITD, rounds: int, timed: bool = False) -> PeerAggITD:
    same = {f.name: getattr(method, f.name) for f in fields(method) if f.name not in ("server", "max_rounds")}
    return PeerAggITD(**same, mean_rounds=rounds, timed=timed)


def among_peers(
    method: AggITD, rounds: int, out: Path, topology: nx.Graph = LINKS, timed: bool = False, **changes: Any
) -> Result:
    protocol = peer(method, rounds, timed)
    return run(Scenario(PROBLEM, topology, protocol, precision="float64", seed=6, **changes), out=out)


def furthest(found: Result, expected: Result) -> float:
    """Of all clients' x, y, p and h from the server's."""
    names = ("outer", "inner", "p", "h")
    return max(float((found.final[name] - expected.final[name]).abs().max()) for name in names)


@pytest.mark.parametrize("changes", [{}, {"solver": "sgd"}, {"start": "fresh", "batch": None}])
def test_one_round_of_everybody_makes_the_servers_means(changes: dict[str, Any], tmp_path: Path) -> None:
    """On the same draws of Q and the same minibatches, iteration by iteration."""
    method = replace(AGGITD, **changes)
    server = serve(PROBLEM, method, tmp_path / "server", seed=6)
    peers = among_peers(method, 1, tmp_path / "peers", fully_connected(4), weights=Uniform())
    assert furthest(peers, server) < 1e-12
    columns = ["outer_step", "loss", "outer_loss"]
    np.testing.assert_allclose(peers.metrics[columns], server.metrics[columns], rtol=0, atol=1e-12)
    assert peers.metrics["consensus"].max() < 1e-14


def test_on_links_that_come_and_go_one_way_the_error_falls_geometrically(tmp_path: Path) -> None:
    server = serve(PROBLEM, AGGITD, tmp_path / "server", seed=6)
    few, more, many = (
        furthest(among_peers(AGGITD, rounds, tmp_path / str(rounds)), server) for rounds in (6, 12, 48)
    )
    assert 1e-4 < few < 1
    assert more < 0.1 * few
    assert many < 1e-8


def test_uneven_paces_and_messages_on_the_way_cost_rounds_and_no_more(tmp_path: Path) -> None:
    """A mean ends when everybody has made its rounds, and those who are done keep what reaches them."""
    server = serve(PROBLEM, AGGITD, tmp_path / "server", seed=6)
    timing = VirtualTime("exponential(1.0)", factors={1: 3.0}, latency="exponential(0.3)")
    few, many = (
        furthest(among_peers(AGGITD, rounds, tmp_path / str(rounds), timing=timing), server)
        for rounds in (20, 160)
    )
    assert few > 1e-4
    assert many < 1e-8


def test_a_mean_costs_its_rounds_over_the_links_that_are_up(tmp_path: Path) -> None:
    """Messages hold what AggITD's hold, and ω."""
    result = among_peers(replace(AGGITD, q=1), 5, tmp_path / "run")
    sent = result.trace.to_pandas()
    edges = LINKS.number_of_edges()
    assert len(sent) == 3 * (2 * N + 3) * 5 * edges
    sizes = {"q": 3, "y": 3, "q+z": 6, "z": 3, "h": 2, "x": 2}
    up = sent[sent.status == "delivered"]
    assert len(up) < len(sent)
    for kind, length in sizes.items():
        assert set(up[up.kind == kind].bytes) == {8 * (length + 1)}
    assert set(sent.kind) == set(sizes)
    assert up.bytes.sum() == result.metrics["bytes"].iloc[-1]


def test_local_steps_take_time_where_it_is_asked_for(tmp_path: Path) -> None:
    """2N + 3 means of R rounds; N times τ − 1 steps for the inner, once for the outer variable."""
    method = replace(AGGITD, inner=LocalSteps(0.1, steps=4), outer=LocalSteps(0.1, steps=3))
    timing = VirtualTime(0.5)
    links = fully_connected(4)
    free = among_peers(method, 6, tmp_path / "free", links, timing=timing)
    timed = among_peers(method, 6, tmp_path / "timed", links, timed=True, timing=timing)
    assert free.metrics["virtual_time"].iloc[-1] == 0.5 * 3 * (2 * N + 3) * 6
    assert timed.metrics["virtual_time"].iloc[-1] == 0.5 * 3 * ((2 * N + 3) * 6 + N * 3 + 2)
    assert free.metrics["messages"].iloc[-1] == timed.metrics["messages"].iloc[-1]


def test_clients_that_cannot_reach_each_other_are_refused() -> None:
    one_way = with_links(nx.DiGraph([(0, 1), (1, 2), (2, 3)]), probability=1.0)
    with pytest.raises(TopologyError, match="not strongly connected"):
        check(Scenario(PROBLEM, one_way, peer(AGGITD, 3)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mean_rounds": 0}, "PeerAggITD: mean_rounds is 0; it must be a whole number, at least 1"),
        ({"scale": 0.0}, r"PeerAggITD: scale is 0"),
        ({"inner": 3}, "inner is 3; it must be LocalSteps"),
        ({"timed": True}, "timed is True, and local steps are given in epochs or for each client"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        replace(peer(AGGITD, 3), **settings)


def test_other_numbers_of_steps_than_clients_are_refused() -> None:
    method = replace(AGGITD, outer=LocalSteps(0.1, steps=(1, 2)))
    with pytest.raises(ScenarioError, match="2 numbers of steps are given for 4 clients"):
        check(Scenario(PROBLEM, LINKS, peer(method, 3)))


def test_float32_is_kept_float32(tmp_path: Path) -> None:
    protocol = peer(AGGITD, 3)
    final = run(Scenario(PROBLEM, LINKS, protocol, precision="float32"), out=tmp_path / "run").final
    assert {value.dtype for value in final.values()} == {torch.float32}
