"""The rounds of a run with a server; `Trace.rounds` says what a round is.

Every message between the server and a client is put into one of four groups of its round: a request, an
answer that the round used, one that a later round used, or one that none did. Their sums hold all that the
table asks for, so memory grows with the number of rounds and not with the number of messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asyncfed.network.waves import Status
from asyncfed.trace.queries import SUMMED_COLUMNS, Ints, PhaseGroup, ratio, status_codes, sums

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("step", "sender", "receiver", "absorbed_step", "phase", "kind", *SUMMED_COLUMNS)

_REQUEST, _USED, _USED_LATE, _UNUSED = range(4)
_ANSWERS = (_USED, _USED_LATE, _UNUSED)
_ALL = (_REQUEST, *_ANSWERS)


def table(chunks: Iterable[pa.Table], server: int) -> pd.DataFrame:
    """`Trace.rounds` from chunks with `COLUMNS`."""
    import pandas as pd

    group = _RoundGroup(server)
    parts = sums(_with_server(chunks, server), group)
    part = parts.index.to_numpy()
    role, step, label = part & 3, part >> 2 & 0xFFFFFFFF, part >> 34
    labels = list(group.phases.labels)
    numbers, place = np.unique(step, return_inverse=True)

    def total(name: str, roles: tuple[int, ...]) -> Ints:
        result: Ints = np.zeros(len(numbers), np.int64)
        chosen = np.isin(role, roles)
        np.add.at(result, place[chosen], parts[name].to_numpy()[chosen])
        return result

    def extreme(function: np.ufunc, name: str, roles: tuple[int, ...]) -> npt.NDArray[np.float64]:
        result = np.full(len(numbers), np.nan)
        chosen = np.isin(role, roles)
        function.at(result, place[chosen], parts[name].to_numpy()[chosen])
        return result

    def names(which: int, roles: tuple[int, ...]) -> list[str]:
        found: list[set[str]] = [set() for _ in numbers]
        for row in np.flatnonzero(np.isin(role, roles)).tolist():
            found[place[row]].add(labels[label[row]][which])
        return ["+".join(sorted(one)) for one in found]

    used_until = extreme(np.fmax, "ended_at", (_USED,))
    columns: dict[str, Any] = {
        "round": numbers,
        "phase": names(0, _ALL),
        "kind": names(1, _ANSWERS),
        "asked": total("attempts", (_REQUEST,)),
        "reached": total("delivered", (_REQUEST,)),
        "answered": total("sent", _ANSWERS),
        "arrived": total("delivered", _ANSWERS),
        "used_late": total("delivered", (_USED_LATE,)),
        "late": total("late", _ANSWERS),
        "lost": total("lost", _ANSWERS),
        "messages": total("sent", _ALL),
        "bytes_down": total("bytes", (_REQUEST,)),
        "bytes_up": total("bytes", _ANSWERS),
        "started_at": extreme(np.fmin, "started_at", _ALL),
        "ended_at": np.where(np.isnan(used_until), extreme(np.fmax, "ended_at", _ALL), used_until),
    }
    stale = total("stale", _ANSWERS)
    if stale.any():
        columns["staleness_mean"] = ratio(total("moves", _ANSWERS), stale)
        columns["staleness_max"] = extreme(np.fmax, "moves_max", _ANSWERS)
    frame = pd.DataFrame(columns)
    return frame[(frame["asked"] > 0) | (frame["answered"] > 0)].reset_index(drop=True)


def _with_server(chunks: Iterable[pa.Table], server: int) -> Iterator[pa.Table]:
    """The messages between the server and its clients."""
    for chunk in chunks:
        from_server, to_server = (chunk[name].to_numpy() == server for name in ("sender", "receiver"))
        kept = chunk.filter(pa.array(from_server != to_server))
        if len(kept):
            yield kept


class _RoundGroup:
    """4 · (the group of `PhaseGroup`) + what the message is to its round"""

    def __init__(self, server: int) -> None:
        self.phases = PhaseGroup()
        self._server = server

    def __call__(self, chunk: pa.Table) -> Ints:
        requests = chunk["sender"].to_numpy() == self._server
        delivered = status_codes(chunk["status"]) == Status.DELIVERED
        later = chunk["absorbed_step"].to_numpy() > chunk["step"].to_numpy()  # null, a NaN here, is not
        role = np.select([requests, delivered & later, delivered], [_REQUEST, _USED_LATE, _USED], _UNUSED)
        groups: Ints = self.phases(chunk) << 2 | role
        return groups
