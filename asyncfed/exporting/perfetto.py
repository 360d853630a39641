"""A timeline for ui.perfetto.dev: a lane per node with its steps, and beneath it what it sent and received.

Sending and arrival of a message are instants, joined by a flow. The category of an instant is what became of
the message. Field numbers are those of perfetto's protos/perfetto/trace.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from asyncfed.exporting.events import (
    Ints,
    Labels,
    MessagePiece,
    StepPiece,
    lanes,
    message_pieces,
    step_pieces,
)
from asyncfed.exporting.protobuf import Parts, constant, data, fixed, message, numbers, rows, text
from asyncfed.trace.columns import STATUS_NAMES

if TYPE_CHECKING:
    from asyncfed.result import Result

_PACKET = 1  # of Trace
_TIMESTAMP, _SEQUENCE, _EVENT, _INTERNED, _FLAGS, _DESCRIPTOR = 8, 10, 11, 12, 13, 60  # of TracePacket
_CATEGORY, _ANNOTATION, _TYPE, _NAME, _TRACK, _FLOW, _LAST_FLOW = 3, 4, 9, 10, 11, 47, 48  # of TrackEvent
_BEGIN, _END, _INSTANT = 1, 2, 3  # types
_KEY, _NUMBER, _STRING = 1, 3, 17  # of DebugAnnotation
_CATEGORIES, _NAMES, _KEYS, _STRINGS = 1, 2, 3, 29  # of InternedData
_UUID, _CALLED, _PARENT, _ORDERING, _RANK = 1, 2, 5, 11, 12  # of TrackDescriptor
_EXPLICIT = 3  # ordering: by rank

_ROOT = 1  # uuid of the run; a node has 2·node + 2, its messages 2·node + 3
_STEP = len(STATUS_NAMES) + 1  # category
_ANNOTATIONS = ("step", "bytes", "to", "from")
_TIME, _PLACE, _COUNT = 9, 5, 9  # widths in bytes


def write_perfetto(result: Result, path: Path) -> None:
    """All steps and messages of a run."""
    trace = result.trace
    names = lanes(trace)
    with path.open("wb") as file:
        _write_lanes(file, str(result.manifest.get("scenario", "run"))[:200], names)
        known = _Known(file)
        for steps in step_pieces(trace):
            _write_steps(file, steps, known(steps.phase))
        for messages in message_pieces(trace):
            _write_messages(file, messages, known(messages.kind))


class _Known:
    """Event names by number: written down when they first appear."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._numbers: dict[str, int] = {}

    def __call__(self, labels: Labels) -> Ints:
        new = [label for label in dict.fromkeys(labels.texts) if label not in self._numbers]
        for label in new:
            self._numbers[label] = len(self._numbers) + 1
        if new:
            _write_interned(self._file, _NAMES, {self._numbers[label]: label for label in new})
        return np.array([self._numbers[label] for label in labels.texts], np.int64)[labels.codes]


def _write_lanes(file: BinaryIO, run: str, names: list[str]) -> None:
    root = constant(_UUID, _ROOT) + text(_CALLED, run) + constant(_ORDERING, _EXPLICIT)
    file.write(data(_PACKET, data(_DESCRIPTOR, root) + constant(_SEQUENCE, 1) + constant(_FLAGS, 1)))
    for node, name in enumerate(names):
        lane = constant(_UUID, 2 * node + 2) + text(_CALLED, name) + constant(_PARENT, _ROOT)
        below = constant(_UUID, 2 * node + 3) + text(_CALLED, f"messages of {name}")
        for descriptor in (
            lane + constant(_RANK, 2 * node),
            below + constant(_PARENT, _ROOT) + constant(_RANK, 2 * node + 1),
        ):
            file.write(data(_PACKET, data(_DESCRIPTOR, descriptor) + constant(_SEQUENCE, 1)))
    _write_interned(file, _CATEGORIES, dict(enumerate((*STATUS_NAMES, "step"), start=1)))
    _write_interned(file, _KEYS, dict(enumerate(_ANNOTATIONS, start=1)))
    _write_interned(file, _STRINGS, dict(enumerate(names, start=1)))


def _write_interned(file: BinaryIO, field: int, texts: dict[int, str]) -> None:
    entries = b"".join(data(field, constant(1, number) + text(2, label)) for number, label in texts.items())
    file.write(data(_PACKET, data(_INTERNED, entries) + constant(_SEQUENCE, 1) + constant(_FLAGS, 2)))


def _write_steps(file: BinaryIO, steps: StepPiece, names: Ints) -> None:
    track = numbers(_TRACK, 2 * steps.client + 2, _PLACE)
    begin: Parts = [
        constant(_TYPE, _BEGIN) + constant(_CATEGORY, _STEP),
        *track,
        *numbers(_NAME, names, _PLACE),
        *_annotated("step", _NUMBER, steps.step, _PLACE),
    ]
    end: Parts = [constant(_TYPE, _END), *track]
    both = _packets(steps.started, begin) + _packets(steps.ended, end)
    file.write(rows(len(steps.step), both))  # row by row: what ends at a time ends before the next begins


def _write_messages(file: BinaryIO, messages: MessagePiece, names: Ints) -> None:
    arrived, gone = messages.joined, ~messages.joined

    def instants(which: np.ndarray, times: Ints, node: Ints, key: str, other: Ints, flow: Parts) -> None:
        event: Parts = [constant(_TYPE, _INSTANT), *numbers(_TRACK, 2 * node[which] + 3, _PLACE)]
        event += numbers(_NAME, names[which], _PLACE)
        event += numbers(_CATEGORY, messages.status[which] + 1, 1)
        event += flow + _annotated(key, _STRING, other[which] + 1, _PLACE)
        event += _annotated("bytes", _NUMBER, messages.bytes[which], _COUNT)
        event += _annotated("step", _NUMBER, messages.step[which], _PLACE)
        file.write(rows(int(which.sum()), _packets(times, event)))

    number, sender, receiver = messages.number[arrived], messages.sender, messages.receiver
    instants(arrived, messages.sent[arrived], sender, "to", receiver, fixed(_FLOW, number))
    instants(gone, messages.sent[gone], sender, "to", receiver, [])
    instants(arrived, messages.arrived, receiver, "from", sender, fixed(_LAST_FLOW, number))


def _annotated(key: str, field: int, values: Ints, width: int) -> Parts:
    name: Parts = [constant(_KEY, _ANNOTATIONS.index(key) + 1)]
    return message(_ANNOTATION, name, numbers(field, values, width))


def _packets(times: Ints, event: Parts) -> Parts:
    of_all: Parts = [constant(_SEQUENCE, 1) + constant(_FLAGS, 2)]
    return message(_PACKET, numbers(_TIMESTAMP, times, _TIME), of_all, message(_EVENT, event))
