"""Studies on the command line."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from asyncfed import load, load_study
from asyncfed.cli import scenarios
from tests.cli.test_console import ASYNCFED, start

NAMES = ["Local", "StoD/SGP", "StoD/SGP-wild"]


def test_run_prints_tables_findings_and_where_everything_is(
    cli: Any, own_study: Path, tmp_path: Path
) -> None:
    done = cli("run", own_study, "--pictures")
    assert done.exit_code == 0, done.stderr
    path = tmp_path / "runs" / "compared-0001"
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "Agreement" in lines
    rows = [line for line in lines if line.startswith(("Local", "StoD/"))]
    assert [row.split()[0] for row in rows] == NAMES
    assert len({len(row.rpartition(".")[2]) for row in rows}) == 1  # as many decimals everywhere
    for words in ("Smaller is better.", "yes  talking helps", "no  silence helps", "–  3 were compared"):
        assert words in lines
    assert f"study      {path}" in lines
    assert f"pictures   {path / 'pictures' / 'consensus.png'}" in lines
    assert (path / "pictures" / "consensus.png").exists()
    for number, name in enumerate(NAMES, 1):
        assert f"part {number} of 3: {name}\n" in done.stderr
    assert "sgp  step 10/10" in done.stderr
    assert load_study(path).complete


def test_parameters_seed_and_parts_are_obeyed(cli: Any, own_study: Path, tmp_path: Path) -> None:
    options = ("--set", "steps=4", "--seed", "7", "--out", tmp_path / "s")
    done = cli("run", own_study, *options, "--only", "Local", "--only", "StoD/SGP")
    assert done.exit_code == 0, done.stderr
    assert "2 of 3 parts" in done.stdout
    assert "partial: some parts were not asked for" in done.stdout
    assert "pictures   none; run it with --pictures" in done.stdout
    run = load(tmp_path / "s" / "StoD" / "SGP")
    assert (run.manifest["seed"], run.metrics["step"].iloc[-1]) == (7, 4)
    assert not (tmp_path / "s" / "StoD" / "SGP-wild").exists()
    done = cli("run", own_study, *options)
    assert "part 1 of 3: Local: complete already" in done.stderr
    assert "yes  talking helps" in done.stdout
    assert load_study(tmp_path / "s").complete


def test_show_prints_parts_and_summary_again(cli: Any, own_study: Path, tmp_path: Path) -> None:
    ran = cli("run", own_study, "--set", "wild=1e30", "--set", "steps=100", "--out", tmp_path / "s")
    assert ran.exit_code == 0, ran.stderr
    assert "part 3 of 3: StoD/SGP-wild: failed: " in ran.stderr
    assert "StoD/SGP-wild  failed: " in ran.stdout
    done = cli("show", tmp_path / "s")
    assert done.exit_code == 0
    for words in ("compared", "Who agrees?", "Agreement", "yes  talking helps", "2 of 3 parts"):
        assert words in done.stdout
    assert re.search(r"Local +complete +[\d.]+ s", done.stdout)
    assert re.search(r"StoD/SGP-wild +failed", done.stdout)
    assert "lower the learning rate" in done.stdout
    assert "SGP(steps=100" in cli("show", tmp_path / "s" / "StoD" / "SGP").stdout


def test_trace_works_on_a_part_and_names_one_where_a_study_is_given(
    cli: Any, own_study: Path, tmp_path: Path
) -> None:
    cli("run", own_study, "--out", tmp_path / "s")
    assert "6 edges" in cli("trace", tmp_path / "s" / "StoD" / "SGP").stdout
    done = cli("trace", tmp_path / "s")
    assert done.exit_code == 4
    assert f"is a study of 3 runs; give one of them, such as {tmp_path / 's' / 'Local'}" in done.stderr


def test_list_sets_studies_apart(cli: Any, own_study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = scenarios._files()
    monkeypatch.setattr(scenarios, "_files", lambda: {**known, "own_study": own_study})
    done = cli("list")
    before, after = done.stdout.split("Studies, of several runs each:")
    assert "sgp_digits" in before
    assert "quickstart" in after
    assert re.search(r"own_study +My own study\.", after)
    assert "own_study" not in scenarios.known_scenarios()
    assert cli("run", "own-study", "--set", "steps=2").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "StoD/SPG"], "did you mean 'StoD/SGP'?"),
        (["--set", "step=3"], "did you mean 'steps'?"),
        (["--set", "steps=few"], "steps is 'few'; it must be a whole number"),
        (
            ["--set", "protocol.lr=3"],
            "set a parameter of its function study(): clients, steps, lr, wild, seed",
        ),
        (["--set", "steps=-1"], "line 21: Local: steps is -1"),
        (["--backend", "rey"], "did you mean 'ray'?"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_bad_input_ends_with_2_and_leaves_nothing(
    cli: Any, own_study: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    done = cli("run", own_study, *arguments)
    assert done.exit_code == 2, (done.stderr, done.exception)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(
    ("old", "new", "code", "words"),
    [
        ("return Study(", "return dict(", 2, "its function study() returned {'name'"),
        ('name="compared"', "name=undefined", 2, "own_study.py, line 19: NameError"),
        ('"Local": lambda: scenario(', '"Local": lambda: senario(', 2, "line 21: NameError"),
        ('"Local": lambda', '"a b": lambda', 2, "line 18: a part cannot be called 'a b'"),
        ('end["consensus"]', 'end["concensus"]', 3, "line 32: KeyError: 'concensus'"),
        (", seed: int = 0", "", 2, "has no parameter 'seed'; it has clients, steps, lr, wild"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_line(
    cli: Any, own_study: Path, old: str, new: str, code: int, words: str
) -> None:
    assert own_study.read_text().count(old) == 1
    own_study.write_text(own_study.read_text().replace(old, new))
    done = cli("run", own_study, "--seed", 1)
    assert done.exit_code == code, done.exception
    assert words in done.stderr


def test_runs_and_studies_do_not_share_a_directory(
    cli: Any, own: Path, own_study: Path, tmp_path: Path
) -> None:
    cli("run", own, "--out", tmp_path / "run")
    assert "already holds a run" in cli("run", own_study, "--out", tmp_path / "run").stderr
    cli("run", own_study, "--out", tmp_path / "study")
    assert "holds a study" in cli("run", own, "--out", tmp_path / "study").stderr
    done = cli("run", own_study, "--set", "lr=0.3", "--out", tmp_path / "study")
    assert done.exit_code == 2
    assert "protocol.lr is 0.1 there and 0.3 now" in done.stderr
    assert "go on with" not in done.stderr


def test_parts_are_of_studies_only(cli: Any, own: Path) -> None:
    done = cli("run", own, "--only", "x")
    assert done.exit_code == 2
    assert "--only chooses parts of a study" in done.stderr


def test_a_scenario_is_asked_for_and_a_study_found(own_study: Path) -> None:
    with pytest.raises(ValueError, match="is a study of several runs"):
        scenarios.load_scenario(str(own_study))


def test_ctrl_c_says_how_to_go_on(cli: Any, own_study: Path, tmp_path: Path) -> None:
    long = own_study.read_text().replace("SGP(steps=steps, lr=wild)", "SGP(steps=10**6, lr=wild)")
    own_study.write_text(long)
    process = start(tmp_path, "run", str(own_study), "--set", "steps=5", "--out", str(tmp_path / "s"))
    metrics = tmp_path / "s" / "StoD" / "SGP-wild" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 1):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert f"go on with: asyncfed run {own_study} --set steps=5 --out {tmp_path / 's'}" in errors
    assert "Traceback" not in errors
    shown = cli("show", tmp_path / "s").stdout
    assert "interrupted: what is complete is kept" in shown
    assert "no summary yet" in shown
    assert re.search(r"StoD/SGP +complete", shown)
    assert re.search(r"StoD/SGP-wild +interrupted", shown)


def test_on_a_terminal_every_part_has_its_bar(own_study: Path, tmp_path: Path) -> None:
    """A real terminal: the bars are drawn and gone at the end."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "ASYNCFED_RUNS": str(tmp_path / "runs"), "PYTHONUTF8": "1", "TERM": "xterm"}
    with subprocess.Popen(
        [*ASYNCFED, "run", str(own_study)], stdout=theirs, stderr=theirs, stdin=theirs, env=environment
    ) as process:
        os.close(theirs)
        written = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                written += os.read(ours, 65536)
            except OSError:  # its end, on Linux
                break
    os.close(ours)
    text = written.decode()
    assert process.returncode == 0, text
    for number, name in enumerate(NAMES, 1):
        assert f"part {number} of 3: {name}" in text
    assert "━" in text
    assert "Agreement" in text
    assert "Traceback" not in text
