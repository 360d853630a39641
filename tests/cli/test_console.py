"""The console script as a user starts it: a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncfed import load, run
from asyncfed.cli.scenarios import load_scenario

ASYNCFED = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'asyncfed'; from asyncfed.cli import main; main()",
]


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "ASYNCFED_RUNS": str(tmp_path / "runs"), "PYTHONUTF8": "1"}
    environment.pop("ASYNCFED_DEBUG", None)
    return subprocess.Popen(
        [*ASYNCFED, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def finished(tmp_path: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(tmp_path, *arguments)
    out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


def test_it_also_starts_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "asyncfed", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[:1]) == (0, ["asyncfed"])


def test_help_answers_in_half_a_second(tmp_path: Path) -> None:
    times = []
    for _ in range(6):
        before = time.perf_counter()
        code, out, _ = finished(tmp_path, "--help")
        times.append(time.perf_counter() - before)
        assert code == 0
        assert "Exit codes" in out
        if times[-1] < 0.5:
            return
    pytest.fail(f"asyncfed --help took {times} s")


def test_help_and_list_import_nothing_heavy(tmp_path: Path) -> None:
    heavy = "{'torch', 'ray', 'pandas', 'pyarrow', 'networkx', 'matplotlib', 'numpy'}"
    script = (
        "import sys; from typer.testing import CliRunner; from asyncfed.cli import app\n"
        "for arguments in (['--help'], ['run', '--help'], ['list']):\n"
        "    assert CliRunner().invoke(app, arguments).exit_code == 0\n"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_a_terminal_there_are_about_ten_plain_lines(tmp_path: Path) -> None:
    code, out, errors = finished(tmp_path, "run", "sgp_digits", "--set", "steps=40")
    assert code == 0, errors
    lines = [line for line in errors.splitlines() if line.startswith("sgp  step ")]
    assert 8 <= len(lines) <= 12
    assert "messages/s" in lines[-1]
    assert "loss" in lines[-1]
    assert "left" in lines[-1]
    assert not [c for c in out + errors if ord(c) < 32 and c != "\n"]
    assert "accuracy" in out


def test_ctrl_c_leaves_a_readable_partial_run(tmp_path: Path) -> None:
    process = start(tmp_path, "run", "sgp_digits", "--set", "steps=1000000", "--set", "evaluate_every=5")
    metrics = tmp_path / "runs" / "sgp_digits-0001" / "metrics.jsonl"
    deadline = time.monotonic() + 40
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert f"asyncfed show {metrics.parent}" in errors
    assert "Traceback" not in errors
    result = load(metrics.parent)
    assert result.status == "interrupted"
    assert len(result.metrics) >= 3
    assert result.trace.totals().sent > 0


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path, own: Path) -> None:
    run(load_scenario(str(own)), out=tmp_path / "r")
    for arguments in (["trace", str(tmp_path / "r")], ["list"]):
        process = start(tmp_path, *arguments)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        process.stderr.close()
        assert process.wait(timeout=30) == 0
