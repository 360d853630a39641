"""What a client may expect of its links, and the weights that follow from it when hyper-gradients travel.

Going forward the sender i chooses the share p_ij of each receiver j. A hyper-gradient travels the other way:
i needs what j holds, weighed by p_ij, but hears from j only while the link j→i is up. Hyper-gradient push
(HGP; Terashita & Hara 2022, Eq. 12) weighs a message of j by p̄_ij/δ̄_{j→i}, which is right on average. Here

    p̄_ij      the mean share that i sends to j, known to i from its own sends            `sent[i→j]`
    p̄_ii      the mean share that i keeps                                                `kept[i]`
    δ̄_{j→i}   the mean number of messages of j that i absorbs per own step, known to i   `received[j→i]`

In lockstep δ̄ is the probability that the link is up and the message arrives; where paces differ it may exceed
one. All three are exact for a declared network, or counted by each client while it talks (`Tally`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncfed.checks import checked, shown
from asyncfed.errors import ScenarioError, TopologyError, UnsoundWarning
from asyncfed.network.links import BoolArray, FloatArray, IntArray, Network
from asyncfed.network.weights import SendersShares, Sends, Shares
from asyncfed.recall import recalled


@recalled()
@dataclass(frozen=True, eq=False)
class Expectations:
    """Of all clients; each entry is the knowledge of one of them."""

    sent: FloatArray  # of each edge i→j the mean weight, which i knows
    kept: FloatArray  # of each client, by itself
    received: FloatArray  # of each edge j→i the mean number of messages per step of i, which i knows


@dataclass(frozen=True)
class Knowledge:
    """What one client has observed; whom it never sent to or heard from is missing."""

    sent: dict[int, float]  # receiver → mean weight
    kept: float
    received: dict[int, float]  # sender → mean number of messages per own step


@checked
def exact_expectations(network: Network, shares: Shares, pace: FloatArray) -> Expectations:
    """Of a declared network, with the steps that each client makes per unit of time (`timing.pace`).

    They hold while all clients are there and no link (or uplink, or downlink) has a queue that grows; bursts
    do not change them.
    """
    require_stationary(network)
    if pace.shape != (network.n,) or pace.dtype.kind not in "fiu" or not (pace > 0).all():
        raise ScenarioError(
            f"pace is {shown(pace)}; it must be a number above 0 for each of the {network.n} clients"
        )
    sent, kept = shares.expected()
    heard = network.probability * (1.0 - network.loss)
    return Expectations(sent, kept, heard * pace[network.senders] / pace[network.receivers])


@recalled(given=("_network",))
@checked
class Tally:
    """Counts, for every client, what it can see itself: its own sends and steps, and what reaches it."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._weight, self._kept = np.zeros(network.edges), np.zeros(network.n)
        self._absorbed = np.zeros(network.edges, dtype=np.int64)
        self._sends, self._steps = (np.zeros(network.n, dtype=np.int64) for _ in range(2))
        # Of each edge: the receiver's steps, and the messages, up to and with the first that it brought.
        # Where messages are late, the steps before say how long the way is, not how often one comes.
        self._first_steps, self._first_messages = (np.zeros(network.edges, np.int64) for _ in range(2))

    def round(self, weights: FloatArray, kept: FloatArray, arrives: BoolArray) -> None:
        """A step of everybody: all send, and absorb what arrives."""
        self._weight += weights
        self._kept += kept
        self._absorbed += arrives
        self._sends += 1
        self._steps += 1

    def sent(self, sends: Sends, weights: FloatArray, kept: FloatArray) -> None:
        """Some sent: the weight of each of their messages, 0 where a link was down."""
        np.add.at(self._weight, sends.edges, weights)
        np.add.at(self._kept, sends.senders, kept)
        np.add.at(self._sends, sends.senders, 1)

    def stepped(self, clients: IntArray, edges: IntArray, at: IntArray) -> None:
        """Some made steps, each client's in their order; message m came over `edges[m]` to the step at place
        `at[m]`.
        """
        assert (self._network.receivers[edges] == clients[at]).all(), "a client counts what reaches itself"
        order = np.argsort(clients, kind="stable")
        own = clients[order]
        first = np.flatnonzero(np.diff(own, prepend=-1))
        number = np.empty(len(clients), dtype=np.int64)  # of its client's steps, each step
        number[order] = (
            self._steps[own] + 1 + np.arange(len(own)) - np.repeat(first, np.diff(first, append=len(own)))
        )
        np.add.at(self._steps, clients, 1)
        new = self._absorbed[edges] == 0
        fresh, its_step = edges[new], number[at[new]]
        earliest = np.full(self._network.edges, np.iinfo(np.int64).max)
        np.minimum.at(earliest, fresh, its_step)
        at_once = fresh[its_step == earliest[fresh]]
        np.add.at(self._first_messages, at_once, 1)
        self._first_steps[fresh] = earliest[fresh]
        np.add.at(self._absorbed, edges, 1)

    def expectations(self) -> Expectations:
        """The means so far; 0 for a link that carried nothing, and who never sent has kept everything."""
        if not self._sends.any():
            raise ScenarioError(
                "the expected weights of HGP cannot be estimated, for no client has sent anything yet (what "
                "is sent after a neighbour has left for good does not count); let the part before it make at "
                "least one step that sends while all are there, or use the exact expectations"
            )
        network = self._network
        return Expectations(
            _mean(self._weight, self._sends[network.senders]),
            np.where(self._sends > 0, _mean(self._kept, self._sends), 1.0),
            self._heard(np.arange(network.edges)),
        )

    def of(self, client: int) -> Knowledge:
        """The same, from what this client has seen and nothing else."""
        network, sends = self._network, self._sends[client]
        out = np.arange(network.first[client], network.first[client + 1])
        into = np.flatnonzero(network.receivers == client)
        return Knowledge(
            _positive(network.receivers[out], _mean(self._weight[out], sends)),
            float(self._kept[client] / sends) if sends else 1.0,
            _positive(network.senders[into], self._heard(into)),
        )

    def _heard(self, edges: IntArray) -> FloatArray:
        """Messages per own step of the receiver, since the first; over all steps where none came after it."""
        steps = self._steps[self._network.receivers[edges]]
        after = self._absorbed[edges] - self._first_messages[edges]
        since = _mean(after, steps - self._first_steps[edges])
        return np.where(since > 0, since, _mean(self._absorbed[edges], steps))


