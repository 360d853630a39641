"""What clients expect of their links: exact, or counted by each of them alone; and the weights made of it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings

from asyncfed.errors import ScenarioError, TopologyError
from asyncfed.network import (
    Bursts,
    DebiasedShares,
    Expectations,
    Given,
    Knowledge,
    Lockstep,
    Metropolis,
    Tally,
    Timing,
    TransposedShares,
    Uniform,
    VirtualTime,
    Weights,
    exact_expectations,
    require_links_back,
    require_undirected,
)
from asyncfed.network.links import Network, compile_network
from asyncfed.network.waves import Conversation, Status
from asyncfed.network.weights import Sends, Shares
from asyncfed.rng import Streams
from tests.network.played import Played, Setting, entries, play, settings_of
from topologies import with_links

law = settings(max_examples=80, deadline=None, derandomize=True)


class Deaf:
    """A recorder that keeps nothing."""

    def messages(self, **columns: Any) -> None: ...

    def steps(self, **columns: Any) -> None: ...


def stochastic(graph: nx.Graph, seed: int = 0) -> nx.Graph:
    """StoU on an undirected graph, StoD on a directed one."""
    pick = np.random.default_rng(seed)
    for *_, marks in graph.edges(data=True):
        marks["probability"] = float(pick.uniform(0.4, 0.8))
    return graph


def complete(n: int, directed: bool) -> nx.Graph:
    return stochastic(nx.complete_graph(n, create_using=nx.DiGraph if directed else nx.Graph))


def edges_of(network: Network) -> list[tuple[int, int]]:
    return list(zip(network.senders.tolist(), network.receivers.tolist(), strict=True))


def tallied(timing: Timing, network: Network, shares: Shares, steps: int, seed: int) -> Tally:
    tally = Tally(network)
    talk = Conversation("inner", "push", steps, message_bytes=8)
    mixing = ((("z",), shares),)
    for _ in timing.among_peers(network, mixing, Streams(seed), talk, Deaf(), 10**9, tally=tally):
        pass
    return tally


def matrix(network: Network, weights: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """[sender, receiver], a client's own on the diagonal."""
    W = np.diag(kept)
    W[network.senders, network.receivers] = weights
    return W


# Exact expectations


def test_a_client_expects_what_the_links_let_through_per_step_of_its_own() -> None:
    graph = nx.Graph()
    graph.add_edge(0, 1, probability=0.5, loss=0.2)
    graph.add_edge(1, 2, probability=1.0)
    timing = VirtualTime("exponential(3)", factors={1: 4.0})
    network = timing.network(graph)
    shares = Uniform().prepare(network)
    expected = exact_expectations(network, shares, timing.pace(network, 3))
    assert edges_of(network) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    # Client 1 is four times slower: it gets four messages a step, and gives a quarter of one.
    assert expected.received == pytest.approx([0.4 * 4, 0.4 / 4, 1 / 4, 4], rel=1e-15)
    assert expected.sent == pytest.approx([1 / 4, 1 / 6, 1 / 4 + 1 / 6, 1 / 2], rel=1e-15)
    assert expected.kept == pytest.approx([3 / 4, 5 / 12, 1 / 2], rel=1e-15)
    lockstep = exact_expectations(network, shares, Lockstep().pace(network, 3))
    assert lockstep.received == pytest.approx([0.4, 0.4, 1, 1], rel=1e-15)
    assert lockstep.sent.tolist() == expected.sent.tolist()


# Counting


