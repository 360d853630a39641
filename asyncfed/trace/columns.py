"""What one row of a trace means, and how its columns lie on disk.

Two tables. `messages` has one row per *potential* message: whatever happened to it, an edge of the topology
gets a row for every step of its sender, so that delivery rates are counted rather than estimated. `steps` has
one row per step of a client. A table is a folder of Parquet files, `messages/00000.parquet`,
`messages/00001.parquet`, …, each of them whole; while a run goes, `messages/00002.tail.parquet` holds the
rows so far of the chunk that comes next, and is gone when that is there. So a folder is a table for whatever
reads Parquet.

The status of a message decides which of its columns hold a value:

    status      arrived_at             absorbed_step     weight   bytes
    delivered   when it arrived        who absorbed it   share    payload
    lost        null                   null              share    payload
    link_down   null                   null              null     0
    in_flight   when it would arrive   null              share    payload
    late        when it arrived        null              share    payload
    carried     when its carrier did   who absorbed it   share    payload

A carried message was lost, and what it held was absorbed with the next one that got through on its link
(running sums); it is not counted as delivered.

Of methods with a server, the step of a message is the number of its round, of requests and answers alike. An
answer used in its own round has absorbed_step = step, one kept for a later round has more, and one that was
dropped because its round had ended, or was given up for want of a quorum, is late. Weights are shares of a
mean over what arrived: an answer that is in none has a null weight.

The staleness of an answer is the number of the server's moves between its request and its use, or its refusal
for being too stale. It is null where there is none: of requests, of answers that a server waited for in their
own round, and among peers. (Traces from before there was such a column are read as if all of it were null.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asyncfed.network.waves import Status

FORMAT = "asyncfed-trace"
VERSION = "1"
MESSAGES = "messages"
STEPS = "steps"
STALENESS = "staleness"  # the last column of messages, and a younger one than the others

STATUS_NAMES = tuple(status.name.lower() for status in Status)

_text = pa.dictionary(pa.int32(), pa.string())


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


SCHEMAS: dict[str, pa.Schema] = {
    MESSAGES: pa.schema(
        [
            _required("step", pa.int32()),
            _required("sender", pa.int32()),
            _required("receiver", pa.int32()),
            _required("status", _text),
            _required("sent_at", pa.float64()),
            pa.field("arrived_at", pa.float64()),
            pa.field("absorbed_step", pa.int32()),
            pa.field("weight", pa.float64()),
            _required("bytes", pa.int64()),
            _required("phase", _text),
            _required("kind", _text),
            pa.field(STALENESS, pa.int32()),
        ]
    ),
    STEPS: pa.schema(
        [
            _required("client", pa.int32()),
            _required("step", pa.int32()),
            _required("started_at", pa.float64()),
            _required("ended_at", pa.float64()),
            _required("absorbed", pa.int32()),
            _required("phase", _text),
        ]
    ),
}

# Chosen by measuring bytes and time, in lockstep and in virtual time, on complete and on sparse networks:
# edges come nearly sorted; weights and sizes take few values; arrival times all differ, and only their
# leading bytes compress. The other columns are plain: zstd finds what every step repeats.
DICTIONARY_COLUMNS = ["status", "weight", "bytes", "phase", "kind"]
STATISTICS = [
    "step",
    "sender",
    "receiver",
    "sent_at",
]  # what queries skip row groups by; the others cost time
ENCODINGS = {
    "sender": "DELTA_BINARY_PACKED",
    "receiver": "DELTA_BINARY_PACKED",
    "absorbed_step": "DELTA_BINARY_PACKED",
    "staleness": "DELTA_BINARY_PACKED",
    "arrived_at": "BYTE_STREAM_SPLIT",
}


class Totals(NamedTuple):
    """Messages by what became of them, and the payload bytes of those that were sent."""

    sent: int = 0
    delivered: int = 0
    lost: int = 0
    link_down: int = 0
    in_flight: int = 0
    late: int = 0
    carried: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, by_status: npt.NDArray[np.int64], sent_bytes: int) -> Totals:
        """From the number of messages of each `Status`."""
        counts = dict(zip(STATUS_NAMES, by_status.tolist(), strict=True))
        return cls(sent=int(by_status.sum()) - counts["link_down"], bytes=sent_bytes, **counts)

    def plus(self, other: Totals) -> Totals:
        return Totals(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def minus(self, other: Totals) -> Totals:
        return Totals(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


def schema_for(table: str, nodes: int, server: int | None = None) -> pa.Schema:
    """The schema of `table`, marked with what a reader must know before it reads."""
    marks = {"format": FORMAT, "version": VERSION, "table": table, "nodes": str(nodes)}
    if server is not None:
        marks["server"] = str(server)
    return SCHEMAS[table].with_metadata(marks)
