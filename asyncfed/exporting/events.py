"""The trace as pieces of a timeline: whole numbers of nanoseconds, a piece at a time.

A unit of virtual time is a second. A message that arrived has two ends, which a timeline joins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asyncfed.errors import TraceError
from asyncfed.network.waves import Status
from asyncfed.trace.columns import MESSAGES, STEPS
from asyncfed.trace.files import read_chunks, trace_files
from asyncfed.trace.queries import dictionary_codes, status_codes

if TYPE_CHECKING:
    from asyncfed.trace import Trace

Ints: TypeAlias = npt.NDArray[np.int64]

MOST_NODES = 100_000  # lanes
_PIECE = 1 << 16  # rows
_LONGEST = 200  # characters of a label
_LAST = 9.0e9  # seconds: what 63 bits of nanoseconds hold


@dataclass(frozen=True)
class Labels:
    """A column of texts: the texts, and the place of each row's."""

    texts: list[str]
    codes: Ints


@dataclass(frozen=True)
class StepPiece:
    """Some steps: whose, which, from when to when, in which phase."""

    client: Ints
    step: Ints
    started: Ints
    ended: Ints
    phase: Labels


@dataclass(frozen=True)
class MessagePiece:
    """Some messages: `number` counts all of a run from 1; `arrived` has only those that did, by `joined`."""

    number: Ints
    step: Ints
    sender: Ints
    receiver: Ints
    sent: Ints
    status: Ints
    kind: Labels
    bytes: Ints
    joined: npt.NDArray[np.bool_]
    arrived: Ints


def lanes(trace: Trace) -> list[str]:
    """The name of every node."""
    if trace.node_count > MOST_NODES:
        raise TraceError(
            f"{trace.directory} has {trace.node_count:,} nodes, too many for a timeline (at most "
            f"{MOST_NODES:,}); export it as csv or parquet"
        )
    given = trace.names.given
    return [
        "server" if node == trace.server and not given else name if given else f"client {name}"
        for node, name in enumerate(str(trace.names[node]) for node in range(trace.node_count))
    ]


def step_pieces(trace: Trace) -> Iterator[StepPiece]:
    for rows in _pieces(trace, STEPS, ("client", "step", "started_at", "ended_at", "phase")):
        client, step = (_whole(rows[name]) for name in ("client", "step"))
        started, ended = (_nanoseconds(trace, rows[name]) for name in ("started_at", "ended_at"))
        yield StepPiece(client, step, started, np.maximum(started, ended), _labels(rows["phase"]))


def message_pieces(trace: Trace) -> Iterator[MessagePiece]:
    wanted = ("step", "sender", "receiver", "status", "sent_at", "arrived_at", "bytes", "kind")
    before = 0
    for rows in _pieces(trace, MESSAGES, wanted):
        step, sender, receiver, size = (
            _whole(rows[name]) for name in ("step", "sender", "receiver", "bytes")
        )
        status = status_codes(rows["status"])
        joined = np.asarray(rows["arrived_at"].is_valid()) & (status != Status.IN_FLIGHT)
        yield MessagePiece(
            number=np.arange(before + 1, before + 1 + len(rows)),
            step=step,
            sender=sender,
            receiver=receiver,
            sent=_nanoseconds(trace, rows["sent_at"]),
            status=status,
            kind=_labels(rows["kind"]),
            bytes=np.maximum(size, 0),
            joined=joined,
            arrived=_nanoseconds(trace, rows["arrived_at"].filter(pa.array(joined))),
        )
        before += len(rows)


def _pieces(trace: Trace, table: str, columns: tuple[str, ...]) -> Iterator[pa.Table]:
    files = trace_files(trace.directory, table)
    for chunk in read_chunks(files, table, trace.node_count, columns):
        for start in range(0, len(chunk), _PIECE):
            yield chunk.slice(start, _PIECE)


def _whole(column: pa.ChunkedArray) -> Ints:
    values: Ints = column.to_numpy().astype(np.int64)
    return values


def _nanoseconds(trace: Trace, column: pa.ChunkedArray) -> Ints:
    times = column.to_numpy()
    if len(times) and not (times.min() >= 0.0 and times.max() <= _LAST):  # nor NaN
        raise TraceError(
            f"times in {trace.directory} go from {times.min()} to {times.max()}; "
            f"a timeline has room for 0 to {_LAST:g}: export it as csv or parquet"
        )
    rounded: Ints = np.rint(times * 1e9).astype(np.int64)
    return rounded


def _labels(column: pa.ChunkedArray) -> Labels:
    codes, texts = dictionary_codes(column)
    return Labels([text[:_LONGEST] for text in texts], codes.astype(np.int64))
