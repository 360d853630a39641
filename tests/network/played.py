"""A schedule played to its end, with everything it said kept as plain Python values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
from hypothesis import strategies as st

from asyncfed.network.distributions import Table
from asyncfed.network.expectations import Tally
from asyncfed.network.links import Network
from asyncfed.network.timing import Lockstep, Timing, VirtualTime
from asyncfed.network.waves import Absorption, Common, Conversation, MatrixSums, Snapshot, Status, Sums, Wave
from asyncfed.network.weights import Given, Metropolis, Mixing, PullShares, Uniform, Weights
from asyncfed.rng import Streams


class Row(NamedTuple):
    """A message as the trace keeps it: what its status leaves empty is None."""

    sender: int
    receiver: int
    step: int
    status: Status
    sent_at: float
    arrived_at: float | None
    absorbed_step: int | None
    weight: float | None
    bytes: int


class StepRow(NamedTuple):
    client: int
    step: int
    started_at: float
    ended_at: float
    absorbed: int


class Recording:
    """A recorder that broadcasts and keeps."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.step_rows: list[StepRow] = []

    def messages(self, *, phase: str, kind: str, **columns: Any) -> None:
        assert (phase, kind) == ("inner", "push")
        names = list(columns)
        for values in zip(*(a.tolist() for a in np.broadcast_arrays(*columns.values())), strict=True):
            row = dict(zip(names, values, strict=True))
            status = row["status"] = Status(row["status"])
            if status in (Status.LOST, Status.LINK_DOWN):
                row["arrived_at"] = None
            if status not in (Status.DELIVERED, Status.CARRIED):
                row["absorbed_step"] = None
            if status == Status.LINK_DOWN:
                assert row["weight"] == 0
                row["weight"], row["bytes"] = None, 0
            elif math.isnan(row["weight"]):
                row["weight"] = None
            self.rows.append(Row(**row))

    def steps(self, *, phase: str, **columns: Any) -> None:
        assert phase == "inner"
        names = list(columns)
        for values in zip(*(a.tolist() for a in np.broadcast_arrays(*columns.values())), strict=True):
            self.step_rows.append(StepRow(**dict(zip(names, values, strict=True))))


@dataclass(frozen=True)
class Setting:
    """All that a schedule depends on."""

    graph: nx.Graph
    timing: Timing
    weights: Weights = field(default_factory=Uniform)
    seed: int = 0
    steps: int = 8
    message_bytes: int = 40
    first_step: int = 0
    started_at: float = 0.0
    snapshot_every: float = 1.0
    tallied: bool = True
    pulled: bool = False  # a second variable, "y", is weighed by its receivers
    recovers: bool = False

    def __repr__(self) -> str:
        values = {k: v for k, v in vars(self).items() if k != "graph"}
        nodes, edges = list(self.graph.nodes(data=True)), list(self.graph.edges(data=True))
        return f"Setting({type(self.graph).__name__} {nodes} {edges}, {values})"


@dataclass
class Played:
    setting: Setting
    network: Network
    rows: list[Row]
    step_rows: list[StepRow]
    items: list[Wave | Snapshot]
    rows_before: list[int]  # rows recorded when each item came
    tally: Tally

    @property
    def waves(self) -> list[Wave]:
        return [item for item in self.items if isinstance(item, Wave)]

    @property
    def snapshots(self) -> list[Snapshot]:
        return [item for item in self.items if isinstance(item, Snapshot)]

    @property
    def emitted(self) -> dict[int, tuple[int, int]]:
        """Payload serial → (client, step)."""
        return {
            int(serial): (int(client), int(step))
            for wave in self.waves
            for client, step, serial in zip(wave.absorption.nodes, wave.steps, wave.emits, strict=True)
        }

    def absorbed(self, absorption: Absorption, name: str = "z") -> dict[int, list[tuple[int, int, float]]]:
        """Client → what it absorbs of a variable, as (client, step, weight), in order."""
        emitted = self.emitted
        return {
            client: [(*emitted[serial], weight) for serial, weight in pairs]
            for client, pairs in entries(absorption, name)
        }


def channel_of(absorption: Absorption, name: str = "z") -> Sums | MatrixSums:
    """The one that brings a variable."""
    (channel,) = (channel for channel in absorption.channels if name in channel.names)
    assert not isinstance(channel, Common), "peers weigh what they absorb"
    return channel


def entries(absorption: Absorption, name: str = "z") -> Iterator[tuple[int, list[tuple[int, float]]]]:
    """(client, [(serial, weight), …]) for each row."""
    channel = channel_of(absorption, name)
    bounds = channel.indptr.tolist()
    for r, client in enumerate(absorption.nodes.tolist()):
        rows = slice(bounds[r], bounds[r + 1])
        yield client, list(zip(channel.sources[rows].tolist(), channel.weights[rows].tolist(), strict=True))


def sources_of(absorption: Absorption) -> set[int]:
    """Every payload that somebody takes in."""
    return {
        source
        for channel in absorption.channels
        for source in ([channel.source] if isinstance(channel, Common) else channel.sources.tolist())
    }


