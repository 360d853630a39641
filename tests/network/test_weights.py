"""What a sender gives away and keeps sums to one, whatever the links do; and sometimes columns do as well."""

from __future__ import annotations

import itertools
import re
import sys
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfed.errors import ScenarioError, TopologyError
from asyncfed.network.links import Network, compile_network
from asyncfed.network.weights import FastestMixing, Given, Metropolis, Sends, Shares, Uniform, Weights
from asyncfed.rng import Streams


def network_of(graph: nx.Graph, probability: float = 1.0, **options: Any) -> Network:
    nx.set_edge_attributes(graph, probability, "probability")
    return compile_network(graph, **options)


def matrix(network: Network, shares: Shares, up: np.ndarray) -> np.ndarray:
    """W[i, j] = p_ij, built edge by edge."""
    weights, kept = shares.of_all(up)
    W = np.diag(kept)
    for i, j, weight in zip(network.senders, network.receivers, weights, strict=True):
        W[i, j] += weight
    return W


def all_up(network: Network) -> np.ndarray:
    return np.ones(network.edges, dtype=bool)


def slem(W: np.ndarray) -> float:
    """Second-largest eigenvalue modulus of a symmetric chain."""
    return float(np.sort(np.abs(np.linalg.eigvalsh(W)))[-2])


def connected(n: int, p: float, seed: int) -> nx.Graph:
    while not nx.is_connected(graph := nx.gnp_random_graph(n, p, seed=seed)):
        seed += 1000
    return graph


def given_matrix(network: Network, seed: int) -> Given:
    """Random positive shares on the network's links."""
    W = np.eye(network.n)
    W[network.senders, network.receivers] = 1
    W *= np.random.default_rng(seed).uniform(0.1, 1, W.shape)
    return Given(tuple(map(tuple, W / W.sum(axis=1, keepdims=True))))


def rules(network: Network, seed: int) -> list[Weights]:
    both = [] if network.directed else [Metropolis()]
    return [Uniform(), given_matrix(network, seed), *both]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_a_senders_shares_sum_to_one_and_only_live_links_carry_any(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 10_000))
    graph = nx.gnp_random_graph(
        data.draw(st.integers(1, 8)), 0.5, seed=seed, directed=data.draw(st.booleans())
    )
    network = network_of(graph, 0.5)
    up = np.array(
        data.draw(st.lists(st.booleans(), min_size=network.edges, max_size=network.edges)), dtype=bool
    )
    for rule in rules(network, seed):
        shares = rule.prepare(network)
        W = matrix(network, shares, up)
        assert W.sum(axis=1) == pytest.approx(np.ones(network.n), abs=1e-12)
        assert (W >= -1e-12).all()
        weights, kept = shares.of_all(up)
        assert (weights[up] > 0).all()
        assert (weights[~up] == 0).all()
        for sender in range(network.n):
            links = slice(network.first[sender], network.first[sender + 1])
            own, keeps = shares.of_senders(Sends.by(network, np.array([sender])), up[links])
            assert own.tolist() == weights[links].tolist()
            assert keeps.tolist() == [kept[sender]]


def test_uniform_is_one_over_the_realised_out_links_and_self() -> None:
    network = network_of(nx.complete_graph(5, create_using=nx.DiGraph), 0.5)
    shares = Uniform().prepare(network)
    for step in range(20):
        up = network.up(Streams(1), step, step)
        W = matrix(network, shares, up)
        for i in range(5):
            out = [
                j
                for e, (s, j) in enumerate(zip(network.senders, network.receivers, strict=True))
                if s == i and up[e]
            ]
            expected = np.zeros(5)
            expected[[i, *out]] = 1 / (1 + len(out))
            assert W[i].tolist() == expected.tolist()


