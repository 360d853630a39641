"""Appends become whole chunks, always the same ones."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from asyncfed.errors import TraceError
from asyncfed.recall import Saved
from asyncfed.trace import Status, Totals, Trace, TraceWriter
from tests.trace import naive

LOCKSTEP = {"sent_at": 3.0, "arrived_at": 4.0, "absorbed_step": 4, "weight": 0.25, "bytes": 100}


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def append_steps(writer: TraceWriter, nodes: int, steps: range) -> None:
    """Lockstep on the complete network, links up at random."""
    sender, receiver = np.divmod(np.arange(nodes * nodes, dtype=np.int32), nodes)
    for step in steps:
        up = np.random.default_rng(step).random(nodes * nodes) < 0.6
        status = np.where(up, Status.DELIVERED, Status.LINK_DOWN)
        writer.messages(
            sender=sender, receiver=receiver, status=status, step=step, phase="inner", kind="p", **LOCKSTEP
        )
        writer.steps(
            client=np.arange(nodes), step=step, started_at=step, ended_at=step + 1, absorbed=0, phase="inner"
        )


def test_the_same_appends_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with TraceWriter(tmp_path / name, 10, chunk_rows=1000) as writer:
            append_steps(writer, 10, range(50))
    assert len(contents(tmp_path / "a")) > 4
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_chunk_is_due_by_rows_alone(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, 10, chunk_rows=330)
    append_steps(writer, 10, range(2))
    assert contents(tmp_path) == {}
    append_steps(writer, 10, range(2, 3))
    writer.wait()
    assert sorted(contents(tmp_path)) == ["messages/00000.parquet", "steps/00000.parquet"]
    append_steps(writer, 10, range(3, 4))
    writer.flush()
    assert len(contents(tmp_path)) == 2, "a small flush waits"
    writer.flush(force=True)
    assert len(contents(tmp_path)) == 4
    writer.close()
    writer.close()
    assert len(contents(tmp_path)) == 4
    assert len(Trace(tmp_path)) == 400


def test_saving_by_the_clock_leaves_no_mark_on_the_files(tmp_path: Path) -> None:
    for name, times in (("never", ()), ("sometimes", (3, 4, 17)), ("always", range(50))):
        with TraceWriter(tmp_path / name, 10, chunk_rows=1000) as writer:
            for step in range(50):
                append_steps(writer, 10, range(step, step + 1))
                if step in times:
                    writer.save()
    assert len(contents(tmp_path / "never")) > 4
    assert contents(tmp_path / "never") == contents(tmp_path / "sometimes") == contents(tmp_path / "always")


def test_what_was_saved_is_read_once_whatever_became_of_it(tmp_path: Path) -> None:
    """Before its chunk is due, beside it (a kill in between), and after that."""
    writer = TraceWriter(tmp_path, 10, chunk_rows=330)
    saved = []
    for step in range(8):
        append_steps(writer, 10, range(step, step + 1))
        writer.save(lambda step=step: saved.append((step, len(Trace(tmp_path)))))
        writer.wait()
        tail = tmp_path / "messages" / f"{(step + 1) // 3:05d}.tail.parquet"
        assert tail.exists() == ((step + 1) % 3 > 0)
        trace = Trace(tmp_path)
        assert len(trace) == len(trace.to_pandas()) == trace.edges()["attempts"].sum() == 100 * (step + 1)
        assert len(trace.edge(3, 4)) == len(trace.by_step()) == step + 1
        assert len(trace.steps()) == 10 * (step + 1)
        if (step + 1) % 3 == 2:
            kept = tail.read_bytes()
        if step == 5:
            (tmp_path / "messages" / "00001.tail.parquet").write_bytes(kept)
            assert len(Trace(tmp_path)) == 600
    assert saved == [(step, 100 * (step + 1)) for step in range(8)], "what is saved is there before `then`"
    (tmp_path / "messages" / "00001.parquet").unlink()
    with pytest.raises(TraceError, match=r"messages/00001\.parquet is missing although later chunks exist"):
        Trace(tmp_path)


def test_a_trace_does_not_change_with_the_tail_it_was_opened_at(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, 10, chunk_rows=330)
    append_steps(writer, 10, range(1))
    writer.save()
    writer.wait()
    early = Trace(tmp_path)
    append_steps(writer, 10, range(1, 2))
    writer.save()
    writer.wait()
    assert len(early) == len(early.to_arrow()) == 100
    append_steps(writer, 10, range(2, 9))
    writer.close()
    assert len(early.edge(3, 4)) == 1
    assert len(Trace(tmp_path)) == 900


def test_one_number_stands_for_all_rows_and_the_status_decides_what_is_null(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, 6) as writer:
        writer.messages(
            sender=0, receiver=np.arange(6), status=np.arange(6), step=3, phase="p", kind="k", **LOCKSTEP
        )
        writer.messages(sender=1, receiver=2, status=Status.DELIVERED, step=4, phase="p", kind="k",
                        sent_at=4.0, arrived_at=5, absorbed_step=-1, weight=math.nan, bytes=7)  # fmt: skip
    rows = pq.read_table(tmp_path / "messages" / "00000.parquet").to_pydict()
    assert rows["sender"] == [0, 0, 0, 0, 0, 0, 1]
    assert rows["status"] == ["delivered", "lost", "link_down", "in_flight", "late", "carried", "delivered"]
    assert rows["arrived_at"] == [4.0, None, None, 4.0, 4.0, 4.0, 5.0]
    assert rows["absorbed_step"] == [4, None, None, None, None, 4, None]
    assert rows["weight"] == [0.25, 0.25, None, 0.25, 0.25, 0.25, None]
    assert rows["bytes"] == [100, 100, 0, 100, 100, 100, 7]
    assert writer.totals == Totals(
        sent=6, delivered=2, lost=1, link_down=1, in_flight=1, late=1, carried=1, bytes=507
    )


def test_totals_count_what_is_written_and_what_is_not(tmp_path: Path) -> None:
    messages = naive.random_messages(5, 700)
    writer = TraceWriter(tmp_path, 5, chunk_rows=150)
    for stop in (100, 130, 500, 700):
        naive.append(writer, messages[writer.totals.sent + writer.totals.link_down : stop])
        expected = naive.counts(messages[:stop])
        del expected["attempts"]
        assert writer.totals._asdict() == expected
    writer.close()
    assert Trace(tmp_path).totals() == writer.totals


def test_an_append_without_rows_writes_nothing(tmp_path: Path) -> None:
    nobody = np.zeros(0, np.int32)
    with TraceWriter(tmp_path, 3, chunk_rows=1) as writer:
        writer.messages(sender=nobody, receiver=nobody, status=0, step=0, phase="p", kind="k", **LOCKSTEP)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"receiver": np.zeros(3, int)}, r"arrays of \[2, 3\] rows"),
        ({"sender": 3}, r"sender is 3; it must lie in \[0, 3\)"),
        ({"receiver": np.array([0, -1])}, r"receiver is -1"),
        ({"status": 9}, r"status is 9"),
    ],
)
def test_rows_that_cannot_be_are_refused(tmp_path: Path, wrong: dict[str, object], complaint: str) -> None:
    values = {"sender": np.arange(2), "receiver": 0, "status": 0, "step": 0, **LOCKSTEP, **wrong}
    writer = TraceWriter(tmp_path, 3)
    with pytest.raises(ValueError, match=complaint):  # noqa: PT012
        writer.messages(**values, phase="p", kind="k")
        writer.flush(force=True)


def test_a_server_that_is_not_a_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"server is 3; it must lie in \[0, 3\)"):
        TraceWriter(tmp_path, 3, server=3)


def test_a_closed_writer_takes_no_more_rows(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, 2)
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        append_steps(writer, 2, range(1))


def test_a_directory_with_a_trace_is_not_overwritten(tmp_path: Path) -> None:
    naive.write(tmp_path, 3, naive.random_messages(3, 10))
    with pytest.raises(TraceError, match="already holds a trace"):
        TraceWriter(tmp_path, 3)
    saved = TraceWriter(tmp_path / "saved", 3)
    append_steps(saved, 3, range(1))
    saved.save()
    saved.wait()
    with pytest.raises(TraceError, match="already holds a trace"):
        TraceWriter(tmp_path / "saved", 3)


@pytest.mark.parametrize("steps", [3, 20])  # before the first chunk, and after some
def test_a_writer_that_goes_on_where_another_was_put_down_ends_with_the_same_bytes(
    steps: int, tmp_path: Path
) -> None:
    with TraceWriter(tmp_path / "whole", 10, chunk_rows=700) as whole:
        append_steps(whole, 10, range(50))
    killed = TraceWriter(tmp_path / "resumed", 10, chunk_rows=700)
    append_steps(killed, 10, range(steps))
    handed_over = killed.put_down()
    append_steps(killed, 10, range(steps, 41))
    killed.save()
    killed.wait()
    saved = handed_over()
    assert len(Trace(tmp_path / "resumed")) == 4100
    continues = Saved(json.loads(json.dumps(saved.plain)), saved.arrays)
    with TraceWriter(tmp_path / "resumed", 10, 700, continues=continues) as resumed:
        append_steps(resumed, 10, range(steps, 50))
    assert contents(tmp_path / "resumed") == contents(tmp_path / "whole")
    assert resumed.totals == whole.totals == Trace(tmp_path / "whole").totals()


def test_a_place_beyond_what_is_there_is_refused(tmp_path: Path) -> None:
    elsewhere = TraceWriter(tmp_path / "elsewhere", 10, chunk_rows=700)
    append_steps(elsewhere, 10, range(20))
    saved = elsewhere.put_down()()
    elsewhere.close()
    with pytest.raises(TraceError, match="holds 0 messages chunks but the checkpoint counts 2"):
        TraceWriter(tmp_path / "here", 10, continues=saved)


def test_a_lockstep_trace_is_small_and_quick_to_write(tmp_path: Path) -> None:
    started = time.perf_counter()
    with TraceWriter(tmp_path, 100) as writer:
        append_steps(writer, 100, range(60))
    assert time.perf_counter() - started < 10
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.parquet"))
    assert size / 600_000 < 1.0
