"""What is left of a run whose process was killed: metrics and trace that belong together, and recent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncfed import Progress, Scenario, load, run
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP
from topologies import ring

RUN = """
import sys, time
from asyncfed import Scenario, run
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP, FedAvg, LocalSteps
from topologies import ring, star

def progress(now):
    time.sleep(0.004)  # so slow that no chunk is due while the test lasts
    print(time.monotonic(), now.totals.sent, flush=True)

protocol, topology = {
    "peers": (SGP(steps=100_000, lr=0.01), ring(3)),
    "server": (FedAvg(100_000, LocalSteps(0.01)), star(3)),
}[sys.argv[2]]
run(Scenario(quadratic(clients=3), topology, protocol, evaluate_every=4), out=sys.argv[1], progress=progress)
"""
SECONDS = 3.0  # the most that may be lost


@pytest.mark.parametrize("kind", ["peers", "server"])
def test_a_killed_run_leaves_metrics_that_the_trace_bears_out(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", RUN, str(out), kind]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline().split()]
        while float(seen[-1][0]) < float(seen[0][0]) + SECONDS + 2.0 or int(seen[-1][1]) < 2000:
            seen.append(process.stdout.readline().split())
        os.kill(process.pid, signal.SIGKILL)
        killed = time.monotonic()
    known = max(int(sent) for at, sent in seen if float(at) < killed - SECONDS)
    assert known > 100
    result = load(out)
    assert result.status == "running"
    recorded = result.trace.totals().sent
    assert known <= int(result.metrics["messages"].iloc[-1]) + 4 * 6 <= recorded + 4 * 6
    assert int(result.metrics["messages"].iloc[-1]) <= recorded
    assert result.trace.to_arrow().num_rows == len(result.trace)
    steps = result.metrics["step"].tolist()
    assert steps == sorted(set(steps)), "every evaluation once"
    assert len(list(result.trace.directory.glob("messages/[!.]*"))) == 1


def test_often_evaluated_runs_write_about_once_in_a_second(tmp_path: Path) -> None:
    found: dict[str, set[int]] = {"trace/messages/00000.tail.parquet": set(), "metrics.jsonl": set()}
    started = time.monotonic()

    def progress(now: Progress) -> None:
        time.sleep(0.02)
        for name, times in found.items():
            if (tmp_path / "run" / name).exists():
                times.add((tmp_path / "run" / name).stat().st_mtime_ns)

    scenario = Scenario(quadratic(clients=3), ring(3), SGP(steps=130, lr=0.01), evaluate_every=1)
    result = run(scenario, out=tmp_path / "run", progress=progress)
    for times in found.values():
        assert 2 <= len(times) <= time.monotonic() - started + 1.0
    assert len(result.metrics) == 131
    assert not list(result.trace.directory.glob("*tail*"))


def test_a_run_that_was_killed_before_its_first_step_has_an_empty_trace(tmp_path: Path) -> None:
    result = run(Scenario(quadratic(clients=3), ring(3), SGP(2, 0.1)), out=tmp_path / "run")
    shutil.rmtree(result.path / "trace")
    manifest = json.loads((result.path / "run.json").read_text())
    kept = {key: manifest[key] for key in manifest if key not in ("totals", "steps")}
    (result.path / "run.json").write_text(json.dumps(kept | {"status": "running"}))
    trace = load(result.path).trace
    assert (len(trace), len(trace.edges()), len(trace.steps())) == (0, 0, 0)