@law
@given(settings_of())
def test_a_clients_knowledge_is_in_the_messages_it_sent_and_those_delivered_to_it(setting: Setting) -> None:
    """Recomputed from the trace of every client: only its own rows are read, and only those from while all
    whom it sends to were there.
    """
    played = play(setting)
    lockstep = isinstance(setting.timing, Lockstep)
    for client in range(played.network.n):
        knowledge = played.tally.of(client)
        until = _first_to_leave(played, client)
        own = [row for row in played.step_rows if row.client == client]
        sends = sum(row.ended_at <= until for row in own)
        counted = sorted(row.step for row in own if row.started_at <= until)
        given_away: Counter[int] = Counter()
        for row in played.rows:
            if row.sender == client and row.weight is not None and row.sent_at <= until:
                given_away[row.receiver] += row.weight
        if sends:
            assert knowledge.sent == pytest.approx({k: w / sends for k, w in given_away.items()}, rel=1e-12)
            assert knowledge.kept == pytest.approx(1 - sum(given_away.values()) / sends, abs=1e-12)
        else:
            assert knowledge.sent == {}
            assert knowledge.kept == 1.0
        delivered = [row for row in played.rows if row.receiver == client and row.status == Status.DELIVERED]
        heard: dict[int, float] = {}
        for sender in {row.sender for row in delivered}:
            steps = [row.absorbed_step for row in delivered if row.sender == sender]
            if lockstep:  # what is sent in a round is absorbed at its end
                heard[sender] = len(steps) / len(counted)
                continue
            steps = [step for step in steps if step in counted]
            after = [step for step in steps if step > min(steps)]
            if after:
                heard[sender] = len(after) / sum(step > min(steps) for step in counted)
            elif steps:
                heard[sender] = len(steps) / len(counted)
        assert knowledge.received == pytest.approx(heard, rel=1e-12)


def _first_to_leave(played: Played, client: int) -> float:
    """When the first of those a client sends to had made all its steps; in lockstep nobody leaves early."""
    if isinstance(played.setting.timing, Lockstep):
        return float("inf")
    last = played.setting.first_step + played.setting.steps - 1
    receivers = set(played.network.receivers[played.network.senders == client].tolist())
    left = [row.ended_at for row in played.step_rows if row.client in receivers and row.step == last]
    return min(left, default=float("inf"))


@law
@given(settings_of())
def test_the_expectations_are_what_the_clients_know_each_by_itself(setting: Setting) -> None:
    played = play(setting)
    if all(played.tally.of(client).kept == 1.0 for client in range(played.network.n)) and not any(
        row.ended_at <= _first_to_leave(played, row.client) for row in played.step_rows
    ):
        with pytest.raises(ScenarioError, match="for no client has sent anything yet"):
            played.tally.expectations()
        return
    expectations = played.tally.expectations()
    known = [played.tally.of(client) for client in range(played.network.n)]
    edges = edges_of(played.network)
    assert expectations.sent.tolist() == [known[i].sent.get(j, 0.0) for i, j in edges]
    assert expectations.kept.tolist() == [knowledge.kept for knowledge in known]
    assert expectations.received.tolist() == [known[j].received.get(i, 0.0) for i, j in edges]


def test_what_others_do_leaves_a_clients_knowledge_as_it_is() -> None:
    network = compile_network(complete(4, directed=True))
    alone, together = Tally(network), Tally(network)
    into_2 = np.flatnonzero(network.receivers == 2)
    own = np.array([0.25, 0.0, 0.5])
    for tally in (alone, together):
        tally.sent(Sends.by(network, np.array([2])), own, np.array([0.25]))
        tally.stepped(np.array([2, 2]), into_2[[0, 2, 2]], np.zeros(3, dtype=np.int64))
    before = alone.of(2)
    assert before == Knowledge({0: 0.25, 3: 0.5}, 0.25, {0: 0.5, 3: 1.0})
    for client in (0, 1, 3):
        together.sent(Sends.by(network, np.array([client])), np.full(3, 0.25), np.array([0.25]))
        into = np.flatnonzero(network.receivers == client)
        together.stepped(np.array([client]), into, np.zeros_like(into))
    assert together.of(2) == before
    assert alone.of(0) == Knowledge({}, 1.0, {})


def test_a_tally_that_is_fed_somebody_elses_messages_says_so() -> None:
    network = compile_network(complete(3, directed=True))
    into = np.flatnonzero(network.receivers == 1)
    with pytest.raises(AssertionError, match="a client counts what reaches itself"):
        Tally(network).stepped(np.array([0]), into, np.zeros_like(into))


