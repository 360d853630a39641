"""What the index says of a window is what the trace of that window alone would say."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest

from asyncfed.errors import TraceError
from asyncfed.explorer import layout, windows
from asyncfed.explorer.index import EVER, ChunkCache, TraceIndex, Window
from asyncfed.explorer.overview import BINS, Overview
from asyncfed.explorer.packed import packed
from asyncfed.trace import STATUS_NAMES, Trace, TraceWriter
from tests.trace import naive
from tests.trace.naive import Message

NODES = 6
WINDOWS: list[Window] = [EVER, (0.0, 5.0), (7.3, 31.9), (20.0, 20.4), (39.0, math.inf), (100.0, 200.0)]


@pytest.fixture(scope="module")
def messages() -> list[Message]:
    return naive.random_messages(NODES, 2000)


def indexed(directory: Path, **options: Any) -> TraceIndex:
    index = TraceIndex(directory, NODES, None, ChunkCache(), **options)
    index.follow()
    return index


def write_steps(writer: TraceWriter, count: int, begin: int = 0) -> None:
    """Step k of client c lasts from k to k + 1 − c/10; phases change every ten."""
    for step in range(begin, begin + count):
        client = np.arange(NODES)
        writer.steps(
            client=client, step=step, started_at=np.full(NODES, float(step)),
            ended_at=step + 1 - client / 10, absorbed=client, phase="ab"[step // 10 % 2],
        )  # fmt: skip


@pytest.fixture(scope="module")
def directory(messages: list[Message], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("index") / "trace"
    with TraceWriter(path, NODES, chunk_rows=300) as writer:
        write_steps(writer, 40)
        naive.append(writer, messages)
    return path


@pytest.mark.parametrize("most_bytes", [1 << 30, 8_000, 1])
def test_edges_of_a_window_are_those_of_a_trace_of_that_window(
    directory: Path, messages: list[Message], tmp_path: Path, most_bytes: int
) -> None:
    index = indexed(directory, most_bytes=most_bytes)
    chunks, pieces = len(list((directory / "messages").iterdir())), len(index.messages.pieces)
    assert chunks >= 7
    assert (pieces == chunks) == (most_bytes == 1 << 30)  # or some were put together to save memory
    for number, window in enumerate(WINDOWS):
        inside = [m for m in messages if window[0] <= m.sent_at < window[1]]
        alone = Trace(naive.write(tmp_path / str(number), NODES, inside), nodes=NODES).edges()
        found = index.edges(window)
        assert list(found) == list(alone.columns)
        for name, values in found.items():
            np.testing.assert_allclose(values, alone[name].to_numpy(), rtol=1e-12, err_msg=name)
    assert index.node_table((10.0, 20.0))["steps"].tolist() == [10] * NODES  # those that end at 10, 11, …, 19


def test_the_whole_run_is_what_the_trace_says(directory: Path) -> None:
    index, trace = indexed(directory), Trace(directory)
    nodes = trace.nodes().drop(columns="client")
    assert index.count() == (2000, 240)
    assert index.taken == index.found == sum(len(list(folder.iterdir())) for folder in directory.iterdir())
    found = index.node_table()
    assert set(found) == set(nodes.columns)
    for name, values in found.items():
        np.testing.assert_allclose(values, nodes[name].to_numpy(), rtol=1e-12, err_msg=name)
    assert index.phases_now() == [("a", 0, 10), ("b", 10, 20), ("a", 20, 30), ("b", 30, 40)]


def test_steps_count_in_the_window_in_which_they_end(directory: Path) -> None:
    found = indexed(directory).node_table((10.0, 20.0))
    assert found["steps"].tolist() == [10] * NODES
    assert found["busy_time"] == pytest.approx(10 - np.arange(NODES))


def test_a_window_of_few_messages_has_them_all_and_one_of_many_their_counts(tmp_path: Path) -> None:
    messages = naive.random_messages(NODES, 6000, seed=3)
    index = indexed(naive.write(tmp_path / "t", NODES, messages, chunk_rows=1000))
    few, facts = windows.window(index, (10.0, 20.0), 1, 3, 64)
    wanted = [
        m
        for m in messages
        if m.sent_at < 20 and max(m.sent_at, m.arrived_at or 0) >= 10 and {1, 2} & {m.sender, m.receiver}
    ]
    assert facts["kind"] == "messages"
    assert facts["messages"] == len(wanted) > 100
    assert sorted(few["sent_at"]) == sorted(m.sent_at for m in wanted)

    many, facts = windows.window(index, (0.0, 121.0), 0, NODES, 64)
    assert (facts["kind"], facts["messages"], facts["lanes"]) == ("cells", 6000, NODES)
    for name in STATUS_NAMES:
        cells = many[f"cells_{name}"].reshape(facts["lanes"], facts["bins"])
        for lane in range(NODES):
            mine = [m.sent_at for m in messages if (m.sender, m.status) == (lane, name)]
            bins = np.floor((np.array(mine) - facts["begin"]) / facts["width"]).astype(int)
            assert cells[lane].tolist() == np.bincount(bins, minlength=facts["bins"]).tolist()


def test_the_overview_stays_exact_when_it_grows() -> None:
    rng = np.random.default_rng(0)
    overview = Overview(300)
    sender, status = rng.integers(0, 300, 5000, dtype=np.int32), rng.integers(0, 6, 5000)
    time = np.sort(rng.exponential(100.0, 5000)) ** 2  # to several thousand bins of what it begins with
    for part in np.array_split(np.arange(5000), 7):
        overview.add(sender[part], status[part], time[part])
    expected = np.zeros_like(overview.counts)
    bins = (time // overview.width).astype(int)
    np.add.at(expected, (status, sender.astype(int) * 256 // 300, bins), 1)
    assert (overview.counts == expected).all()
    assert BINS / 2 <= bins.max() < BINS


def test_an_edge_tells_its_messages_and_its_strip(directory: Path) -> None:
    index, trace = indexed(directory), Trace(directory)
    sender, receiver = (int(trace.edges()[end][4]) for end in ("sender", "receiver"))
    columns, facts = windows.edge(index, sender, receiver, EVER, 0.0)
    alone = trace.edge(sender, receiver)
    assert facts["whole"]
    for name in ("step", "sent_at", "arrived_at", "bytes", "weight"):
        np.testing.assert_array_equal(columns[name], alone[name].to_numpy(dtype=float), err_msg=name)
    assert [STATUS_NAMES[code] for code in columns["status"]] == alone["status"].tolist()
    assert columns["staleness"].tolist() == alone["staleness"].fillna(-1).tolist()
    assert sum(columns[f"strip_{name}"].sum() for name in STATUS_NAMES) == len(alone)
    assert columns["strip_lost"].sum() == (alone["status"] == "lost").sum()


def test_a_run_that_goes_on_is_followed_and_one_that_begins_anew_is_read_anew(tmp_path: Path) -> None:
    messages = naive.random_messages(NODES, 1000)
    path = tmp_path / "trace"
    index = indexed(path)
    assert index.count() == (0, 0)
    with TraceWriter(path, NODES, chunk_rows=300) as writer:
        naive.append(writer, messages[:450])
        writer.save()
        writer.wait()
        index.follow()
        assert index.count() == (450, 0)  # a chunk, and the tail after it
        changes = index.changes
        index.follow()
        assert index.changes == changes  # nothing new, so no page asks again
        naive.append(writer, messages[450:800])
        writer.save()
        writer.wait()
        index.follow()
        assert index.count() == (800, 0)
    index.follow()
    assert index.count() == (800, 0)
    assert index.edges()["attempts"].sum() == 800
    for file in (path / "messages").iterdir():
        file.unlink()
    with TraceWriter(path, NODES, chunk_rows=300) as writer:
        naive.append(writer, messages[:100])
    index.follow()
    assert index.count() == (100, 0)


@pytest.mark.parametrize("time", [math.nan, math.inf, -1.0])
def test_times_that_no_run_has_are_refused_by_file(tmp_path: Path, time: float) -> None:
    path = naive.write(tmp_path / "t", NODES, naive.random_messages(NODES, 10))
    file = path / "messages" / "00000.parquet"
    rows = pq.read_table(file)
    times = rows["sent_at"].to_numpy().copy()
    times[3] = time
    column = rows.schema.get_field_index("sent_at")
    pq.write_table(rows.set_column(column, rows.schema.field(column), [times]), file)
    with pytest.raises(TraceError, match=r"00000\.parquet is damaged: its sent_at goes from"):
        indexed(path)


def unpacked(content: bytes) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """As the page reads it."""
    (length,) = struct.unpack("<I", content[:4])
    head, place = json.loads(content[4 : 4 + length]), 4 + length
    kinds = {"Float64Array": "<f8", "Float32Array": "<f4", "Int32Array": "<i4", "Uint8Array": "u1"}
    columns = {}
    for name, kind, count in head["columns"]:
        assert place % 8 == 0
        columns[name] = np.frombuffer(content, kinds[kind], count, place)
        place += -(-columns[name].nbytes // 8) * 8
    assert place == len(content)
    return head["facts"], columns


def test_columns_are_packed_as_the_page_reads_them() -> None:
    given = {
        "many": np.array([1 << 40, -3]),
        "few": np.array([1, 2, 3], np.int32),
        "real": np.array([0.5, np.nan]),
        "short": np.array([1.5], np.float32),
        "code": np.array([1, 2, 255], np.uint8),
        "yes": np.array([True]),
        "none": np.zeros(0),
    }
    facts, columns = unpacked(packed(given, whole=True, first=math.inf, words="→"))
    assert facts == {"whole": True, "first": None, "words": "→"}
    assert list(columns) == list(given)
    for name, values in given.items():
        np.testing.assert_array_equal(columns[name], values.astype(columns[name].dtype))


def test_a_layout_puts_linked_nodes_together() -> None:
    """Two groups that are linked inside, and by one link with each other."""
    pairs = [(a + g, b + g) for g in (0, 10) for a in range(10) for b in range(a)] + [(0, 10)]
    sender, receiver = np.array(pairs).T
    where = layout.spring(20, sender, receiver)
    assert np.abs(where).max() == pytest.approx(1.0)
    middles = where[:10].mean(axis=0), where[10:].mean(axis=0)
    spread = max(
        np.linalg.norm(where[:10] - middles[0], axis=1).max(),
        np.linalg.norm(where[10:] - middles[1], axis=1).max(),
    )
    assert np.linalg.norm(middles[0] - middles[1]) > 1.5 * spread
    assert (where == layout.spring(20, sender, receiver)).all()
    for nodes in (1, 2, 3, 1500):  # nobody is linked
        assert np.isfinite(layout.spring(nodes, np.zeros(0, int), np.zeros(0, int))).all()
