"""The timeline as JSON, in Chrome's trace-event format, which Perfetto and others read too.

A process per node, with a thread for its steps and one for its messages. Sending and arrival of a message are
slices of no length, joined by `bind_id`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from asyncfed.exporting.events import (
    Ints,
    Labels,
    MessagePiece,
    StepPiece,
    lanes,
    message_pieces,
    step_pieces,
)
from asyncfed.trace.columns import STATUS_NAMES

if TYPE_CHECKING:
    from asyncfed.result import Result

_STEPS, _MESSAGES = 0, 1  # threads


def write_chrome(result: Result, path: Path) -> None:
    """All steps and messages of a run."""
    trace = result.trace
    names = lanes(trace)
    called = pa.array([json.dumps(name) for name in names])
    with path.open("w", encoding="utf-8", errors="replace") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(_metadata(names)))
        for steps in step_pieces(trace):
            file.write(_joined(_steps(steps)))
        for messages in message_pieces(trace):
            for ends in _messages(messages, called):
                file.write(_joined(ends))
        file.write("\n]}\n")


def _metadata(names: list[str]) -> Iterator[str]:
    for node, name in enumerate(names):
        about: list[tuple[str, int, dict[str, Any]]] = [
            ("process_name", _STEPS, {"name": name}),
            ("process_sort_index", _STEPS, {"sort_index": node}),
            ("thread_name", _STEPS, {"name": "steps"}),
            ("thread_name", _MESSAGES, {"name": "messages"}),
        ]
        for what, thread, told in about:
            yield json.dumps({"ph": "M", "name": what, "pid": node, "tid": thread, "args": told})


def _steps(steps: StepPiece) -> pa.Array:
    return _texts(
        '{"ph": "X", "cat": "step", "name": ', _named(steps.phase),
        ', "pid": ', steps.client, f', "tid": {_STEPS}, "ts": ', _microseconds(steps.started),
        ', "dur": ', _microseconds(steps.ended - steps.started), ', "args": {"step": ', steps.step, "}}",
    )  # fmt: skip


def _messages(messages: MessagePiece, called: pa.Array) -> Iterator[pa.Array]:
    """Sendings of those that arrived, of the others, and arrivals."""
    statuses = pa.array(STATUS_NAMES).take(pa.array(messages.status))
    names = _named(messages.kind)

    def ends(which: np.ndarray, times: Ints, node: Ints, key: str, other: Ints, flow: str) -> pa.Array:
        chosen = pa.array(which)
        bound = ('", "bind_id": "0x', messages.number[which], f'", "{flow}": true, "name": ')
        return _texts(
            '{"ph": "X", "dur": 0, "cat": "', statuses.filter(chosen),
            *(bound if flow else ('", "name": ',)), names.filter(chosen),
            ', "pid": ', node[which], f', "tid": {_MESSAGES}, "ts": ', _microseconds(times),
            f', "args": {{"{key}": ', called.take(pa.array(other[which])),
            ', "bytes": ', messages.bytes[which], ', "step": ', messages.step[which], "}}",
        )  # fmt: skip

    arrived, gone = messages.joined, ~messages.joined
    sender, receiver = messages.sender, messages.receiver
    yield ends(arrived, messages.sent[arrived], sender, "to", receiver, "flow_out")
    yield ends(gone, messages.sent[gone], sender, "to", receiver, "")
    yield ends(arrived, messages.arrived, receiver, "from", sender, "flow_in")


def _named(labels: Labels) -> pa.Array:
    return pa.array([json.dumps(text) for text in labels.texts], pa.string()).take(pa.array(labels.codes))


def _microseconds(nanoseconds: Ints) -> pa.Array:
    return pa.array(nanoseconds / 1000.0)


def _texts(*parts: str | Ints | pa.Array) -> pa.Array:
    """The parts of every row, put together."""
    columns = [part if isinstance(part, str) else pc.cast(pa.array(part), pa.string()) for part in parts]
    return pc.binary_join_element_wise(*columns, "")


def _joined(events: pa.Array) -> str:
    """After what was written before."""
    return "".join(f",\n{event}" for event in events.to_pylist())
