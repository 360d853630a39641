"""Sums over a trace, one chunk at a time.

Every summary gives each message a group (its edge, or its phase, kind and step) as one integer and adds the
message to the sums of its group. Memory grows with the number of groups, never with the number of messages
or with clients squared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asyncfed.checks import shown
from asyncfed.errors import TraceError, UnknownNameError
from asyncfed.network.waves import Status
from asyncfed.trace.columns import STALENESS, STATUS_NAMES, Totals

if TYPE_CHECKING:
    import pandas as pd

Ints = npt.NDArray[np.int64]

SUMMED_COLUMNS = ("status", "sent_at", "arrived_at", "bytes", STALENESS)
COUNTS = ("attempts", "sent", *STATUS_NAMES, "bytes")


def sums(chunks: Iterable[pa.Table], group: Callable[[pa.Table], Ints]) -> pd.DataFrame:
    """One row per group, which is its index, sorted: counts, bytes, delays, first and last time."""
    result = Sums()
    for chunk in chunks:
        result.add(chunk, group(chunk))
    return result.frame()


class Sums:
    """Sums by group, in the order of the sorted `groups`; those of which there is nothing take no room."""

    def __init__(self) -> None:
        self.groups: Ints = np.zeros(0, np.int64)
        self._values: dict[str, npt.NDArray[Any]] = {}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """A sum of every group: a status, or one of the others that `frame` has."""
        found = self._values.get(name)
        if found is None:
            kind = np.float64 if name in _REAL else np.int64
            found = np.full(len(self.groups), _BEFORE_ANY.get(name, 0), kind)
        return found

    def add(self, chunk: pa.Table, group: Ints) -> None:
        """Count messages, each to its group."""
        slot = self._slots(group)
        status = status_codes(chunk["status"])
        sent_at, arrived_at, size = (chunk[name].to_numpy() for name in ("sent_at", "arrived_at", "bytes"))
        count, statuses = len(self.groups), len(Status)
        by_status = np.bincount(slot * statuses + status, minlength=count * statuses).reshape(count, statuses)
        for name, column in zip(STATUS_NAMES, by_status.T, strict=True):
            if column.any():
                self._of(name)[:] += column
        np.add.at(self._of("bytes"), slot, size)
        np.minimum.at(self._of("started_at"), slot, sent_at)
        np.maximum.at(self._of("ended_at"), slot, sent_at)

        delivered = np.flatnonzero(status == Status.DELIVERED)
        if not len(delivered):
            return
        slot, arrived_at = slot[delivered], arrived_at[delivered]
        delay = arrived_at - sent_at[delivered]
        np.add.at(self._of("delivered_bytes"), slot, size[delivered])
        np.add.at(self._of("delay_sum"), slot, delay)
        np.fmax.at(self._of("delay_max"), slot, delay)
        np.maximum.at(self._of("ended_at"), slot, arrived_at)

        if chunk[STALENESS].null_count < len(chunk):
            moves = chunk[STALENESS].to_numpy()[delivered].astype(float)
            known = ~np.isnan(moves)
            slot, moves = slot[known], moves[known]
            np.add.at(self._of("stale"), slot, 1)
            np.add.at(self._of("moves"), slot, moves.astype(np.int64))
            np.fmax.at(self._of("moves_max"), slot, moves)

    def plus(self, other: Sums) -> None:
        """Add the sums of other messages."""
        place: Any = slice(None)
        if not np.array_equal(self.groups, other.groups):
            place = self._slots(other.groups)
        for name, values in other._values.items():
            mine = self._of(name)
            mine[place] = _COMBINED.get(name, np.add)(mine[place], values)

    def of_group(self, place: int) -> dict[str, float]:
        """The sums of one group, those of which there are any."""
        return {name: values[place].item() for name, values in self._values.items()}

    def copy(self) -> Sums:
        """The same, to add to."""
        same = Sums()
        same.plus(self)
        return same

    def compact(self) -> Sums:
        """The same, to be kept and added: whole numbers in four bytes where they fit."""
        small = Sums()
        small.groups = self.groups
        for name, values in self._values.items():
            fits = values.dtype == np.int64 and values.max(initial=0) <= np.iinfo(np.int32).max
            small._values[name] = values.astype(np.int32) if fits else values
        return small

    @property
    def nbytes(self) -> int:
        return self.groups.nbytes + sum(values.nbytes for values in self._values.values())

    def frame(self) -> pd.DataFrame:
        import pandas as pd

        by_status = {name: self[name] for name in STATUS_NAMES}
        attempts: Ints = np.sum(list(by_status.values()), axis=0, dtype=np.int64)
        columns = {"attempts": attempts, "sent": attempts - by_status["link_down"]} | by_status
        columns |= {name: self[name] for name in _OTHERS}
        return pd.DataFrame(columns, index=self.groups)

    def _of(self, name: str) -> npt.NDArray[Any]:
        """A sum to add to."""
        return self._values.setdefault(name, self[name])

    def _slots(self, group: Ints) -> Ints:
        """Where the sums of each row's group stand; room is made for groups not seen before."""
        encoded = pa.array(group).dictionary_encode()
        present = encoded.dictionary.to_numpy()
        place = np.searchsorted(self.groups, present)
        if not np.array_equal(np.append(self.groups, -1)[place], present):
            self._make_room(np.union1d(self.groups, present))
            place = np.searchsorted(self.groups, present)
        slots: Ints = place[encoded.indices.to_numpy()]
        return slots

    def _make_room(self, groups: Ints) -> None:
        before, kept = self._values, np.searchsorted(groups, self.groups)
        self.groups, self._values = groups, {}
        for name, old in before.items():
            self._of(name)[kept] = old