@law
@given(settings_of())
def test_being_tallied_changes_nothing(setting: Setting) -> None:
    one, two = play(setting), play(setting, tallied=False)
    assert one.rows == two.rows
    assert one.step_rows == two.step_rows
    assert one.rows_before == two.rows_before


@law
@given(settings_of(timing="lockstep"))
def test_equal_clocks_without_delay_teach_the_same_as_lockstep(setting: Setting) -> None:
    assert isinstance(setting.timing, Lockstep)
    one, two = play(setting), play(setting, timing=VirtualTime(loss=setting.timing.loss))
    for client in range(one.network.n):
        ours, theirs = one.tally.of(client), two.tally.of(client)
        assert (ours.sent, ours.kept) == (theirs.sent, theirs.kept)


def test_what_arrives_after_the_last_step_counts_too() -> None:
    """As many messages are absorbed as are sent, so that links that are always up deliver one per step."""
    graph = nx.path_graph(2)
    nx.set_edge_attributes(graph, 1.0, "probability")
    for timing in (Lockstep(), VirtualTime()):
        tally = play(Setting(graph, timing, steps=3)).tally
        assert [tally.of(client).received for client in (0, 1)] == [{1: 1.0}, {0: 1.0}]


def test_without_a_single_send_there_is_nothing_to_expect() -> None:
    network = compile_network(complete(3, directed=True))
    with pytest.raises(
        ScenarioError,
        match=re.escape(
            "let the part before it make at least one step that sends while all are there, or use the exact"
        ),
    ):
        Tally(network).expectations()
    tally = Tally(network)
    tally.sent(Sends.by(network, np.array([1])), np.array([0.5, 0.0]), np.array([0.5]))
    expectations = tally.expectations()
    assert expectations.sent.tolist() == [0, 0, 0.5, 0, 0, 0]
    assert expectations.kept.tolist() == [1.0, 0.5, 1.0]
    assert expectations.received.tolist() == [0] * 6


# Counting long enough


@pytest.mark.parametrize("directed", [False, True], ids=["StoU", "StoD"])
def test_what_clients_count_in_lockstep_tends_to_the_exact_at_the_square_root_rate(directed: bool) -> None:
    """Errors over 380 edges after T = 100 and, with other draws, after 16 T rounds: the ratio is about 4.

    Rounds are independent, so that the errors of the means have covariance C/T, with C that of one round. The
    mean square error then has mean tr C/(T E) and (by the central limit theorem) variance 2 tr C²/(T E)², and
    its root a relative standard error of half √(2 tr C²)/tr C. For independent edges that would be 1/√(2 E) =
    3.6%; it is 4 to 5.5%, because the shares of one sender go together, and so does an undirected pair. C is
    measured on 2,000 rounds of its own, which makes tr C² too large by (tr C)²/2,000, where independent edges
    have (tr C)²/380. Tolerances are 4 standard errors: 12 comparisons and 40 kept shares leave a sound
    estimator 0.3% of all seeds to fail. A bias of one standard error after 16 T rounds would make it 3.
    """
    network = compile_network(complete(20, directed), loss=0.1)
    shares = Uniform().prepare(network)
    exact = exact_expectations(network, shares, Lockstep().pace(network, network.n))
    streams = Streams(99)
    ups = [network.up(streams, step, step) for step in range(2_000)]
    arrived = [up & ~network.lost(streams, step) for step, up in enumerate(ups)]
    weights, kept = (np.array(parts) for parts in zip(*(shares.of_all(up) for up in ups), strict=True))
    T = 100
    learned = {t: tallied(Lockstep(), network, shares, t, seed=t).expectations() for t in (T, 16 * T)}
    for name, observed in {"sent": weights, "received": np.array(arrived, float)}.items():
        C = np.cov(observed, rowvar=False)
        relative_error = 0.5 * np.sqrt(2 * np.square(C).sum()) / np.trace(C)
        assert relative_error < 0.07
        error = {}
        for t, estimate in learned.items():
            error[t] = np.sqrt(np.mean((getattr(estimate, name) - getattr(exact, name)) ** 2))
            right = np.sqrt(np.trace(C) / network.edges / t)
            assert abs(error[t] / right - 1) < 4 * relative_error
        assert abs(error[T] / error[16 * T] / 4 - 1) < 4 * np.sqrt(2) * relative_error
    assert (np.abs(learned[16 * T].kept - exact.kept) < 4 * kept.std(axis=0) / np.sqrt(16 * T)).all()


