"""Exports, read back by other programs' readers and held against the trace."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto
from typer.testing import CliRunner

from asyncfed import (
    Result,
    Scenario,
    ScenarioError,
    TraceError,
    UnknownNameError,
    VirtualTime,
    export,
    run,
)
from asyncfed.cli.app import app
from asyncfed.exporting.protobuf import constant, data, fixed, message, numbers, rows
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP
from asyncfed.trace import Trace
from topologies import stochastic_directed

NAMES = ["Ålesund", "</script>", "b\x07ell", "d"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Named clients in virtual time: messages that arrive, are lost, find no link, and are on their way."""
    graph = nx.relabel_nodes(stochastic_directed(4, seed=1), dict(enumerate(NAMES)))
    graph.graph.pop("recipe")
    timing = VirtualTime(compute="exponential(1.0)", latency="exponential(0.5)", loss=0.2, running_sums=False)
    scenario = Scenario(
        problem=quadratic(clients=4, dimension=2),
        topology=graph,
        protocol=SGP(steps=8, lr=0.1),
        timing=timing,
        name="a <run>",
    )
    return run(scenario, out=tmp_path_factory.mktemp("export") / "run")


def numbered(result: Result) -> pd.DataFrame:
    """Messages with the numbers of their nodes."""
    return Trace(result.path / "trace").to_pandas()


def ends_expected(result: Result) -> Counter[tuple[Any, ...]]:
    """(node, other, time in ns, status, bytes, sent or arrived, whether a flow joins it)"""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in numbered(result).itertuples():
        arrives = row.status not in ("lost", "link_down", "in_flight")
        found[row.sender, row.receiver, round(row.sent_at * 1e9), row.status, row.bytes, "to", arrives] += 1
        if arrives:
            at = round(row.arrived_at * 1e9)
            found[row.receiver, row.sender, at, row.status, row.bytes, "from", arrives] += 1
    assert {end[3] for end in found} >= {"delivered", "lost", "link_down"}
    return found


def steps_expected(result: Result) -> Counter[tuple[int, ...]]:
    table = Trace(result.path / "trace").steps()
    return Counter(
        (row.client, row.step, round(row.started_at * 1e9), round(row.ended_at * 1e9))
        for row in table.itertuples()
    )