_OTHERS = (
    "bytes", "delivered_bytes", "stale", "moves", "delay_sum", "delay_max", "started_at", "ended_at",
    "moves_max",
)  # fmt: skip
_REAL = ("delay_sum", "delay_max", "started_at", "ended_at", "moves_max")
_BEFORE_ANY = {"delay_max": np.nan, "started_at": np.inf, "ended_at": -np.inf, "moves_max": np.nan}
_COMBINED: dict[str, np.ufunc] = {
    "delay_max": np.fmax, "started_at": np.minimum, "ended_at": np.maximum, "moves_max": np.fmax,
}  # fmt: skip


def check_quantity(quantity: str, edges: pd.DataFrame) -> None:
    """Refuse what is not a quantity in a table of edges."""
    known = list(edges.columns.drop(["sender", "receiver"]))
    if quantity not in known:
        raise UnknownNameError("quantity", quantity, known)


def edge_columns(sums: pd.DataFrame, nodes: int) -> dict[str, npt.NDArray[Any]]:
    """The columns of `Trace.edges` from sums by `edge_group`."""
    sender, receiver = np.divmod(sums.index.to_numpy(), nodes)
    columns: dict[str, Any] = {"sender": sender, "receiver": receiver}
    columns |= {name: sums[name].to_numpy() for name in COUNTS}
    attempts, delivered = columns["attempts"], columns["delivered"]
    columns["delivery_rate"] = ratio(delivered, attempts)
    columns["up_rate"] = 1.0 - ratio(columns["link_down"], attempts)
    columns["delay_mean"] = ratio(sums["delay_sum"].to_numpy(), delivered)
    columns["delay_max"] = sums["delay_max"].to_numpy()
    return columns | staleness(sums)


def node_columns(sums: pd.DataFrame, nodes: int) -> dict[str, npt.NDArray[Any]]:
    """What every node sent and received, from sums by `edge_group`, as in `Trace.nodes`."""
    sender, receiver = np.divmod(sums.index.to_numpy(), nodes)

    def total(client: Ints, name: str) -> Ints:
        result: Ints = np.zeros(nodes, np.int64)
        np.add.at(result, client, sums[name].to_numpy())
        return result

    return {
        "sent": total(sender, "sent"),
        "received": total(receiver, "delivered"),
        "lost": total(sender, "lost"),
        "link_down": total(sender, "link_down"),
        "late": total(sender, "late"),
        "bytes_sent": total(sender, "bytes"),
        "bytes_received": total(receiver, "delivered_bytes"),
    }


def edge_group(nodes: int) -> Callable[[pa.Table], Ints]:
    """sender · nodes + receiver"""
    return lambda chunk: chunk["sender"].to_numpy().astype(np.int64) * nodes + chunk["receiver"].to_numpy()


