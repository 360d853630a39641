"""Edge lists and contact traces: a file's lines are the links, and what is wrong with it is said by line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncfed.errors import ScenarioError
from asyncfed.network import LinkTimes
from asyncfed.network.links import compile_network
from asyncfed.rng import Streams
from topologies import from_file, from_recipe, save, with_links

HERE = str(Path(__file__).with_name("contacts.csv"))


def test_a_file_becomes_a_network() -> None:
    graph = from_file(HERE, directed=False, n=4)
    assert not graph.is_directed()
    assert list(graph) == [0, 1, 2, 3]
    assert {edge: graph.edges[edge] for edge in graph.edges} == {
        (0, 1): {"probability": 1.0, "schedule": str(LinkTimes([(0, 7.5)]))},
        (0, 2): {"probability": 1.0, "schedule": str(LinkTimes([(1, 2), (4, 6)]))},
        (1, 2): {"probability": 1.0, "schedule": str(LinkTimes([(10, math.inf)]))},
    }
    one_way = from_file(HERE, directed=True)
    assert sorted(one_way.edges) == [(0, 1), (0, 2), (1, 0), (2, 1)]


def test_links_are_up_while_there_is_contact() -> None:
    network = compile_network(from_file(HERE, directed=False, n=4))
    contact = {(0, 1): [(0, 7.5)], (0, 2): [(1, 2), (4, 6)], (1, 2): [(10, math.inf)]}
    for time in np.arange(0, 14, 0.25).tolist():
        up = network.up(Streams(0), 0, time)
        for edge, (i, j) in enumerate(zip(network.senders.tolist(), network.receivers.tolist(), strict=True)):
            assert up[edge] == any(a <= time < b for a, b in contact[min(i, j), max(i, j)])


def test_names_are_numbered_as_they_come_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "met.csv"
    path.write_text("from,to,t1,t2\nzoe,adam,0,1\nadam,eve,1,2\n")
    graph = from_file(path, directed=False, period=3.0)
    assert list(graph) == ["zoe", "adam", "eve"]
    assert graph.edges["adam", "eve"]["schedule"] == str(LinkTimes([(1, 2)], period=3.0))
    assert list(with_links(graph, loss=0.1).edges) == list(graph.edges) == [("zoe", "adam"), ("adam", "eve")]


def test_an_edge_list_says_all_of_its_links_and_nodes(tmp_path: Path) -> None:
    edges, nodes = tmp_path / "edges.csv", tmp_path / "nodes.csv"
    edges.write_text(
        "from,to,probability,latency,bandwidth,loss,ordered,schedule,distance\n"
        'hub,ann,0.5,exponential(0.2),1e6,,false,"[(0, 8), (9, 10)]",3\n'
        'ann,hub,,0.25,,0.1,,"LinkTimes([(0, 8)], 24)",\n'
        "hub,bob,1,,,,,,\nbob,hub,1,,,,,,\n"
    )
    nodes.write_text("node,compute,uplink,device\nbob,4,1e5,phone\nann,,,\nhub,,,\n")
    graph = from_file(edges, directed=True, server="hub", nodes=nodes, extra={"distance"})
    assert list(graph.nodes(data=True)) == [
        ("bob", {"compute": 4.0, "uplink": 1e5, "device": "phone"}), ("ann", {}), ("hub", {}),
    ]  # fmt: skip
    assert graph.edges["hub", "ann"] == {
        "probability": 0.5, "latency": "exponential(0.2)", "bandwidth": 1e6, "ordered": False,
        "schedule": str(LinkTimes([(0, 8), (9, 10)])), "distance": 3.0,
    }  # fmt: skip
    assert graph.edges["ann", "hub"] == {
        "probability": 1.0, "latency": 0.25, "loss": 0.1, "schedule": str(LinkTimes([(0, 8)], 24.0)),
    }  # fmt: skip
    network = compile_network(graph)
    assert (network.names[0], network.server, network.compute.tolist()) == ("bob", 2, [4.0, 1.0, 1.0])
    assert from_recipe(graph.graph["recipe"]).edges == graph.edges


def test_whole_numbers_are_names_where_they_do_not_begin_at_0(tmp_path: Path) -> None:
    (tmp_path / "g.csv").write_text("from,to\n10,2\n2,1\n1,10\n")
    network = compile_network(from_file(tmp_path / "g.csv", directed=True))
    assert [network.names[node] for node in range(3)] == ["1", "2", "10"]
    assert network.names.number(2, "a test") == 1


@pytest.mark.parametrize("suffix", [".json", ".graphml"])
def test_it_is_kept_in_files_and_recipes(suffix: str, tmp_path: Path) -> None:
    graph = from_file(HERE, directed=False)
    save(graph, tmp_path / f"g{suffix}")
    for again in (from_file(tmp_path / f"g{suffix}"), from_recipe(json.loads(graph.graph["recipe"]))):
        assert list(again.edges(data=True)) == list(graph.edges(data=True))


@pytest.mark.parametrize(
    ("text", "options", "named"),
    [
        (
            "a,b\n",
            {},
            "begins with a,b; its first line must be a header: from,to, and where wanted probability",
        ),
        ("from,to,latnecy\n", {}, "unknown column of {path} 'latnecy'; did you mean 'latency'?"),
        ("from,to,size\n", {}, "where it is one of your own, say so: from_file(…, extra=['size'])"),
        ("from,to,t1,t2\n", {}, "has no links, so there are no clients; give nodes, or n"),
        ("from,to\n0,1\n0\n", {}, "line 3 has 1 fields; its header has 2"),
        ("from,to\n0,\n", {}, "line 2: to is empty; name a node"),
        ("from,to,loss\n0,1,1.5\n", {}, "line 2: loss of edge 0–1 is 1.5; it must lie in [0, 1)"),
        ("from,to,ordered\n0,1,2\n", {}, "line 2: ordered of edge 0–1 is 2.0; it must be True or False"),
        ("from,to,latency\n0,1,slow\n", {}, "line 2: latency of edge 0–1: cannot read 'slow'"),
        (
            "from,to\n0,1\n1,0\n",
            {},
            "line 3: the link 1→0 stands in {path}, line 2 already; give it once, or",
        ),
        ("from,to,t1,t2\n0,1,2,1\n", {}, "line 2: an interval from 2 to 1 must have 0 ≤ from < to"),
        ("from,to,t1,t2\n0,1,x,1\n", {}, "line 2: 'x' is no time; it must be a number"),
        ("from,to,t1,t2\n0,1,0,1\n2,2,0,1\n", {}, "line 3: node 2 is linked with itself"),
        ("from,to,t1,t2\n0,1,0,1\n0,3,0,1\n", {"n": 3}, "line 3 names node '3'; with n=3 the nodes are"),
        ("from,to,t1,t2\n0,1,0,5\n", {"period": 4.0}, "does not lie within its period of 4"),
        ("from,to,t1,t2\n0,1,,5\n", {}, "line 2: t2 is 5 and t1 is empty; say from when"),
        ("from,to,t1\n0,1,0\n0,1,\n", {}, "line 3: the link 0→1 stands in {path}, line 2 already"),
        ('from,to,t1,schedule\n0,1,0,"[(0, 1)]"\n', {}, "line 2: it has a schedule and t1; give one"),
        ("from,to\n0,1\n", {"period": 4.0}, "line 2: a period is for links with times, and it has no t1"),
        ("from,to\n0,1\n", {"directed": None}, "say directed=True where a line is one direction"),
        ("from,to\n0,1\n", {"server": 2}, "its server 2 is not a node"),
    ],
)
def test_a_file_that_is_wrong_says_where(
    text: str, options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "met.csv"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=re.escape(named.replace("{path}", str(path)))):
        from_file(path, **{"directed": False} | options)
