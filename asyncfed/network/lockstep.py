"""Lockstep, the papers' model: at step t the links δ(t) are drawn, everybody sends, everybody absorbs.

In virtual time a step lasts one unit and messages arrive as soon as they are sent: step t runs from t to t +
1, its messages are sent and arrive at t + 1, and step t + 1 absorbs them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from asyncfed.network.expectations import Tally
from asyncfed.network.links import BoolArray, FloatArray, IntArray, Network
from asyncfed.network.waves import (
    Absorption,
    Conversation,
    MatrixAbsorption,
    Recorder,
    Snapshot,
    Status,
    Wave,
)
from asyncfed.network.weights import Shares
from asyncfed.rng import Streams

_DENSE = 0.2  # share of all possible links from which on a matrix is the better form


class LockstepTimeline:
    """Every wave is everybody; payload serials are step · n + client."""

    def __init__(
        self,
        network: Network,
        shares: Shares,
        streams: Streams,
        talk: Conversation,
        recorder: Recorder,
        snapshot_every: float,
        *,
        tally: Tally | None = None,
    ) -> None:
        self._network, self._shares, self._streams = network, shares, streams
        self._talk, self._recorder, self._tally = talk, recorder, tally
        self._every = max(1, round(snapshot_every))
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

    def __iter__(self) -> Iterator[Wave | Snapshot]:
        n, talk = self._network.n, self._talk
        absorption: Absorption | MatrixAbsorption = Absorption(
            self._everyone,
            np.zeros(n + 1, dtype=np.int64),
            np.zeros(0, dtype=np.int64),
            np.zeros(0, dtype=np.float64),
        )
        nothing = np.zeros(0, dtype=np.int64)
        absorbed = np.zeros(n, dtype=np.int64)
        for t in range(talk.steps + 1):
            step, now = talk.first_step + t, talk.started_at + t
            if t % self._every == 0 or t == talk.steps:
                yield Snapshot(absorption, now, np.full(n, step), final=t == talk.steps)
            if t == talk.steps:
                return
            emits = step * n + self._everyone
            self._recorder.steps(
                client=self._everyone,
                step=step,
                started_at=now,
                ended_at=now + 1.0,
                absorbed=absorbed,
                phase=talk.phase,
            )
            yield Wave(absorption, np.full(n, step), emits, nothing if t == 0 else emits - n, now)
            absorption, absorbed = self._send(step, now + 1.0)

    def _send(self, step: int, at: float) -> tuple[Absorption | MatrixAbsorption, IntArray]:
        network = self._network
        up = network.up(self._streams, step)
        weights, kept = self._shares.of_all(up)
        arrives = up
        status = (~up).view(np.uint8) * np.uint8(Status.LINK_DOWN)  # delivered is 0
        if not network.lossless:
            lost = up & network.lost(self._streams, step)
            status[lost] = Status.LOST
            arrives = up & ~lost
        if self._tally is not None:
            self._tally.round(weights, kept, arrives)
        if network.edges:
            self._recorder.messages(
                sender=self._columns[0],
                receiver=self._columns[1],
                status=status,
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
        return self._absorption(step, arrives, weights, kept), absorbed

    def _absorption(
        self, step: int, arrives: BoolArray, weights: FloatArray, kept: FloatArray
    ) -> Absorption | MatrixAbsorption:
        network, first = self._network, step * self._network.n
        if self._cells is not None:
            matrix = np.zeros((network.n, network.n))
            matrix.reshape(-1)[self._cells] = weights if network.lossless else weights * arrives
            matrix.reshape(-1)[:: network.n + 1] = kept
            return MatrixAbsorption(self._everyone, matrix, first)
        self._present[: network.edges] = arrives
        self._share[: network.edges], self._share[network.edges :] = weights, kept
        here = self._present[self._order]
        np.cumsum(here, out=self._counts[1:])
        chosen = np.flatnonzero(here)
        sources = first + self._pattern_senders[chosen]
        return Absorption(
            self._everyone, self._counts[self._pattern_first], sources, self._share[self._order[chosen]]
        )
