"""Who gets which share: p_ij, chosen by the sender i from the links it has.

A rule is a frozen value (`Uniform()`, `Metropolis()`, `FastestMixing()`, `Given(matrix)`); `prepare` binds it
to a network and returns `Shares`. What a sender gives away and keeps always sums to one (the papers'
column-stochastic P), whatever the links do: a rule with fixed weights keeps at home the share of a link that
is down. Where links are undirected that keeps a symmetric, doubly stochastic matrix symmetric and doubly
stochastic at every step.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from asyncfed.checks import NonNegativeFloat, Words
from asyncfed.errors import ScenarioError, TopologyError
from asyncfed.network.links import BoolArray, FloatArray, IntArray, Network
from asyncfed.registry import register

_TOLERANCE = 1e-9


@runtime_checkable
class Shares(Protocol):
    """Weights bound to a network.

    A sender shares among the links it has, whether or not its messages arrive. Where weights are the
    receiver's (`by_receiver`), `of_all` is told which messages arrive, and `of_receiver` how many did.
    """

    by_receiver: bool

    @property
    def doubly_stochastic(self) -> bool:
        """Whether every client's received weights sum to one as well, at every step."""

    def of_all(self, up: BoolArray) -> tuple[FloatArray, FloatArray]:
        """(weight of each edge, weight each client keeps) for the links that are up; those down weigh 0."""

    def of_senders(self, sends: Sends, up: BoolArray) -> tuple[FloatArray, FloatArray]:
        """(weight of each message, weight each sender keeps), for some sends at any times."""

    def of_receiver(self, messages: IntArray) -> FloatArray:
        """What each of so many messages weighs at its receiver, and what it holds itself as well."""

    def expected(self) -> tuple[FloatArray, FloatArray]:
        """The mean of what `of_all` gives, over which links are up. A loss on the way plays no part."""


@dataclass(frozen=True, eq=False)
class Sends:
    """Of some senders (one may be among them repeatedly) all links, those of one send together."""

    senders: IntArray
    of: IntArray  # of each message: which of the sends it belongs to
    edges: IntArray

    @classmethod
    def by(cls, network: Network, senders: IntArray) -> Sends:
        first, degree = network.first[senders], np.diff(network.first)[senders]
        of = np.repeat(np.arange(len(senders)), degree)
        ends = np.cumsum(degree)
        return cls(senders, of, np.arange(len(of)) + np.repeat(first - (ends - degree), degree))

    def sums(self, values: npt.NDArray[Any]) -> FloatArray:
        """Of the messages of each send."""
        return np.bincount(self.of, values, minlength=len(self.senders)).astype(np.float64)


Mixing: TypeAlias = tuple[tuple[tuple[str, ...], Shares], ...]
"""Which variables are weighed by which shares; a message's weight in the trace is that of the first."""


class SendersShares:
    """What is common to weights that a sender chooses."""

    by_receiver = False

    def of_receiver(self, messages: IntArray) -> FloatArray:
        raise AssertionError("these weights are the sender's")


@runtime_checkable
class Weights(Protocol):
    """A rule, as a value that a scenario names."""

    def prepare(self, network: Network) -> Shares:
        """Bound to a network; refuses one on which it has no meaning."""
        ...


@register("weights")
@dataclass(frozen=True)
class Uniform:
    """1 / (realised out-links, self included): what SGP uses on random links."""

    def prepare(self, network: Network) -> Shares:
        return _UniformShares(network)


@register("weights")
@dataclass(frozen=True)
class Metropolis:
    """1 / (1 + the larger of the two degrees): doubly stochastic on an undirected graph, and cheap."""

    def prepare(self, network: Network) -> Shares:
        _require_symmetric(network, "Metropolis")
        degree = np.diff(network.first)
        weights = 1.0 / (1.0 + np.maximum(degree[network.senders], degree[network.receivers]))
        return _FixedShares(network, weights)


@register("weights")
@dataclass(frozen=True)
class FastestMixing:
    """The symmetric weights whose second-largest eigenvalue modulus is smallest (Boyd, Diaconis & Xiao 2004,
    as a semidefinite program). Needs the extra `asyncfed[fmmc]`."""

    def prepare(self, network: Network) -> Shares:
        _require_symmetric(network, "the fastest-mixing Markov chain")
        return _FixedShares(network, _fastest_mixing(network))