def test_in_bursts_the_exact_expectations_are_those_of_the_stationary_state() -> None:
    """Means over 25 seeds of 200 rounds. Rounds of one seed depend on each other, the seeds do not: their
    deviation gives the standard error (at most 0.02), of which 5 are allowed, for 28 numbers at once.
    """
    network = Lockstep().network(with_links(complete(4, False), probability=0.9, bursts=Bursts(5, 3, 0.1)))
    shares = Uniform().prepare(network)
    exact = exact_expectations(network, shares, Lockstep().pace(network, network.n))
    assert exact.received == pytest.approx(np.full(12, 0.9 * 5 / 8 + 0.1 * 3 / 8))
    counted = [tallied(Lockstep(), network, shares, 200, seed=seed).expectations() for seed in range(25)]
    for name in ("sent", "kept", "received"):
        found = np.array([getattr(one, name) for one in counted])
        error = found.std(axis=0, ddof=1) / np.sqrt(25)
        assert (np.abs(found.mean(axis=0) - getattr(exact, name)) < 5 * error).all()
        assert (error < 0.02).all()


@pytest.mark.parametrize("directed", [False, True], ids=["StoU", "StoD"])
def test_what_clients_count_at_their_own_pace_tends_to_the_pace_times_the_exact(directed: bool) -> None:
    """Exponential compute times make a client's sends a Poisson process.

    Of the N_j ~ Poisson(r_j H) sends of j until H, q = p (1 - loss) reach i, but for those on the way at the
    end (a share latency/H); independent of the N_i steps of i. The ratio has a relative standard error of
    √(1/(q r_j H) + 1/(r_i H)), 3 to 15% here; 4 of them for 30 edges fail a sound count for 0.2% of seeds,
    while most paces differ by a factor of 2 to 16. A share lies in [0, 1/2], and what is kept in [0, 1], so
    that their deviations are at most 1/4 and 1/2. Nobody leaves before the horizon: who finds some of its
    neighbours gone shares among the others, which the exact values know nothing of.
    """
    H, latency = 1_000.0, 0.7
    timing = VirtualTime(
        "exponential(1)",
        factors=[1.0, 0.5, 2.0, 4.0, 8.0, 0.5],
        latency=f"exponential({latency})",
        loss=0.1,
        horizon=H,
    )
    network = timing.network(complete(6, directed))
    shares, pace = Uniform().prepare(network), timing.pace(network, 6)
    exact = exact_expectations(network, shares, pace)
    estimate = tallied(timing, network, shares, steps=10**9, seed=3).expectations()
    heard = network.probability * 0.9 * pace[network.senders] * H
    steps = pace * H
    relative_error = np.sqrt(1 / heard + 1 / steps[network.receivers])
    deviation = np.abs(estimate.received / exact.received - 1)
    assert (deviation < 4 * relative_error + latency / H).all()
    assert exact.received.max() > 8
    assert exact.received.min() < 0.05
    assert (np.abs(estimate.sent - exact.sent) < 4 * 0.25 / np.sqrt(steps[network.senders])).all()
    assert (np.abs(estimate.kept - exact.kept) < 4 * 0.5 / np.sqrt(steps)).all()


# The weights of HGP


@pytest.mark.parametrize(("directed", "rule"), [(False, Uniform()), (True, Uniform()), (False, Metropolis())])
def test_debiased_weights_are_on_average_what_the_receiver_sends(directed: bool, rule: Weights) -> None:
    network = compile_network(complete(7, directed), loss=0.2)
    shares = rule.prepare(network)
    exact = exact_expectations(network, shares, Lockstep().pace(network, 7))
    debiased = DebiasedShares(network, exact)
    weights, kept = debiased.expected()
    # Row i of the transpose: Σ_j E[δ_{j→i}] p̄_ij/δ̄_{j→i}, the losses included, is i's own mean share.
    mean = matrix(network, weights * (1 - network.loss), kept)
    assert pytest.approx(mean.T, rel=1e-12) == matrix(network, *shares.expected())
    assert mean.sum(axis=0) == pytest.approx(np.ones(7), rel=1e-12)


