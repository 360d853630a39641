"""Networks whose links come and go."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfed.errors import TopologyError
from asyncfed.rng import Streams
from topologies import ring, star, stochastic_directed, stochastic_undirected

BOTH = pytest.mark.parametrize("generator", [stochastic_undirected, stochastic_directed])


def given_probabilities(graph: nx.Graph) -> list[float]:
    return [data["probability"] for *_, data in graph.edges(data=True)]


def test_a_number_of_clients_means_that_all_are_linked_with_all() -> None:
    undirected, directed = stochastic_undirected(5), stochastic_directed(5)
    assert type(undirected) is nx.Graph
    assert type(directed) is nx.DiGraph
    assert undirected.number_of_edges() == 10
    assert directed.number_of_edges() == 20
    assert list(stochastic_directed(1)) == [0]


@BOTH
@given(
    n=st.integers(1, 12),
    bounds=st.tuples(st.floats(0, 1, exclude_min=True), st.floats(0, 1, exclude_min=True)),
    seed=st.integers(0, 2**64),
)
def test_drawn_probabilities_lie_in_their_range(
    generator: object, n: int, bounds: tuple[float, float], seed: int
) -> None:
    low, high = min(bounds), max(bounds)
    assert all(low <= p <= high for p in given_probabilities(generator(n, (low, high), seed)))


@BOTH
def test_the_same_seed_gives_the_same_network_and_another_seed_another(generator: object) -> None:
    drawn = {seed: given_probabilities(generator(6, (0.4, 0.8), seed)) for seed in range(20)}
    assert drawn[3] == given_probabilities(generator(6, (0.4, 0.8), 3))
    assert len({tuple(values) for values in drawn.values()}) == 20


@BOTH
def test_probabilities_are_drawn_by_the_position_of_the_edge(generator: object) -> None:
    graph = generator(7, (0.4, 0.8), seed=9)
    draws = Streams(9).uniforms("topology probability", 0, 0, graph.number_of_edges())
    assert given_probabilities(graph) == [0.4 + (0.8 - 0.4) * u for u in draws.tolist()]


@BOTH
def test_drawn_probabilities_fill_their_range_evenly(generator: object) -> None:
    values = np.array(given_probabilities(generator(80, (0.4, 0.8), seed=0)))
    standard_error = 0.4 / 12**0.5 / len(values) ** 0.5
    assert abs(values.mean() - 0.6) < 4 * standard_error
    assert values.min() < 0.41
    assert values.max() > 0.79


def test_the_two_directions_of_a_link_have_their_own_probabilities() -> None:
    graph = stochastic_directed(10, seed=1)
    assert all(
        graph.edges[i, j]["probability"] != graph.edges[j, i]["probability"] for i, j in graph.edges if i < j
    )


@BOTH
def test_a_probability_may_be_a_constant_or_a_function(generator: object) -> None:
    assert set(given_probabilities(generator(5, 0.25))) == {0.25}
    assert set(given_probabilities(generator(5, 1))) == {1.0}
    graph = generator(5, lambda sender, receiver: (10 * sender + receiver) / 100)
    assert all(graph.edges[i, j]["probability"] == (10 * i + j) / 100 for i, j in graph.edges)


def test_a_function_on_undirected_links_sees_the_smaller_client_first() -> None:
    seen = []
    stochastic_undirected(nx.Graph([(2, 1), (1, 0)]), lambda i, j: seen.append((i, j)) or 0.5)
    assert seen == [(0, 1), (1, 2)]


def test_a_mapping_gives_every_direction_its_probability() -> None:
    graph = stochastic_directed(2, {(1, 0): 0.3, (0, 1): 0.6})
    assert list(graph.edges(data="probability")) == [(0, 1, 0.6), (1, 0, 0.3)]


def test_a_mapping_may_name_an_undirected_edge_either_way_round() -> None:
    graph = stochastic_undirected(3, {(1, 0): 0.3, (0, 2): 0.6, (2, 0): 0.6, (1, 2): 0.9})
    assert list(graph.edges(data="probability")) == [(0, 1, 0.3), (0, 2, 0.6), (1, 2, 0.9)]


def test_an_array_is_indexed_by_sender_and_receiver() -> None:
    array = np.array([[0, 0.1, 0.2], [0.3, 0, 0.4], [0.5, 0.6, 0]])
    graph = stochastic_directed(3, array)
    assert all(graph.edges[i, j]["probability"] == array[i, j] for i, j in graph.edges)
    assert all(type(p) is float for p in given_probabilities(graph))
    symmetric = stochastic_undirected(ring(4), np.full((4, 4), 0.7))
    assert given_probabilities(symmetric) == [0.7] * 4


def test_any_graph_may_be_the_base_and_says_which_links_there_are() -> None:
    graph = stochastic_undirected(ring(6), seed=2)
    assert list(graph.edges) == list(ring(6).edges)
    assert graph.graph["name"] == "stochastic undirected on ring, 6 clients"
    both_ways = stochastic_directed(ring(6), seed=2)
    assert set(both_ways.edges) == {(i, j) for i in range(6) for j in ((i + 1) % 6, (i - 1) % 6)}
    one_way = stochastic_directed(ring(6, directed=True), seed=2)
    assert list(one_way.edges) == list(ring(6, directed=True).edges)


@BOTH
def test_the_base_graph_is_not_changed(generator: object) -> None:
    base = nx.Graph([("b", "a"), ("a", "a"), ("a", "c")], name="mine")
    generator(base)
    assert dict(base.graph) == {"name": "mine"}
    assert list(base.edges(data=True)) == [("b", "a", {}), ("a", "a", {}), ("a", "c", {})]


def test_a_base_graph_keeps_its_names_in_order_without_self_loops() -> None:
    base = nx.Graph([("b", "a"), ("a", "a"), ("a", "c")])
    assert list(stochastic_undirected(base).edges) == [("b", "a"), ("a", "c")]
    assert list(stochastic_undirected(nx.Graph([(30, 10), (10, 20)])).edges) == [(10, 20), (10, 30)]
    given = np.array([[0, 0.2, 0], [0.2, 0, 0.7], [0, 0.7, 0]])  # in the order of the graph
    assert given_probabilities(stochastic_undirected(base, given)) == [0.2, 0.7]


@BOTH
def test_the_order_in_which_a_base_was_built_does_not_matter(generator: object) -> None:
    forwards, backwards = nx.Graph(ring(6).edges), nx.Graph(list(ring(6).edges)[::-1])
    assert list(generator(forwards, seed=4).edges(data=True)) == list(
        generator(backwards, seed=4).edges(data=True)
    )


def test_other_marks_and_the_server_of_a_base_are_kept() -> None:
    base = nx.Graph(server="hub")
    base.add_edge("a", "hub", latency=2.0, probability=0.9)
    graph = stochastic_directed(base, probability=0.5)
    assert list(graph.edges(data=True)) == [
        ("a", "hub", {"latency": 2.0, "probability": 0.5}),
        ("hub", "a", {"latency": 2.0, "probability": 0.5}),
    ]
    assert graph.graph["server"] == "hub"


def test_none_keeps_the_probabilities_of_the_base() -> None:
    base = nx.Graph()
    base.add_edge(0, 1, probability=0.3)
    base.add_edge(1, 2, probability=1)
    assert given_probabilities(stochastic_undirected(base, None)) == [0.3, 1.0]
    assert given_probabilities(stochastic_directed(base, None)) == [0.3, 0.3, 1.0, 1.0]


def test_a_star_has_its_server_last() -> None:
    graph = star(3, up=0.5, down=0.75)
    assert type(graph) is nx.DiGraph
    assert graph.graph["server"] == 3
    assert list(graph) == [0, 1, 2, 3]
    assert list(graph.edges(data="probability")) == [
        (0, 3, 0.5), (1, 3, 0.5), (2, 3, 0.5), (3, 0, 0.75), (3, 1, 0.75), (3, 2, 0.75),
    ]  # fmt: skip
    assert set(given_probabilities(star(3))) == {1.0}


def test_a_star_takes_ranges_functions_and_mappings_for_each_direction() -> None:
    graph = star(40, up=(0.1, 0.2), down=(0.7, 0.9), seed=5)
    assert all(0.1 <= graph.edges[client, 40]["probability"] <= 0.2 for client in range(40))
    assert all(0.7 <= graph.edges[40, client]["probability"] <= 0.9 for client in range(40))
    both = star(40, up=(0.1, 0.2), down=(0.1, 0.2), seed=5)
    assert len(set(given_probabilities(both))) == 80
    mixed = star(2, up=lambda sender, receiver: (sender + 1) / 10, down={(2, 0): 0.3, (2, 1): 0.4})
    assert given_probabilities(mixed) == [0.1, 0.2, 0.3, 0.4]


def test_a_directed_base_is_refused_for_undirected_links() -> None:
    with pytest.raises(
        TopologyError, match=r"base graph of stochastic_undirected is directed.*use stochastic_directed"
    ):
        stochastic_undirected(nx.DiGraph([(0, 1)]))


@BOTH
@pytest.mark.parametrize("base", [0, -3, 2.5, "ring", None, True, [1, 2]])
def test_the_first_argument_must_be_a_number_of_clients_or_a_graph(generator: object, base: object) -> None:
    with pytest.raises(
        TopologyError,
        match=r"n_or_base is .*; it must be the number of clients, at least 1, or a networkx graph",
    ):
        generator(base)


@BOTH
def test_bases_that_are_no_networks_are_refused(generator: object) -> None:
    with pytest.raises(TopologyError, match=r"the graph has no nodes"):
        generator(nx.Graph())
    with pytest.raises(TopologyError, match=r"parallel edges"):
        generator(nx.MultiGraph([(0, 1), (0, 1)]))
    with pytest.raises(TopologyError, match=r"the server 7 is not a node"):
        generator(nx.Graph([(0, 1)], server=7))


def test_a_probability_out_of_range_names_its_edge() -> None:
    with pytest.raises(TopologyError, match=r"probability of edge 3→7 is 1.4; it must lie in \(0, 1\]"):
        stochastic_directed(8, lambda i, j: 1.4 if (i, j) == (3, 7) else 0.5)
    with pytest.raises(TopologyError, match=r"probability of edge 3–7 is 0; it must lie in \(0, 1\]"):
        stochastic_undirected(8, lambda i, j: 0 if (i, j) == (3, 7) else 0.5)
    with pytest.raises(TopologyError, match=r"probability of edge 0→1 is nan; it must lie"):
        stochastic_directed(2, np.full((2, 2), np.nan))
    with pytest.raises(TopologyError, match=r"stochastic_directed: probability"):
        stochastic_directed(2, {(0, 1): "high", (1, 0): 0.5})
    with pytest.raises(TopologyError, match=r"probability of edge 1→2 is -0.1; it must lie"):
        star(2, up={(0, 2): 0.5, (1, 2): -0.1})


@BOTH
@pytest.mark.parametrize("value", [0, 1.4, -0.5, float("nan"), True])
def test_a_constant_out_of_range_is_refused(generator: object, value: float) -> None:
    with pytest.raises(TopologyError, match=rf"probability is {value!r}(\.0)?; it must .* \(0, 1\]"):
        generator(3, value)


@BOTH
def test_a_range_is_low_to_high_within_zero_and_one(generator: object) -> None:
    with pytest.raises(
        TopologyError, match=r"probability range \(0.8, 0.4\) has low > high; write \(0.4, 0.8\)"
    ):
        generator(3, (0.8, 0.4))
    with pytest.raises(
        TopologyError, match=r"probability of range \(0.0, 0.4\) is 0.0; it must lie in \(0, 1\]"
    ):
        generator(3, (0.0, 0.4))
    with pytest.raises(
        TopologyError, match=r"probability of range \(0.5, 1.5\) is 1.5; it must lie in \(0, 1\]"
    ):
        generator(3, (0.5, 1.5))
    with pytest.raises(TopologyError, match=r"probability is"):
        generator(3, (0.1, 0.2, 0.3))


@BOTH
@pytest.mark.parametrize("rule", ["often", {0.5}, 1j])
def test_a_probability_of_another_kind_is_refused_with_the_kinds_there_are(
    generator: object, rule: object
) -> None:
    with pytest.raises(TopologyError, match=r"it must be a number in .*range.*function.*mapping.*array"):
        generator(3, rule)


def test_a_mapping_must_fit_the_edges() -> None:
    with pytest.raises(TopologyError, match=r"edge 1→0 has no probability in the mapping"):
        stochastic_directed(2, {(0, 1): 0.5})
    with pytest.raises(TopologyError, match=r"probability is given for \(0, 2\), which is not an edge"):
        stochastic_directed(2, {(0, 1): 0.5, (1, 0): 0.5, (0, 2): 0.5})
    with pytest.raises(TopologyError, match=r"probability is"):
        stochastic_undirected(2, {5: 0.5})
    with pytest.raises(TopologyError, match=r"probability of edge 0–1 is given as 0.5 and as 0.6"):
        stochastic_undirected(2, {(0, 1): 0.5, (1, 0): 0.6})


def test_an_array_must_fit_the_clients_and_be_symmetric_for_undirected_links() -> None:
    with pytest.raises(TopologyError, match=r"has shape \(2, 3\); it must be \(3, 3\)"):
        stochastic_directed(3, np.full((2, 3), 0.5))
    with pytest.raises(
        TopologyError, match=r"probability of edge 0–1 is given as 0.1 and as 0.2; .*symmetric"
    ):
        stochastic_undirected(2, np.array([[0, 0.1], [0.2, 0]]))
    with pytest.raises(TopologyError, match=r"probability of edge 0–1 is nan"):
        stochastic_undirected(2, np.full((2, 2), np.nan))


@BOTH
def test_none_needs_a_base_graph_with_probabilities(generator: object) -> None:
    with pytest.raises(TopologyError, match=r"probability is None, but 5 clients are no base graph"):
        generator(5, None)
    with pytest.raises(TopologyError, match=r"edge 0[–→]1 of the base graph has no probability"):
        generator(nx.Graph([(0, 1)]), None)


def test_the_other_arguments_are_checked() -> None:
    with pytest.raises(TopologyError, match=r"seed is '1'; it must be a whole number"):
        stochastic_directed(3, seed="1")
    with pytest.raises(TopologyError, match=r"star: clients is 0; it must be a whole number, at least 1"):
        star(0)
    with pytest.raises(TopologyError, match=r"star: up is None; it must be a number in"):
        star(2, up=None)
