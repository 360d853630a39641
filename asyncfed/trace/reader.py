"""Reads a trace: of a finished run, of one that was killed, or of one that still goes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from asyncfed import checks
from asyncfed.errors import ScenarioError, TraceError
from asyncfed.markup import panel
from asyncfed.network.names import Names, plain_name
from asyncfed.network.waves import Status
from asyncfed.trace import exports, queries, rounds
from asyncfed.trace.columns import MESSAGES, SCHEMAS, STALENESS, STEPS, Totals
from asyncfed.trace.files import (
    MOST_NODES,
    checked,
    completed,
    nodes_of,
    open_chunk,
    path_of,
    read_chunks,
    reading,
    server_of,
    source_of,
    trace_files,
)

if TYPE_CHECKING:
    import pandas as pd

    from asyncfed.report.plots import TracePlots

_MOST_SQUARE = 20_000  # nodes: 3.2 GB in doubles


@checks.checked
class Trace:
    """The trace in `directory` as far as it was written when this object was made.

    `nodes` is read from the files; it must be given for a run that has not written any yet. So is `server`,
    the node around which rounds are made; it is None where the run has none or did not note it. A trace does
    not follow a run that goes on: make a new one to see more.

    The files hold numbers. Tables for people show nodes by `names`, and nodes are asked for by them, where
    there are any: those of a run's graph are in its scenario.json, so `load(run).trace` has them.
    """

    def __init__(
        self, directory: checks.PathLike, nodes: int | None = None, names: Names | None = None
    ) -> None:
        self.directory = Path(directory)
        self.server: int | None = None
        if nodes is None and not os.path.isdir(directory):
            raise TraceError(
                f"{self.directory} is not a directory; give the directory that a run wrote its trace to"
            )
        self._files = {table: trace_files(self.directory, table) for table in (MESSAGES, STEPS)}
        for table, files in self._files.items():
            if files:
                with open_chunk(files[0], table, nodes) as chunk:
                    nodes, self.server = nodes_of(chunk), server_of(chunk)
        if nodes is None:
            raise TraceError(f"{self.directory} holds no trace yet; give nodes=… to read it as an empty one")
        if not 1 <= nodes <= MOST_NODES:
            raise TraceError(f"nodes is {nodes}; a trace is of 1 to {MOST_NODES:,} nodes")
        self.node_count = nodes
        self.names = Names(range(nodes)) if names is None else names

    def __repr__(self) -> str:
        return f"Trace({str(self.directory)!r}, nodes={self.node_count})"

    def _repr_html_(self) -> str:
        counted = self.totals()._asdict()
        carried = {name.replace("_", " "): f"{count:,}" for name, count in counted.items() if count}
        server = {} if self.server is None else {"server": self.names[self.server]}
        nodes = {"nodes": f"{self.node_count:,}", **server}
        return panel(f"Trace in {self.directory}", nodes | {"potential messages": f"{len(self):,}"} | carried)

    @property
    def plot(self) -> TracePlots:
        """Figures of matplotlib: `plot.network()`, `plot.timeline()`, `plot.matrix()`."""
        from asyncfed.report.plots import TracePlots

        return TracePlots(self)

    def __len__(self) -> int:
        """Number of potential messages."""
        return self._rows(MESSAGES)

    def _rows(self, table: str) -> int:
        rows = 0
        for file in self._files[table]:
            with open_chunk(file, table, self.node_count) as chunk:
                rows += chunk.metadata.num_rows
        return rows

    def check_complete(self, messages: int, steps: int | None) -> None:
        """Refuse a trace that has not all of the messages and steps that were counted when it was written.
        Of older runs nobody knows how many steps there were; some there must be.
        """
        for table, counted in ((MESSAGES, messages), (STEPS, steps)):
            found = self._rows(table)
            if found == counted or (counted is None and (found or not messages)):
                continue
            files = [path_of(file).name for file in self._files[table]]
            there = f"{files[0]} to {files[-1]}" if files else "no chunk at all"
            expected = "more" if counted is None else f"{counted:,}"
            too_many = found > (counted or 0)
            remedy = "it is of another run" if too_many else "restore the chunks that are missing"
            raise TraceError(
                f"{self.directory} holds {found:,} {table} ({there}), and its run counted {expected}; "
                f"{remedy}, or read what is there with asyncfed.Trace"
            )

    def totals(self) -> Totals:
        """Messages by what became of them, and payload bytes sent."""
        return queries.count(self._chunks("status", "bytes"))

    def edges(self) -> pd.DataFrame:
        """One row per directed edge that appears, sorted by sender and receiver.

        attempts counts all potential messages; sent is all but those whose link was down; bytes is what was
        sent; delivery_rate is delivered / attempts and up_rate is 1 − link_down / attempts; delays are
        virtual times from sending to arrival, of delivered messages. Where answers were stale, staleness_mean
        and staleness_max are of those that the server used.
        """
        columns = queries.edge_columns(self._edge_sums, self.node_count)
        ends = {end: self._shown(columns[end]) for end in ("sender", "receiver")}
        return _frame(columns | ends)

    def edge(self, sender: int | str, receiver: int | str) -> pd.DataFrame:
        """One row per potential message from `sender` to `receiver`, in order of sent_at: all columns."""
        a, b = (self._number(node) for node in (sender, receiver))
        found = self._where(sender=a, receiver=b)
        if not len(found):
            outgoing = self._where(["receiver"], sender=a)
            receivers = np.unique(outgoing["receiver"].to_numpy()).tolist()
            listing = ", ".join(self.names[one] for one in receivers[:10])
            listing += ", …" if len(receivers) > 10 else ""
            raise TraceError(
                f"edge {sender}→{receiver} does not appear in {self.directory}; "
                f"client {sender} has edges to {listing or 'nobody'}"
            )
        return self._to_pandas(exports.in_order(found))

    def nodes(self) -> pd.DataFrame:
        """One row per client.

        steps done, messages sent by it, received (delivered to it), lost, link_down and late (of those it
        would send), bytes_sent, bytes_received, busy_time (virtual time inside its steps), finished_at (end
        of its last step), absorbed_per_step (mean number of messages that a step took in).
        """
        sums = queries.ClientSums(self.node_count)
        for chunk in read_chunks(self._files[STEPS], STEPS, self.node_count):
            sums.add(chunk)
        steps = sums.columns()
        return _frame(
            {
                "client": self._shown(np.arange(self.node_count)),
                "steps": steps.pop("steps"),
                **queries.node_columns(self._edge_sums, self.node_count),
                **steps,
            }
        )

    def phases(self) -> pd.DataFrame:
        """One row per (phase, kind), in order of their first message.

        steps is the number of distinct steps in which there was one; started_at is when the first was sent,
        ended_at when the last was sent or delivered.
        """
        labels, sums = self._phase_sums
        number = sums.index.to_numpy() >> 32
        counted = list(queries.COUNTS)
        summed = sums[counted].groupby(number).sum()
        result = _frame(
            {
                "phase": [phase for phase, _ in labels],
                "kind": [kind for _, kind in labels],
                "steps": np.bincount(number, minlength=len(labels)),
                **{name: summed[name].to_numpy() for name in counted},
                "started_at": sums["started_at"].groupby(number).min().to_numpy(),
                "ended_at": sums["ended_at"].groupby(number).max().to_numpy(),
            }
        )
        return result.sort_values("started_at", kind="stable", ignore_index=True)

    def by_step(self) -> pd.DataFrame:
        """One row per step of the senders, over all phases and kinds."""
        _, sums = self._phase_sums
        step = sums.index.to_numpy() & 0xFFFFFFFF
        return sums[list(queries.COUNTS)].groupby(step).sum().rename_axis("step").reset_index()

    def rounds(self, server: int | None = None) -> pd.DataFrame:
        """One row per communication round, of a run with a server; this is what a round is, everywhere.

        In a communication round, participating clients send to the server, it aggregates, and sends the
        aggregate back (with the requests of the next round). Its messages carry its number as their step, so
        the rounds are the steps in which at least one client sent something towards the server, whatever
        became of it. Steps in which the server asked and nobody answered have a row too, with answered = 0;
        `communication_rounds` does not count them. Messages between clients belong to no round.

        round is the number, phase and kind the labels (kind: of the answers, sent or not; several are joined
        by +). Of the server's requests, asked counts all, link_down among them, and reached those delivered.
        Of the answers, answered counts those sent; arrived those delivered, whichever round absorbed them;
        used_late those among them that a later round absorbed; late those that came too late and were
        dropped; lost those lost; what remains is in flight. messages counts what was sent both ways,
        bytes_down from and bytes_up to the server. started_at is when the first message was due, ended_at
        when the last answer used in the round itself arrived; where there is none, when the last message of
        the round was sent or delivered. Where answers were stale, staleness_mean and staleness_max are of the
        answers to this round's requests that were used, now or later.

        `server` is the node around which to count; unless given, the one that the run noted.
        """
        server = self.server if server is None else server
        if server is None:
            if self._files[MESSAGES]:
                raise TraceError(
                    f"{self.directory} is of a run that has no server, and only a server makes rounds; "
                    "by_step() (--by step) is the table for peers"
                )
            return rounds.table((), 0)  # nothing was sent, to a server or otherwise
        if not 0 <= server < self.node_count:
            raise TraceError(
                f"server is {server}; the nodes of {self.directory} are 0 to {self.node_count - 1}"
            )
        return rounds.table(self._chunks(*rounds.COLUMNS), server)

    def communication_rounds(self, server: int | None = None) -> int:
        """How many `rounds` had an answer; among peers, in how many steps something was sent."""
        if server is None and self.server is None:
            return int((self.by_step()["sent"] > 0).sum())
        return int((self.rounds(server)["answered"] > 0).sum())

    def steps(self) -> pd.DataFrame:
        """One row per step of a client, in the order in which they were written."""
        chunks = read_chunks(self._files[STEPS], STEPS, self.node_count)
        return self._to_pandas(pa.concat_tables([SCHEMAS[STEPS].empty_table(), *chunks]).unify_dictionaries())

    def matrix(self, quantity: str) -> npt.NDArray[Any]:
        """A column of `edges()` as a nodes × nodes array [sender, receiver].

        Where there is no edge, counts and bytes are 0, rates and delays NaN.
        """
        edges = self.edges()
        sender, receiver = np.divmod(self._edge_sums.index.to_numpy(), self.node_count)
        queries.check_quantity(quantity, edges)
        values = edges[quantity].to_numpy()
        missing = 0 if values.dtype.kind == "i" else np.nan
        self._check_square()
        result = np.full((self.node_count, self.node_count), missing, values.dtype)
        result[sender, receiver] = values
        return result

    def links_up(self, step: int) -> npt.NDArray[np.bool_]:
        """nodes × nodes [sender, receiver]: True where the link existed at that step of the sender.

        The diagonal is True: a client always reaches itself.
        """
        rows = self._where(["sender", "receiver", "status"], step=step)
        if not len(rows):
            raise TraceError(
                f"step {step} does not appear in {self.directory}; see by_step() for those that do"
            )
        up = queries.status_codes(rows["status"]) != Status.LINK_DOWN
        self._check_square()
        result: npt.NDArray[np.bool_] = np.eye(self.node_count, dtype=np.bool_)
        result[rows["sender"].to_numpy()[up], rows["receiver"].to_numpy()[up]] = True
        return result

    def to_arrow(self) -> pa.Table:
        """All messages as an Arrow table, sorted by sent_at, sender, receiver, step; nodes by number."""
        return exports.all_messages(self._files[MESSAGES], self.node_count, self.server)

    def to_pandas(self) -> pd.DataFrame:
        """All messages, sorted by sent_at, sender, receiver, step; status, phase and kind are categories."""
        return self._to_pandas(self.to_arrow())

    def to_csv(self, path: Path | str) -> None:
        """Write all messages in the order of `to_arrow` as CSV; a null is an empty field."""
        exports.write_csv(self._files[MESSAGES], self.node_count, Path(path), self.names)

    def to_parquet(self, path: Path | str) -> None:
        """Write all messages in the order of `to_arrow` as one Parquet file, nodes by number."""
        exports.write_parquet(self._files[MESSAGES], self.node_count, self.server, Path(path))

    @cached_property
    def _edge_sums(self) -> pd.DataFrame:
        chunks = self._chunks("sender", "receiver", *queries.SUMMED_COLUMNS)
        return queries.sums(chunks, queries.edge_group(self.node_count))

    @cached_property
    def _phase_sums(self) -> tuple[list[tuple[str, str]], pd.DataFrame]:
        group = queries.PhaseGroup()
        sums = queries.sums(self._chunks("step", "phase", "kind", *queries.SUMMED_COLUMNS), group)
        return list(group.labels), sums

    def _shown(self, numbers: npt.NDArray[np.int64]) -> Any:
        return self.names.column(numbers)

    def _number(self, node: int | str) -> int:
        if not self.names.given and not isinstance(node, str):
            return node  # whoever is not there has no messages
        try:
            return self.names.number(plain_name(node), "the edge", "node")
        except ScenarioError as error:
            raise TraceError(f"{error} (in {self.directory})") from None

    def _to_pandas(self, table: pa.Table) -> pd.DataFrame:
        frame = _to_pandas(table)
        for name in ("sender", "receiver", "client") if self.names.given else ():
            if name in frame:
                frame[name] = self._shown(table[name].to_numpy())
        return frame

    def _check_square(self) -> None:
        if self.node_count > _MOST_SQUARE:
            raise TraceError(
                f"a matrix of {self.node_count:,} × {self.node_count:,} nodes is too large to make (at most "
                f"{_MOST_SQUARE:,}); edges() has a row for each edge that appears"
            )

    def _chunks(self, *columns: str) -> Iterator[pa.Table]:
        return read_chunks(self._files[MESSAGES], MESSAGES, self.node_count, columns)

    def _where(self, columns: list[str] | None = None, **equals: int) -> pa.Table:
        """The messages whose columns have these values, in the order of writing."""
        condition = [(name, "==", value) for name, value in equals.items()]
        schema = SCHEMAS[MESSAGES]
        found = [(schema if columns is None else pa.schema([schema.field(c) for c in columns])).empty_table()]
        for file in self._files[MESSAGES]:
            open_chunk(file, MESSAGES, self.node_count).close()
            with reading(path_of(file)):
                rows = pq.read_table(
                    source_of(file),
                    columns=columns,
                    filters=condition,
                    partitioning=None,  # a run may lie in a directory called lr=0.1, which is not a column
                    page_checksum_verification=True,
                )
                found.append(completed(checked(rows, self.node_count), columns or schema.names))
        return pa.concat_tables(found).unify_dictionaries()


def _frame(columns: dict[str, Any]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(columns)


def _to_pandas(table: pa.Table) -> pd.DataFrame:
    """Labels become categories; integer columns with nulls keep their integers."""
    import pandas as pd

    frame: pd.DataFrame = table.to_pandas()
    for name in ("absorbed_step", STALENESS):
        if name in frame:
            values = table[name]
            frame[name] = pd.array(values.fill_null(0).to_numpy().copy(), dtype="Int32")
            frame.loc[values.is_null().to_numpy(), name] = pd.NA
    return frame
