"""list, run, show and trace, in this process."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncfed import load
from tests.trace import naive


def test_list_names_every_scenario_with_its_first_line(cli: Any) -> None:
    done = cli("list")
    assert done.exit_code == 0
    for name in ("quickstart", "stragglers", "fedavg", "dsgd", "local", "sgp_mnist", "large"):
        assert any(line.startswith(name) and len(line) > 40 for line in done.stdout.splitlines()), name


def test_run_prints_a_result_table_and_where_everything_is(cli: Any, own: Path, tmp_path: Path) -> None:
    done = cli("run", own, "--set", "steps=8")
    assert done.exit_code == 0, done.stderr
    run = tmp_path / "runs" / "mine-0001"
    assert "train loss" in done.stdout
    assert "test loss" in done.stdout
    assert f"asyncfed trace {run} --by edge --top 5" in done.stdout
    assert load(run).metrics["step"].iloc[-1] == 8


def test_seed_and_out_are_obeyed(cli: Any, own: Path, tmp_path: Path) -> None:
    assert cli("run", own, "--seed", "7", "--out", tmp_path / "here", "--save-final").exit_code == 0
    result = load(tmp_path / "here")
    assert result.manifest["seed"] == 7
    assert result.final["inner"].shape == (4, 3)


def test_a_value_called_scenario_serves_too(cli: Any, own: Path, tmp_path: Path) -> None:
    value = tmp_path / "value.py"
    value.write_text(own.read_text().replace("def scenario(", "def make(") + "\nSCENARIO = make()\n")
    assert cli("run", value, "--set", "protocol.steps=3", "--out", tmp_path / "v").exit_code == 0
    assert load(tmp_path / "v").metrics["step"].iloc[-1] == 3


def test_show_says_what_was_run(cli: Any, own: Path, tmp_path: Path) -> None:
    cli("run", own, "--out", tmp_path / "r")
    done = cli("show", tmp_path / "r")
    assert done.exit_code == 0
    for words in (
        "mine, 4 clients, seed 0",
        "quadratic(clients=4",
        "SGP(steps=10",
        "complete",
        "torch",
        "this process",
    ):
        assert words in done.stdout
    assert "train loss" in done.stdout


def test_show_says_that_a_run_is_partial(cli: Any, own: Path, tmp_path: Path) -> None:
    cli("run", own, "--out", tmp_path / "r")
    manifest = tmp_path / "r" / "run.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "status": "running"}))
    assert "partial run" in cli("show", tmp_path / "r").stdout


@pytest.mark.parametrize(
    ("by", "column", "count"),
    [("edge", "delivery rate", 12), ("node", "busy time", 4), ("phase", "kind", 1), ("step", "attempts", 10)],
)
def test_trace_tables(cli: Any, own: Path, tmp_path: Path, by: str, column: str, count: int) -> None:
    cli("run", own, "--out", tmp_path / "r")
    target = tmp_path / "table.csv"
    done = cli("trace", tmp_path / "r", "--by", by, "--csv", target)
    assert done.exit_code == 0
    assert column in done.stdout
    with target.open() as file:
        assert len(list(csv.DictReader(file))) == count


def test_top_and_sort_choose_rows_and_say_how_many_there_are(cli: Any, own: Path, tmp_path: Path) -> None:
    cli("run", own, "--out", tmp_path / "r")
    target = tmp_path / "table.csv"
    done = cli("trace", tmp_path / "r", "--top", 2, "--sort", "delivery_rate", "--ascending", "--csv", target)
    assert "2 of 12 edges" in done.stdout
    worst = load(tmp_path / "r").trace.edges()["delivery_rate"].min()
    with target.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    assert float(rows[0]["delivery_rate"]) == pytest.approx(worst)


def test_trace_of_one_edge_shows_its_messages(cli: Any, own: Path, tmp_path: Path) -> None:
    cli("run", own, "--out", tmp_path / "r")
    done = cli("trace", tmp_path / "r", "--edge", 0, 1)
    assert "10 messages from 0 to 1" in done.stdout


def test_rounds_of_a_run_with_a_server(cli: Any, own: Path, tmp_path: Path) -> None:
    cli("run", own, "--out", tmp_path / "r")
    shutil.rmtree(tmp_path / "r" / "trace")
    naive.write(tmp_path / "r" / "trace", 4, naive.SERVED, server=0)
    manifest = json.loads((tmp_path / "r" / "run.json").read_text())
    (tmp_path / "r" / "run.json").write_text(json.dumps({**manifest, "status": "interrupted"}))
    target = tmp_path / "table.csv"
    done = cli("trace", tmp_path / "r", "--by", "round", "--top", 2, "--csv", target)
    assert done.exit_code == 0, done.stderr
    assert "used late" in done.stdout
    assert "2 of 4 rounds" in done.stdout
    with target.open() as file:
        assert [row["answered"] for row in csv.DictReader(file)] == ["3", "2"]


def test_peers_have_no_rounds_and_are_told_what_they_have(cli: Any, own: Path, tmp_path: Path) -> None:
    cli("run", own, "--out", tmp_path / "r")
    done = cli("trace", tmp_path / "r", "--by", "round")
    assert done.exit_code == 4
    assert "no server" in done.stderr
    assert "--by step" in done.stderr


def test_a_run_that_sent_nothing_has_an_empty_trace_and_says_so(cli: Any, own: Path, tmp_path: Path) -> None:
    cli("run", own, "--set", "protocol=Local(steps=3, lr=0.1)", "--out", tmp_path / "r")
    done = cli("trace", tmp_path / "r")
    assert done.exit_code == 0
    assert "nothing was sent" in done.stdout


def test_a_csv_that_cannot_be_written_leaves_nothing_behind(cli: Any, own: Path, tmp_path: Path) -> None:
    cli("run", own, "--out", tmp_path / "r")
    done = cli("trace", tmp_path / "r", "--csv", tmp_path / "nowhere" / "t.csv")
    assert done.exit_code == 2
    assert "cannot write" in done.stderr
    folder = tmp_path / "is_a_folder.csv"
    folder.mkdir()
    assert cli("trace", tmp_path / "r", "--csv", folder).exit_code == 2
    assert not list(tmp_path.glob(".*.part"))


def test_pictures_are_drawn_where_asked_for(cli: Any, own: Path, tmp_path: Path) -> None:
    done = cli("run", own, "--out", tmp_path / "r", "--pictures")
    assert done.exit_code == 0, done.stderr
    assert str(tmp_path / "r" / "pictures" / "learning.png") in done.stdout