def test_debiased_weights_are_constant_while_a_link_is_up_and_nothing_else_matters() -> None:
    network = compile_network(complete(5, directed=True))
    expectations = tallied(Lockstep(), network, Uniform().prepare(network), 20, seed=1).expectations()
    debiased = DebiasedShares(network, expectations)
    at = {edge: e for e, edge in enumerate(edges_of(network))}
    always = [expectations.sent[at[i, j]] / expectations.received[at[j, i]] for j, i in edges_of(network)]
    for step in range(20):
        up = network.up(Streams(2), step, step)
        weights, kept = debiased.of_all(up)
        assert weights.tolist() == np.where(up, always, 0.0).tolist()
        assert kept.tolist() == expectations.kept.tolist()
        for sender in range(5):
            links = slice(network.first[sender], network.first[sender + 1])
            own, keeps = debiased.of_senders(Sends.by(network, np.array([sender])), up[links])
            assert own.tolist() == weights[links].tolist()
            assert keeps.tolist() == [kept[sender]]
    mean, kept = debiased.expected()
    assert mean == pytest.approx(always * network.probability, rel=1e-15)
    assert kept.tolist() == expectations.kept.tolist()
    assert not debiased.doubly_stochastic


def test_whom_a_client_never_heard_before_it_ignores() -> None:
    network = compile_network(complete(3, directed=True))
    expectations = Expectations(np.full(6, 0.25), np.full(3, 0.5), np.array([0.5, 0.5, 0, 0.5, 0.5, 2.0]))
    weights, _ = DebiasedShares(network, expectations).of_all(np.ones(6, dtype=bool))
    assert weights.tolist() == [0.5, 0.5, 0, 0.5, 0.5, 0.125]


class Prepared:
    """Shares made for the network at hand, to be named where a rule is."""

    def __init__(self, make: Any) -> None:
        self.prepare = make


def debiased_at(timing: Timing) -> Any:
    def make(network: Network) -> Shares:
        return DebiasedShares(
            network, exact_expectations(network, Uniform().prepare(network), timing.pace(network, network.n))
        )

    return Prepared(make)


@pytest.mark.parametrize(
    "timing",
    [
        Lockstep(loss=0.2),
        VirtualTime("exponential(1)", factors={2: 3.0}, latency="exponential(0.4)", loss=0.2),
    ],
)
def test_both_timings_carry_debiased_weights(timing: Timing) -> None:
    graph = complete(4, directed=True)
    played = play(Setting(graph, timing, debiased_at(timing), steps=12))
    network = played.network
    exact = exact_expectations(network, Uniform().prepare(network), timing.pace(network, 4))
    at = {edge: e for e, edge in enumerate(edges_of(network))}
    seen = 0
    for wave in played.waves:
        for client, sources in played.absorbed(wave.absorption).items():
            for sender, _, weight in sources:
                seen += sender != client
                if sender == client:
                    assert weight == exact.kept[client]
                else:
                    assert weight == exact.sent[at[client, sender]] / exact.received[at[sender, client]]
    assert seen > 50


def test_a_link_without_a_link_back_is_refused_by_name() -> None:
    graph = nx.DiGraph()
    graph.add_nodes_from(["hub", "left", "right"])
    graph.add_edges_from(
        [("hub", "left"), ("left", "hub"), ("hub", "right"), ("right", "left")], probability=0.5
    )
    network = compile_network(graph)
    nothing = Expectations(np.zeros(4), np.zeros(3), np.zeros(4))
    for refused in (lambda: require_links_back(network), lambda: DebiasedShares(network, nothing)):
        with pytest.raises(TopologyError) as error:
            refused()
        text = str(error.value)
        assert text.startswith("there is a link hub→right but none right→hub (2 such links in all)")
        assert "Assumption 6" in text
        assert "client right weighs what it hears from hub by what it sends to hub" in text
        assert "add the link right→hub (topologies.with_links marks it)" in text
        assert "or use a network whose links go both ways" in text
    for fine in (complete(3, directed=True), complete(3, directed=False), nx.empty_graph(2)):
        require_links_back(compile_network(fine))


