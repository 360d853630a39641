"""Bad input is refused with a sentence, an exit code, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quikstart"], "did you mean 'quickstart'?"),
        (["missing.py"], "there is no file missing.py"),
        (["sgp_digits", "--backend", "rey"], "did you mean 'ray'?"),
        (["sgp_digits", "--clients-per-actor", "many"], "'auto' or a whole number"),
        (["sgp_digits", "--set", "steps"], "path=value"),
        (["sgp_digits", "--set", "step=3"], "did you mean 'steps'?"),
        (["sgp_digits", "--set", "protocol.lrr=3"], "did you mean 'protocol.lr'?"),
        (["sgp_digits", "--set", "steps=few"], "steps is 'few'; it must be a whole number"),
        (
            ["sgp_digits", "--set", "protocol.batch=few"],
            "SGP: batch is 'few'; it must be a whole number, at least 1, or None",
        ),
        (["sgp_digits", "--set", "protocol.lr=-1"], "SGP: lr is -1; it must be a finite number above 0"),
        (["sgp_digits", "--set", "evaluate_every=often"], "evaluate_every is 'often'"),
        (["sgp_digits", "--set", "timing=Lockstop()"], "did you mean 'Lockstep'?"),
        (["sgp_digits", "--set", "timing=__import__('os').system('true')"], "cannot read"),
        (["sgp_digits", "--set", "problem.dataset=digitz"], "digits"),
        (["sgp_digits", "--set", "topology.probability=1.4"], "1.4"),
        (["sgp_digits", "--set", "topology.n_or_base=7"], "7 nodes, but the problem has 20 clients"),
        (["sgp_digits", "--device", "abacus"], "abacus"),
    ],
)
def test_bad_input_ends_with_2_and_says_what_to_do(
    cli: Any, tmp_path: Path, arguments: list[str], words: str
) -> None:
    done = cli("run", *arguments)
    assert done.exit_code == 2, (done.stderr, done.exception)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runs").glob("*"))


def test_a_directory_that_holds_a_run_is_not_touched(cli: Any, own: Path, tmp_path: Path) -> None:
    cli("run", own, "--out", tmp_path / "r")
    done = cli("run", own, "--out", tmp_path / "r")
    assert done.exit_code == 2
    assert "already holds a run" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("def scenario(", "def scenario(]", "own.py, line 8: SyntaxError"),
        ("lr=lr)", "lr=undefined)", "own.py, line 13: NameError: name 'undefined' is not defined"),
        ("steps=steps", "steps=-1", "own.py, line 13: SGP: steps is -1"),
        ("from topologies import", "from topologies_ import", "own.py, line 5: ModuleNotFoundError"),
        ("return Scenario(", "return dict(", "returned {'name'"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_line(
    cli: Any, own: Path, old: str, new: str, words: str
) -> None:
    own.write_text(own.read_text().replace(old, new))
    done = cli("run", own)
    assert done.exit_code == 2
    assert words in done.stderr


def test_divergence_ends_with_3_and_the_partial_run_can_be_shown(cli: Any, own: Path, tmp_path: Path) -> None:
    done = cli("run", own, "--set", "lr=1e30", "--set", "steps=200", "--out", tmp_path / "r")
    assert done.exit_code == 3
    assert "lower the learning rate" in done.stderr
    assert f"asyncfed show {tmp_path / 'r'}" in done.stderr
    shown = cli("show", tmp_path / "r")
    assert shown.exit_code == 0
    assert "failed: a partial run" in shown.stdout


def test_what_is_no_run_ends_with_4(cli: Any, own: Path, tmp_path: Path) -> None:
    for command in ("show", "trace"):
        done = cli(command, tmp_path / "nothing")
        assert done.exit_code == 4
        assert "there is no run" in done.stderr
    cli("run", own, "--out", tmp_path / "r")
    for chunk in (tmp_path / "r" / "trace").glob("messages/*"):
        chunk.write_bytes(chunk.read_bytes()[:50])
    assert cli("trace", tmp_path / "r").exit_code == 4


def test_unknown_columns_and_tables_suggest_the_nearest(cli: Any, own: Path, tmp_path: Path) -> None:
    cli("run", own, "--out", tmp_path / "r")
    assert "did you mean 'edge'?" in cli("trace", tmp_path / "r", "--by", "edges").stderr
    assert "did you mean 'bytes'?" in cli("trace", tmp_path / "r", "--sort", "byte").stderr
    assert cli("trace", tmp_path / "r", "--edge", 0, 99).exit_code == 4


def test_usage_errors_end_with_2(cli: Any) -> None:
    assert cli("run").exit_code == 2
    assert cli("walk").exit_code == 2
    assert cli("trace", "x", "--top", "0").exit_code == 2


def test_debug_shows_the_error_itself(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCFED_DEBUG", "1")
    done = cli("run", "quikstart")
    assert type(done.exception).__name__ == "UnknownNameError"


def test_a_warning_is_one_line_and_stays_with_the_run(cli: Any, own: Path, tmp_path: Path) -> None:
    done = cli("run", own, "--set", "timing=VirtualTime(factors={0: 10.0})", "--out", tmp_path / "r")
    assert done.exit_code == 0, (done.stderr, done.exception)
    (line,) = [line for line in done.stderr.splitlines() if "push-sum" in line]
    assert line.startswith("warning: SGP at paces that differ 10-fold (client 0 is the slowest): ")
    assert ".py" not in line
    assert "SGP at paces that differ 10-fold" in " ".join(cli("show", tmp_path / "r").stdout.split())


def test_a_study_tells_a_warning_once(cli: Any, own_study: Path, tmp_path: Path) -> None:
    uneven = own_study.read_text().replace("seed=seed", "seed=seed, timing=VirtualTime(factors={0: 9})")
    own_study.write_text(uneven.replace("import Scenario", "import VirtualTime, Scenario"))
    done = cli("run", own_study, "--out", tmp_path / "s")
    assert done.exit_code == 0, (done.stderr, done.exception)
    assert done.stderr.count("warning: SGP at paces") == 1
