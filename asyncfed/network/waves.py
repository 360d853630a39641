"""What a timing model produces: waves of client steps, and snapshots between them.

The network decides alone: a timeline computes who steps when and absorbs what, without knowing any value.
Every client step emits one *payload*, known by its serial number, to be weighed and absorbed by others (and
by the client itself at its next step). A wave is a set of steps that need nothing from one another, in an
order such that everything they absorb was emitted by an earlier wave. Whoever executes the waves (a process,
or Ray actors) gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from asyncfed.network.links import FloatArray, IntArray


class Status(IntEnum):
    """What became of a potential message."""

    DELIVERED = 0
    LOST = 1
    LINK_DOWN = 2
    IN_FLIGHT = 3
    LATE = 4  # it arrived when the receiver had stopped waiting, and was dropped


@dataclass(frozen=True, eq=False)
class Absorption:
    """Row r of the given clients absorbs the payloads `sources[indptr[r]:indptr[r + 1]]`, weighed."""

    clients: IntArray
    indptr: IntArray
    sources: IntArray
    weights: FloatArray


@dataclass(frozen=True, eq=False)
class MatrixAbsorption:
    """The same where all absorb from one round of everybody: payload `first` + c has weights matrix[:, c]."""

    clients: IntArray
    matrix: FloatArray
    first: int

    @cached_property
    def _links(self) -> tuple[IntArray, IntArray]:
        linked = self.matrix != 0
        np.fill_diagonal(linked, True)  # everybody absorbs its own payload, be its share as small as it may
        receivers, senders = np.nonzero(linked)
        return receivers.astype(np.int64), senders.astype(np.int64)

    @cached_property
    def indptr(self) -> IntArray:
        return np.searchsorted(self._links[0], np.arange(len(self.clients) + 1))

    @cached_property
    def sources(self) -> IntArray:
        return self.first + self._links[1]

    @cached_property
    def weights(self) -> FloatArray:
        return self.matrix[self._links]


@dataclass(frozen=True, eq=False)
class Wave:
    """Steps that may run at once: each absorbs, computes and emits payload `emits[r]`."""

    absorption: Absorption | MatrixAbsorption
    steps: IntArray
    emits: IntArray
    released: IntArray  # payloads that nobody absorbs after this wave
    time: float  # when the last of these steps starts


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state every client would start its next step from, at virtual time `time`; consumes nothing."""

    absorption: Absorption | MatrixAbsorption
    time: float
    steps: IntArray  # steps begun by each client
    final: bool
    waiting: int = 0  # messages that have arrived but that no step has absorbed yet: not in the trace so far
    on_the_way: int = 0  # messages sent but not arrived: not in the trace so far either


class Recorder(Protocol):
    """Where a timeline reports messages and steps; arrays are not changed after they are handed over.

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
    ) -> None: ...

    def steps(
        self, *, client: Any, step: Any, started_at: Any, ended_at: Any, absorbed: Any, phase: str
    ) -> None: ...


@dataclass(frozen=True)
class Conversation:
    """What a timeline needs to know of a protocol's phase: how long, how large, and what to call it."""

    phase: str
    kind: str
    steps: int
    message_bytes: int
    first_step: int = 0
    started_at: float = 0.0


class Timeline(Protocol):
    """One phase of a run, as waves and snapshots; the last thing it yields is the final snapshot."""

    def __iter__(self) -> Iterator[Wave | Snapshot]: ...
