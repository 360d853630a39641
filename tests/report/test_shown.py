"""In a notebook, objects show themselves: in words that are never markup, and in figures."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import networkx as nx
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from asyncfed import (
    Result,
    Scenario,
    Study,
    StudyResult,
    Summary,
    SummaryTable,
    Trace,
    VirtualTime,
    hypergradient,
    run,
    run_study,
)
from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.explorer.windows import MOST_ARROWS
from asyncfed.problems import bilevel_quadratic, quadratic
from asyncfed.protocols import SGP
from topologies import ring, stochastic_directed

HOSTILE = "<script>alert('$x^$')</script>"
NODES = ["<img src=x>", "b$^$", "c"]


def scenario(steps: int = 12) -> Scenario:
    graph = nx.relabel_nodes(stochastic_directed(3, probability=0.7, seed=1), dict(enumerate(NODES)))
    timing = VirtualTime("exponential(1.0)", latency=0.3, loss=0.1)
    return Scenario(quadratic(clients=3), graph, SGP(steps, lr=0.05), timing, name=HOSTILE)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(scenario(), out=tmp_path_factory.mktemp("shown") / "a<b>run")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    frame = pd.DataFrame({HOSTILE: ["<b>"] * 61, "n": range(61)})
    summary = Summary([SummaryTable("T<1>", frame, "a <note>")], [("it is <fast>", False)])
    part = Scenario(quadratic(clients=3), ring(3), SGP(steps=2, lr=0.1))
    out = tmp_path_factory.mktemp("shown") / "study"
    return run_study(Study("s<1>", {"a": part}, lambda _: summary), out=out)


class Seen(HTMLParser):
    """What a browser would make of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def seen(shown: object) -> Seen:
    found = Seen(shown._repr_html_())  # type: ignore[attr-defined]
    assert found.tags <= {"table", "caption", "thead", "tbody", "tr", "th", "td", "div", "p"}
    assert found.attributes <= {"scope", "class"}
    return found


def test_a_scenario_shows_what_it_prints() -> None:
    shown = scenario()
    words = seen(shown).cells
    assert words[0] == f"Scenario {HOSTILE}, seed 0, float32"
    assert [word for word in words[2::2] if word not in repr(shown)] == []


def test_a_result_shows_what_was_run_and_found(result: Result) -> None:
    words = seen(result).cells
    pairs = dict(zip(words[1::2], words[2::2], strict=True))
    assert pairs["run"] == str(result.path)
    assert pairs["scenario"].startswith(HOSTILE)
    assert f"loss {result.metrics['loss'].iloc[-1]:,.5g}" in pairs["last evaluation"]


def test_a_trace_shows_what_became_of_its_messages(result: Result) -> None:
    words = seen(result.trace).cells
    pairs = dict(zip(words[1::2], words[2::2], strict=True))
    totals = result.trace.totals()
    assert pairs["nodes"] == "3"
    assert totals.delivered * totals.link_down * totals.carried > 0
    for name in ("delivered", "link_down", "carried", "bytes"):
        assert pairs[name.replace("_", " ")] == f"{getattr(totals, name):,}"


def test_an_estimate_shows_its_error_and_its_cost(tmp_path: Path) -> None:
    problem = bilevel_quadratic(clients=3, seed=1)
    estimate = hypergradient(problem, ring(3), inner=SGP(20, lr=0.1), rounds=5, out=tmp_path / "<e>")
    words = seen(estimate).cells
    pairs = dict(zip(words[1::2], words[2::2], strict=True))
    assert pairs["error"].startswith(f"{estimate.error:.3g} of ")
    assert pairs["cost"].startswith(f"{estimate.rounds} rounds, {estimate.messages} messages")
    assert pairs["run"] == str(tmp_path / "<e>")


def test_a_study_shows_its_tables_and_findings(study: StudyResult) -> None:
    words = seen(study).cells
    assert words[0] == "s<1>"
    assert words[words.index("parts") + 1] == "1 complete"
    assert {"T<1>", HOSTILE, "a <note>", "1 more rows"} <= set(words)
    assert words.count("<b>") == 60
    assert words[-2:] == ["no", "it is <fast>"]