def play(setting: Setting, **changes: Any) -> Played:
    setting = replace(setting, **changes)
    timing = setting.timing
    network = timing.network(setting.graph)
    recording, tally = Recording(), Tally(network)
    talk = Conversation(
        "inner", "push", setting.steps, setting.message_bytes, setting.first_step, setting.started_at,
        conserves=True, recovers=setting.recovers,
    )  # fmt: skip
    mixing: Mixing = ((("z",), setting.weights.prepare(network)),)
    if setting.pulled:
        mixing = (*mixing, (("y",), PullShares(network)))
    schedule = timing.among_peers(
        network,
        mixing,
        Streams(setting.seed),
        talk,
        recording,
        setting.snapshot_every,
        tally=tally if setting.tallied else None,
    )
    items, rows_before = [], []
    for item in schedule:
        items.append(item)
        rows_before.append(len(recording.rows))
    return Played(setting, network, recording.rows, recording.step_rows, items, rows_before, tally)


def given_weights(graph: nx.Graph, seed: int) -> Given:
    """Random positive shares on the graph's links."""
    n = len(graph)
    W = np.eye(n) + nx.to_numpy_array(graph, nodelist=range(n), weight=None)
    W *= np.random.default_rng(seed).uniform(0.1, 1, (n, n))
    return Given(tuple(map(tuple, W / W.sum(axis=1, keepdims=True))))


@st.composite
def graphs(draw: st.DrawFn, *, most: int = 6) -> nx.Graph:
    """A strongly connected graph with probabilities: a cycle through everybody, and more."""
    n = draw(st.integers(1, most))
    pick = np.random.default_rng(draw(st.integers(0, 10_000)))
    graph = nx.DiGraph() if draw(st.booleans()) else nx.Graph()
    graph.add_nodes_from(range(n))
    order = pick.permutation(n).tolist()
    graph.add_edges_from((a, b) for a, b in zip(order, [*order[1:], order[0]], strict=True) if a != b)
    graph.add_edges_from((a, b) for a in range(n) for b in range(n) if a != b and pick.random() < 0.3)
    for _, _, marks in graph.edges(data=True):
        marks["probability"] = float(pick.choice([0.3, 0.7, 1.0]))
        if pick.random() < 0.2:
            marks["ordered"] = bool(pick.random() < 0.5)
    return graph


def with_shared_links(graph: nx.Graph, seed: int) -> nx.Graph:
    """A copy in which about half of the nodes have an uplink, and half a downlink."""
    graph, pick = graph.copy(), np.random.default_rng(seed)
    for node in graph:
        for mark in ("uplink", "downlink"):
            if pick.random() < 0.5:
                graph.nodes[node][mark] = float(pick.choice([20.0, 64.0, 400.0]))
    return graph


@st.composite
def virtual_times(draw: st.DrawFn, n: int, started_at: float) -> VirtualTime:
    tables = st.builds(
        Table,
        st.lists(st.lists(st.sampled_from([0.5, 1.0, 1.75]), min_size=1, max_size=3), min_size=n, max_size=n),
    )
    compute = draw(
        st.sampled_from([1.0, 0.3, "exponential(1)", "uniform(0.5, 1.5)", "lognormal(1, 0.7)"]) | tables
    )
    horizon = draw(st.none() | st.floats(0.05, 12))
    return VirtualTime(
        compute=compute,
        factors={
            client: draw(st.sampled_from([1.0, 0.5, 2.0, 10.0])) for client in range(n) if draw(st.booleans())
        },
        latency=draw(st.sampled_from([0.0, 0.5, "exponential(0.7)", "lognormal(0.5, 1)"])),
        bandwidth=draw(st.sampled_from([float("inf"), 50.0])),
        loss=draw(st.sampled_from([0.0, 0.3])),
        horizon=None if horizon is None else started_at + horizon,
        ordered=draw(st.booleans()),
    )


@st.composite
def settings_of(draw: st.DrawFn, *, timing: str = "both") -> Setting:
    graph = draw(graphs())
    if draw(st.booleans()):
        graph = with_shared_links(graph, draw(st.integers(0, 99)))
    started_at = draw(st.sampled_from([0.0, 3.5]))
    locksteps = st.builds(Lockstep, loss=st.sampled_from([0.0, 0.3]))
    virtual = virtual_times(len(graph), started_at)
    weights: list[Weights] = [Uniform(), given_weights(graph, draw(st.integers(0, 99)))]
    if not graph.is_directed():
        weights.append(Metropolis())
    return Setting(
        graph,
        draw({"both": locksteps | virtual, "lockstep": locksteps, "virtual": virtual}[timing]),
        draw(st.sampled_from(weights)),
        seed=draw(st.integers(0, 10_000)),
        steps=draw(st.integers(0, 15)),
        first_step=draw(st.sampled_from([0, 5])),
        started_at=started_at,
        snapshot_every=draw(st.sampled_from([1, 0.7, 3, 1000])),
        pulled=draw(st.booleans()),
    )
