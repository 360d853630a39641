"""Messages among peers that are under way, in columns; and what becomes of those that get lost.

Where links are offered more than they carry, ever more is under way. So where most is far away, a mailbox
does not look at it: it stands in *runs*, each by the time of arrival and (when the next is made) more than
twice as long as that, and a look takes the front of each.

A message that is lost is lost for good, unless the network keeps *running sums* (Hadjicostis, Vaidya &
Domínguez-García 2016; Spiridonoff, Olshevsky & Paschalidis 2020): on every link a sender then sends the sum
of all it ever sent there, and a receiver takes the difference to the last one it has. So what was lost comes
with the next message that gets through. Here that is: the lost payload, with its weight, is absorbed
together with its *carrier*, and a message is no longer for it. What waits for a carrier is the sender's, who
loses it in a crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from asyncfed.network.links import BoolArray, FloatArray, IntArray
from asyncfed.network.wire import Fates, Wire
from asyncfed.recall import recalled

_FEW = 2048  # letters that are looked at in no time


@recalled()
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
    number: IntArray  # in a mailbox: which of all that were ever put there it is

    def __len__(self) -> int:
        return len(self.sender)

    def at(self, places: IntArray | BoolArray | slice) -> Letters:
        return Letters(*(getattr(self, column.name)[places] for column in fields(self)))


def joined_letters(some: list[Letters]) -> Letters:
    return Letters(
        *(np.concatenate([getattr(one, column.name) for one in some]) for column in fields(Letters))
    )


def no_letters(channels: int) -> Letters:
    nothing, numbers = np.zeros(0, np.int64), np.zeros(0)
    flags, weights = np.zeros(0, np.bool_), np.zeros((0, channels))
    return Letters(nothing, nothing, nothing, nothing, nothing, numbers, numbers, flags, weights, nothing)


@recalled()
class Mailbox:
    """Letters until somebody takes them, told in the order in which they were put."""

    def __init__(self, channels: int) -> None:
        self._ever = 0  # put
        self.here = no_letters(channels)  # to be looked at
        self._runs: list[Letters] = []  # far away
        self._shelved: list[Letters] = []

    def __len__(self) -> int:
        return sum(map(len, self.pieces()))

    def pieces(self) -> list[Letters]:
        """All, in no particular order."""
        return [self.here, *self._runs, *self._shelved]

    def all(self) -> Letters:
        return _in_order(self.pieces())

    def put(self, letters: Letters, until: float) -> None:
        """What is `here` is then looked at; but where most of it arrives at a time or later, that is put away
        until then.
        """
        numbers = np.arange(self._ever, self._ever + len(letters))
        self._ever += len(letters)
        self.here = joined_letters([self.here, replace(letters, number=numbers)])
        far = self.here.arrives >= until
        if len(far) <= _FEW or 2 * np.count_nonzero(far) <= len(far):
            return
        together = [self.take(far)]
        while self._runs and len(self._runs[-1]) <= 2 * sum(map(len, together)):
            together.append(self._runs.pop())
        run = joined_letters(together)
        self._runs.append(run.at(np.argsort(run.arrives, kind="stable")))

    def look(self, before: float) -> Letters:
        """What is here: all that arrive before a time, and were not shelved, among them."""
        fronts = [self.here]
        for place, run in enumerate(self._runs):
            count = int(np.searchsorted(run.arrives, before))
            if count:
                fronts.append(run.at(slice(count)))
                self._runs[place] = run.at(slice(count, None))
        if len(fronts) > 1:
            self._runs = [run for run in self._runs if len(run)]
            self.here = _in_order(fronts)
        return self.here

    def take(self, places: BoolArray) -> Letters:
        """Some of those that are here."""
        taken, self.here = self.here.at(places), self.here.at(~places)
        return taken

    def shelve(self, places: BoolArray) -> None:
        """Some of those that are here: nobody will take them before all is over."""
        if places.any():
            self._shelved.append(self.take(places))

    def by(self, time: float) -> Letters:
        """Those that have arrived by then, the shelved too."""
        self.look(np.nextafter(time, np.inf))
        pieces = [self.here, *self._shelved]
        return _in_order([letters.at(letters.arrives <= time) for letters in pieces])


def _in_order(some: Sequence[Letters]) -> Letters:
    letters = joined_letters([one for one in some if len(one)] or [some[0]])
    return letters.at(np.argsort(letters.number))


@recalled(given=("_wire", "_size"))
class Downlinks:
    """What is under way where receivers' downlinks are shared, until it reaches them.

    Until then `arrives` of a message is when it reaches its receiver. All that reach somebody before a time
    are known at that time, and so is when they have been taken in, one by one: that is when they arrive. What
    is carried takes no time of its own and arrives with its carrier.
    """

    def __init__(self, wire: Wire, size: int, channels: int) -> None:
        self._wire, self._size, self._coming = wire, size, Mailbox(channels)

    def __len__(self) -> int:
        return len(self._coming)

    def settle(self, sent: Letters, until: float) -> Letters:
        """Of these and earlier ones those that have reached somebody before that time."""
        self._coming.put(sent, until)
        here = self._coming.look(until).arrives < until
        return self._taken_in(self._coming.take(here), foreseen=False)

    def foreseen(self, time: float) -> Letters:
        """The others that reach somebody by then, if nothing more is sent."""
        return self._taken_in(self._coming.by(time), foreseen=True)

    def _taken_in(self, letters: Letters, *, foreseen: bool) -> Letters:
        if not len(letters):
            return letters
        own, carried = ~letters.carried, np.flatnonzero(letters.carried)
        reaching = Fates(own, own, letters.arrives)
        arrives = self._wire.take_in(letters.edge, reaching, self._size, foreseen=foreseen).arrives
        if len(carried):
            arrives[carried] = arrives[_carriers(letters.at(carried), letters, own)]
        return replace(letters, arrives=arrives)


@recalled()
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
        carrier = _carriers(lost, sent, goes)
        found = carrier >= 0
        known = np.ones(len(lost), dtype=np.bool_)
        known[found] = since[carrier[found]] <= lost.sent[found]
        self.waiting = lost.at(~found)
        with_it = found & known
        arrives = lost.arrives.copy()
        arrives[with_it] = sent.arrives[carrier[with_it]]
        lost = replace(lost, arrives=arrives, carried=np.ones(len(lost), dtype=np.bool_))
        return lost.at(with_it), lost.at(found & ~known)


def _carriers(lost: Letters, sent: Letters, goes: BoolArray) -> IntArray:
    """Of each lost message the place of its carrier: the first on its link, of those that go, with a higher
    step; -1 where there is none.
    """
    carriers = np.flatnonzero(goes)
    if not len(carriers):
        return np.full(len(lost), -1, dtype=np.int64)
    carriers = carriers[np.lexsort((sent.step[carriers], sent.edge[carriers]))]
    most = 1 + int(max(lost.step.max(), sent.step[carriers].max()))
    keys = sent.edge[carriers] * most + sent.step[carriers]
    place = np.searchsorted(keys, lost.edge * most + lost.step, side="right")
    place[place == len(carriers)] = 0
    found = carriers[place]
    behind = (sent.edge[found] == lost.edge) & (sent.step[found] > lost.step)
    return np.where(behind, found, -1)