def test_a_perfetto_timeline_says_what_the_trace_says(result: Result, tmp_path: Path) -> None:
    """By perfetto's own schema: lanes, slices, instants, flows."""
    (file,) = export(result, "perfetto", tmp_path / "run.pftrace")
    read = proto.Trace()
    read.ParseFromString(file.read_bytes())
    lanes = {
        p.track_descriptor.uuid: p.track_descriptor for p in read.packet if p.HasField("track_descriptor")
    }
    root = next(lane for lane in lanes.values() if not lane.parent_uuid)
    assert (root.name, root.child_ordering) == ("a <run>", proto.TrackDescriptor.EXPLICIT)
    ranked = sorted(
        (lane for lane in lanes.values() if lane.parent_uuid == root.uuid),
        key=lambda each: each.sibling_order_rank,
    )
    assert [lane.name for lane in ranked] == [
        f"{way}{name}" for name in NAMES for way in ("", "messages of ")
    ]
    node = {lane.uuid: place // 2 for place, lane in enumerate(ranked)}
    texts: dict[str, dict[int, str]] = {}
    for packet in read.packet:
        for field, entries in packet.interned_data.ListFields():
            for entry in entries:
                value = entry.str.decode() if field.name.endswith("string_values") else entry.name
                assert texts.setdefault(field.name, {}).setdefault(entry.iid, value) == value
    steps: Counter[tuple[int, ...]] = Counter()
    ends: Counter[tuple[Any, ...]] = Counter()
    opened: dict[int, tuple[int, int]] = {}
    flows: dict[int, list[tuple[str, int]]] = {}
    for packet in read.packet:
        if not packet.HasField("track_event"):
            continue
        event, where = packet.track_event, node[packet.track_event.track_uuid]
        told = {texts["debug_annotation_names"][a.name_iid]: a for a in event.debug_annotations}
        if event.type == proto.TrackEvent.TYPE_SLICE_BEGIN:
            assert texts["event_names"][event.name_iid] == "sgp"
            opened[where] = (told["step"].uint_value, packet.timestamp)
        elif event.type == proto.TrackEvent.TYPE_SLICE_END:
            steps[(where, *opened.pop(where), packet.timestamp)] += 1
        else:
            assert texts["event_names"][event.name_iid] == "push"
            way = "to" if "to" in told else "from"
            other = NAMES.index(texts["debug_annotation_string_values"][told[way].string_value_iid])
            status = texts["event_categories"][event.category_iids[0]]
            joined = [*event.flow_ids, *event.terminating_flow_ids]
            ends[where, other, packet.timestamp, status, told["bytes"].uint_value, way, bool(joined)] += 1
            for flow in joined:
                assert list(event.flow_ids if way == "to" else event.terminating_flow_ids) == [flow]
                flows.setdefault(flow, []).append((way, where))
    assert steps == steps_expected(result)
    assert ends == ends_expected(result)
    pairs = Counter((flow[0][1], flow[1][1]) for flow in flows.values())
    assert all([way for way, _ in flow] == ["to", "from"] for flow in flows.values())
    table = numbered(result)
    delivered = table[table["status"].isin(["delivered", "late", "carried"])]
    assert pairs == Counter(zip(delivered["sender"], delivered["receiver"], strict=True))


def test_a_chrome_timeline_says_the_same(result: Result, tmp_path: Path) -> None:
    (file,) = export(result, "chrome", tmp_path / "run.json")
    events = json.loads(file.read_text("utf-8"))["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [named[node] for node in range(4)] == NAMES
    slices = [e for e in events if e["ph"] == "X"]
    steps = Counter(
        (e["pid"], e["args"]["step"], round(e["ts"] * 1e3), round(e["ts"] * 1e3 + e["dur"] * 1e3))
        for e in slices
        if e["tid"] == 0
    )
    assert steps == steps_expected(result)
    ends: Counter[tuple[Any, ...]] = Counter()
    flows: dict[str, list[str]] = {}
    for event in slices:
        if event["tid"] == 1:
            told = event["args"]
            way = "to" if "to" in told else "from"
            bound = "bind_id" in event
            key = (event["pid"], NAMES.index(told[way]), round(event["ts"] * 1e3), event["cat"])
            ends[(*key, told["bytes"], way, bound)] += 1
            if bound:
                assert event["flow_out" if way == "to" else "flow_in"]
                flows.setdefault(event["bind_id"], []).append(way)
    assert ends == ends_expected(result)
    assert all(ways == ["to", "from"] for ways in flows.values())


@pytest.mark.parametrize(("to", "read"), [("graphml", nx.read_graphml), ("gexf", nx.read_gexf)])
def test_a_network_has_what_was_measured(result: Result, tmp_path: Path, to: str, read: Any) -> None:
    (file,) = export(result, to, tmp_path / f"network.{to}")
    graph, edges = read(file), result.trace.edges()
    assert graph.number_of_edges() == len(edges)
    for row in edges.to_dict("records"):
        marks = graph.edges[row["sender"].replace("\x07", "\\x07"), row["receiver"].replace("\x07", "\\x07")]
        for name in ("bytes", "delivery_rate", "delay_mean", "attempts"):
            if np.isnan(row[name]):
                assert name not in marks
            else:
                assert marks[name] == pytest.approx(row[name], rel=1e-12)
    assert graph.nodes["d"]["steps"] == 8


def test_tables_hold_every_row(result: Result, tmp_path: Path) -> None:
    messages, steps = export(result.path, "csv", tmp_path / "tables")
    assert (messages.name, steps.name) == ("messages.csv", "steps.csv")
    assert len(pd.read_csv(messages)) == len(result.trace)
    read, expected = pd.read_csv(steps), result.trace.steps()
    for name in expected:
        assert read[name].tolist() == expected[name].tolist()
    (parquet,) = export(result, "parquet", tmp_path / "one.parquet")
    assert pq.read_table(parquet).equals(result.trace.to_arrow())


def test_padded_numbers_are_read_as_they_are() -> None:
    """One array of rows, and each of them a message of its own."""
    values = np.array([0, 1, 127, 128, (1 << 62) + 5])
    packed = rows(5, message(1, numbers(8, values, 9), [constant(10, 300)], message(11, fixed(47, values))))
    read = proto.Trace()
    read.ParseFromString(packed + data(1, constant(8, 7)))
    assert [p.timestamp for p in read.packet] == [*values, 7]
    assert [p.track_event.flow_ids[0] for p in read.packet[:5]] == values.tolist()
    assert {p.trusted_packet_sequence_id for p in read.packet[:5]} == {300}


def test_the_command_says_where_its_files_are(result: Result, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(result.path), "--to", "csv"])
    assert done.exit_code == 0, done.output
    assert [Path(line).name for line in done.stdout.splitlines()] == ["messages.csv", "steps.csv"]
    assert all(Path(line).parent == result.path / "export" for line in done.stdout.splitlines())
    refused = CliRunner().invoke(app, ["export", str(result.path), "--to", "perfeto"])
    assert (refused.exit_code, "did you mean 'perfetto'" in refused.stderr) == (2, True)


def test_what_cannot_be_drawn_is_refused_and_leaves_no_file(result: Result, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown format 'xml'"):
        export(result, "xml")
    with pytest.raises(ScenarioError, match="is a directory; give a file"):
        export(result, "chrome", tmp_path)
    with pytest.raises(TraceError, match="there is no run"):
        export(tmp_path / "nowhere", "chrome")
    empty = tmp_path / "huge"
    empty.mkdir()
    manifest = {"format": "asyncfed-run", "version": 1, "status": "running", "nodes": 1 << 22}
    (empty / "run.json").write_text(json.dumps(manifest))
    for to in ("perfetto", "chrome", "graphml"):
        with pytest.raises(TraceError, match="too many for"):
            export(empty, to)
    assert not [file for file in (empty / "export").iterdir() if file.is_file()]
