"""Contact traces: the file's contacts are the links' times, and what is wrong with a file is said by line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncfed.errors import TopologyError
from asyncfed.network import LinkTimes
from asyncfed.network.links import compile_network
from asyncfed.rng import Streams
from topologies import contacts, from_recipe, load, save

HERE = str(Path(__file__).with_name("contacts.csv"))


def test_a_file_becomes_a_network() -> None:
    graph = contacts(HERE, n=4)
    assert not graph.is_directed()
    assert list(graph) == [0, 1, 2, 3]
    assert {edge: graph.edges[edge] for edge in graph.edges} == {
        (0, 1): {"probability": 1.0, "schedule": str(LinkTimes([(0, 7.5)]))},
        (0, 2): {"probability": 1.0, "schedule": str(LinkTimes([(1, 2), (4, 6)]))},
        (1, 2): {"probability": 1.0, "schedule": str(LinkTimes([(10, math.inf)]))},
    }
    one_way = contacts(HERE, directed=True)
    assert sorted(one_way.edges) == [(0, 1), (0, 2), (1, 0), (2, 1)]


def test_links_are_up_while_there_is_contact() -> None:
    network = compile_network(contacts(HERE, n=4))
    contact = {(0, 1): [(0, 7.5)], (0, 2): [(1, 2), (4, 6)], (1, 2): [(10, math.inf)]}
    for time in np.arange(0, 14, 0.25).tolist():
        up = network.up(Streams(0), 0, time)
        for edge, (i, j) in enumerate(zip(network.senders.tolist(), network.receivers.tolist(), strict=True)):
            assert up[edge] == any(a <= time < b for a, b in contact[min(i, j), max(i, j)])


def test_names_are_numbered_as_they_come_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "met.csv"
    path.write_text("from,to,t1,t2\nzoe,adam,0,1\nadam,eve,1,2\n")
    graph = contacts(str(path), period=3.0)
    assert [graph.nodes[i]["label"] for i in graph] == ["zoe", "adam", "eve"]
    assert graph.edges[1, 2]["schedule"] == str(LinkTimes([(1, 2)], period=3.0))


@pytest.mark.parametrize("suffix", [".json", ".graphml"])
def test_it_is_kept_in_files_and_recipes(suffix: str, tmp_path: Path) -> None:
    graph = contacts(HERE)
    save(graph, tmp_path / f"g{suffix}")
    for again in (load(tmp_path / f"g{suffix}"), from_recipe(json.loads(graph.graph["recipe"]))):
        assert list(again.edges(data=True)) == list(graph.edges(data=True))


@pytest.mark.parametrize(
    ("text", "options", "named"),
    [
        ("from,to,t1\n", {}, "begins with from,to,t1; its first line must be the header from,to,t1,t2"),
        ("from,to,t1,t2\n", {}, "has no contacts, so there are no clients; give n"),
        ("from,to,t1,t2\n0,1,2,1\n", {}, "line 2: an interval from 2 to 1 must have 0 ≤ from < to"),
        ("from,to,t1,t2\n0,1,x,1\n", {}, "line 2: 'x' is no time; it must be a number"),
        ("from,to,t1,t2\n0,1,0,1\n2,2,0,1\n", {}, "line 3: node 2 is in contact with itself"),
        ("from,to,t1,t2\n0,1,0,1\n0,3,0,1\n", {"n": 3}, "line 3 names node '3'; with n=3 the nodes are"),
        ("from,to,t1,t2\n0,1,0,5\n", {"period": 4.0}, "does not lie within its period of 4"),
    ],
)
def test_a_file_that_is_wrong_says_where(
    text: str, options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "met.csv"
    path.write_text(text)
    with pytest.raises(TopologyError, match=re.escape(named)):
        contacts(str(path), **options)
