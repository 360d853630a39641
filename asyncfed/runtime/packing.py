"""The rules by which clients are put into actors and actors onto devices. No Ray here, so that they can be
tested anywhere.

One client per actor is the default. An actor costs about 200 MiB before it holds anything (an interpreter and
torch), so n actors need n · (200 MiB + their clients' bytes); where that exceeds 80% of the memory at hand,
the clients are packed evenly into one actor per core, or into fewer where even those would not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from asyncfed.errors import ScenarioError

ACTOR_BYTES = 200 * 2**20
USABLE = 0.8
_UNITS = 10_000  # of a core or a GPU: Ray counts in ten-thousandths


@dataclass(frozen=True)
class Packing:
    """Contiguous ranges of clients, one per actor, and why."""

    ranges: tuple[tuple[int, int], ...]
    note: str

    @property
    def actors(self) -> int:
        return len(self.ranges)

    @property
    def clients_per_actor(self) -> int:
        return max(stop - start for start, stop in self.ranges)


def pack(
    clients: int,
    clients_per_actor: int | Literal["auto"],
    *,
    memory: float,
    client_bytes: float,
    cores: int,
    actors: int | None = None,
) -> Packing:
    """Which clients share an actor: in so many actors, where that is given."""
    if actors is not None:
        return Packing(_ranges(clients, actors), "")
    if clients_per_actor != "auto":
        return Packing(_ranges(clients, -(-clients // clients_per_actor)), "")
    needed = clients * (ACTOR_BYTES + client_bytes)
    if needed <= USABLE * memory:
        return Packing(_ranges(clients, clients), "")
    fitting = int((USABLE * memory - clients * client_bytes) // ACTOR_BYTES)
    actors = max(1, min(clients, cores, fitting))
    note = (
        f"{clients} actors would need about {needed / 2**30:.1f} GiB and {USABLE * memory / 2**30:.1f} GiB "
        f"are free for them, so the clients share {actors} actor{'s' if actors > 1 else ''}, "
        f"{'one per core' if actors == cores else 'as many as fit'}; clients_per_actor=1 forces one each"
    )
    return Packing(_ranges(clients, actors), note)


def _ranges(clients: int, actors: int) -> tuple[tuple[int, int], ...]:
    """As even as can be: sizes differ by at most one."""
    size, more = divmod(clients, actors)
    stops = [(a + 1) * size + min(a + 1, more) for a in range(actors)]
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def gpus_per_actor(device: str, gpus: float, actors: int) -> float:
    """The share of a GPU that each actor asks Ray for: whole GPUs while they last, then equal fractions, so
    that as many actors as necessary sit on each; none where there is no GPU or none is wanted."""
    if device == "cpu":
        return 0.0
    if gpus < 1:
        if device != "auto":
            raise ScenarioError(
                f"device is {device!r}, but the Ray cluster has no GPU; use device='cpu' or 'auto'"
            )
        return 0.0
    if actors <= gpus:
        return 1.0
    together = -(-actors // int(gpus))
    return int(_UNITS / together) / _UNITS


def cpus_per_actor(
    cores: Sequence[float], actors: int, *, rooms: Sequence[float] | None = None, others: int = 0
) -> float:
    """The share of a core that each actor asks Ray for: the largest, up to a whole one, with which all find a
    place on machines with so many cores, none of them across two. `rooms` says how many actors find a GPU on
    each; the `others` need none.
    """
    units = [int(_UNITS * own) for own in cores]
    limits = [math.inf] * len(units) if rooms is None else rooms

    def fits(share: int) -> bool:
        each = [own // share for own in units]
        placed = sum(min(room, most) for room, most in zip(limits, each, strict=True))
        return placed >= actors and sum(each) >= actors + others

    small, large = 1, _UNITS  # the smallest share there is, whether it fits or not
    while small < large:
        middle = (small + large + 1) // 2
        small, large = (middle, large) if fits(middle) else (small, middle - 1)
    return small / _UNITS


def threads_per_actor(cores: float, actors: int) -> int:
    """Torch threads inside each actor."""
    return max(1, int(cores) // actors)
