"""What holds of every generator: the conventions, the list of public names, and recipes."""

import json
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import topologies
from asyncfed.errors import TopologyError, UnknownNameError
from topologies._recipes import GENERATORS

EVERY_GENERATOR = [
    topologies.edgeless(3),
    topologies.erdos_renyi(12, 0.4, seed=3),
    topologies.from_file(str(Path(__file__).with_name("contacts.csv")), directed=False, n=4),
    topologies.fully_connected(5),
    topologies.grid(3, 4),
    topologies.random_geometric(20, 0.4, seed=1, latency=(0.1, 2.0), probability=(0.5, 0.9)),
    topologies.random_graph(30, 3.0, seed=2),
    topologies.ring(5, directed=True),
    topologies.small_world(20, 4, 0.3, seed=1),
    topologies.star(4, up=(0.2, 0.9), down=0.5, seed=8),
    topologies.stochastic_directed(6, seed=1),
    topologies.stochastic_undirected(6, probability=0.5),
    topologies.torus(3, 3),
]


def described(graph: nx.Graph) -> tuple[object, ...]:
    return (
        graph.is_directed(),
        dict(graph.graph),
        list(graph.nodes(data=True)),
        list(graph.edges(data=True)),
    )


def test_the_public_names_are_these() -> None:
    assert topologies.__all__ == [
        "Device", "by_distance", "edgeless", "erdos_renyi", "from_file", "from_recipe", "fully_connected",
        "grid", "random_geometric", "random_graph", "ring", "save", "small_world", "star",
        "stochastic_directed", "stochastic_undirected", "torus", "with_devices", "with_links",
    ]  # fmt: skip
    assert all(getattr(topologies, name).__doc__ for name in topologies.__all__)


def test_every_generator_is_a_public_name_and_stands_in_the_list_of_this_file() -> None:
    made = {json.loads(graph.graph["recipe"])["generator"] for graph in EVERY_GENERATOR}
    assert made == set(GENERATORS)
    others = {"Device", "by_distance", "from_recipe", "save", "with_devices", "with_links"}
    assert made == set(topologies.__all__) - others


@pytest.mark.parametrize("graph", EVERY_GENERATOR, ids=lambda graph: graph.graph["name"])
def test_a_generated_network_keeps_the_conventions(graph: nx.Graph) -> None:
    assert type(graph) in (nx.Graph, nx.DiGraph)
    assert list(graph) == list(range(len(graph)))
    assert nx.number_of_selfloops(graph) == 0
    assert list(graph.edges) == sorted(graph.edges)
    assert all(type(data["probability"]) is float for *_, data in graph.edges(data=True))
    assert all(0 < data["probability"] <= 1 for *_, data in graph.edges(data=True))


@pytest.mark.parametrize("graph", EVERY_GENERATOR, ids=lambda graph: graph.graph["name"])
def test_a_recipe_makes_the_same_graph_again_as_text_and_as_a_mapping(graph: nx.Graph) -> None:
    recipe = graph.graph["recipe"]
    assert described(topologies.from_recipe(recipe)) == described(graph)
    assert described(topologies.from_recipe(json.loads(recipe))) == described(graph)


def test_names_say_what_the_network_is() -> None:
    assert [graph.graph["name"] for graph in EVERY_GENERATOR] == [
        "edgeless, 3 clients",
        "Erdős–Rényi p=0.4, 12 clients",
        "contacts.csv, 4 clients",
        "fully connected, 5 clients",
        "grid 3×4, 12 clients",
        "random geometric r=0.4, 20 clients",
        "random graph of mean degree 3, 30 clients",
        "directed ring, 5 clients",
        "small world k=4 rewire=0.3, 20 clients",
        "star, 4 clients",
        "stochastic directed, 6 clients",
        "stochastic undirected, 6 clients",
        "torus 3×3, 9 clients",
    ]
    assert topologies.ring(1).graph["name"] == "ring, 1 client"


def test_a_recipe_holds_every_argument_with_the_defaults() -> None:
    graph = topologies.stochastic_directed(20, seed=1)
    assert json.loads(graph.graph["recipe"]) == {
        "generator": "stochastic_directed",
        "arguments": {"n_or_base": 20, "probability": [0.4, 0.8], "seed": 1},
    }
    assert json.loads(topologies.torus(3, 4).graph["recipe"]) == {
        "generator": "torus",
        "arguments": {"rows": 3, "columns": 4},
    }


def test_numpy_numbers_are_plain_arguments() -> None:
    graph = topologies.stochastic_directed(np.int64(4), (np.float64(0.3), np.float32(0.5)), seed=np.int64(7))
    assert described(topologies.from_recipe(graph.graph["recipe"])) == described(graph)
    assert described(topologies.ring(np.int32(4))) == described(topologies.ring(4))


def test_no_recipe_where_an_argument_is_a_graph_a_function_or_an_array() -> None:
    ring = topologies.ring(4)
    assert "recipe" not in topologies.stochastic_directed(ring).graph
    assert "recipe" not in topologies.stochastic_undirected(ring, lambda i, j: 0.5).graph
    assert "recipe" not in topologies.stochastic_directed(4, np.full((4, 4), 0.5)).graph
    assert "recipe" not in topologies.star(2, up={(0, 2): 0.5, (1, 2): 0.6}).graph
    assert "recipe" not in topologies.with_links(ring, latency=1.0).graph
    assert "recipe" in ring.graph


@given(
    n=st.integers(1, 8),
    seed=st.integers(-(2**70), 2**70),
    bounds=st.tuples(st.floats(0, 1, exclude_min=True), st.floats(0, 1, exclude_min=True)),
)
def test_recipes_round_trip_for_any_size_seed_and_range(
    n: int, seed: int, bounds: tuple[float, float]
) -> None:
    graph = topologies.stochastic_directed(n, (min(bounds), max(bounds)), seed)
    assert described(topologies.from_recipe(graph.graph["recipe"])) == described(graph)


def test_a_recipe_may_leave_out_defaults() -> None:
    graph = topologies.from_recipe({"generator": "ring", "arguments": {"n": 4}})
    assert described(graph) == described(topologies.ring(4))


def test_an_unknown_generator_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="unknown topology generator 'rings'; did you mean 'ring'"):
        topologies.from_recipe({"generator": "rings", "arguments": {}})


@pytest.mark.parametrize("name", ["load", "save", "with_links", "from_recipe", "__import__"])
def test_a_recipe_calls_nothing_but_generators(name: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown topology generator"):
        topologies.from_recipe({"generator": name, "arguments": {}})


def test_an_unknown_argument_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="unknown argument of ring 'size'; known: directed, n"):
        topologies.from_recipe({"generator": "ring", "arguments": {"size": 4}})


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(TopologyError, match="the recipe for grid lacks the argument 'columns'"):
        topologies.from_recipe({"generator": "grid", "arguments": {"rows": 4}})


@pytest.mark.parametrize("recipe", ["{", "[]", "3", '{"generator": "ring"}', {"arguments": {}}, {}])
def test_what_is_no_recipe_is_refused(recipe: object) -> None:
    with pytest.raises(TopologyError, match="the recipe"):
        topologies.from_recipe(recipe)
