"""Links that are offered more than they carry: said by name before a run.

A link puts one message on the wire at a time, and a node's uplink and downlink are shared by all of its
links. What comes faster than it goes waits, ever longer: what is absorbed is ever older, and all that waits
is kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncfed.errors import UnsoundWarning
from asyncfed.network.links import FloatArray, IntArray
from asyncfed.network.timing import VirtualTime

if TYPE_CHECKING:
    from asyncfed.protocols.part import Part, Scene

WAITING = 10  # messages that wait in the end; fewer do not hurt


class _Shared(NamedTuple):
    """What messages queue for: all the links, or all uplinks, or all downlinks."""

    names: list[str]
    kind: str
    offered: FloatArray  # bytes per unit of time
    carried: FloatArray
    messages: FloatArray  # in all


def warn_saturated(parts: Iterable[Part], scene: Scene, itemsize: int) -> None:
    """Name the link, uplink or downlink that is worst off; numbers are in so many bytes."""
    if not isinstance(scene.timing, VirtualTime):
        return
    for text in dict.fromkeys(text for part in parts if part.sends for text in _said(part, scene, itemsize)):
        warnings.warn(text, UnsoundWarning, stacklevel=3)


def _said(part: Part, scene: Scene, itemsize: int) -> list[str]:
    size = part.message_bytes(scene.sizes, itemsize)
    return [
        _told(type(part).__name__, size, shared) for shared in _queues(part, scene, size) if _hurts(shared)
    ]


def _queues(part: Part, scene: Scene, size: int) -> list[_Shared]:
    network, timing = scene.network, scene.timing
    assert isinstance(timing, VirtualTime)
    pace = timing.pace(network, scene.sizes.clients, part.samples_per_step(scene.problem))
    steps = np.full(len(pace), float(part.steps))
    if timing.horizon is not None:
        steps = np.minimum(steps, pace * timing.horizon)
    senders, receivers, up = network.senders, network.receivers, network.probability
    rate, count = pace[senders] * up * size, steps[senders] * up
    names = [network.names[node] for node in range(network.n)]
    edges = [f"edge {names[a]}→{names[b]}" for a, b in zip(senders.tolist(), receivers.tolist(), strict=True)]

    def at_nodes(ends: IntArray, values: FloatArray) -> FloatArray:
        return np.bincount(ends, values, minlength=network.n).astype(np.float64)

    come = 1 - network.loss
    uplinks, downlinks = (
        [f"the {kind} of client {name}" for name in names] for kind in ("uplink", "downlink")
    )
    return [
        _Shared(edges, "edges", rate, network.bandwidth, count),
        _Shared(uplinks, "uplinks", at_nodes(senders, rate), network.uplink, at_nodes(senders, count)),
        _Shared(
            downlinks, "downlinks", at_nodes(receivers, rate * come), network.downlink,
            at_nodes(receivers, count * come),
        ),
    ]  # fmt: skip


def _waiting(shared: _Shared) -> FloatArray:
    """Messages that wait in the end; nobody knows it (nan) where links are up at their own times."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return shared.messages * (1 - shared.carried / shared.offered)


def _hurts(shared: _Shared) -> bool:
    return bool((_waiting(shared) >= WAITING).any())


def _told(who: str, size: int, shared: _Shared) -> str:
    waiting = _waiting(shared)
    hurt = np.flatnonzero(waiting >= WAITING)
    worst = int(hurt[waiting[hurt].argmax()])
    messages, more = waiting[worst], f" ({len(hurt)} such {shared.kind} in all)" if len(hurt) > 1 else ""
    return (
        f"{who} offers {shared.names[worst]} {shared.offered[worst]:.3g} bytes per unit of time, and it "
        f"carries {shared.carried[worst]:.3g}{more}: messages wait there ever longer, some {messages:,.0f} "
        f"in the end ({messages * size / 2**20:.3g} MiB), what is absorbed is ever older, and memory holds "
        "all that is still to be; give it more bandwidth, let steps take longer, or make fewer"
    )