def enumerated(network: Network, shares: Shares) -> tuple[np.ndarray, np.ndarray]:
    """The mean shares over all patterns of links, sender by sender, each pattern with its probability."""
    sent, kept = np.zeros(network.edges), np.zeros(network.n)
    for sender in range(network.n):
        links = slice(network.first[sender], network.first[sender + 1])
        p = network.probability[links]
        for pattern in itertools.product([False, True], repeat=len(p)):
            up = np.array(pattern, dtype=bool)
            weights, (keeps,) = shares.of_senders(Sends.by(network, np.array([sender])), up)
            chance = np.where(up, p, 1 - p).prod()
            sent[links] += chance * weights
            kept[sender] += chance * keeps
    return sent, kept


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("options", [{}, {"loss": 0.3}], ids=["lossless", "lossy"])
@pytest.mark.parametrize("seed", range(6))
def test_expected_shares_are_those_over_all_link_patterns(
    directed: bool, options: dict[str, Any], seed: int
) -> None:
    pick = np.random.default_rng(seed)
    graph = nx.gnp_random_graph(9, [0.3, 0.6, 1.0][seed % 3], seed=seed, directed=directed)
    for *_, marks in graph.edges(data=True):
        marks["probability"] = float(pick.choice([1.0, 1e-9, 0.5, pick.uniform(0, 1)]))
    network = compile_network(graph, **options)
    for rule in rules(network, seed):
        shares = rule.prepare(network)
        sent, kept = shares.expected()
        right_sent, right_kept = enumerated(network, shares)
        assert sent == pytest.approx(right_sent, rel=1e-12, abs=1e-15)
        assert kept == pytest.approx(right_kept, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("degree", [1, 2, 26, 27, 28, 29, 99, 100, 999, 30_000])
@pytest.mark.parametrize("p", [1.0, 0.999, 0.6, 1e-3, 1e-12])
def test_expected_uniform_shares_of_many_equal_links_have_a_closed_form(degree: int, p: float) -> None:
    """S + 1 ~ 1 + Binomial(k, p): E[1/(S + 1)] = (1 - (1-p)^(k+1))/((k+1) p), the rest is for all alike."""
    network = network_of(nx.DiGraph([(0, j + 1) for j in range(degree)]), p)
    sent, kept = Uniform().prepare(network).expected()
    some = 1.0 if p == 1 else -np.expm1((degree + 1) * np.log1p(-p))
    keeps = some / ((degree + 1) * p)
    assert kept[0] == pytest.approx(keeps, rel=1e-12)
    assert kept[1:] == pytest.approx(np.ones(degree), abs=1e-13), "who has no links keeps everything"
    # 1 - keeps is no better than the last digit of keeps.
    assert sent == pytest.approx(np.full(degree, (1 - keeps) / degree), rel=1e-12, abs=1e-15 / degree)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_expected_shares_are_shares(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 10_000))
    graph = nx.gnp_random_graph(
        data.draw(st.integers(1, 40)), 0.5, seed=seed, directed=data.draw(st.booleans())
    )
    pick = np.random.default_rng(seed)
    for *_, marks in graph.edges(data=True):
        marks["probability"] = 1.0 - float(pick.random())
    network = compile_network(graph)
    for rule in rules(network, seed):
        sent, kept = rule.prepare(network).expected()
        assert kept + np.bincount(network.senders, sent, minlength=network.n) == pytest.approx(
            np.ones(network.n), abs=1e-12
        )
        assert (sent > 0).all()
        assert (kept > 0).all()
        assert (sent <= network.probability).all()


def test_metropolis_on_a_path_of_three_by_hand() -> None:
    network = network_of(nx.path_graph(3), 0.5)
    shares = Metropolis().prepare(network)
    third = 1 / 3
    assert matrix(network, shares, all_up(network)) == pytest.approx(
        np.array([[2 / 3, third, 0], [third, third, third], [0, third, 2 / 3]]), abs=1e-15
    )
    up = np.array([False, False, True, True])  # the link 0–1 is down: both keep its share
    assert matrix(network, shares, up) == pytest.approx(
        np.array([[1, 0, 0], [0, 2 / 3, third], [0, third, 2 / 3]]), abs=1e-15
    )


