"""Lockstep, the papers' model: at step t the links δ(t) are drawn, everybody sends, everybody absorbs.

In virtual time a step lasts one unit and messages arrive as soon as they are sent: step t runs from t to t +
1, its messages are sent and arrive at t + 1, and step t + 1 absorbs them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from asyncfed.network.expectations import Tally
from asyncfed.network.links import BoolArray, FloatArray, IntArray
from asyncfed.network.waves import (
    NO_NODES,
    Absorption,
    Channel,
    Conversation,
    MatrixSums,
    Snapshot,
    Status,
    Sums,
    Wave,
)
from asyncfed.network.weights import Mixing
from asyncfed.network.wire import Wire
from asyncfed.recall import recalled

_DENSE = 0.2  # share of all possible links from which on a matrix is the better form


@recalled(holds=("_step", "_made"))
class LockstepSchedule:
    """Every wave is everybody; payload serials are step · n + node."""

    def __init__(
        self,
        wire: Wire,
        mixing: Mixing,
        talk: Conversation,
        snapshot_every: float,
        *,
        tally: Tally | None = None,
    ) -> None:
        self._wire, self._mixing, self._talk, self._tally = wire, mixing, talk, tally
        self._every = max(1, round(snapshot_every))
        self._step, self._made = 0, False  # of the part, and whether it was made, so that its messages go
        network = self._network = wire.network
        n = network.n
        self._everyone = np.arange(n, dtype=np.int64)
        self._columns = network.senders.astype(np.int32), network.receivers.astype(np.int32)  # as recorded
        # On a dense network weights go straight into a matrix (receiver, sender), at these places.
        dense = network.edges >= _DENSE * n * n
        self._cells = network.receivers * n + network.senders if dense else None
        if not dense:
            self._lay_pattern()

    def _lay_pattern(self) -> None:
        """The links into each client, senders in order and the client itself among them: what every
        absorption on a sparse network is a part of.
        """
        network = self._network
        receivers = np.concatenate([network.receivers, self._everyone])
        senders = np.concatenate([network.senders, self._everyone])
        self._order = np.lexsort((senders, receivers))
        self._pattern_senders = senders[self._order]
        self._pattern_first = np.searchsorted(receivers[self._order], np.arange(network.n + 1))
        # Work space: what arrives (a client's own share always does), its weight, and how much came before.
        self._present = np.ones(len(senders), dtype=np.bool_)
        self._share = np.empty(len(senders))
        self._counts = np.zeros(len(senders) + 1, dtype=np.int64)

    @property
    def rests(self) -> bool:
        """Whether it could be put down after what it has yielded last."""
        return self._made

    def __iter__(self) -> Iterator[Wave | Snapshot]:
        n, talk = self._network.n, self._talk
        started_at = float(talk.started_at)
        nothing = np.zeros(n + 1, dtype=np.int64)
        names = tuple(name for names, _ in self._mixing for name in names)
        absorption = Absorption(self._everyone, (Sums(names, nothing, NO_NODES, np.zeros(0), NO_NODES),))
        absorbed = np.zeros(n, dtype=np.int64)
        while True:
            if self._made:
                now = started_at + self._step + 1.0
                absorption, absorbed = self._send(talk.first_step + self._step, now)
                self._step, self._made = self._step + 1, False
            t = self._step
            step, now = talk.first_step + t, started_at + t
            if t % self._every == 0 or t == talk.steps:
                yield Snapshot(absorption, now, np.full(n, step), final=t == talk.steps, part=talk.part)
            if t == talk.steps:
                return
            emits = step * n + self._everyone
            self._wire.record_steps(
                self._everyone,
                step=step,
                started_at=now,
                ended_at=now + 1.0,
                absorbed=absorbed,
                phase=talk.phase,
            )
            released = NO_NODES if t == 0 else emits - n
            elapsed = np.full(n, min(t, 1.0))
            self._made = True
            yield Wave(absorption, np.full(n, step), emits, released, now, talk.part, elapsed=elapsed)

    def _send(self, step: int, at: float) -> tuple[Absorption, IntArray]:
        network = self._network
        up, arrives = self._wire.everybody(step, at)
        shares = [(names, *own.of_all(arrives if own.by_receiver else up)) for names, own in self._mixing]
        _, weights, kept = shares[0]
        if self._tally is not None:
            self._tally.round(weights, kept, arrives)
        if network.edges:
            status = (~up).view(np.uint8) * np.uint8(Status.LINK_DOWN)  # delivered is 0
            if not network.lossless:
                status[up & ~arrives] = Status.LOST
            self._wire.record(
                *self._columns,
                status,
                step=step,
                sent_at=at,
                arrived_at=at,
                absorbed_step=step + 1,
                weight=weights,
                bytes=self._talk.message_bytes,
                phase=self._talk.phase,
                kind=self._talk.kind,
            )
        absorbed = np.bincount(network.receivers, arrives, minlength=network.n).astype(np.int64)
        channels = tuple(self._channel(names, step, arrives, *own) for names, *own in shares)
        return Absorption(self._everyone, channels), absorbed

    def _channel(
        self, names: tuple[str, ...], step: int, arrives: BoolArray, weights: FloatArray, kept: FloatArray
    ) -> Channel:
        network, first = self._network, step * self._network.n
        if self._cells is not None:
            matrix = np.zeros((network.n, network.n))
            matrix.reshape(-1)[self._cells] = weights if network.lossless else weights * arrives
            matrix.reshape(-1)[:: network.n + 1] = kept
            return MatrixSums(names, matrix, first, self._cells, arrives)
        self._present[: network.edges] = arrives
        self._share[: network.edges], self._share[network.edges :] = weights, kept
        here = self._present[self._order]
        np.cumsum(here, out=self._counts[1:])
        chosen = np.flatnonzero(here)
        senders = self._pattern_senders[chosen]
        shares = self._share[self._order[chosen]]
        return Sums(names, self._counts[self._pattern_first], first + senders, shares, senders)
