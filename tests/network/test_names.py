"""Numbers inside, names wherever a person names or reads of a node; misspelt attributes are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from typer.testing import CliRunner

from asyncfed import Scenario, load, run
from asyncfed.cli import app
from asyncfed.errors import DivergenceError, ScenarioError, TraceError
from asyncfed.network import GivenPresence, Names, VirtualTime
from asyncfed.network.links import compile_network
from asyncfed.network.server import Server
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP, FedAvg, LocalSteps
from asyncfed.report import pictures


def around(server: object, clients: list[Any]) -> nx.Graph:
    graph = nx.Graph(server=server)
    graph.add_nodes_from([server, *clients])
    graph.add_edges_from(((server, client) for client in clients), probability=1.0)
    return graph


@pytest.mark.parametrize(
    ("labels", "names", "asked", "number"),
    [
        (range(3), None, 1, 1),
        ((2, 0, 1), None, 1, 1),  # counted off, in whatever order the graph lists them
        ((5, 7, 9), ("5", "7", "9"), 7, 1),
        ((1, 2, 3), ("1", "2", "3"), 1, 0),  # what everybody calls 1
        (("ann", "bob", ("x", 1)), ("ann", "bob", "('x', 1)"), ("x", 1), 2),
        (("ann", "bob"), ("ann", "bob"), 1, 1),
        (("ann", "1"), ("ann", "1"), 1, 1),
    ],
)
def test_a_node_is_called_what_its_graph_calls_it(
    labels: Any, names: tuple[str, ...] | None, asked: Any, number: int
) -> None:
    found = Names(labels)
    assert found.given == (names is not None)
    assert found.number(asked, "a test") == number
    if names is not None:
        assert tuple(found[place] for place in range(len(found))) == names
        assert found.column(np.array([1, 0])).tolist() == [names[1], names[0]]


@pytest.mark.parametrize(
    ("labels", "asked", "said"),
    [
        (range(3), 3, "names client 3; the clients are 0 to 2"),
        (range(3), "1x", "names client '1x'; the clients are 0 to 2"),
        (range(3), True, "names client True; the clients are 0 to 2"),
        (("alice", "bob"), "alcie", "did you mean 'alice'? The clients are alice, bob (or 0 to 1)"),
        ((1, 2, 3), 0, "names client 0; the clients are 1, 2, 3"),
    ],
)
def test_whoever_is_nobody_is_refused_with_the_nearest_name(labels: Any, asked: Any, said: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(said)):
        Names(labels).number(asked, "a test")


def test_two_nodes_of_one_name_are_refused() -> None:
    graph = nx.Graph()
    graph.add_edge(1, "1", probability=1.0)
    with pytest.raises(ScenarioError, match="two nodes are called 1"):
        compile_network(graph)


def test_names_are_kept_wherever_a_person_looks_and_numbers_are_inside(tmp_path: Path) -> None:
    scenario = Scenario(
        problem=quadratic(clients=3),
        topology=around("hub", ["ann", "bob", "cid"]),
        protocol=FedAvg(4, LocalSteps(0.1), server=Server([["ann", "bob"], ["bob", "cid"]])),
        timing=VirtualTime(factors={"bob": 10.0}, presence=GivenPresence({"cid": [(0, 1000)]})),
    )
    result = run(scenario, out=tmp_path / "run")
    again = load(tmp_path / "run")
    assert again.trace.nodes()["client"].tolist() == ["ann", "bob", "cid", "hub"]
    assert again.clients["client"].tolist() == ["ann", "bob", "cid"]
    edges = again.trace.edges()
    assert set(zip(edges["sender"], edges["receiver"], strict=True)) == {
        pair for one in ("ann", "bob", "cid") for pair in ((one, "hub"), ("hub", one))
    }
    steps = again.trace.steps()
    busy = (steps["ended_at"] - steps["started_at"]).groupby(steps["client"], observed=True).max()
    assert busy.to_dict() == {"ann": 1.0, "bob": 10.0, "cid": 1.0, "hub": 0.0}
    assert again.trace.edge("hub", "bob")["receiver"].unique().tolist() == ["bob"]
    assert again.trace.edge("hub", "bob").equals(again.trace.edge(3, 1))
    assert again.trace.rounds()["asked"].tolist() == [2, 2, 2, 2]
    assert sorted(set(again.trace.to_arrow()["sender"].to_pylist())) == [0, 1, 2, 3]
    again.trace.to_csv(tmp_path / "all.csv")
    assert (tmp_path / "all.csv").read_text().splitlines()[1].split(",")[1:3] == ['"hub"', '"ann"']
    assert again.trace.matrix("sent")[3].tolist() == [2, 4, 2, 0]
    assert len(pictures(again)) == 3
    printed = CliRunner().invoke(app, ["trace", str(again.path), "--edge", "hub", "bob"])
    assert (printed.exit_code, "4 messages from hub to bob" in printed.output) == (0, True)
    assert repr(run(again.scenario, out=tmp_path / "again").metrics) == repr(result.metrics)
    with pytest.raises(TraceError, match="did you mean 'bob'"):
        again.trace.edge("hub", "bobb")


def test_errors_call_clients_by_name(tmp_path: Path) -> None:
    graph = nx.relabel_nodes(nx.complete_graph(3), {0: "ann", 1: "bob", 2: "cid"})
    nx.set_edge_attributes(graph, 1.0, "probability")
    scenario = Scenario(quadratic(clients=3), graph, SGP(steps=300, lr=1e30, batch=None))
    with pytest.raises(DivergenceError, match=r"of client (ann|bob|cid) became"):
        run(scenario, out=tmp_path / "run")
    assert "of client ann" in load(tmp_path / "run").manifest["error"]


# --- attributes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "name", "said"),
    [
        ("edge", "probabilty", "attribute of edge 0–1 'probabilty'; did you mean 'probability'?"),
        ("edge", "weight", "graph.graph['extra'] = ['weight']"),
        ("node", "uplnik", "attribute of node 1 'uplnik'; did you mean 'uplink'?"),
        ("graph", "sever", "attribute of the graph 'sever'; did you mean 'server'?"),
    ],
)
def test_an_unknown_attribute_is_refused_unless_it_is_listed(where: str, name: str, said: str) -> None:
    graph = nx.path_graph(3)
    nx.set_edge_attributes(graph, 1.0, "probability")
    {"edge": graph.edges[0, 1], "node": graph.nodes[1], "graph": graph.graph}[where][name] = 1
    with pytest.raises(ScenarioError, match=re.escape(said)):
        compile_network(graph)
    for extra in ({name}, [name, "other"], f"other, {name}"):
        graph.graph["extra"] = extra
        assert compile_network(graph).edges == 4
    graph.graph["extra"] = 3
    with pytest.raises(ScenarioError, match="extra is 3; it must be names of attributes"):
        compile_network(graph)