@pytest.mark.parametrize("rule", [Metropolis(), FastestMixing()])
def test_symmetric_rules_are_doubly_stochastic_at_every_step_of_undirected_random_links(
    rule: Weights,
) -> None:
    network = network_of(connected(8, 0.5, seed=3), 0.6)
    shares = rule.prepare(network)
    assert shares.doubly_stochastic
    for step in range(30):
        W = matrix(network, shares, network.up(Streams(2), step, step))
        assert pytest.approx(W.T, abs=1e-15) == W
        assert W.sum(axis=0) == pytest.approx(np.ones(8), abs=1e-12)
        assert W.sum(axis=1) == pytest.approx(np.ones(8), abs=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_the_fastest_chain_on_a_path_has_halves_on_its_edges(n: int) -> None:
    # Boyd, Diaconis, Sun & Xiao (2006): 1/2 on every edge and a loop of 1/2 at either end, modulus cos(π/n).
    network = network_of(nx.path_graph(n))
    W = matrix(network, FastestMixing().prepare(network), all_up(network))
    expected = np.diag(np.full(n - 1, 0.5), 1) + np.diag(np.full(n - 1, 0.5), -1)
    expected[0, 0] = expected[-1, -1] = 0.5
    assert pytest.approx(expected, abs=1e-4) == W
    assert slem(W) == pytest.approx(np.cos(np.pi / n), abs=1e-5)


def test_the_fastest_chain_on_a_complete_graph_forgets_everything_at_once() -> None:
    network = network_of(nx.complete_graph(6))
    W = matrix(network, FastestMixing().prepare(network), all_up(network))
    assert pytest.approx(np.full((6, 6), 1 / 6), abs=1e-5) == W


@pytest.mark.parametrize("seed", range(4))
def test_the_fastest_chain_mixes_no_slower_than_metropolis(seed: int) -> None:
    network = network_of(connected(9, 0.35, seed))
    fastest = matrix(network, FastestMixing().prepare(network), all_up(network))
    metropolis = matrix(network, Metropolis().prepare(network), all_up(network))
    assert (fastest >= -1e-12).all()
    assert fastest.sum(axis=0) == pytest.approx(np.ones(9), abs=1e-12)
    assert slem(fastest) <= slem(metropolis) + 1e-6


def test_without_cvxpy_the_fastest_chain_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(ScenarioError, match=re.escape("pip install 'asyncfed[fmmc]', or use Metropolis()")):
        FastestMixing().prepare(network_of(nx.path_graph(17)))  # one that no other test has solved


def test_a_network_without_links_keeps_everything() -> None:
    network = network_of(nx.empty_graph(3))
    for rule in (Uniform(), Metropolis(), FastestMixing(), Given(tuple(map(tuple, np.eye(3))))):
        shares = rule.prepare(network)
        assert matrix(network, shares, all_up(network)).tolist() == np.eye(3).tolist()
        assert shares.of_senders(Sends.by(network, np.array([1])), np.zeros(0, dtype=bool))[1] == [1.0]
        assert shares.doubly_stochastic


@pytest.mark.parametrize("rule", [Metropolis(), FastestMixing()])
def test_symmetric_rules_refuse_directed_links(rule: Weights) -> None:
    with pytest.raises(TopologyError, match=re.escape("needs undirected links (an nx.Graph)")):
        rule.prepare(network_of(nx.cycle_graph(4, create_using=nx.DiGraph)))
    with pytest.raises(TopologyError, match=re.escape("this topology is directed: use weights=Uniform()")):
        rule.prepare(network_of(nx.complete_graph(4, create_using=nx.DiGraph), 0.5))
    # Both directions always there: as good as undirected.
    assert rule.prepare(network_of(nx.complete_graph(4, create_using=nx.DiGraph))).doubly_stochastic


def permuted(n: int) -> Given:
    """Half kept, half to the next: doubly stochastic and not symmetric."""
    return Given(tuple(map(tuple, (np.eye(n) + np.roll(np.eye(n), 1, axis=1)) / 2)))


LOPSIDED = Given(((0.5, 0.5, 0.0), (0.25, 0.5, 0.25), (0.0, 0.5, 0.5)))
DIRECTED = {"create_using": nx.DiGraph}


@pytest.mark.parametrize(
    ("graph", "probability", "options", "rule", "expected"),
    [
        (nx.complete_graph(4), 1.0, {}, Uniform(), True),
        (nx.cycle_graph(5), 1.0, {}, Uniform(), True),
        (nx.cycle_graph(5, **DIRECTED), 1.0, {}, Uniform(), True),
        (nx.cycle_graph(5), 0.5, {}, Uniform(), False),
        (nx.path_graph(3), 1.0, {}, Uniform(), False),
        (nx.star_graph(4), 1.0, {}, Uniform(), False),
        (nx.DiGraph([(0, 1), (1, 0), (1, 2), (2, 0)]), 1.0, {}, Uniform(), False),
        (nx.cycle_graph(5), 1.0, {"loss": 0.1}, Uniform(), False),
        (nx.star_graph(4), 1.0, {}, Metropolis(), True),
        (nx.star_graph(4), 0.3, {}, Metropolis(), True),
        (nx.star_graph(4), 0.3, {"loss": 0.1}, Metropolis(), False),
        (nx.cycle_graph(4, **DIRECTED), 1.0, {}, permuted(4), True),
        (nx.cycle_graph(4, **DIRECTED), 0.5, {}, permuted(4), False),
        (nx.path_graph(3), 1.0, {}, LOPSIDED, False),
    ],
)
def test_double_stochasticity_is_known(
    graph: nx.Graph, probability: float, options: dict[str, Any], rule: Weights, expected: bool
) -> None:
    network = network_of(graph.copy(), probability, **options)
    shares = rule.prepare(network)
    assert shares.doubly_stochastic is expected
    # … and is what the realised matrices say, links and losses drawn.
    streams = Streams(0)
    columns = []
    for step in range(40):
        up = network.up(streams, step, step)
        weights, kept = shares.of_all(up)
        weights = np.where(network.lost(streams, step), 0.0, weights)
        columns.append(kept + np.bincount(network.receivers, weights, minlength=network.n))
    assert bool(np.allclose(columns, 1.0, atol=1e-9)) is expected


def test_given_weights_are_used_as_given_and_a_link_that_is_down_leaves_its_share_at_home() -> None:
    network = network_of(nx.path_graph(3), 0.5)
    shares = LOPSIDED.prepare(network)
    assert matrix(network, shares, all_up(network)).tolist() == [list(row) for row in LOPSIDED.matrix]
    up = np.array([True, False, True, False])  # 0→1 and 1→2
    assert matrix(network, shares, up).tolist() == [[0.5, 0.5, 0.0], [0.0, 0.75, 0.25], [0.0, 0.0, 1.0]]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (((1.0,),), "the weight matrix has 1 rows of length [1]; 3 clients need 3 rows of 3"),
        (((1.0, 0.0), (0.0, 1.0), (0.0, 1.0)), "the weight matrix has 3 rows of length [2]"),
        (((1.0, 0.0, 0.0), (0.0, 1.0), (0.0, 0.0, 1.0)), "the weight matrix has 3 rows of length [2, 3]"),
        (
            ((1.5, -0.5, 0), (0, 1, 0), (0, 0, 1)),
            "Given: matrix[0][1] is -0.5; it must be a finite number, at least 0",
        ),
        (
            ((0.5, 0.4, 0), (0, 1, 0), (0, 0, 1)),
            "client 0 gives away and keeps sum to 0.9; they must sum to 1",
        ),
        (
            ((1, 0, 0), (0, float("nan"), 0), (0, 0, 1)),
            "Given: matrix[1][1] is nan; it must be a finite number, at least 0",
        ),
        (((0.5, 0, 0.5), (0, 1, 0), (0, 0, 1)), "weight 0→2 is 0.5, but the topology has no such link"),
    ],
)
def test_a_matrix_that_does_not_fit_is_refused(rows: Any, named: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(named)):
        Given(rows).prepare(network_of(nx.path_graph(3)))


def test_a_matrix_may_be_an_array() -> None:
    array: Any = np.full((3, 3), 1 / 3)
    assert Given(array) == Given(((1 / 3,) * 3,) * 3)
