"""Messages as plain Python rows, a way to write them, and a slow count over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from asyncfed.trace import Status, TraceWriter

PHASES = (("inner", "params"), ("hyper", "params"), ("hyper", "mass"))


class Message(NamedTuple):
    step: int
    sender: int
    receiver: int
    status: str
    sent_at: float
    arrived_at: float | None
    absorbed_step: int | None
    weight: float | None
    bytes: int
    phase: str
    kind: str
    staleness: int | None = None


def random_messages(nodes: int, count: int, seed: int = 0, pairs: int | None = None) -> list[Message]:
    rng = np.random.default_rng(seed)
    if pairs is None:
        pairs = nodes * nodes
    senders, receivers = rng.integers(0, nodes, (2, pairs)).tolist()
    messages = []
    for position in range(count):
        edge = int(rng.integers(pairs))
        status = Status(rng.choice(6, p=[0.4, 0.1, 0.2, 0.1, 0.1, 0.1]))
        sent_at = position / 50 + float(rng.random())
        arrives = status in (Status.DELIVERED, Status.IN_FLIGHT, Status.LATE, Status.CARRIED)
        up = status != Status.LINK_DOWN
        phase, kind = PHASES[int(rng.integers(3))]
        messages.append(
            Message(
                step=int(sent_at),
                sender=senders[edge],
                receiver=receivers[edge],
                status=status.name.lower(),
                sent_at=sent_at,
                arrived_at=sent_at + float(rng.exponential()) if arrives else None,
                absorbed_step=int(sent_at) + int(rng.integers(0, 4))
                if status in (Status.DELIVERED, Status.CARRIED)
                else None,
                weight=float(rng.random()) if up else None,
                bytes=int(rng.integers(1, 10**6)) if up else 0,
                phase=phase,
                kind=kind,
                staleness=int(rng.integers(0, 5)) if status == Status.DELIVERED and position % 3 else None,
            )
        )
    return messages


def _request(step: int, client: int, status: str = "delivered", sent_at: float = 0.0) -> Message:
    done = status == "delivered"
    size = 0 if status == "link_down" else 100
    arrived_at = sent_at + 1.0 if done else None
    return Message(
        step, 0, client, status, sent_at, arrived_at, step if done else None, None, size, "inner", "request"
    )


# Server 0, clients 1 to 3, quorum of one. In round 0 client 2's answer is kept for round 1 and client 3's is
# lost; in round 1 client 3 cannot be asked and client 2 comes too late; nobody can answer in round 2, and in
# round 3 the run ends while the only answer is on its way.
SERVED = [
    _request(0, 1),
    _request(0, 2),
    _request(0, 3),
    Message(0, 1, 0, "delivered", 2.0, 3.0, 0, 1.0, 40, "inner", "q"),
    Message(0, 2, 0, "delivered", 4.5, 6.5, 1, 0.5, 40, "inner", "q"),
    Message(0, 3, 0, "lost", 2.0, None, None, None, 40, "inner", "q"),
    _request(1, 1, sent_at=3.0),
    _request(1, 2, sent_at=3.0),
    _request(1, 3, "link_down", sent_at=3.0),
    Message(1, 1, 0, "delivered", 5.0, 7.0, 1, 0.5, 40, "inner", "y"),
    Message(1, 2, 0, "late", 8.0, 9.0, None, 0.25, 40, "inner", "y"),
    _request(2, 1, sent_at=7.0),
    _request(2, 2, "lost", sent_at=7.0),
    Message(2, 1, 0, "link_down", 9.0, None, None, None, 0, "inner", "h"),
    _request(3, 3, sent_at=9.5),
    Message(3, 3, 0, "in_flight", 11.0, 12.0, None, 1.0, 40, "inner", "h"),
]


def append(writer: TraceWriter, messages: Sequence[Message]) -> None:
    """Hand the messages over in as few calls as their labels allow."""
    start = 0
    for stop in range(1, len(messages) + 1):
        first = messages[start]
        if stop < len(messages) and messages[stop][-3:-1] == first[-3:-1]:
            continue
        rows = messages[start:stop]
        writer.messages(
            sender=np.array([m.sender for m in rows], np.int32),
            receiver=np.array([m.receiver for m in rows], np.int32),
            status=np.array([Status[m.status.upper()] for m in rows], np.int8),
            step=np.array([m.step for m in rows]),
            sent_at=np.array([m.sent_at for m in rows]),
            arrived_at=np.array([math.nan if m.arrived_at is None else m.arrived_at for m in rows]),
            absorbed_step=np.array([-1 if m.absorbed_step is None else m.absorbed_step for m in rows]),
            weight=np.array([math.nan if m.weight is None else m.weight for m in rows]),
            bytes=np.array([m.bytes for m in rows]),
            phase=first.phase,
            kind=first.kind,
            staleness=np.array([-1 if m.staleness is None else m.staleness for m in rows]),
        )
        start = stop


def write(
    directory: Path,
    nodes: int,
    messages: Sequence[Message],
    chunk_rows: int = 300,
    server: int | None = None,
) -> Path:
    with TraceWriter(directory, nodes, chunk_rows, server=server) as writer:
        append(writer, messages)
    return directory


def counts(messages: Sequence[Message]) -> dict[str, int]:
    by_status = {
        name: sum(m.status == name for m in messages)
        for name in ("delivered", "lost", "link_down", "in_flight", "late", "carried")
    }
    return {
        "attempts": len(messages),
        "sent": len(messages) - by_status["link_down"],
        **by_status,
        "bytes": sum(m.bytes for m in messages),
    }


def rounds(messages: Sequence[Message], server: int) -> pd.DataFrame:
    rows = []
    for step in sorted({m.step for m in messages}):
        mine = [m for m in messages if m.step == step]
        down = [m for m in mine if m.sender == server and m.receiver != server]
        up = [m for m in mine if m.receiver == server and m.sender != server]
        asked, answered = counts(down), counts(up)
        delivered = [m for m in up if m.status == "delivered"]
        on_time = [m for m in delivered if m.absorbed_step == step]
        if not asked["attempts"] and not answered["sent"]:
            continue
        ends = [m.arrived_at for m in on_time] or [
            m.arrived_at if m.status == "delivered" else m.sent_at for m in down + up
        ]
        rows.append(
            {
                "round": step,
                "phase": "+".join(sorted({m.phase for m in down + up})),
                "kind": "+".join(sorted({m.kind for m in up})),
                "asked": asked["attempts"],
                "reached": asked["delivered"],
                "answered": answered["sent"],
                "arrived": len(delivered),
                "used_late": len(delivered) - len(on_time),
                "late": answered["late"],
                "lost": answered["lost"],
                "messages": asked["sent"] + answered["sent"],
                "bytes_down": asked["bytes"],
                "bytes_up": answered["bytes"],
                "started_at": min(m.sent_at for m in down + up),
                "ended_at": max(end for end in ends if end is not None),
                **staleness(up),
            }
        )
    return without_empty_staleness(pd.DataFrame(rows))


def staleness(messages: Sequence[Message]) -> dict[str, float]:
    known = [m.staleness for m in messages if m.status == "delivered" and m.staleness is not None]
    mean = sum(known) / len(known) if known else math.nan
    return {"staleness_mean": mean, "staleness_max": float(max(known, default=math.nan))}


def without_empty_staleness(frame: pd.DataFrame) -> pd.DataFrame:
    empty = "staleness_mean" in frame and frame["staleness_mean"].isna().all()
    return frame.drop(columns=["staleness_mean", "staleness_max"]) if empty else frame


def canonical(messages: Sequence[Message]) -> list[Message]:
    return sorted(messages, key=lambda m: (m.sent_at, m.sender, m.receiver, m.step))
