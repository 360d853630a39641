"""Messages among peers that are under way, in columns; and what becomes of those that get lost.

A message that is lost is lost for good, unless the network keeps *running sums* (Hadjicostis, Vaidya &
Domínguez-García 2016; Spiridonoff, Olshevsky & Paschalidis 2020): on every link a sender then sends the sum
of all it ever sent there, and a receiver takes the difference to the last one it has. So what was lost comes
with the next message that gets through. Here that is: the lost payload, with its weight, is absorbed
together with its *carrier*, and a message is no longer for it. What waits for a carrier is the sender's, who
loses it in a crash.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from asyncfed.network.links import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Letters:
    """Messages, in columns."""

    sender: IntArray
    receiver: IntArray
    edge: IntArray
    step: IntArray  # of the sender
    serial: IntArray
    sent: FloatArray
    arrives: FloatArray
    carried: BoolArray  # whether it was lost and comes with another
    weights: FloatArray  # (messages, channels)

    def __len__(self) -> int:
        return len(self.sender)

    def at(self, places: IntArray | BoolArray) -> Letters:
        return Letters(*(getattr(self, column.name)[places] for column in fields(self)))


def joined_letters(some: list[Letters]) -> Letters:
    return Letters(
        *(np.concatenate([getattr(one, column.name) for one in some]) for column in fields(Letters))
    )


def no_letters(channels: int) -> Letters:
    nothing, numbers = np.zeros(0, np.int64), np.zeros(0)
    flags, weights = np.zeros(0, np.bool_), np.zeros((0, channels))
    return Letters(nothing, nothing, nothing, nothing, nothing, numbers, numbers, flags, weights)


class RunningSums:
    """What was lost on each link and waits for a message that gets through."""

    def __init__(self, channels: int) -> None:
        self.waiting = no_letters(channels)

    def carry(self, sent: Letters, goes: BoolArray, since: FloatArray) -> tuple[Letters, Letters]:
        """Of messages that were sent (`goes`: those that get through; `since`: from when on their senders
        remember) what is carried by others, and what its sender has forgotten. The rest waits.
        """
        lost = joined_letters([self.waiting, sent.at(~goes)])
        if not len(lost):
            return lost, lost
        carriers = np.flatnonzero(goes)
        carriers = carriers[np.lexsort((sent.step[carriers], sent.edge[carriers]))]
        # A lost message's carrier is the first on its link, of those that go, with a higher step.
        most = 1 + int(max(lost.step.max(), sent.step[carriers].max(initial=0)))
        keys = sent.edge[carriers] * most + sent.step[carriers]
        place = np.searchsorted(keys, lost.edge * most + lost.step, side="right")
        found = place < len(carriers)
        carrier = carriers[np.where(found, place, 0)] if len(carriers) else np.zeros(len(lost), np.int64)
        if len(carriers):
            found &= sent.edge[carrier] == lost.edge
        else:
            found[:] = False
        known = np.ones(len(lost), dtype=np.bool_)
        known[found] = since[carrier[found]] <= lost.sent[found]
        self.waiting = lost.at(~found)
        with_it = found & known
        arrives = lost.arrives.copy()
        arrives[with_it] = sent.arrives[carrier[with_it]]
        lost = replace(lost, arrives=arrives, carried=np.ones(len(lost), dtype=np.bool_))
        return lost.at(with_it), lost.at(found & ~known)
