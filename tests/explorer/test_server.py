"""The server answers this machine's browser, with its token, by GET, about the runs it was given: no more."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asyncfed import load
from asyncfed.cli import app
from asyncfed.errors import ScenarioError, TraceError
from asyncfed.explorer import ExplorerServer, opened
from tests.explorer.conftest import CLIENTS, serving
from tests.explorer.test_index import unpacked


@pytest.fixture(scope="module")
def server(peers: Path) -> Iterator[ExplorerServer]:
    with serving([peers]) as made:
        for run in made.runs:
            run.follow()
        yield made


def asked(
    server: ExplorerServer, path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers or {})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, dict(answer.getheaders())


def told(server: ExplorerServer, question: str) -> Any:
    status, content, _ = asked(server, f"/{server.token}/api/{question}")
    assert status == 200, content
    return json.loads(content) if content.startswith(b"{") else unpacked(content)


def test_it_listens_on_this_machine_only(server: ExplorerServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):  # another address that leads here
        socket.create_connection(("127.0.0.2", server.server_port), timeout=2).close()


def test_without_its_token_nothing_is_told(server: ExplorerServer) -> None:
    for path in ("/", "/api/state", f"/{server.token[:-1]}/", f"/{server.token}x/api/state", "//", "/%00/"):
        status, content, _ = asked(server, path)
        assert status == 403
        assert b"peers" not in content
    assert asked(server, f"/{server.token}/")[0] == 200
    assert len(server.token) >= 32
    with serving([server.runs[0].path]) as other:
        assert other.token != server.token


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", "[::1]:80", ""]
)
def test_other_names_for_it_are_refused(server: ExplorerServer, host: str) -> None:
    status, content, _ = asked(server, f"/{server.token}/api/state", headers={"Host": host})
    assert status == 421
    assert b"peers" not in content


def test_its_own_names_are_answered(server: ExplorerServer) -> None:
    for name in ("127.0.0.1", "localhost"):
        host = {"Host": f"{name}:{server.server_port}"}
        assert asked(server, f"/{server.token}/api/state", headers=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "NONSENSE"])
def test_only_get_is_answered(server: ExplorerServer, method: str) -> None:
    status, content, _ = asked(server, f"/{server.token}/api/state", method)
    assert status == 405
    assert b"peers" not in content


@pytest.mark.parametrize(
    "path",
    [
        "run.json", "../run.json", "..%2frun.json", "api/0/../../run.json", "server.py", "/etc/passwd",
        "static/main.js", "api/1/about", "api/0/nonsense", "api/-1/about", "api/00000/about", "api/0", "api/",
        "api/0/trace/messages/00000.parquet",
    ],
)  # fmt: skip
def test_no_other_path_leads_anywhere(server: ExplorerServer, path: str) -> None:
    status, content, _ = asked(server, f"/{server.token}/{path}")
    assert status == 404
    assert b"asyncfed-run" not in content


@pytest.mark.parametrize(
    "question",
    ["edges?from=x", "edges?to=nan", "window?low=-1", "window?bins=0", "window?bins=1e9",
     "window?low=3&high=3", "edge?sender=6&receiver=0", "edge?sender=0.5"],
)  # fmt: skip
def test_values_that_are_none_are_refused_by_name(server: ExplorerServer, question: str) -> None:
    status, content, _ = asked(server, f"/{server.token}/api/0/{question}")
    assert status == 400
    assert re.search(rb"(from|to|low|bins|high|sender) is .*; it must be a (whole )?number", content)


def test_the_page_may_load_nothing_from_elsewhere(server: ExplorerServer) -> None:
    for path in ("", "main.js", "style.css", "api/state"):
        _, _, headers = asked(server, f"/{server.token}/{path}")
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers
    for name, content in server.files.items():
        assert not re.search(rb"https?://(?!www\.w3\.org/2000/svg)", content), name


def test_answers_are_those_of_the_run(server: ExplorerServer, peers: Path) -> None:
    result = load(peers)
    (state,) = told(server, "state")["runs"]
    assert (state["nodes"], state["messages"], state["status"]) == (CLIENTS, len(result.trace), "complete")
    facts, edges = told(server, "0/edges")
    alone = result.trace.edges()
    assert facts["edges"] == len(alone)
    assert edges["delivery_rate"] == pytest.approx(alone["delivery_rate"].to_numpy())
    metrics = told(server, "0/metrics")
    assert metrics["metrics"]["accuracy"] == result.metrics["accuracy"].tolist()
    assert metrics["clients"]["accuracy"] == result.clients["accuracy"].tolist()
    _, graph = told(server, "0/graph")
    topology = result.scenario.topology
    for sender, receiver in ((0, 1), (5, 2)):
        place = ((graph["sender"] == sender) & (graph["receiver"] == receiver)).nonzero()[0]
        assert graph["probability"][place].tolist() == [topology.edges[sender, receiver]["probability"]]
    facts, classes = told(server, "0/classes")
    train = result.scenario.problem.data.train
    assert classes["counts"].reshape(CLIENTS, 10).sum(axis=1).tolist() == list(train.sizes)


def test_nobody_begins_a_step_while_it_is_away(served: Path) -> None:
    (run,) = opened([served])
    run.follow()
    away = run.marks()["absences"]
    steps = load(served).trace.steps()
    assert len(away) > 3
    for client, begin, end in away:
        mine = steps[steps["client"] == client]["started_at"]
        assert not ((mine > begin) & (mine < end)).any()


def test_a_study_is_its_parts_and_too_many_runs_are_refused(peers: Path, tmp_path: Path) -> None:
    study = {"format": "asyncfed-study", "version": 1, "name": "s", "note": "", "status": "partial",
             "parts": {"a": {"status": "complete"}, "b": {"status": "waiting"}}}  # fmt: skip
    (tmp_path / "study.json").write_text(json.dumps(study))
    with pytest.raises(TraceError, match=r"no part of the study in .* was begun"):
        opened([tmp_path])
    shutil.copytree(peers, tmp_path / "a")
    assert [run.name for run in opened([tmp_path, peers])] == ["a", "peers"]
    with pytest.raises(ScenarioError, match="25 runs are too many"):
        opened([peers] * 25)


def test_damage_is_told_and_the_rest_is_answered(peers: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(peers, tmp_path / "run"))
    scenario = json.loads((path / "scenario.json").read_text())
    scenario["topology"] = {"nodes": [["x"]], "from": 7, "about": None}
    (path / "scenario.json").write_text(json.dumps(scenario))
    (path / "metrics.jsonl").write_text('{"step": "many"}\n')
    (run,) = opened([path])
    run.follow()
    assert unpacked(run.graph())[1]["sender"].tolist() == []
    assert run.about()["names"] is None
    assert "does not describe a network as runs do" in run.about()["notes"][0]
    with pytest.raises(TraceError, match=r"metrics\.jsonl is damaged"):
        run.metrics()
    assert len(unpacked(run.edges())[1]["sender"]) == CLIENTS * (CLIENTS - 1)
    (path / "trace" / "messages" / "00000.parquet").write_bytes(b"PAR1 and no more")
    run.follow()
    assert "cannot be read as Parquet" in run.state()["error"]


def test_of_very_many_edges_those_with_most_messages_are_told(peers: Path) -> None:
    (run,) = opened([peers])
    run.follow()
    facts, edges = unpacked(run.edges(most=10))
    assert facts["edges"] == 30
    assert len(edges["sender"]) == 10


def test_more_nodes_than_can_be_drawn_are_refused(peers: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(peers, tmp_path / "run"))
    manifest = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(manifest | {"nodes": 200_000, "status": "interrupted"}))
    shutil.rmtree(path / "trace")
    with pytest.raises(TraceError, match="has 200,000 nodes, too many to be drawn"):
        opened([path])


def test_a_run_that_is_removed_is_told(peers: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(peers, tmp_path / "run"))
    (run,) = opened([path])
    run.follow()
    shutil.rmtree(path)
    run.follow()
    assert run.state()["status"] == "unreadable"
    assert "there is no run at" in run.state()["error"]


def test_the_command_serves_until_it_is_interrupted(peers: Path) -> None:
    command = [sys.executable, "-m", "asyncfed", "view", str(peers), "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "exploring peers" in process.stdout.readline()
        url = process.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/[\w-]{32}/)", url)
        assert found, url
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=10)
        connection.request("GET", f"{found[2]}api/state")
        assert connection.getresponse().status == 200
        connection.close()
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, output, errors) == (0, "", "")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["view", str(tmp_path / "nothing"), "--no-open"])
    assert done.exit_code == 4
    assert "there is no run at" in done.output
    os.mkfifo(tmp_path / "run.json")
    done = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "r.html")])
    assert done.exit_code == 4
    assert "a named pipe" in done.output