PLOTS: list[Callable[[Result], Figure]] = [
    lambda result: result.plot(),
    lambda result: result.trace.plot.network(),
    lambda result: result.trace.plot.timeline(),
    lambda result: result.trace.plot.matrix(),
]


@pytest.mark.parametrize("plot", PLOTS, ids=["learning", "network", "timeline", "matrix"])
def test_a_figure_shows_itself_whatever_names_say(plot: Callable[[Result], Figure], result: Result) -> None:
    """Names with dollars are not mathematics: these would not even parse."""
    picture = plot(result)._repr_png_()  # type: ignore[attr-defined]
    assert picture.startswith(b"\x89PNG")


def test_the_matrix_is_the_traces(result: Result) -> None:
    (axes, _) = result.trace.plot.matrix("bytes").axes
    drawn = np.ma.getdata(axes.images[0].get_array())
    expected = result.trace.matrix("bytes").astype(float)
    np.fill_diagonal(expected, np.nan)
    np.testing.assert_array_equal(drawn, expected)
    assert [label.get_text() for label in axes.get_yticklabels()] == NODES


def test_both_directions_of_a_link_are_drawn_by_their_own_rates(result: Result) -> None:
    (axes, _) = result.trace.plot.network(places=np.array([[0, 0], [1, 0], [0, 1]])).axes
    (lines,) = (one for one in axes.collections if hasattr(one, "get_segments"))
    edges = result.trace.edges()
    np.testing.assert_array_equal(lines.get_array(), edges["delivery_rate"])
    there, back = (
        lines.get_segments()[edges.index[(edges["sender"] == a) & (edges["receiver"] == b)][0]]
        for a, b in ((NODES[0], NODES[1]), (NODES[1], NODES[0]))
    )
    np.testing.assert_allclose(there, [[0, -0.006], [1, -0.006]])  # on the right hand, going right
    np.testing.assert_allclose(back, [[1, 0.006], [0, 0.006]])


def test_the_timeline_has_every_message_of_its_window(result: Result) -> None:
    messages = result.trace.to_pandas()
    last = np.fmax(messages["sent_at"], messages["arrived_at"])
    inside = messages[(messages["sent_at"] < 6) & (last >= 2)]
    (axes,) = result.trace.plot.timeline(2, 6).axes
    assert axes.get_title() == f"{len(inside)} messages"
    legend = axes.get_legend()
    assert legend is not None
    counts = dict(re.findall(r"(.+) \((\d+)\)", "\n".join(text.get_text() for text in legend.texts)))
    expected = inside["status"].value_counts()
    assert counts == {name.replace("_", " "): str(count) for name, count in expected.items() if count}
    assert axes.get_xlim() == (2, 6)


def test_a_long_timeline_is_counted(tmp_path: Path) -> None:
    trace = run(scenario(steps=800), out=tmp_path / "r").trace
    assert len(trace) > MOST_ARROWS
    axes, _ = trace.plot.timeline().axes
    assert int(axes.images[0].get_array().sum()) == len(trace)  # type: ignore[union-attr]


def test_of_nothing_a_figure_says_so(tmp_path: Path) -> None:
    trace = Trace(tmp_path, nodes=3)
    for figure in (trace.plot.network(), trace.plot.timeline()):
        (axes,) = figure.axes
        assert axes.texts[0].get_text().startswith("nothing")


def test_what_cannot_be_drawn_is_named(result: Result) -> None:
    plots = result.trace.plot
    for draw in (plots.matrix, plots.network):
        with pytest.raises(UnknownNameError, match=r"'byte'.*bytes"):
            draw("byte")
    with pytest.raises(ScenarioError, match=r"from 3 to 3 is empty"):
        plots.timeline(3, 3)
    with pytest.raises(ScenarioError, match=r"\(2, 2\); it must be \(3, 2\)"):
        plots.network(places=np.zeros((2, 2)))