@register("weights")
@dataclass(frozen=True)
class Given:
    """A matrix W with W[i, j] = p_ij, the share that i sends to j; rows sum to one."""

    matrix: Annotated[
        tuple[tuple[NonNegativeFloat, ...], ...], Words("a matrix of weights, finite and at least 0")
    ]

    def prepare(self, network: Network) -> Shares:
        n, names = network.n, network.names
        lengths = sorted({len(row) for row in self.matrix})
        if len(self.matrix) != n or lengths != [n]:
            raise ScenarioError(
                f"the weight matrix has {len(self.matrix)} rows of length {lengths}; "
                f"{n} clients need {n} rows of {n}"
            )
        W = np.array(self.matrix, dtype=np.float64)
        sums = W.sum(axis=1)
        if np.abs(sums - 1).max() > _TOLERANCE:
            i = int(np.abs(sums - 1).argmax())
            raise ScenarioError(
                f"the weights that client {names[i]} gives away and keeps sum to {sums[i]:.12g}; they must "
                "sum to 1"
            )
        linked = np.eye(network.n, dtype=np.bool_)
        linked[network.senders, network.receivers] = True
        if (W > 0)[~linked].any():
            i, j = (int(v) for v in np.argwhere((W > 0) & ~linked)[0])
            raise ScenarioError(
                f"weight {names[i]}→{names[j]} is {W[i, j]}, but the topology has no such link; set it to 0 "
                "or add the link"
            )
        return _FixedShares(network, W[network.senders, network.receivers])


class PullShares:
    """1 / (messages that arrived + 1), for each of them and for what the receiver holds itself: weights that
    sum to one at every receiver (row-stochastic), whatever was lost; a sender's sum to one at the sender.
    """

    by_receiver = True
    doubly_stochastic = False

    def __init__(self, network: Network) -> None:
        self._network = network

    def of_all(self, up: BoolArray) -> tuple[FloatArray, FloatArray]:
        arrived = np.bincount(self._network.receivers, up, minlength=self._network.n)
        keep: FloatArray = 1.0 / (1.0 + arrived.astype(np.float64))
        return keep[self._network.receivers] * up, keep

    def of_senders(self, sends: Sends, up: BoolArray) -> tuple[FloatArray, FloatArray]:
        raise AssertionError("these weights are the receiver's")

    def of_receiver(self, messages: IntArray) -> FloatArray:
        return np.asarray(1.0 / (1.0 + messages), dtype=np.float64)

    def expected(self) -> tuple[FloatArray, FloatArray]:
        raise ScenarioError("the expected weights of a receiver are not known; use weights of the sender")


class _UniformShares(SendersShares):
    def __init__(self, network: Network) -> None:
        self._network = network
        # With every link always there, uniform is doubly stochastic where degrees allow it: on a ring, say.
        weights, kept = self.of_all(np.ones(network.edges, dtype=np.bool_))
        received = kept + np.bincount(network.receivers, weights, minlength=network.n)
        balanced = bool((np.abs(received - 1) < _TOLERANCE).all())
        self.doubly_stochastic = network.lossless and bool((network.probability == 1).all()) and balanced

    def of_all(self, up: BoolArray) -> tuple[FloatArray, FloatArray]:
        before = np.zeros(
            len(up) + 1, dtype=np.int64
        )  # links up before each edge; edges stand sorted by sender
        np.cumsum(up, out=before[1:])
        keep = 1.0 / (1.0 + np.diff(before[self._network.first]))
        return keep[self._network.senders] * up, keep

    def of_senders(self, sends: Sends, up: BoolArray) -> tuple[FloatArray, FloatArray]:
        keep = 1.0 / (1.0 + sends.sums(up))
        return keep[sends.of] * up, keep

    def expected(self) -> tuple[FloatArray, FloatArray]:
        # With S other links up, E[1/(a + S)] is the integral of t^(a-1) E[t^S] over t from 0 to 1, and E[t^S]
        # is the product of 1 - p + p t over those links.
        network = self._network
        sent, kept = np.zeros(network.edges), np.zeros(network.n)
        for rest, dt in _nodes(int(np.diff(network.first).max(initial=0))):
            logs = np.log1p(-network.probability * rest)
            every = np.bincount(network.senders, logs, minlength=network.n)
            kept += dt * np.exp(every)
            sent += dt * (1.0 - rest) * np.exp(every[network.senders] - logs)
        return network.probability * sent, kept


