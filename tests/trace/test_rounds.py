"""What counts as a communication round, and what a row about one says."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfed.errors import TraceError
from asyncfed.trace import Trace
from tests.trace import naive


@pytest.fixture
def served(tmp_path: Path) -> Trace:
    return Trace(naive.write(tmp_path, 4, naive.SERVED, chunk_rows=3, server=0))


def test_each_round_tells_what_became_of_its_requests_and_answers(served: Trace) -> None:
    expected = pd.DataFrame(
        {
            "round": [0, 1, 2, 3],
            "phase": ["inner"] * 4,
            "kind": ["q", "y", "h", "h"],
            "asked": [3, 3, 2, 1],
            "reached": [3, 2, 1, 1],
            "answered": [3, 2, 0, 1],
            "arrived": [2, 1, 0, 0],
            "used_late": [1, 0, 0, 0],
            "late": [0, 1, 0, 0],
            "lost": [1, 0, 0, 0],
            "messages": [6, 4, 2, 2],
            "bytes_down": [300, 200, 200, 100],
            "bytes_up": [120, 80, 0, 40],
            "started_at": [0.0, 3.0, 7.0, 9.5],
            "ended_at": [3.0, 7.0, 9.0, 11.0],
        }
    )
    assert len(list(served.directory.glob("messages/*.parquet"))) > 3
    pd.testing.assert_frame_equal(served.rounds(), expected)
    pd.testing.assert_frame_equal(naive.rounds(naive.SERVED, 0), expected)


def test_a_round_that_nobody_answered_is_not_a_communication_round(served: Trace) -> None:
    assert served.rounds()["answered"].tolist() == [3, 2, 0, 1]
    assert served.communication_rounds() == 3


def test_totals_and_tables_count_late_messages(served: Trace) -> None:
    assert served.totals().late == 1
    assert served.edges().set_index(["sender", "receiver"]).loc[(2, 0), "late"] == 1
    assert served.by_step()["late"].tolist() == [0, 1, 0, 0]
    assert served.phases().set_index("kind").loc["y", "late"] == 1
    assert served.nodes()["late"].tolist() == [0, 0, 1, 0]


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(2, 5),
    count=st.integers(0, 300),
    chunk_rows=st.integers(1, 90),
    seed=st.integers(0, 2**20),
    server=st.integers(0, 1),
)
def test_rounds_agree_with_a_slow_count(
    nodes: int, count: int, chunk_rows: int, seed: int, server: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    messages = naive.random_messages(nodes, count, seed)
    directory = naive.write(tmp_path_factory.mktemp("t"), nodes, messages, chunk_rows, server)
    trace = Trace(directory, nodes)
    found, expected = trace.rounds(), naive.rounds(messages, server)
    assert len(found) == len(expected)
    if len(expected):
        pd.testing.assert_frame_equal(found, expected)
        assert trace.communication_rounds() == (expected["answered"] > 0).sum()
    assert trace.communication_rounds(server) == trace.communication_rounds()


def test_an_attempt_to_answer_over_a_link_that_is_down_makes_no_round(tmp_path: Path) -> None:
    down = next(m for m in naive.SERVED if m.status == "link_down" and m.receiver == 0)
    between_clients = naive.SERVED[3]._replace(step=5, receiver=2)
    trace = Trace(naive.write(tmp_path, 4, [down._replace(step=4), between_clients], server=0))
    assert len(trace.rounds()) == trace.communication_rounds() == 0


def test_the_server_is_noted_in_every_file_and_export(served: Trace, tmp_path: Path) -> None:
    assert served.server == 0
    served.to_parquet(tmp_path / "all.parquet")
    for path in (tmp_path / "all.parquet", *served.directory.glob("messages/*.parquet")):
        assert pq.read_schema(path).metadata[b"server"] == b"0"


def test_peers_have_steps_instead_of_rounds(tmp_path: Path) -> None:
    messages = [m for m in naive.SERVED if m.step != 2 or m.status == "link_down"]
    trace = Trace(naive.write(tmp_path, 4, messages))
    assert trace.server is None
    with pytest.raises(TraceError, match=r"has no server.*by_step\(\)"):
        trace.rounds()
    assert trace.communication_rounds() == 3, "in step 2 nothing was sent"


def test_a_server_can_be_given_where_none_was_noted_or_another_was(tmp_path: Path) -> None:
    for number, noted in enumerate((None, 2)):
        trace = Trace(naive.write(tmp_path / str(number), 4, naive.SERVED, server=noted))
        pd.testing.assert_frame_equal(trace.rounds(server=0), naive.rounds(naive.SERVED, 0))
        assert trace.communication_rounds(server=0) == 3
        with pytest.raises(TraceError, match=r"server is 4; .* 0 to 3"):
            trace.rounds(server=4)


def test_files_from_before_late_messages_and_servers_are_read(tmp_path: Path) -> None:
    """Their dictionary of statuses has four names, and their schema no server."""
    naive.write(tmp_path, 4, [m for m in naive.SERVED if m.status != "late"])
    (chunk,) = tmp_path.glob("messages/*.parquet")
    table = pq.read_table(chunk)
    place = table.schema.get_field_index("status")
    status = table["status"].cast("string").dictionary_encode()
    pq.write_table(table.set_column(place, table.schema.field(place), status), chunk)
    assert "late" not in status.chunk(0).dictionary.to_pylist()
    trace = Trace(tmp_path)
    assert trace.totals().late == 0
    assert trace.edges()["late"].tolist() == [0] * 6
    assert trace.rounds(server=0)["answered"].tolist() == [3, 1, 0, 1]


def test_files_from_before_there_was_a_staleness_are_read(tmp_path: Path) -> None:
    messages = naive.random_messages(4, 60)
    directory = naive.write(tmp_path, 4, messages, chunk_rows=25, server=0)
    old = sorted(directory.glob("messages/*.parquet"))[:2]
    for path in old:
        pq.write_table(pq.read_table(path, partitioning=None).drop_columns("staleness"), path)
    trace = Trace(directory)
    frame = trace.to_pandas()
    expected = [m._replace(staleness=None) if place < 50 else m for place, m in enumerate(messages)]
    known = [m.staleness for m in naive.canonical(expected) if m.staleness is not None]
    assert frame["staleness"].dropna().tolist() == known
    assert len(frame) == 60
    assert len(trace.edge(messages[0].sender, messages[0].receiver)["staleness"]) > 0
    pd.testing.assert_frame_equal(trace.rounds(), naive.rounds(expected, 0))
