"""A report holds what was run and found, as text, in one small file; how it draws is tested in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
from html import unescape
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import asyncfed
from asyncfed import Scenario, Study, Summary, SummaryTable, run, run_study
from asyncfed.cli import app
from asyncfed.errors import ScenarioError
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP
from asyncfed.report import draw_curves, report
from topologies import ring, stochastic_directed


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two parts, a table with a paper's numbers, findings, a picture."""

    def summarise(results: object) -> Summary:
        table = pd.DataFrame(
            {"method": ["<b>SGP</b>", "DSGD"], "accuracy": [0.91, 0.88], "paper": [0.9, np.nan]}
        )
        return Summary(
            [SummaryTable("Table 1", table, "± is a standard error & more")],
            [("SGP wins by 0.03 ± 0.01", True), ("it is <fast>", False), ("nobody knows", None)],
            {"curves": lambda path: draw_curves(path, {"a": ([1, 2], [1, 2])}, xlabel="x", ylabel="y")},
        )

    parts = {
        name: Scenario(quadratic(clients=3), ring(3), SGP(steps=4, lr=lr))
        for name, lr in (("a", 0.1), ("b", 0.2))
    }
    path = tmp_path_factory.mktemp("report") / "study"
    run_study(Study("s<1>", parts, summarise, note="A note."), out=path, pictures=True)
    return path


def test_a_study_has_its_tables_findings_and_pictures(study: Path, tmp_path: Path) -> None:
    written = asyncfed.load_study(study).report(tmp_path / "r.html")
    text = written.read_text("utf-8")
    assert written.stat().st_size < 1_000_000
    static = text[: text.index('<script type="application/json"')]
    assert "<h2>The study s&lt;1&gt;</h2><p>A note.</p>" in static
    assert "<caption>Table 1</caption>" in static
    assert (
        '<td>&lt;b&gt;SGP&lt;/b&gt;</td><td class="number">0.9100</td><td class="number">0.9000</td>'
        in static
    )
    assert "<p>± is a standard error &amp; more</p>" in static
    assert '<li data-holds="yes">SGP wins by 0.03 ± 0.01</li>' in static
    assert '<li data-holds="no">it is &lt;fast&gt;</li><li data-holds="–">nobody knows</li>' in static
    picture = re.search(r'<img src="data:image/png;base64,([^"]+)" alt="curves">', static)
    assert picture
    assert base64.b64decode(picture[1]) == (study / "pictures" / "curves.png").read_bytes()
    assert asyncfed.load_study(study).report() == study / "report.html"


def test_the_command_in_it_runs_the_same_again(tmp_path: Path) -> None:
    scenario = Scenario(quadratic(clients=3), stochastic_directed(3, seed=2), SGP(steps=5, lr=0.1), seed=7)
    result = run(scenario, out=tmp_path / "it's a run")
    text = result.report().read_text("utf-8")
    command = re.search(r"<pre>(python -c .*?)</pre>", text)
    assert command
    assert result.path.name == "it's a run"
    words = unescape(command[1])
    assert f"asyncfed.load({str(result.path)!r})" in words.replace("'\"'\"'", "'")
    assert "<dt>scenario</dt><dd>scenario, 3 clients, seed 7</dd>" in text
    again = run(asyncfed.load(result.path).scenario, out=tmp_path / "again")
    assert again.metrics.equals(result.metrics)
    assert text == result.report(tmp_path / "other.html").read_text(
        "utf-8"
    )  # nothing in it changes by itself


def test_nothing_runs_in_it_but_what_was_put_in(study: Path, tmp_path: Path) -> None:
    text = report([study / "a"], tmp_path / "r.html").read_text("utf-8")
    script = re.search(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert script
    assert style
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])  # type: ignore[index]
    for kind, content in (("script", script[1]), ("style", style[1])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    assert not re.search(r"^(import|export) ", script[1], re.MULTILINE)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_a_problem_of_ones_own_says_that_its_file_is_needed(tmp_path: Path) -> None:
    scenario = Scenario(quadratic(clients=3), ring(3), SGP(steps=2, lr=0.1))
    result = run(scenario, out=tmp_path / "r")
    data = (result.path / "scenario.json").read_text().replace('"factory": "quadratic"', '"own": "mine"')
    (result.path / "scenario.json").write_text(data)
    assert "run it from the Python file" in result.report().read_text("utf-8")


def test_the_command_line_writes_it_and_refuses_nothing_at_all(study: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["report", str(study / "a"), str(study / "b"), "-o", str(tmp_path / "x" / "r.html")]
    )
    assert (done.exit_code, done.output.strip()) == (0, str(tmp_path / "x" / "r.html"))
    with pytest.raises(ScenarioError, match="at least one run"):
        report([], tmp_path / "r.html")
