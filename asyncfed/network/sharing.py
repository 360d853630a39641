"""What a node's links share: one uplink out of it, one downlink into it.

An uplink carries one message at a time, in the order in which they were handed to it (ties by receiver); a
downlink takes in one at a time, in the order in which they reach it (ties by sender). Both are queues:

    over_k = max(due_k, over_{k−1}) + bytes_k / rate        over_0 = until when it is busy already

of those whose rate is finite; what has no limit holds nothing up.

A message goes through its sender's uplink, its link (bandwidth, then latency) and its receiver's downlink,
and arrives when the last has taken it in. One that is not sent uses nothing; one that is lost has used the
uplink and the link, but never reaches the downlink.

All that is remembered between calls is until when each node's uplink, or downlink, is busy. So messages must
come in order over the calls too, of each node:

    uplink      by the time at which they are handed over: whoever simulates in the order of time has that
    downlink    by the time at which they reach it, which is not the order of sending. What is due by a time t
                is known at t (nothing sent later reaches anybody before). So put a message aside when it is
                sent, and hand it to `downlink_arrives` when its receiver looks, with all that are due by then

The sums are those of a plain loop to the last bit: over the queues at once, within a queue one by one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from asyncfed.recall import recalled

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_TOGETHER = 8  # messages per place in a queue from which on numpy is faster than a loop


def uplink_leaves(
    at: FloatArray | float,
    senders: IntArray,
    receivers: IntArray,
    sizes: IntArray | int,
    rate: FloatArray,
    busy: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """When messages have left their senders' uplinks, and until when all uplinks are busy then.

    Parameters
    ----------
    at
        When each is handed over (m,); none before those of earlier calls from the same sender.
    senders, receivers
        Of each (m,).
    sizes
        Bytes of each (m,), or of all.
    rate
        Bytes per unit of time of every node (n,); infinite where it has no limit.
    busy
        Until when every node's uplink is (n,); −inf at first. Left as it is.
    """
    return _one_by_one(at, senders, receivers, sizes, rate, busy)


def downlink_arrives(
    reaching: FloatArray | float,
    senders: IntArray,
    receivers: IntArray,
    sizes: IntArray | int,
    rate: FloatArray,
    busy: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """When messages have been taken in by their receivers, and until when all downlinks are busy then.

    As `uplink_leaves`, with the times at which they reach their receivers: none before those of earlier calls
    to the same receiver.
    """
    return _one_by_one(reaching, receivers, senders, sizes, rate, busy)


@recalled(given=("_rate",))
class Intake:
    """The downlink of one node that wants to know what is coming: what is certain, and forecasts beside it.

    Messages have keys (sender, number) that tell them apart. `arrivals` says when all would be taken in if
    nothing else came; `settle` makes that final for those that reach it by a time, before which nothing else
    can reach it any more.
    """

    def __init__(self, rate: float) -> None:
        self._rate, self._busy = rate, -np.inf
        self._coming: dict[tuple[int, int], tuple[float, int]] = {}

    def add(self, key: tuple[int, int], reaches: float, size: int) -> None:
        """A message is certain to reach it then."""
        self._coming[key] = reaches, size

    def awaits(self, key: tuple[int, int]) -> bool:
        """Whether a message is certain, and when it will have been taken in is not settled."""
        return key in self._coming

    def arrivals(
        self, forecasts: Mapping[tuple[int, int], tuple[float, int]]
    ) -> dict[tuple[int, int], float]:
        """By key, of those that are certain and of others that are foreseen: when each has been taken in."""
        return self._taken(self._coming | dict(forecasts))

    def settle(self, now: float) -> dict[tuple[int, int], float]:
        """By key, of those that have reached it by now."""
        due = {key: value for key, value in self._coming.items() if value[0] <= now}
        if not due:
            return {}
        self._coming = {key: value for key, value in self._coming.items() if value[0] > now}
        taken = self._taken(due)
        self._busy = max(taken.values())
        return taken

    def _taken(self, messages: Mapping[tuple[int, int], tuple[float, int]]) -> dict[tuple[int, int], float]:
        taken, busy = {}, self._busy
        for reaches, key, size in sorted((reaches, key, size) for key, (reaches, size) in messages.items()):
            taken[key] = busy = max(reaches, busy) + size / self._rate
        return taken


def _one_by_one(
    due: FloatArray | float,
    nodes: IntArray,
    others: IntArray,
    sizes: IntArray | int,
    rate: FloatArray,
    busy: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """The queues of `nodes`, each in the order of (due, other)."""
    due = np.broadcast_to(np.asarray(due, dtype=np.float64), nodes.shape)
    takes = sizes / rate[nodes]
    over, busy = due.copy(), busy.copy()
    limited = np.flatnonzero(np.isfinite(rate)[nodes])  # the others pass at once, in whatever order
    order = limited[np.lexsort((others[limited], due[limited], nodes[limited]))]
    queue = nodes[order]
    first = np.flatnonzero(np.append(True, queue[1:] != queue[:-1])[: len(queue)])
    lengths = np.diff(np.append(first, len(queue)))
    due_in_order, takes_in_order = due[order], takes[order]
    if len(queue) < _TOGETHER * lengths.max(initial=0):
        heads = queue[first]
        until = dict(zip(heads.tolist(), busy[heads].tolist(), strict=True))
        ends = []
        for node, time, length in zip(
            queue.tolist(), due_in_order.tolist(), takes_in_order.tolist(), strict=True
        ):
            until[node] = end = max(time, until[node]) + length
            ends.append(end)
        over[order] = ends
        busy[heads] = list(until.values())
        return over, busy
    longest_first = np.argsort(-lengths, kind="stable")
    first, lengths = first[longest_first], lengths[longest_first]
    until_now = busy[queue[first]]
    for place in range(int(lengths[0]) if len(lengths) else 0):
        k = int(np.searchsorted(-lengths, -place, side="left"))  # queues that are longer than that
        here = first[:k] + place
        until_now[:k] = np.maximum(due_in_order[here], until_now[:k]) + takes_in_order[here]
        over[order[here]] = until_now[:k]
    busy[queue[first]] = until_now
    return over, busy