class _FixedShares(SendersShares):
    def __init__(self, network: Network, weights: FloatArray) -> None:
        self._network, self._weights = network, weights
        back = np.where(network.reverse >= 0, weights[network.reverse], 0.0)
        symmetric = bool((np.abs(back - weights) < _TOLERANCE).all())
        received = np.bincount(network.receivers, weights, minlength=network.n)
        given = np.bincount(network.senders, weights, minlength=network.n)
        balanced = bool((np.abs(received - given) < _TOLERANCE).all())
        always_up = bool((network.probability == 1).all())
        self.doubly_stochastic = network.lossless and (
            (network.undirected and symmetric) or (always_up and balanced)
        )

    def of_all(self, up: BoolArray) -> tuple[FloatArray, FloatArray]:
        weights = np.where(up, self._weights, 0.0)
        given = np.bincount(self._network.senders, weights, minlength=self._network.n)
        return weights, 1.0 - given.astype(np.float64)

    def of_senders(self, sends: Sends, up: BoolArray) -> tuple[FloatArray, FloatArray]:
        weights = np.where(up, self._weights[sends.edges], 0.0)
        return weights, 1.0 - sends.sums(weights)

    def expected(self) -> tuple[FloatArray, FloatArray]:
        weights = self._weights * self._network.probability
        given = np.bincount(self._network.senders, weights, minlength=self._network.n)
        return weights, 1.0 - given.astype(np.float64)


def _nodes(degree: int) -> list[tuple[float, float]]:
    """(1 - t, dt), such that Σ f(t) dt integrates a polynomial f up to that degree over t from 0 to 1.

    These are Gauss-Legendre nodes in s, where t = 1 - s²: degree + 1 of them are exact. Many links make f
    fall off like exp(-degree s²). On the Bernstein ellipse of radius 1 + ε that is exp(degree ε⁴/2) at most,
    to leading order, and so 12 ⁴√degree nodes leave an error of about exp(-41).
    """
    nodes = min(degree + 1, int(np.ceil(12.0 * max(degree, 1) ** 0.25)))
    x, weights = np.polynomial.legendre.leggauss(nodes)
    s = (1.0 + x) / 2.0
    return list(zip((s * s).tolist(), (s * weights).tolist(), strict=True))


def _require_symmetric(network: Network, name: str) -> None:
    if network.undirected:
        return
    raise TopologyError(
        f"{name} needs undirected links (an nx.Graph), for its weights are the same in both directions; "
        "this topology is directed: use weights=Uniform()"
    )


def _fastest_mixing(network: Network) -> FloatArray:
    edges = list(zip(network.senders.tolist(), network.receivers.tolist(), strict=True))
    pairs = tuple((i, j) for i, j in edges if i < j)
    by_pair = dict(zip(pairs, _solved(network.n, pairs), strict=True))
    return np.array([by_pair[min(edge), max(edge)] for edge in edges])


@lru_cache(maxsize=8)
def _solved(n: int, pairs: tuple[tuple[int, int], ...]) -> tuple[float, ...]:
    """The weight of each pair; kept, for the solver is slow and the same network is asked for twice."""
    if not pairs:
        return ()
    try:
        cvxpy: Any = importlib.import_module("cvxpy")  # as Any, for its own annotations are in part missing
    except ImportError:
        raise ScenarioError(
            "FastestMixing needs cvxpy, which is not installed; "
            "run pip install 'asyncfed[fmmc]', or use Metropolis()"
        ) from None
    weight, modulus = cvxpy.Variable(len(pairs), nonneg=True), cvxpy.Variable()
    incidence = np.zeros((n, len(pairs)))
    for e, (i, j) in enumerate(pairs):
        incidence[i, e], incidence[j, e] = 1.0, -1.0
    P = np.eye(n) - incidence @ cvxpy.diag(weight) @ incidence.T
    rest = P - np.ones((n, n)) / n
    kept = 1 - np.abs(incidence) @ weight
    problem = cvxpy.Problem(
        cvxpy.Minimize(modulus), [rest << modulus * np.eye(n), rest >> -modulus * np.eye(n), kept >= 0]
    )
    try:
        problem.solve(solver=cvxpy.SCS if n > 40 else cvxpy.CLARABEL)
    except cvxpy.error.SolverError as error:
        raise ScenarioError(
            f"the fastest-mixing chain could not be computed ({error}); use Metropolis()"
        ) from None
    if weight.value is None:
        raise ScenarioError(
            f"the fastest-mixing chain could not be computed ({problem.status}); use Metropolis()"
        )
    found = np.maximum(np.asarray(weight.value), 0.0)
    # The solver meets the constraints to its tolerance; scale down the little that a client would give away
    # too much.
    given = np.abs(incidence) @ found
    return tuple((found / max(1.0, float(given.max()))).tolist())
