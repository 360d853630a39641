"""Whether a network gives a method the right to its answer: said by name before a run, and when it fails.

Push-sum divides what a client holds by its weight ω: x = z/ω. All ω together are n, as long as nothing is
lost for good and nothing is under way. Three things make them small.

    loss             what is lost is lost for good, from z and from ω alike; but gradients enter z at full
                     length, so the fewer ω there are, the longer the step lr/ω
    waiting          what stands in the mailbox of a slow client, or is on a long way, is not with those who
                     step meanwhile: their ω dwindles, and the step lr/ω grows
    crashes          what a client holds is lost with it, and when it is back it holds what others give it:
                     there are fewer and fewer ω, as with losses that nobody makes up for

An answer may be wrong for either, and the run still end as if nothing were wrong. What is said here are
warnings, not refusals: with a small learning rate it may go well. Where waiting begins to hurt was measured
(docs/decisions/0014-soundness.md).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from asyncfed.errors import UnsoundWarning
from asyncfed.network.distributions import Constant, Table, as_distribution
from asyncfed.network.presence import GivenPresence, PresenceFile
from asyncfed.network.timing import VirtualTime
from asyncfed.rng import Streams

if TYPE_CHECKING:
    from asyncfed.network.links import Network
    from asyncfed.protocols.part import Part, Scene

STEADIER = "PushDIGing(omega0=1.0), which waits while ω is small, or PushPull, which divides by nothing"
"""What to use instead where ω gets small: the method that does the same and bears it."""

UNEVEN = 3.0  # times that the slowest client, or a client's slow tenth of steps, takes longer: so many hurt
LATE = 1.0  # steps that are made while a message is under way, in the mean; so many hurt
_LATER = 1e15  # a time that no run comes to
SMALL = 0.1  # of a push-sum weight, whose mean is 1: steps of ten times the learning rate


def warn_unsound(parts: Iterable[Part], scene: Scene) -> None:
    """Name what the network and the timing do to the answer of a method among peers, each only once."""
    for text in dict.fromkeys(text for part in parts if part.sends for text in _doubts(part, scene)):
        warnings.warn(text, UnsoundWarning, stacklevel=3)


def small_weight(weight: Tensor, row: int) -> str | None:
    """Why the model of the client at `row` stopped being finite, where its push-sum weight tells."""
    omega = float(weight[row])
    if math.isfinite(omega) and omega >= SMALL:
        return None
    longer = f", {1 / omega:.2g} times the learning rate" if math.isfinite(omega) and omega > 0 else ""
    return (
        f"its push-sum weight ω is {omega:.2g} where the mean is 1: almost all of it was lost or is under "
        f"way, and a step of its model is lr/ω long{longer}. Keep running_sums on where messages are lost; "
        f"choose paces that differ less and shorter latencies, or use {STEADIER}; a lower learning rate only "
        "puts it off"
    )


def _doubts(part: Part, scene: Scene) -> list[str]:
    who, found = type(part).__name__, []
    if part.conserves and not scene.network.lossless and _gives_up_losses(scene):
        found.append(
            f"{who} on links that lose messages ({_edge_that_loses(scene.network)}): what is lost is lost "
            "for good, push-sum weights and sums dwindle, and the answer is wrong; leave running_sums on, "
            "which carries what was lost with the next message, or set loss to 0"
        )
    found += _absences(part, scene)
    if not part.moves_by_weight or not isinstance(scene.timing, VirtualTime):
        return found
    pace = scene.timing.pace(scene.network, scene.sizes.clients, part.samples_per_step(scene.problem))
    slowest, uneven = int(pace.argmin()), float(pace.max() / pace.min())
    remedy = f"choose paces and latencies that differ less, a smaller learning rate, or {STEADIER}"
    if uneven >= UNEVEN:
        found.append(
            f"{who} at paces that differ {uneven:.3g}-fold (client {scene.network.names[slowest]} is the "
            "slowest): push-sum weight piles up with the slow, the ω of the others dwindles and their steps "
            f"of lr/ω grow; it may spike or diverge, and gradients of fast clients count more; {remedy}"
        )
    scatter = _scatter(scene.timing)
    if scatter >= UNEVEN:
        found.append(
            f"{who} with step times that scatter {scatter:.3g}-fold between the slow tenth and the fast "
            "tenth: a client that makes several quick steps while little arrives gives most of its push-sum "
            f"weight ω away, and steps of lr/ω grow; it may spike or diverge; {remedy}"
        )
    late = _steps_under_way(scene.network, scene.timing, float(pace.mean()))
    if late >= LATE:
        found.append(
            f"{who} with messages that take as long as {late:.3g} steps: most of the push-sum weight is "
            f"under way, ω dwindles and steps of lr/ω grow; it may spike or diverge; {remedy}"
        )
    return found


def _absences(part: Part, scene: Scene) -> list[str]:
    """What clients that come and go do to it."""
    attendance = scene.timing.attendance(scene.network, scene.sizes.clients, Streams(0))
    if attendance is None:
        return []
    who, found = type(part).__name__, []
    if attendance.crashes and part.conserves:
        found.append(
            f"{who} with clients that crash: what a client holds, of push-sum weights, sums and tracked "
            "gradients, is lost with it; all of them together dwindle with every crash, and the answer is "
            "wrong; choose absence='pause', or a method with a server"
        )
    elif attendance.crashes:
        found.append(
            f"{who} with clients that crash: who is back begins with nothing in the midst of it, while the "
            "others count on all that was sent before, and the answer is wrong; choose absence='pause'"
        )
    leavers = _leavers(scene)
    if leavers and part.conserves and not attendance.hands_over:
        found.append(
            f"{who} with clients that leave for good with all they hold ({_named(leavers)}): push-sum "
            "weights and sums are lost with them, and the answer is wrong; choose leaving='hand over'"
        )
    elif leavers and part.tracks:
        found.append(
            f"{who} with clients that leave for good ({_named(leavers)}): the last gradient of each stays in "
            "what is tracked, for nobody takes it back, and the answer is wrong; let them pause instead, or "
            "use SGP"
        )
    return found


def _leavers(scene: Scene) -> list[str]:
    """Who is there at first and some time no more; nobody is known to where it is drawn, or comes again and
    again.
    """
    presence = scene.timing.presence
    if not isinstance(presence, (GivenPresence, PresenceFile)):
        return []
    clients = range(scene.sizes.clients)
    uptimes = presence.attend(scene.network.names.first(len(clients)), Streams(0)).uptimes
    return [
        scene.network.names[client]
        for client in clients
        if math.isfinite(uptimes.next_on(client, 0.0)) and uptimes.next_on(client, _LATER) == math.inf
    ]


def _named(clients: list[str]) -> str:
    more = f" and {len(clients) - 3} more" if len(clients) > 3 else ""
    return f"client {', '.join(clients[:3])}{more}"


def _gives_up_losses(scene: Scene) -> bool:
    """Whether what is lost stays lost; by default it travels with the next message (running sums)."""
    return getattr(scene.timing, "running_sums", None) is False


def _edge_that_loses(network: Network) -> str:
    edge = int(network.loss.argmax())
    sender, receiver = (network.names[int(ends[edge])] for ends in (network.senders, network.receivers))
    return f"{sender}→{receiver} loses {network.loss[edge]:.3g} of them"


def _scatter(timing: VirtualTime) -> float:
    """The 90% quantile of a client's step times over the 10% quantile; where they stand in a table, of the
    client of whom they differ most.
    """
    tenths = np.array([0.1, 0.9])
    if isinstance(timing.compute, Table):
        ends = [np.quantile(row, tenths) for row in timing.compute.rows]
    else:
        ends = [as_distribution(timing.compute).quantile(tenths)]
    return max(float(slow / fast) if fast > 0 else math.inf for fast, slow in ends)


def _steps_under_way(network: Network, timing: VirtualTime, pace: float) -> float:
    """Steps that a client makes while a message to it is under way, in the mean. Where all step at the same
    instants the next has begun when it comes, however soon that is.
    """
    means = np.array([latency.mean for latency in network.latency])
    steps = float(means[network.latency_of].mean()) * pace if network.edges else 0.0
    together = isinstance(timing.compute, Constant)
    return math.ceil(steps - 1e-9) if together else steps