@checked
class DebiasedShares(SendersShares):
    """The weights of HGP, as seen from the edge j→i on which a message comes: p̄_ij/δ̄_{j→i}, and p̄_ii kept.

    They are the receiver's, so that a sender's own do not sum to one. A client ignores whom it never heard
    before. Every link must have a link back.
    """

    doubly_stochastic = False

    def __init__(self, network: Network, expectations: Expectations) -> None:
        require_links_back(network)
        self._network, self._kept = network, expectations.kept
        self._weights = _mean(expectations.sent[network.reverse], expectations.received)

    def of_all(self, up: BoolArray) -> tuple[FloatArray, FloatArray]:
        return np.where(up, self._weights, 0.0), self._kept

    def of_senders(self, sends: Sends, up: BoolArray) -> tuple[FloatArray, FloatArray]:
        return np.where(up, self._weights[sends.edges], 0.0), self._kept[sends.senders]

    def expected(self) -> tuple[FloatArray, FloatArray]:
        return self._weights * self._network.probability, self._kept


@checked
class TransposedShares(SendersShares):
    """The weights of exact recurrent backpropagation (Terashita & Hara 2022, Alg. 3): i weighs a message of j
    by p_ij(δ_i), what it would itself send to j at that step.

    Only where links are undirected does i hear from exactly those that it would send to, and only in lockstep
    is there such a thing as that step.
    """

    def __init__(self, network: Network, shares: Shares) -> None:
        require_undirected(network, "exact recurrent backpropagation")
        self._shares, self._reverse = shares, network.reverse
        self.doubly_stochastic = shares.doubly_stochastic

    def of_all(self, up: BoolArray) -> tuple[FloatArray, FloatArray]:
        weights, kept = self._shares.of_all(up)
        return weights[self._reverse], kept

    def of_senders(self, sends: Sends, up: BoolArray) -> tuple[FloatArray, FloatArray]:
        raise ScenarioError(
            "exact recurrent backpropagation needs lockstep, for a client weighs what it receives by what it "
            "would send at the same step; use timing=Lockstep(), or HGP"
        )

    def expected(self) -> tuple[FloatArray, FloatArray]:
        weights, kept = self._shares.expected()
        return weights[self._reverse], kept


@checked
def require_links_back(network: Network) -> None:
    """Assumption 6 of HGP: if j can reach i, then i can reach j."""
    alone = np.flatnonzero(network.reverse < 0)
    if len(alone) == 0:
        return
    a, b = (network.names[ends[alone[0]]] for ends in (network.senders, network.receivers))
    raise TopologyError(
        f"there is a link {a}→{b} but none {b}→{a} ({len(alone)} such links in all); HGP needs a link back "
        f"(Assumption 6 of Terashita & Hara 2022), for client {b} weighs what it hears from {a} by what it "
        f"sends to {a}: add the link {b}→{a} (topologies.with_links marks it), or use a network whose links "
        "go both ways, such as topologies.stochastic_directed"
    )


def require_stationary(network: Network) -> None:
    """Exact expectations are of links that are up with the same probability at any time."""
    if not network.stationary:
        raise ScenarioError(
            "there are no exact expectations (p̄ and δ̄) where links have a schedule or a probability that "
            "changes with time; use expectations='estimated', from inner steps on the same links"
        )


def warn_of_dependence(network: Network, what: str, *, always_there: bool = True) -> None:
    """Rounds whose Jacobians are multiplied must have links of their own: else the mean of the product is not
    the product of the means. Who is away has none for some rounds.
    """
    if network.independent and always_there:
        return
    reason = "come in bursts" if network.stationary else "change with time"
    if not always_there:
        reason = "come and go with the clients"
    warnings.warn(
        f"{what} is unbiased where the links of every round are drawn anew, and here they {reason}: rounds "
        "that follow one another depend on each other, and the estimate is biased; use links that are drawn "
        "independently, or take it as an approximation",
        UnsoundWarning,
        stacklevel=2,
    )


@checked
def require_undirected(network: Network, what: str) -> None:
    """Every client must hear, at every step, from exactly those that it would send to."""
    if network.undirected and network.lossless:
        return
    found = "loses messages" if network.undirected else "is directed"
    raise TopologyError(
        f"{what} needs undirected links (an nx.Graph) that lose nothing, for a client must hear from exactly "
        f"those that it would send to at that step; this network {found}: use HGP, which needs neither"
    )


def _mean(total: FloatArray | IntArray, count: npt.ArrayLike) -> FloatArray:
    """total / count, and 0 where nothing was counted."""
    mean = np.zeros(len(total))
    np.divide(total, count, out=mean, where=np.asarray(count) > 0)
    return mean


def _positive(clients: IntArray, means: FloatArray) -> dict[int, float]:
    seen = means > 0
    return dict(zip(clients[seen].tolist(), means[seen].tolist(), strict=True))
