"""Every query against a slow count over the same messages."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfed.errors import TraceError, UnknownNameError
from asyncfed.trace import Status, Trace, TraceWriter
from tests.trace import naive
from tests.trace.naive import Message

NODES = 6


@pytest.fixture(scope="module")
def messages() -> list[Message]:
    return naive.random_messages(NODES, 2000)


@pytest.fixture(scope="module")
def trace(messages: list[Message], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return Trace(naive.write(tmp_path_factory.mktemp("trace"), NODES, messages))


def naive_edges(messages: list[Message]) -> pd.DataFrame:
    rows = []
    for sender, receiver in sorted({(m.sender, m.receiver) for m in messages}):
        mine = [m for m in messages if (m.sender, m.receiver) == (sender, receiver)]
        count = naive.counts(mine)
        delays = [m.arrived_at - m.sent_at for m in mine if m.status == "delivered" and m.arrived_at]
        rows.append(
            {
                "sender": sender,
                "receiver": receiver,
                **count,
                "delivery_rate": count["delivered"] / len(mine),
                "up_rate": 1 - count["link_down"] / len(mine),
                "delay_mean": sum(delays) / len(delays) if delays else math.nan,
                "delay_max": max(delays, default=math.nan),
                **naive.staleness(mine),
            }
        )
    return naive.without_empty_staleness(pd.DataFrame(rows))


def as_messages(frame: pd.DataFrame) -> list[Message]:
    rows = (dict(row) for row in frame.astype(object).to_dict("records"))
    return [Message(**{k: None if pd.isna(v) else v for k, v in row.items()}) for row in rows]


def test_edges_count_every_message_of_an_edge(trace: Trace, messages: list[Message]) -> None:
    assert len(list(trace.directory.glob("messages/*.parquet"))) > 3
    pd.testing.assert_frame_equal(trace.edges(), naive_edges(messages), rtol=1e-12)


def test_edges_of_a_large_sparse_network(tmp_path: Path) -> None:
    nodes = 2_000_000
    messages = naive.random_messages(nodes, 1500, seed=3, pairs=200)
    trace = Trace(naive.write(tmp_path, nodes, messages))
    pd.testing.assert_frame_equal(trace.edges(), naive_edges(messages), rtol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.integers(1, 5),
    count=st.integers(0, 60),
    chunk_rows=st.integers(1, 40),
    seed=st.integers(0, 2**20),
)
def test_what_is_written_is_read_whatever_the_chunks(
    nodes: int, count: int, chunk_rows: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    messages = naive.random_messages(nodes, count, seed)
    directory = naive.write(tmp_path_factory.mktemp("t"), nodes, messages, chunk_rows)
    trace = Trace(directory, nodes)
    assert len(trace) == count
    assert as_messages(trace.to_pandas()) == naive.canonical(messages)
    if count:
        pd.testing.assert_frame_equal(trace.edges(), naive_edges(messages), rtol=1e-12)


def test_an_edge_shows_all_its_messages_in_order(trace: Trace, messages: list[Message]) -> None:
    edges = sorted({(m.sender, m.receiver) for m in messages})
    for sender, receiver in edges[::5]:
        expected = [m for m in naive.canonical(messages) if (m.sender, m.receiver) == (sender, receiver)]
        assert as_messages(trace.edge(sender, receiver)) == expected


def test_an_edge_that_never_appears_is_refused_with_those_that_do(tmp_path: Path) -> None:
    messages = [m._replace(sender=0, receiver=1 + m.receiver % 2) for m in naive.random_messages(4, 20)]
    trace = Trace(naive.write(tmp_path, 4, messages))
    with pytest.raises(TraceError, match=r"edge 0→3 does not appear .* client 0 has edges to 1, 2"):
        trace.edge(0, 3)
    with pytest.raises(TraceError, match="client 2 has edges to nobody"):
        trace.edge(2, 0)


def test_a_directory_named_like_a_partition_adds_no_columns(tmp_path: Path) -> None:
    messages = naive.random_messages(3, 50)
    trace = Trace(naive.write(tmp_path / "lr=0.1" / "seed=2", 3, messages))
    first = messages[0]
    assert list(trace.edge(first.sender, first.receiver).columns) == list(Message._fields)


def test_nodes_count_what_each_client_sent_and_received(tmp_path: Path) -> None:
    messages = naive.random_messages(NODES, 500)
    client, step, started, ended, absorbed = [0, 2, 2], [0, 0, 1], [0.0, 0.5, 2.0], [1.0, 1.5, 4.5], [0, 3, 4]
    with TraceWriter(tmp_path, NODES, chunk_rows=100) as writer:
        naive.append(writer, messages)
        writer.steps(
            client=np.array(client),
            step=np.array(step),
            started_at=np.array(started),
            ended_at=np.array(ended),
            absorbed=np.array(absorbed),
            phase="inner",
        )
    trace = Trace(tmp_path)
    nodes = trace.nodes()
    assert nodes["client"].tolist() == list(range(NODES))
    for i in range(NODES):
        outgoing = naive.counts([m for m in messages if m.sender == i])
        incoming = [m for m in messages if m.receiver == i and m.status == "delivered"]
        row = nodes.loc[i]
        assert row["sent"] == outgoing["sent"]
        assert row["lost"] == outgoing["lost"]
        assert row["link_down"] == outgoing["link_down"]
        assert row["late"] == outgoing["late"]
        assert row["bytes_sent"] == outgoing["bytes"]
        assert row["received"] == len(incoming)
        assert row["bytes_received"] == sum(m.bytes for m in incoming)
    assert nodes["steps"].tolist() == [1, 0, 2, 0, 0, 0]
    assert nodes["busy_time"].tolist() == [1.0, 0.0, 3.5, 0.0, 0.0, 0.0]
    np.testing.assert_equal(nodes["finished_at"][:3].to_numpy(), [1.0, np.nan, 4.5])
    np.testing.assert_equal(nodes["absorbed_per_step"][:3].to_numpy(), [0.0, np.nan, 3.5])
    steps = trace.steps()
    assert steps["client"].tolist() == client
    assert steps["ended_at"].tolist() == ended
    assert steps["phase"].tolist() == ["inner"] * 3


def test_phases_count_steps_messages_and_time(trace: Trace, messages: list[Message]) -> None:
    phases = trace.phases()
    assert phases["started_at"].is_monotonic_increasing
    assert {*zip(phases["phase"], phases["kind"], strict=True)} == set(naive.PHASES)
    for _, row in phases.iterrows():
        mine = [m for m in messages if (m.phase, m.kind) == (row["phase"], row["kind"])]
        assert {name: row[name] for name in naive.counts(mine)} == naive.counts(mine)
        assert row["steps"] == len({m.step for m in mine})
        assert row["started_at"] == min(m.sent_at for m in mine)
        arrivals = [m.arrived_at for m in mine if m.status == "delivered" and m.arrived_at]
        assert row["ended_at"] == max([*arrivals, *(m.sent_at for m in mine)])


def test_by_step_counts_every_step(trace: Trace, messages: list[Message]) -> None:
    by_step = trace.by_step()
    assert by_step["step"].tolist() == sorted({m.step for m in messages})
    for _, row in by_step.iterrows():
        expected = naive.counts([m for m in messages if m.step == row["step"]])
        assert {name: row[name] for name in expected} == expected


def test_totals_agree_with_the_writer(trace: Trace, messages: list[Message]) -> None:
    expected = naive.counts(messages)
    del expected["attempts"]
    assert trace.totals()._asdict() == expected


def test_matrix_has_senders_as_rows_and_marks_missing_edges(tmp_path: Path) -> None:
    messages = [m for m in naive.random_messages(NODES, 300) if m.sender != 2 and m.sender != m.receiver]
    trace = Trace(naive.write(tmp_path, NODES, messages))
    sent, rate = trace.matrix("sent"), trace.matrix("delivery_rate")
    assert sent.dtype == np.int64
    for i in range(NODES):
        for j in range(NODES):
            mine = naive.counts([m for m in messages if (m.sender, m.receiver) == (i, j)])
            assert sent[i, j] == mine["sent"]
            if mine["attempts"]:
                assert rate[i, j] == mine["delivered"] / mine["attempts"]
            else:
                assert math.isnan(rate[i, j])
    with pytest.raises(UnknownNameError, match="did you mean 'delivery_rate'"):
        trace.matrix("delivery_rat")
    with pytest.raises(UnknownNameError):
        trace.matrix("sender")


def test_links_up_is_true_where_something_could_be_sent_and_on_the_diagonal(
    trace: Trace, messages: list[Message]
) -> None:
    expected = np.eye(NODES, dtype=bool)
    for m in messages:
        if m.step == 7 and m.status != "link_down":
            expected[m.sender, m.receiver] = True
    np.testing.assert_array_equal(trace.links_up(7), expected)
    with pytest.raises(TraceError, match="step 99999 does not appear"):
        trace.links_up(99999)


def test_tables_keep_labels_as_categories_and_absorbed_steps_as_integers(trace: Trace) -> None:
    frame = trace.to_pandas()
    assert [frame[name].dtype.name for name in ("status", "phase", "kind")] == ["category"] * 3
    assert frame["absorbed_step"].dtype == "Int32"
    table = trace.to_arrow()
    assert table["absorbed_step"].null_count == (~frame["status"].isin(["delivered", "carried"])).sum()
    assert table["weight"].null_count == (frame["status"] == "link_down").sum()


def test_canonical_order_holds_when_chunks_overlap_in_time(tmp_path: Path) -> None:
    messages = naive.random_messages(3, 400)
    rng = np.random.default_rng(0)
    shuffled = [messages[k] for k in rng.permutation(len(messages))]
    ties = [m._replace(sent_at=float(m.step // 4), kind=f"k{m.step % 3}") for m in shuffled]
    for number, rows in enumerate((shuffled, ties)):
        trace = Trace(naive.write(tmp_path / str(number), 3, rows, chunk_rows=20))
        assert as_messages(trace.to_pandas()) == naive.canonical(rows)


def test_csv_and_parquet_exports_hold_the_same_rows(
    trace: Trace, messages: list[Message], tmp_path: Path
) -> None:
    trace.to_csv(tmp_path / "all.csv")
    with (tmp_path / "all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [
        {k: "" if v is None else v for k, v in m._asdict().items()} for m in naive.canonical(messages)
    ]
    parsed = [
        {k: row[k] if isinstance(v, str) else type(v)(row[k]) for k, v in m.items()}
        for row, m in zip(rows, expected, strict=True)
    ]
    assert parsed == expected
    trace.to_parquet(tmp_path / "all.parquet")
    assert pq.read_table(tmp_path / "all.parquet").equals(trace.to_arrow())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.csv", "all.parquet"]


def test_an_empty_trace_answers_every_query(tmp_path: Path) -> None:
    trace = Trace(tmp_path, nodes=3)
    assert len(trace) == 0
    assert trace.totals() == (0, 0, 0, 0, 0, 0, 0, 0)
    columns = naive_edges(naive.random_messages(3, 9)).columns.drop(["staleness_mean", "staleness_max"])
    assert list(trace.edges().columns) == list(columns)
    for frame in (
        trace.edges(),
        trace.phases(),
        trace.by_step(),
        trace.rounds(),
        trace.steps(),
        trace.to_pandas(),
    ):
        assert len(frame) == 0
    assert trace.communication_rounds() == 0
    assert trace.nodes()["sent"].tolist() == [0, 0, 0]
    assert trace.matrix("sent").tolist() == [[0] * 3] * 3
    assert np.isnan(trace.matrix("delay_max")).all()
    trace.to_csv(tmp_path / "empty.csv")
    assert (tmp_path / "empty.csv").read_text().replace('"', "").strip() == ",".join(Message._fields)
    trace.to_parquet(tmp_path / "empty.parquet")
    assert pq.read_table(tmp_path / "empty.parquet").num_rows == 0
    with pytest.raises(TraceError, match="has edges to nobody"):
        trace.edge(0, 1)


def test_totals_are_plain_integers(trace: Trace) -> None:
    assert json.loads(json.dumps(trace.totals())) == list(trace.totals())
    assert Status(0).name.lower() == "delivered"
