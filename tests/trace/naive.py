"""Random messages as plain Python rows, a way to write them, and a slow count over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

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


def random_messages(nodes: int, count: int, seed: int = 0, pairs: int | None = None) -> list[Message]:
    rng = np.random.default_rng(seed)
    if pairs is None:
        pairs = nodes * nodes
    senders, receivers = rng.integers(0, nodes, (2, pairs)).tolist()
    messages = []
    for position in range(count):
        edge = int(rng.integers(pairs))
        status = Status(rng.choice(4, p=[0.5, 0.1, 0.3, 0.1]))
        sent_at = position / 50 + float(rng.random())
        arrives = status in (Status.DELIVERED, Status.IN_FLIGHT)
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
                absorbed_step=int(sent_at) + int(rng.integers(1, 4)) if status == Status.DELIVERED else None,
                weight=float(rng.random()) if up else None,
                bytes=int(rng.integers(1, 10**6)) if up else 0,
                phase=phase,
                kind=kind,
            )
        )
    return messages


def append(writer: TraceWriter, messages: Sequence[Message]) -> None:
    """Hand the messages over in as few calls as their labels allow."""
    start = 0
    for stop in range(1, len(messages) + 1):
        first = messages[start]
        if stop < len(messages) and messages[stop][-2:] == first[-2:]:
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
        )
        start = stop


def write(directory: Path, nodes: int, messages: Sequence[Message], chunk_rows: int = 300) -> Path:
    with TraceWriter(directory, nodes, chunk_rows) as writer:
        append(writer, messages)
    return directory


def counts(messages: Sequence[Message]) -> dict[str, int]:
    by_status = {
        name: sum(m.status == name for m in messages)
        for name in ("delivered", "lost", "link_down", "in_flight")
    }
    return {
        "attempts": len(messages),
        "sent": len(messages) - by_status["link_down"],
        **by_status,
        "bytes": sum(m.bytes for m in messages),
    }


def canonical(messages: Sequence[Message]) -> list[Message]:
    return sorted(messages, key=lambda m: (m.sent_at, m.sender, m.receiver, m.step))
