"""Lockstep, the papers' model: at step t the links δ(t) are drawn, everybody sends, everybody absorbs.

In virtual time a step lasts one unit and messages arrive as soon as they are sent: step t runs from t to t +
1, its messages are sent and arrive at t + 1, and step t + 1 absorbs them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from asyncfed.network.links import BoolArray, FloatArray, IntArray, Network
from asyncfed.network.waves import Absorption, Conversation, Recorder, Snapshot, Status, Wave
from asyncfed.network.weights import Shares
from asyncfed.rng import Streams


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
    ) -> None:
        self._network, self._shares, self._streams = network, shares, streams
        self._talk, self._recorder = talk, recorder
        self._every = max(1, round(snapshot_every))
        # The links into each client, senders in order and the client itself among them: the pattern of every
        # absorption.
        n = network.n
        everyone = np.arange(n, dtype=np.int64)
        receivers = np.concatenate([network.receivers, everyone])
        senders = np.concatenate([network.senders, everyone])
        self._order = np.lexsort((senders, receivers))
        self._pattern_senders = senders[self._order]
        self._pattern_first = np.searchsorted(receivers[self._order], np.arange(n + 1))
        self._everyone = everyone

    def __iter__(self) -> Iterator[Wave | Snapshot]:
        n, talk = self._network.n, self._talk
        absorption = Absorption(
            self._everyone,
            np.zeros(n + 1, dtype=np.int64),
            np.zeros(0, dtype=np.int64),
            np.zeros(0, dtype=np.float64),
        )
        nothing = np.zeros(0, dtype=np.int64)
        for t in range(talk.steps + 1):
            step, now = talk.first_step + t, talk.started_at + t
            if t % self._every == 0 or t == talk.steps:
                yield Snapshot(absorption, now, np.full(n, step), final=t == talk.steps)
            if t == talk.steps:
                return
            emits = step * n + self._everyone
            absorbed = np.diff(absorption.indptr) - (t > 0)
            self._recorder.steps(
                client=self._everyone,
                step=step,
                started_at=now,
                ended_at=now + 1.0,
                absorbed=absorbed,
                phase=talk.phase,
            )
            yield Wave(absorption, np.full(n, step), emits, nothing if t == 0 else emits - n)
            absorption = self._send(step, now + 1.0)

    def _send(self, step: int, at: float) -> Absorption:
        network = self._network
        up = network.up(self._streams, step)
        weights, kept = self._shares.of_all(up)
        arrives = up
        status = np.where(up, np.uint8(Status.DELIVERED), np.uint8(Status.LINK_DOWN))
        if not network.lossless:
            lost = up & network.lost(self._streams, step)
            status[lost] = Status.LOST
            arrives = up & ~lost
        if network.edges:
            self._recorder.messages(
                sender=network.senders,
                receiver=network.receivers,
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
        return self._absorption(step, arrives, weights, kept)

    def _absorption(self, step: int, arrives: BoolArray, weights: FloatArray, kept: FloatArray) -> Absorption:
        here = np.concatenate([arrives, np.ones(self._network.n, dtype=np.bool_)])[self._order]
        chosen = np.flatnonzero(here)
        counts = np.concatenate([[0], np.cumsum(here)])
        indptr: IntArray = counts[self._pattern_first].astype(np.int64)
        sources = step * self._network.n + self._pattern_senders[chosen]
        share = np.concatenate([weights, kept])[self._order[chosen]]
        return Absorption(self._everyone, indptr, sources, share)
