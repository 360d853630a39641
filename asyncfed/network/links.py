"""The network as arrays: who can reach whom, how often, how fast.

An edge is (sender, receiver); edges are sorted by sender, then receiver, so a sender's links stand together.
Self-links always exist and are not edges. An undirected networkx graph means that both directions of a link
are up or down together (one draw for the pair); a directed graph draws every direction for itself. What of a
link changes with time is in `over_time`.

A node may carry `compute` (how many times slower it is), `uplink` and `downlink` (bytes per unit of time,
shared by all of its links; see `sharing`).

Nodes are numbered in the order of the graph, the server (where there is one) last: so a client has the same
number here, in the problem, in the metrics and in the trace. What people call them is in `names`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asyncfed.checks import Capacity, fits, shown
from asyncfed.errors import ScenarioError, TopologyError
from asyncfed.network.attributes import check_attributes
from asyncfed.network.distributions import Constant, Distribution, PositiveTime, as_distribution
from asyncfed.network.names import Names, in_order
from asyncfed.network.over_time import LinksOverTime, compile_over_time, varies
from asyncfed.rng import Streams, chances

if TYPE_CHECKING:
    import networkx as nx

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Network:
    """What the timing models read. `draw` says which uniform of a step decides each edge."""

    n: int
    labels: tuple[Hashable, ...]
    senders: IntArray
    receivers: IntArray
    probability: FloatArray  # that a link is up at any time; nan where that depends on the time
    loss: FloatArray
    bandwidth: FloatArray
    latency: tuple[Distribution, ...]
    latency_of: IntArray
    ordered: BoolArray  # whether messages on an edge arrive in the order in which they were sent
    directed: bool
    draw: IntArray
    first: IntArray  # edges first[i]:first[i + 1] leave client i
    compute: FloatArray  # of each node: how many times slower it is
    uplink: FloatArray  # of each node: bytes per unit of time over all of its links, infinite where it may
    downlink: FloatArray
    server: int | None = None
    over_time: LinksOverTime | None = None

    @property
    def edges(self) -> int:
        return len(self.senders)

    @cached_property
    def names(self) -> Names:
        return Names(self.labels)

    @cached_property
    def lossless(self) -> bool:
        return not self.loss.any()

    @property
    def independent(self) -> bool:
        """Whether links are drawn anew every time, each with the same probability at any time."""
        return self.over_time is None

    @property
    def stationary(self) -> bool:
        """Whether each link is up with the same probability at any time, if not independently."""
        return self.over_time is None or self.over_time.stationary

    @cached_property
    def shares_uplinks(self) -> bool:
        return bool(np.isfinite(self.uplink).any())

    @cached_property
    def shares_downlinks(self) -> bool:
        return bool(np.isfinite(self.downlink).any())

    @cached_property
    def reverse(self) -> IntArray:
        """For each edge a→b the index of b→a, or -1 where there is no link back."""
        n = np.int64(self.n)
        there, back = self.senders * n + self.receivers, self.receivers * n + self.senders
        found = np.searchsorted(there, back)  # edges stand sorted
        found[found == self.edges] = 0
        return np.where(there[found] == back, found, -1)

    @cached_property
    def undirected(self) -> bool:
        """Whether the two directions of every link are always up or down together."""
        return not self.directed or bool((self.probability == 1).all() and (self.reverse >= 0).all())

    @cached_property
    def _chances(self) -> npt.NDArray[np.uint64]:
        return chances(self.probability)

    def up(self, streams: Streams, step: int, at: float) -> BoolArray:
        """δ(t) for every edge, at a step and a time."""
        if self.over_time is not None:
            edges = np.arange(self.edges, dtype=np.int64)
            drawn = streams.uniforms("links", step, 0, self.edges)[self.draw]
            return drawn < self.over_time.limits(streams, edges, at)
        if self.directed:
            return streams.below("links", step, 0, self._chances)
        return streams.uniforms("links", step, 0, self.edges)[self.draw] < self.probability

    def up_of(self, streams: Streams, edges: IntArray, steps: IntArray, at: FloatArray) -> BoolArray:
        """The same for any messages: each over an edge, at a step of its sender and a time."""
        if self.directed and self.over_time is None:
            return streams.words_at("links", steps, edges, self.edges) <= self._chances[edges]
        drawn = streams.uniforms_at("links", steps, self.draw[edges], self.edges)
        if self.over_time is None:
            return drawn < self.probability[edges]
        return drawn < self.over_time.limits(streams, edges, at)

    def lost(self, streams: Streams, step: int) -> BoolArray:
        """Which messages are lost on the way, of every edge, were they sent at that step of their sender."""
        if self.lossless:
            return np.zeros(self.edges, dtype=np.bool_)
        return streams.uniforms("loss", step, 0, self.edges) < self.loss

    def lost_of(self, streams: Streams, edges: IntArray, steps: IntArray) -> BoolArray:
        """The same draws, for some edges at steps of their senders."""
        if self.lossless:
            return np.zeros(len(edges), dtype=np.bool_)
        return streams.uniforms_at("loss", steps, edges, self.edges) < self.loss[edges]

    @cached_property
    def prompt(self) -> bool:
        """Whether every message takes the same time on its link, whatever else its sender has sent."""
        nothing_waits = bool(np.isinf(self.bandwidth).all()) and not self.shares_uplinks
        return nothing_waits and all(isinstance(d, Constant) for d in self.latency)

    def latencies_of(self, streams: Streams, edges: IntArray, steps: IntArray) -> FloatArray:
        """How long messages are on the way, once they have left."""
        if len(self.latency) == 1 and isinstance(self.latency[0], Constant):
            return np.full(len(edges), self.latency[0].value)
        u = streams.uniforms_at("latency", steps, edges, self.edges)
        if len(self.latency) == 1:
            return self.latency[0].quantile(u)
        result = np.empty(len(edges))
        kinds = self.latency_of[edges]
        for kind in np.unique(kinds):
            here = kinds == kind
            result[here] = self.latency[kind].quantile(u[here])
        return result

    def silent(self) -> Network:
        """The same clients with no links at all."""
        nothing = np.empty(0, dtype=np.int64)
        none = np.empty(0)
        first = np.zeros(self.n + 1, dtype=np.int64)
        return Network(
            self.n,
            self.labels,
            nothing,
            nothing,
            none,
            none,
            none,
            self.latency,
            nothing,
            np.empty(0, dtype=np.bool_),
            True,
            nothing,
            first,
            self.compute,
            self.uplink,
            self.downlink,
            self.server,
        )


def compile_network(
    graph: nx.Graph,
    *,
    latency: float | str | Distribution = 0.0,
    bandwidth: float = np.inf,
    loss: float = 0.0,
    ordered: bool = True,
    whole_steps: bool = False,
) -> Network:
    """Read a marked networkx graph; the keywords are for edges that say nothing of their own. With
    `whole_steps`, for lockstep, bursts last for whole numbers of steps.
    """
    if graph.is_multigraph():
        raise TopologyError(
            "the topology is a multigraph; give one edge per pair of clients (nx.Graph or nx.DiGraph)"
        )
    if len(graph) == 0:
        raise TopologyError("the topology has no clients; give a graph with at least one node")
    server = graph.graph.get("server")
    if server is not None and server not in graph:
        raise TopologyError(f"the topology's server is {server!r}, which is not one of its nodes")
    check_attributes(graph)
    labels = in_order(graph.nodes, server)
    n = len(labels)
    index = {label: i for i, label in enumerate(labels)}
    directed = bool(graph.is_directed())
    rows: list[tuple[int, int, Mapping[str, Any]]] = []
    for a, b, marks in graph.edges(data=True):
        if a == b:
            continue  # a client always reaches itself
        rows.append((index[a], index[b], marks))
        if not directed:
            rows.append((index[b], index[a], marks))
    rows.sort(key=lambda row: row[:2])

    senders = np.array([i for i, _, _ in rows], dtype=np.int64)
    receivers = np.array([j for _, j, _ in rows], dtype=np.int64)
    probability = _marks(
        rows, labels, "probability", None, lambda v: 0 < v <= 1, "it must lie in (0, 1]", varies
    )
    losses = _marks(rows, labels, "loss", loss, lambda v: 0 <= v < 1, "it must lie in [0, 1)")
    bandwidths = _marks(rows, labels, "bandwidth", bandwidth, lambda v: v > 0, "it must be above 0 bytes/s")
    kinds: dict[Distribution, int] = {as_distribution(latency): 0}
    latency_of = np.zeros(len(rows), dtype=np.int64)
    for e, (i, j, marks) in enumerate(rows):
        if "latency" in marks:
            latency_of[e] = kinds.setdefault(_latency(marks["latency"], labels[i], labels[j]), len(kinds))
    if directed:
        draw = np.arange(len(rows), dtype=np.int64)
    else:  # both directions look at the uniform of the one that starts at the smaller client
        position = {(i, j): e for e, (i, j, _) in enumerate(rows)}
        draw = np.array([position[min(i, j), max(i, j)] for i, j, _ in rows], dtype=np.int64)
    over_time, probability = compile_over_time(
        [marks for _, _, marks in rows], [f"edge {labels[i]}→{labels[j]}" for i, j, _ in rows],
        probability, draw, whole_steps=whole_steps,
    )  # fmt: skip
    first = np.searchsorted(senders, np.arange(n + 1)).astype(np.int64)
    keeps_order = np.array([_flag(marks, labels, i, j, ordered) for i, j, marks in rows], dtype=np.bool_)
    compute = _of_nodes(
        graph, labels, "compute", 1.0, "it must be finite and above 0: how many times slower the node is"
    )
    uplink, downlink = (
        _of_nodes(graph, labels, name, np.inf, "it must be above 0 bytes per unit of time")
        for name in ("uplink", "downlink")
    )
    return Network(
        n, labels, senders, receivers, probability, losses, bandwidths, tuple(kinds), latency_of, keeps_order,
        directed, draw, first, compute, uplink, downlink, None if server is None else index[server],
        over_time,
    )  # fmt: skip


def require_strongly_connected(network: Network) -> None:
    """Every client must reach every other in the expected graph, or no consensus exists."""
    for senders, receivers, wording in (
        (network.senders, network.receivers, "cannot be reached from"),
        (network.receivers, network.senders, "cannot reach"),
    ):
        reached = _reachable(network.n, senders, receivers)
        if not reached.all():
            missing = int(np.flatnonzero(~reached)[0])
            raise TopologyError(
                f"the topology is not strongly connected: client {network.names[missing]} {wording} "
                f"client {network.names[0]} ({int((~reached).sum())} such clients in all); "
                "add links, or use the protocol Local, which needs none"
            )


def _reachable(n: int, senders: IntArray, receivers: IntArray) -> BoolArray:
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order

    links = csr_matrix((np.ones(len(senders), dtype=np.int8), (senders, receivers)), shape=(n, n))
    reached = np.zeros(n, dtype=np.bool_)
    reached[breadth_first_order(links, 0, return_predecessors=False)] = True
    return reached


def _of_nodes(
    graph: nx.Graph, labels: tuple[Hashable, ...], name: str, default: float, rule: str
) -> FloatArray:
    """A mark of every node: a number above 0, and finite where it must have an end."""
    values = np.empty(len(labels))
    for i, label in enumerate(labels):
        value = graph.nodes[label].get(name, default)
        if not fits(value, PositiveTime if np.isfinite(default) else Capacity):
            raise TopologyError(f"{name} of node {label} is {shown(value)}; {rule}")
        values[i] = value
    return values


def _flag(
    marks: Mapping[str, Any], labels: tuple[Hashable, ...], sender: int, receiver: int, default: bool
) -> bool:
    value = marks.get("ordered", default)
    if not isinstance(value, (bool, np.bool_)):
        raise TopologyError(
            f"ordered of edge {labels[sender]}→{labels[receiver]} is {shown(value)}; it must be True "
            "(messages keep their order) or False (they may overtake one another)"
        )
    return bool(value)


def _latency(value: float | str | Distribution, sender: Hashable, receiver: Hashable) -> Distribution:
    try:
        return as_distribution(value)
    except ScenarioError as error:
        raise TopologyError(f"latency of edge {sender}→{receiver}: {error}") from None


def _marks(
    rows: list[tuple[int, int, Mapping[str, Any]]],
    labels: tuple[Hashable, ...],
    name: str,
    default: float | None,
    allowed: Any,
    rule: str,
    passed: Callable[[Any], bool] = lambda value: False,
) -> FloatArray:
    """Numbers, one for each edge; nan for what is `passed` over, to be read by others."""
    values = np.empty(len(rows))
    for e, (i, j, marks) in enumerate(rows):
        value = marks.get(name, default)
        if value is None:
            raise TopologyError(
                f"edge {labels[i]}→{labels[j]} carries no `{name}`; "
                "set it on every edge, for instance with topologies.with_links(graph, probability=1.0)"
            )
        if passed(value):
            values[e] = np.nan
            continue
        if not fits(value, float) or not allowed(value):
            raise TopologyError(f"{name} of edge {labels[i]}→{labels[j]} is {shown(value)}; {rule}")
        values[e] = value
    return values
