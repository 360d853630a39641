"""What a schedule produces: waves of steps, and snapshots between them.

The network decides alone: a schedule computes who steps when and absorbs what, without knowing any value.
Every step of a node (a client, or the server) emits one *payload*, known by its serial number, to be weighed
and absorbed by others (and by the node itself at its next step). A wave is a set of steps that need nothing
from one another, in an order such that everything they absorb was emitted by an earlier wave. Whoever
executes the waves (a process, or Ray actors) gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np

from asyncfed.network.links import BoolArray, FloatArray, IntArray

NO_NODES: IntArray = np.zeros(0, dtype=np.int64)


class Status(IntEnum):
    """What became of a potential message."""

    DELIVERED = 0
    LOST = 1
    LINK_DOWN = 2
    IN_FLIGHT = 3
    LATE = 4  # it arrived when the receiver had stopped waiting, and was dropped
    CARRIED = 5  # it was lost, and what it held came with a later message on its link


@dataclass(frozen=True, eq=False)
class Sums:
    """Row r of an absorption takes the payloads `sources[indptr[r]:indptr[r + 1]]`, weighed."""

    names: tuple[str, ...]  # of the variables that are mixed in this way
    indptr: IntArray
    sources: IntArray
    weights: FloatArray
    senders: IntArray  # of the sources


@dataclass(frozen=True, eq=False)
class MatrixSums:
    """The same where all absorb from one round of everybody: payload `first` + c has weights matrix[:, c]. Of
    the flat matrix, `cells` are the links, and `arrived` says which of them brought something.
    """

    names: tuple[str, ...]
    matrix: FloatArray
    first: int
    cells: IntArray
    arrived: BoolArray

    @cached_property
    def _links(self) -> tuple[IntArray, IntArray]:
        # Not where weights are zero: a message of no weight is a message, and everybody has its own payload.
        linked = np.eye(len(self.matrix), dtype=np.bool_)
        linked.reshape(-1)[self.cells] = self.arrived
        receivers, senders = np.nonzero(linked)
        return receivers.astype(np.int64), senders.astype(np.int64)

    @cached_property
    def indptr(self) -> IntArray:
        return np.searchsorted(self._links[0], np.arange(len(self.matrix) + 1))

    @cached_property
    def sources(self) -> IntArray:
        return self.first + self._links[1]

    @cached_property
    def weights(self) -> FloatArray:
        return self.matrix[self._links]

    @cached_property
    def senders(self) -> IntArray:
        return self._links[1]


@dataclass(frozen=True, eq=False)
class Common:
    """All rows take one and the same payload, as it is."""

    names: tuple[str, ...]
    source: int


Channel: TypeAlias = Sums | MatrixSums | Common


@dataclass(frozen=True, eq=False)
class Absorption:
    """What some nodes take in: variables that are weighed alike share a channel."""

    nodes: IntArray
    channels: tuple[Channel, ...]
    empty: IntArray = field(default_factory=lambda: NO_NODES)  # who has nothing: it is where all began


@dataclass(frozen=True, eq=False)
class Wave:
    """Steps that may run at once: each absorbs, computes and emits payload `emits[r]`."""

    absorption: Absorption
    steps: IntArray  # each node's own count, or the number of a server's round
    emits: IntArray
    released: IntArray  # payloads that nobody absorbs after this wave
    time: float  # when the last of these steps starts
    part: int = 0  # which of the parts that were opened they are steps of
    readers: int | None = None  # how many nodes may ever absorb what these emit; None where it may be any
    elapsed: FloatArray | None = None  # among peers: since a node began its previous step; 0 for its first
    reborn: IntArray = field(default_factory=lambda: NO_NODES)  # of these nodes: who forgets everything first
    leaving: bool = False  # whether they compute nothing and hand over what they hold
    turn: int = 0  # of the works that each node does in one and the same round of a server


@dataclass(frozen=True)
class Unrecorded:
    """Messages that were sent but are not in the trace yet: that comes when their fate is known. And those of
    which it is known so early that they are in the trace as delivered while they are still on their way.
    """

    arrived: int = 0
    on_the_way: int = 0
    bytes: int = 0
    early: int = 0


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What every client is to be judged by at virtual time `time`: the state from which it makes the step it
    is at, or would make the next. Consumes nothing.
    """

    absorption: Absorption
    time: float
    steps: IntArray  # steps ended by each client
    final: bool
    part: int = 0
    unrecorded: Unrecorded = field(default_factory=Unrecorded)
    rounds: int | None = None  # of the server, where there is one
    counts: dict[str, IntArray] = field(default_factory=dict)  # what works have added, of each client
    ends: FloatArray | None = None  # where nobody waits for others: when each client is through with the part


class Recorder(Protocol):
    """Where messages and steps are written down; arrays are not changed after they are handed over.

    A column that a status leaves empty (the arrival of a lost message, say) may be given all the same.
    """

    def messages(
        self,
        *,
        sender: Any,
        receiver: Any,
        status: Any,
        step: Any,
        sent_at: Any,
        arrived_at: Any,
        absorbed_step: Any,
        weight: Any,
        bytes: Any,
        phase: str,
        kind: str,
        staleness: Any = -1,
    ) -> None: ...

    def steps(
        self, *, client: Any, step: Any, started_at: Any, ended_at: Any, absorbed: Any, phase: str
    ) -> None: ...


@dataclass(frozen=True)
class Conversation:
    """What a schedule needs to know of a part among peers: how long, how large, and what to call it."""

    phase: str
    kind: str
    steps: int
    message_bytes: int
    first_step: int = 0
    started_at: float | FloatArray = 0.0  # or, where nobody waits for others, of each client
    part: int = 0
    conserves: bool = False  # whether its sums are wrong where something is lost for good
    recovers: bool = False  # whether what is lost on a link comes with the next message that gets through
    samples: FloatArray | None = None  # that a step of each client goes over, where that is asked for
    back: int = 0  # how many steps ago the step was whose draws (links, losses, times) its first one has


class Schedule(Protocol):
    """One part of a run, as waves and snapshots; the last thing it yields is the final snapshot.

    It can be put down where it `rests`, and goes on from there: all it needs is in its attributes.
    """

    @property
    def rests(self) -> bool:
        """Whether it could be put down after what it has yielded last."""

    def __iter__(self) -> Iterator[Wave | Snapshot]: ...
