"""Graphs drawn once and then fixed."""

import time

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfed.errors import TopologyError
from topologies import erdos_renyi, random_graph, small_world


@given(n=st.integers(1, 30), p=st.floats(0.3, 1.0), seed=st.integers(0, 10**6))
def test_erdos_renyi_is_connected_and_depends_on_its_arguments_alone(n: int, p: float, seed: int) -> None:
    graph = erdos_renyi(n, p, seed, attempts=2000)
    assert nx.is_connected(graph)
    assert set(nx.get_edge_attributes(graph, "probability").values()) <= {1.0}
    assert list(graph.edges) == list(erdos_renyi(n, p, seed, attempts=2000).edges)


def test_erdos_renyi_has_about_p_of_all_edges() -> None:
    graph = erdos_renyi(400, 0.25, seed=5)
    pairs = 400 * 399 / 2
    deviation = (pairs * 0.25 * 0.75) ** 0.5
    assert abs(graph.number_of_edges() - 0.25 * pairs) < 4 * deviation


def test_erdos_renyi_with_certain_edges_is_complete() -> None:
    assert erdos_renyi(7, 1.0).number_of_edges() == 21


def test_another_seed_gives_another_graph() -> None:
    edges = {tuple(erdos_renyi(20, 0.4, seed).edges) for seed in range(20)}
    assert len(edges) == 20
    assert len({tuple(random_graph(50, 4, seed).edges) for seed in range(20)}) == 20
    assert len({tuple(small_world(50, 4, 0.3, seed).edges) for seed in range(20)}) == 20


def test_erdos_renyi_is_redrawn_until_connected() -> None:
    # At this p about one graph in twelve is connected, so a single attempt nearly always fails for some seed.
    def connected_at_once(seed: int) -> bool:
        try:
            erdos_renyi(20, 0.1, seed, attempts=1)
        except TopologyError:
            return False
        return True

    assert not all(connected_at_once(seed) for seed in range(20))
    assert all(nx.is_connected(erdos_renyi(20, 0.1, seed, attempts=2000)) for seed in range(20))


@pytest.mark.parametrize("p", [0.001, 1e-18])
def test_a_hopeless_p_is_refused_with_the_threshold_the_attempts_and_a_remedy(p: float) -> None:
    with pytest.raises(TopologyError) as refusal:
        erdos_renyi(100, p, seed=1, attempts=50)
    assert str(refusal.value) == (
        f"none of 50 random graphs with n=100 and p={p} was connected; that is likely only above the "
        "threshold p = ln(n)/n = 0.04605: raise p, allow more attempts, or use random_graph(n, mean_degree), "
        "which joins the pieces"
    )


def test_ten_thousand_clients_take_seconds_not_minutes() -> None:
    start = time.process_time()
    graph = erdos_renyi(10_000, 0.0014, seed=1)
    sparse = random_graph(10_000, 10, seed=1)
    assert time.process_time() - start < 10
    assert nx.is_connected(graph)
    assert nx.is_connected(sparse)
    assert 9.8 < 2 * sparse.number_of_edges() / 10_000 < 10.2


@given(n=st.integers(2, 60), share=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_random_graph_is_connected_at_every_mean_degree(n: int, share: float, seed: int) -> None:
    tree = 2 * (n - 1) / n
    degree = min(tree + share * (n - 1 - tree), n - 1)
    graph = random_graph(n, degree, seed)
    assert nx.is_connected(graph)
    assert list(graph.edges) == list(random_graph(n, degree, seed).edges)


def test_random_graph_adds_one_edge_per_separate_component() -> None:
    # With the same draw, what was there stays and each piece costs one edge: edges = drawn + pieces - 1.
    graph = random_graph(200, 2.0, seed=4)
    bridges = set(nx.bridges(graph))
    assert nx.is_connected(graph)
    assert len(bridges) > 20
    assert 2.0 < 2 * graph.number_of_edges() / 200 < 3.2


def test_small_world_without_rewiring_is_a_ring_of_near_neighbours() -> None:
    graph = small_world(8, 4, 0.0)
    assert all(set(graph[i]) == {(i + d) % 8 for d in (-2, -1, 1, 2)} for i in range(8))


@given(n=st.integers(5, 40), rewire=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_small_world_is_connected_and_keeps_its_number_of_edges(n: int, rewire: float, seed: int) -> None:
    graph = small_world(n, 4, rewire, seed)
    assert nx.is_connected(graph)
    assert graph.number_of_edges() == 2 * n
    assert list(graph.edges) == list(small_world(n, 4, rewire, seed).edges)


def test_a_small_world_that_falls_apart_in_every_attempt_is_refused() -> None:
    with pytest.raises(
        TopologyError, match=r"none of 1 small worlds with n=3000, neighbours=2 and rewire=1.0 was connected"
    ):
        small_world(3000, 2, 1.0, attempts=1)


@pytest.mark.parametrize("p", [0, -0.1, 1.2, float("nan"), "0.4", None])
def test_p_must_be_a_probability(p: object) -> None:
    with pytest.raises(TopologyError, match=rf"p is {p!r}; it must be a number in \(0, 1\]; use edgeless"):
        erdos_renyi(10, p)


@pytest.mark.parametrize("call", [erdos_renyi, random_graph])
@pytest.mark.parametrize("n", [0, 1.5, None])
def test_the_number_of_clients_is_checked(call: object, n: object) -> None:
    with pytest.raises(TopologyError, match=rf"n is {n!r}; it must be a whole number"):
        call(n, 0.5)


def test_the_mean_degree_must_be_possible() -> None:
    with pytest.raises(TopologyError, match=r"mean_degree is 1.5; it must lie in \[1.8, 9\]"):
        random_graph(10, 1.5)
    with pytest.raises(TopologyError, match=r"mean_degree is 9.5; it must lie in \[1.8, 9\]"):
        random_graph(10, 9.5)
    assert random_graph(10, 9).number_of_edges() == 45
    assert list(random_graph(2, 1).edges) == [(0, 1)]


@pytest.mark.parametrize("neighbours", [3, 10, 12])
def test_neighbours_must_be_even_and_fewer_than_the_clients(neighbours: int) -> None:
    with pytest.raises(
        TopologyError, match=f"neighbours is {neighbours}; it must be even .* less than n = 10"
    ):
        small_world(10, neighbours, 0.1)


def test_other_bad_input_is_named() -> None:
    with pytest.raises(
        TopologyError, match=r"small_world: neighbours is 0; it must be a whole number, at least 2"
    ):
        small_world(10, 0, 0.1)
    with pytest.raises(TopologyError, match=r"rewire is 1.1; it must be a number in \[0, 1\]"):
        small_world(10, 2, 1.1)
    with pytest.raises(TopologyError, match=r"erdos_renyi: attempts is 0; it must be a whole number in"):
        erdos_renyi(10, 0.5, attempts=0)
    with pytest.raises(TopologyError, match=r"seed is 1.5; it must be a whole number"):
        erdos_renyi(10, 0.5, seed=1.5)
    with pytest.raises(TopologyError, match=r"seed is None; it must be a whole number"):
        random_graph(10, 3, seed=None)