class PhaseGroup:
    """(number of the (phase, kind) in `labels`) · 2³² + step"""

    def __init__(self) -> None:
        self.labels: dict[tuple[str, str], int] = {}

    def __call__(self, chunk: pa.Table) -> Ints:
        phase, phases = dictionary_codes(chunk["phase"])
        kind, kinds = dictionary_codes(chunk["kind"])
        pair = phase.astype(np.int64) * len(kinds) + kind
        numbers = np.zeros(len(phases) * len(kinds), np.int64)
        for used in np.unique(pair).tolist():
            label = phases[used // len(kinds)], kinds[used % len(kinds)]
            numbers[used] = self.labels.setdefault(label, len(self.labels))
        step: npt.NDArray[np.int32] = chunk["step"].to_numpy()
        groups: Ints = numbers[pair] << 32 | step
        return groups


def count(chunks: Iterable[pa.Table]) -> Totals:
    """What `TraceWriter.totals` said when these chunks had been appended."""
    totals = Totals()
    for chunk in chunks:
        by_status = np.bincount(status_codes(chunk["status"]), minlength=len(Status))
        totals = totals.plus(Totals.of(by_status, int(chunk["bytes"].to_numpy().sum())))
    return totals


class ClientSums:
    """Sums over the table of steps, one row per client."""

    def __init__(self, nodes: int) -> None:
        self.steps, self.absorbed = (np.zeros(nodes, np.int64) for _ in range(2))
        self.busy_time = np.zeros(nodes)
        self.finished_at = np.full(nodes, -np.inf)

    def add(self, chunk: pa.Table) -> None:
        """Count steps."""
        client, ended = chunk["client"].to_numpy(), chunk["ended_at"].to_numpy()
        nodes = len(self.steps)
        self.steps += np.bincount(client, minlength=nodes)
        self.busy_time += np.bincount(client, ended - chunk["started_at"].to_numpy(), nodes)
        self.absorbed += np.bincount(client, chunk["absorbed"].to_numpy(), nodes).astype(np.int64)
        np.maximum.at(self.finished_at, client, ended)

    def plus(self, other: ClientSums) -> None:
        """Add the sums of other steps."""
        self.steps += other.steps
        self.busy_time += other.busy_time
        self.absorbed += other.absorbed
        np.maximum(self.finished_at, other.finished_at, out=self.finished_at)

    def copy(self) -> ClientSums:
        """The same, to add to."""
        same = ClientSums(len(self.steps))
        same.plus(self)
        return same

    def compact(self) -> ClientSums:
        """The same, to be kept."""
        return self

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in vars(self).values())

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """steps, busy_time, finished_at, absorbed_per_step, as in `Trace.nodes`."""
        return {
            "steps": self.steps,
            "busy_time": self.busy_time,
            "finished_at": np.where(self.steps > 0, self.finished_at, np.nan),
            "absorbed_per_step": ratio(self.absorbed, self.steps),
        }


def staleness(sums: pd.DataFrame) -> dict[str, npt.NDArray[np.float64]]:
    """Mean and largest by group, NaN where there is none; nothing at all where there is none anywhere."""
    if not sums["stale"].any():
        return {}
    mean = ratio(sums["moves"].to_numpy(), sums["stale"].to_numpy())
    return {"staleness_mean": mean, "staleness_max": sums["moves_max"].to_numpy()}


def ratio(numerator: npt.NDArray[Any], denominator: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """numerator / denominator, NaN where the denominator is 0."""
    result: npt.NDArray[np.float64]
    result = np.divide(numerator, denominator, out=np.full(len(numerator), np.nan), where=denominator > 0)
    return result


def dictionary_codes(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int32], list[str]]:
    """A column of labels as numbers and the labels they stand for."""
    array = column.unify_dictionaries().combine_chunks()
    return array.indices.to_numpy(), array.dictionary.to_pylist()


def status_codes(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    codes, names = dictionary_codes(column)
    unknown = [name for name in names if name not in STATUS_NAMES]
    if unknown:
        raise TraceError(
            f"unknown message status {shown(unknown[0])}; this asyncfed knows {', '.join(STATUS_NAMES)}: "
            "read the trace with the asyncfed that wrote it"
        )
    return np.array([STATUS_NAMES.index(name) for name in names], np.int64)[codes]
