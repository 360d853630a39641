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
from typing import Any, Protocol, TypeAlias

import numpy as np

from asyncfed.errors import ScenarioError, TopologyError
from asyncfed.network.links import BoolArray, FloatArray, Network

_TOLERANCE = 1e-9


class Shares(Protocol):
    """Weights bound to a network."""

    @property
    def doubly_stochastic(self) -> bool:
        """Whether every client's received weights sum to one as well, at every step."""

    def of_all(self, up: BoolArray) -> tuple[FloatArray, FloatArray]:
        """(weight of each edge, weight each client keeps) for the links that are up; those down weigh 0."""

    def of_sender(self, sender: int, up: BoolArray) -> tuple[FloatArray, float]:
        """The same for one sender's links."""


@dataclass(frozen=True)
class Uniform:
    """1 / (realised out-links, self included): what SGP uses on random links."""

    def prepare(self, network: Network) -> Shares:
        return _UniformShares(network)


@dataclass(frozen=True)
class Metropolis:
    """1 / (1 + the larger of the two degrees): doubly stochastic on an undirected graph, and cheap."""

    def prepare(self, network: Network) -> Shares:
        _require_symmetric(network, "Metropolis")
        degree = np.diff(network.first)
        weights = 1.0 / (1.0 + np.maximum(degree[network.senders], degree[network.receivers]))
        return _FixedShares(network, weights)


@dataclass(frozen=True)
class FastestMixing:
    """The symmetric weights whose second-largest eigenvalue modulus is smallest (Boyd, Diaconis & Xiao 2004,
    as a semidefinite program). Needs the extra `asyncfed[fmmc]`."""

    def prepare(self, network: Network) -> Shares:
        _require_symmetric(network, "the fastest-mixing Markov chain")
        return _FixedShares(network, _fastest_mixing(network))


@dataclass(frozen=True)
class Given:
    """A matrix W with W[i, j] = p_ij, the share that i sends to j; rows sum to one."""

    matrix: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "matrix", tuple(tuple(float(v) for v in row) for row in self.matrix))

    def prepare(self, network: Network) -> Shares:
        n = network.n
        lengths = sorted({len(row) for row in self.matrix})
        if len(self.matrix) != n or lengths != [n]:
            raise ScenarioError(
                f"the weight matrix has {len(self.matrix)} rows of length {lengths}; "
                f"{n} clients need {n} rows of {n}"
            )
        W = np.array(self.matrix)
        if (W < 0).any():
            i, j = (int(v) for v in np.argwhere(W < 0)[0])
            raise ScenarioError(f"weight {i}→{j} is {W[i, j]}; weights must not be negative")
        sums = W.sum(axis=1)
        if not np.abs(sums - 1).max() <= _TOLERANCE:  # a NaN is refused too
            i = int(np.abs(sums - 1).argmax())
            raise ScenarioError(
                f"the weights that client {i} gives away and keeps sum to {sums[i]:.12g}; they must sum to 1"
            )
        linked = np.eye(network.n, dtype=np.bool_)
        linked[network.senders, network.receivers] = True
        if (W > 0)[~linked].any():
            i, j = (int(v) for v in np.argwhere((W > 0) & ~linked)[0])
            raise ScenarioError(
                f"weight {i}→{j} is {W[i, j]}, but the topology has no link {i}→{j}; "
                "set it to 0 or add the link"
            )
        return _FixedShares(network, W[network.senders, network.receivers])


Weights: TypeAlias = Uniform | Metropolis | FastestMixing | Given


class _UniformShares:
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

    def of_sender(self, sender: int, up: BoolArray) -> tuple[FloatArray, float]:
        keep = 1.0 / (1.0 + float(np.count_nonzero(up)))
        return np.where(up, keep, 0.0), keep


class _FixedShares:
    def __init__(self, network: Network, weights: FloatArray) -> None:
        self._network, self._weights = network, weights
        W = {(int(i), int(j)): w for i, j, w in zip(network.senders, network.receivers, weights, strict=True)}
        symmetric = all(abs(W.get((j, i), 0.0) - w) < _TOLERANCE for (i, j), w in W.items())
        received = np.bincount(network.receivers, weights, minlength=network.n)
        given = np.bincount(network.senders, weights, minlength=network.n)
        balanced = bool((np.abs(received - given) < _TOLERANCE).all())
        always_up = bool((network.probability == 1).all())
        same_links = not network.directed or always_up
        self.doubly_stochastic = network.lossless and ((same_links and symmetric) or (always_up and balanced))

    def of_all(self, up: BoolArray) -> tuple[FloatArray, FloatArray]:
        weights = np.where(up, self._weights, 0.0)
        given = np.bincount(self._network.senders, weights, minlength=self._network.n)
        return weights, 1.0 - given.astype(np.float64)

    def of_sender(self, sender: int, up: BoolArray) -> tuple[FloatArray, float]:
        lo, hi = self._network.first[sender], self._network.first[sender + 1]
        weights = np.where(up, self._weights[lo:hi], 0.0)
        return weights, 1.0 - float(
            np.bincount(np.zeros(len(weights), dtype=np.int64), weights, minlength=1)[0]
        )


def _symmetric(network: Network) -> bool:
    n = np.int64(network.n)
    forward = network.senders * n + network.receivers
    return bool(np.array_equal(forward, np.sort(network.receivers * n + network.senders)))


def _require_symmetric(network: Network, name: str) -> None:
    if _symmetric(network) and (not network.directed or (network.probability == 1).all()):
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