# The weights of exact recurrent backpropagation


@pytest.mark.parametrize("rule", [Uniform(), Metropolis()], ids=["uniform", "metropolis"])
def test_transposed_shares_are_the_transpose_at_every_step(rule: Weights) -> None:
    network = compile_network(stochastic(nx.gnp_random_graph(8, 0.6, seed=2)))
    shares = rule.prepare(network)
    transposed = TransposedShares(network, shares)
    assert transposed.doubly_stochastic is (rule == Metropolis())
    for step in range(20):
        up = network.up(Streams(4), step, step)
        weights, kept = transposed.of_all(up)
        assert matrix(network, weights, kept).T.tolist() == matrix(network, *shares.of_all(up)).tolist()
        assert (weights[~up] == 0).all()
    assert matrix(network, *transposed.expected()).T.tolist() == matrix(network, *shares.expected()).tolist()


def test_lockstep_absorbs_the_transpose() -> None:
    """Client i weighs the payload of j by what it sends to j in the same round of an ordinary run."""
    graph = stochastic(nx.gnp_random_graph(6, 0.6, seed=2))
    setting = Setting(graph, Lockstep(), Given(()), seed=5)

    def absorbed(rule: Any) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        played: Played = play(setting, weights=rule)
        for wave in played.waves[1:]:
            W = np.zeros((6, 6))
            for client, pairs in entries(wave.absorption):
                for serial, weight in pairs:
                    W[client, serial % 6] = weight
            found.append(W)
        return found

    there = absorbed(Uniform())
    back = absorbed(Prepared(lambda network: TransposedShares(network, Uniform().prepare(network))))
    assert len(there) == 7
    assert [W.T.tolist() for W in there] == [W.tolist() for W in back]


def test_transposed_shares_need_lockstep() -> None:
    network = compile_network(complete(4, directed=False))
    shares = TransposedShares(network, Uniform().prepare(network))
    with pytest.raises(ScenarioError, match=re.escape("needs lockstep")) as error:
        tallied(VirtualTime(), network, shares, steps=2, seed=0)
    assert "use timing=Lockstep(), or HGP" in str(error.value)


@pytest.mark.parametrize(
    ("graph", "loss", "found"),
    [
        (complete(4, directed=True), 0.0, "this network is directed: use HGP"),
        (complete(4, directed=True), 0.1, "this network is directed: use HGP"),
        (complete(4, directed=False), 0.1, "this network loses messages: use HGP"),
        (nx.DiGraph([(0, 1), (1, 2), (2, 0)]), 0.0, "this network is directed: use HGP"),
    ],
)
def test_exact_backpropagation_needs_undirected_links_that_lose_nothing(
    graph: nx.Graph, loss: float, found: str
) -> None:
    for *_, marks in graph.edges(data=True):
        marks.setdefault("probability", 1.0)
    network = compile_network(graph, loss=loss)
    with pytest.raises(TopologyError) as error:
        require_undirected(network, "this method")
    assert str(error.value).startswith("this method needs undirected links (an nx.Graph) that lose nothing")
    assert "must hear from exactly those that it would send to at that step" in str(error.value)
    assert found in str(error.value)
    with pytest.raises(TopologyError, match="exact recurrent backpropagation needs undirected links"):
        TransposedShares(network, Uniform().prepare(network))


def test_links_that_are_always_there_in_both_directions_are_as_good_as_undirected() -> None:
    graph = nx.path_graph(3).to_directed()
    nx.set_edge_attributes(graph, 1.0, "probability")
    require_undirected(compile_network(graph), "this method")
    require_undirected(compile_network(complete(3, directed=False)), "this method")
