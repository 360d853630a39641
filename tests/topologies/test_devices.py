"""Kinds of devices among the clients, and latency by distance."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfed.errors import TopologyError, UnknownNameError
from asyncfed.network.links import compile_network
from topologies import Device, by_distance, edgeless, random_geometric, ring, star, with_devices, with_links

KINDS = {"phone": Device(compute=4, uplink=1e5, downlink=1e6), "desktop": Device(), "box": Device(0.5)}


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(any))
def test_as_many_have_each_kind_as_the_largest_remainders_say(n: int, parts: list[int]) -> None:
    shares = {name: part / sum(parts) for name, part in zip(KINDS, parts, strict=True)}
    graph = with_devices(edgeless(n), KINDS, shares, seed=n)
    counts = Counter(dict(graph.nodes(data="device")).values())
    assert sum(counts.values()) == n
    # In whole numbers, so that nothing depends on rounding.
    floors = {name: n * part // sum(parts) for name, part in zip(KINDS, parts, strict=True)}
    rests = {name: n * part % sum(parts) for name, part in zip(KINDS, parts, strict=True)}
    for name in sorted(KINDS, key=lambda name: -rests[name])[: n - sum(floors.values())]:
        floors[name] += 1
    assert counts == Counter({name: count for name, count in floors.items() if count})


def test_nodes_say_what_their_device_is_and_the_server_is_none() -> None:
    graph = with_devices(star(10), KINDS, {"phone": 0.8, "desktop": 0.2}, seed=3)
    assert graph.nodes[10] == {}
    phones = [node for node in graph if graph.nodes[node].get("device") == "phone"]
    assert len(phones) == 8
    for node in range(10):
        expected: dict[str, Any] = {"device": "desktop", "compute": 1.0}
        if node in phones:
            expected = {"device": "phone", "compute": 4.0, "uplink": 1e5, "downlink": 1e6}
        assert graph.nodes[node] == expected
    network = compile_network(graph)
    assert np.flatnonzero(network.compute == 4).tolist() == phones
    assert np.flatnonzero(np.isfinite(network.uplink)).tolist() == phones
    assert network.downlink[phones].tolist() == [1e6] * 8


def test_who_has_which_is_drawn_from_the_seed_and_nothing_of_an_older_device_stays() -> None:
    who = [dict(with_devices(ring(12), KINDS, seed=seed).nodes(data="device")) for seed in (0, 0, 1)]
    assert who[0] == who[1] != who[2]
    again = with_devices(with_devices(ring(4), KINDS, ["phone"] * 4), KINDS, ["box", "desktop"] * 2)
    assert [again.nodes[node] for node in (0, 1)] == [
        {"device": "box", "compute": 0.5},
        {"device": "desktop", "compute": 1.0},
    ]


def test_a_table_in_a_file_is_the_same_as_one_in_python(tmp_path: Path) -> None:
    path = tmp_path / "devices.csv"
    path.write_text("device,compute,uplink,downlink,share\nphone,4,1e5,1000000,0.75\nbox,0.5,,,0.25\n")
    from_file = with_devices(ring(8), path, seed=5)
    kinds = {"phone": KINDS["phone"], "box": KINDS["box"]}
    in_python = with_devices(ring(8), kinds, {"phone": 0.75, "box": 0.25}, seed=5)
    assert dict(from_file.nodes(data=True)) == dict(in_python.nodes(data=True))
    assert Counter(dict(from_file.nodes(data="device")).values()) == {"phone": 6, "box": 2}
    halves = with_devices(ring(8), str(path), {"phone": 0.5, "box": 0.5})
    assert Counter(dict(halves.nodes(data="device")).values()) == {"phone": 4, "box": 4}


@pytest.mark.parametrize(
    ("devices", "shares", "named"),
    [
        (KINDS, {"phone": 0.5}, "the shares {'phone': 0.5} add up to 0.5; they must to 1"),
        (KINDS, {"phone": 1.5}, "with_devices: shares['phone'] is 1.5; it must be a number in [0, 1]"),
        (KINDS, {"fone": 1.0}, "unknown device 'fone'; did you mean 'phone'"),
        (KINDS, ["phone", "tablet", "box"], "unknown device 'tablet'"),
        (KINDS, ["phone"], "it must be a mapping from device to share"),
        (KINDS, "phone", "it must be a mapping from device to share"),
        ({}, None, "no devices are given"),
        ({"phone": 4}, None, "with_devices: devices['phone'] is 4; it must be Device(…)"),
        ("nowhere.csv", None, "cannot read the devices in nowhere.csv"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_by_name(devices: Any, shares: Any, named: str) -> None:
    with pytest.raises((TopologyError, UnknownNameError), match=re.escape(named)):
        with_devices(ring(3), devices, shares)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("device,speed\nphone,3\n", "devices.csv is 'device,speed'; it must be device,compute"),
        ("device,compute\nphone,fast\n", "line 2 of"),
        ("device,compute\nphone,0\n", "Device: compute is 0.0; it must be a finite number above 0"),
        ("device,uplink\nphone,1\nphone,2\n", "names the device 'phone'; every line must name another"),
        ("device,uplink\nphone,1,2\n", "line 2 of"),
        ("device,compute\n", "no devices are given"),
    ],
)
def test_a_file_that_is_no_table_is_refused_by_line(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "devices.csv"
    path.write_text(text)
    with pytest.raises(TopologyError, match=re.escape(named)):
        with_devices(ring(3), path)


@pytest.mark.parametrize(
    ("mark", "value"),
    [
        ("compute", 0), ("compute", math.inf), ("compute", "slow"), ("uplink", -1.0), ("uplink", True),
        ("downlink", math.nan), ("downlink", None),
    ],
)  # fmt: skip
def test_a_mark_of_a_node_that_is_none_is_refused_by_name(mark: str, value: Any) -> None:
    graph = ring(3)
    graph.nodes[1][mark] = value
    for reading in (compile_network, with_links):
        with pytest.raises(TopologyError, match=re.escape(f"{mark} of node 1 is {value!r}; it must be")):
            reading(graph)


# --- distance ---


def test_every_edge_takes_the_base_and_so_much_per_distance() -> None:
    graph = random_geometric(40, 0.3, seed=4, latency=(0.25, 3.0), probability=0.5)
    assert nx.is_connected(graph)
    for i, j, data in graph.edges(data=True):
        (a, b), (c, d) = graph.nodes[i]["pos"], graph.nodes[j]["pos"]
        distance = math.sqrt((a - c) ** 2 + (b - d) ** 2)
        assert distance <= 0.3
        assert math.isclose(data["latency"], 0.25 + 3.0 * distance)
        assert data["probability"] == 0.5
    near = [
        (i, j)
        for i in range(40)
        for j in range(i + 1, 40)
        if math.dist(graph.nodes[i]["pos"], graph.nodes[j]["pos"]) <= 0.3
    ]
    assert list(graph.edges) == near
    assert all("latency" not in data for *_, data in random_geometric(5, 1.0).edges(data=True))


def test_any_graph_whose_nodes_have_places_can_have_latency_by_distance() -> None:
    graph = nx.path_graph(3, create_using=nx.DiGraph)
    for node, pos in enumerate([(0, 0, 0), [3, 4, 0], np.array([3.0, 4.0, 12.0])]):
        graph.nodes[node]["pos"] = pos
    linked = with_links(graph, probability=1.0, latency=by_distance(1.0, 0.5))
    assert [data["latency"] for *_, data in linked.edges(data=True)] == [3.5, 7.0]
    assert linked.nodes[2]["pos"] == (3.0, 4.0, 12.0)


def test_what_has_no_distance_is_refused_by_name() -> None:
    with pytest.raises(TopologyError, match="node 0 has no place; set `pos` on every node"):
        with_links(ring(3), latency=by_distance(0.0, 1.0))
    graph = nx.path_graph(2)
    nx.set_node_attributes(graph, {0: (0.0, 1.0), 1: (1.0,)}, "pos")
    with pytest.raises(TopologyError, match="node 1 has 1 coordinates and another has 2"):
        with_links(graph, latency=by_distance(0.0, 1.0))
    graph.nodes[1]["pos"] = "here"
    with pytest.raises(TopologyError, match="pos of node 1 is 'here'; it must be coordinates"):
        with_links(graph)
    with pytest.raises(
        TopologyError, match=re.escape("ByDistance: per_unit is -1; it must be a finite number, at least 0")
    ):
        by_distance(0.0, -1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"radius": 0}, "random_geometric: radius is 0; it must be a number in (0, √2], √2 being the"),
        ({"radius": 0.01}, "none of 100 random geometric graphs with n=20 and radius=0.01 was connected"),
        ({"radius": 1.0, "latency": 3.0}, "latency is 3.0; it must be (base, per_unit)"),
        (
            {"radius": 1.0, "latency": (1.0, -3.0)},
            "random_geometric: latency[1] is -3.0; it must be a finite number, at least 0",
        ),
    ],
)
def test_a_plane_that_cannot_be_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(named)):
        random_geometric(20, **options)


def test_a_recipe_keeps_the_places() -> None:
    graph = random_geometric(8, 0.6, seed=2, latency=(0.0, 1.0))
    assert json.loads(graph.graph["recipe"])["arguments"]["latency"] == [0.0, 1.0]
    assert all(type(pos) is tuple and len(pos) == 2 for _, pos in graph.nodes(data="pos"))
