"""Pictures can be drawn of every kind of run, and of nothing that was not recorded."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import networkx as nx
import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from asyncfed import Scenario, VirtualTime, load, run
from asyncfed.errors import DivergenceError
from asyncfed.explorer.graph import declared
from asyncfed.problems import classification, quadratic
from asyncfed.protocols import SGP, FedAvg, Local, LocalSteps
from asyncfed.report import pictures
from asyncfed.report.clients import label_clients
from asyncfed.report.network import _draw_promises
from asyncfed.report.style import new_figure
from topologies import (
    edgeless,
    fully_connected,
    random_geometric,
    ring,
    stochastic_directed,
    stochastic_undirected,
)


def names(paths: list[Path]) -> list[str]:
    for path in paths:
        height, width = imread(path).shape[:2]
        assert width > 400
        assert height > 300
    return [path.name for path in paths]


@pytest.mark.parametrize("clients", [2, 60])
def test_all_three_pictures_of_a_classification(tmp_path: Path, clients: int) -> None:
    scenario = Scenario(
        problem=classification("digits", clients=clients, partition="dirichlet:0.4"),
        topology=stochastic_directed(clients, seed=1),
        protocol=SGP(steps=3, lr=0.1),
    )
    result = run(scenario, out=tmp_path / "r")
    assert names(pictures(result)) == ["learning.png", "network.png", "clients.png"]
    assert names(pictures(result, tmp_path / "elsewhere")) == ["learning.png", "network.png", "clients.png"]
    assert (tmp_path / "elsewhere" / "network.png").exists()


@pytest.mark.parametrize(
    "topology",
    [
        fully_connected(6),
        stochastic_undirected(ring(6), seed=1),
        stochastic_directed(6, probability=0.5),
        random_geometric(6, 0.8, seed=1, latency=(0.1, 1.0), probability=0.7),
    ],
)
def test_virtual_time_and_other_networks(tmp_path: Path, topology: nx.Graph) -> None:
    scenario = Scenario(
        problem=quadratic(clients=6),
        topology=topology,
        protocol=SGP(steps=10, lr=0.05, order="4a"),
        timing=VirtualTime(compute="exponential(1.0)", latency=0.1, loss=0.05),
    )
    result = run(scenario, out=tmp_path / "r")
    assert names(pictures(result)) == ["learning.png", "network.png", "clients.png"]


@pytest.mark.parametrize("hub", [0, 1, 3, "hub"])
def test_links_with_a_server_are_held_to_what_they_declare_wherever_it_stands(
    hub: int | str, tmp_path: Path
) -> None:
    graph = nx.DiGraph(server=hub)
    graph.add_nodes_from([0, 1, 2, 3] if hub != "hub" else ["a", "hub", "b", "c"])
    for place, client in enumerate(node for node in graph.nodes if node != hub):
        graph.add_edge(hub, client, probability=0.5 + 0.1 * place)
        graph.add_edge(client, hub, probability=0.9)
    scenario = Scenario(
        problem=quadratic(clients=3), topology=graph, protocol=FedAvg(outer_steps=4, local=LocalSteps(0.1))
    )
    result = run(scenario, out=tmp_path / "r")
    assert names(pictures(result)) == ["learning.png", "network.png", "clients.png"]
    promised = {(3, client): 0.5 + 0.1 * client for client in range(3)}
    assert declared(result.scenario_data["topology"]) == promised | {(client, 3): 0.9 for client in range(3)}


def test_more_clients_than_a_matrix_can_show(tmp_path: Path) -> None:
    scenario = Scenario(problem=quadratic(clients=500), topology=ring(500), protocol=SGP(steps=2, lr=0.1))
    assert names(pictures(run(scenario, out=tmp_path / "r"))) == [
        "learning.png",
        "network.png",
        "clients.png",
    ]


def test_where_nothing_was_sent_there_is_no_network_to_draw(tmp_path: Path) -> None:
    scenario = Scenario(problem=quadratic(clients=3), topology=edgeless(3), protocol=Local(steps=4, lr=0.1))
    assert names(pictures(run(scenario, out=tmp_path / "r"))) == ["learning.png", "clients.png"]


def test_a_partial_run_is_drawn_as_far_as_it_went(tmp_path: Path) -> None:
    scenario = Scenario(
        problem=quadratic(clients=3), topology=fully_connected(3), protocol=SGP(steps=100, lr=1e30)
    )
    with pytest.raises(DivergenceError):
        run(scenario, out=tmp_path / "r")
    assert "clients.png" not in names(pictures(load(tmp_path / "r")))


def test_a_link_is_held_to_its_word_by_its_own_number_of_attempts() -> None:
    """0.6 instead of 0.5 is nothing after 20 attempts (0.9 standard errors), and much after 2,000 (8.9)."""
    edges = pd.DataFrame(
        {"sender": [0, 1], "receiver": [1, 0], "up_rate": [0.6, 0.6], "delivery_rate": [0.6, 0.6]}
        | {"attempts": [20, 2000]}
    )
    figure = new_figure("", 4, 4)
    axes = figure.subplots()
    _draw_promises(axes, edges, {(0, 1): 0.5, (1, 0): 0.5})
    within, beyond = (np.asarray(dots.get_offsets()).tolist() for dots in axes.collections)
    assert (within, beyond) == ([[0.5, 0.6]], [[0.5, 0.6]])
    assert "50.0% beyond" in axes.get_title()
    figure.draw_without_rendering()
    legend = axes.get_legend()
    assert legend is not None
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())


@pytest.mark.parametrize("clients", [5, 40, 200])
def test_labels_of_clients_do_not_overlap(clients: int) -> None:
    figure = new_figure("", 7.5 if clients <= 60 else 10, 3.4)
    axes = figure.subplots()
    axes.bar(range(clients), [1.0] * clients)
    label_clients(axes, list(range(clients)))
    figure.draw_without_rendering()
    extents = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(extents) >= min(clients, 40)
    assert all(left.x1 < right.x0 for left, right in pairwise(extents))
