"""What a run tells as it goes: to callbacks, which change nothing, and to whoever watches."""

from __future__ import annotations

import os
import pty
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from asyncfed import (
    Callback,
    CallbackError,
    EvaluationReport,
    MessageSummary,
    PhaseStart,
    Progress,
    Result,
    RunStart,
    Scenario,
    ScenarioError,
    Study,
    Summary,
    load,
    resume,
    run,
    run_study,
)
from asyncfed.errors import CallbackWarning
from asyncfed.problems import bilevel_quadratic, quadratic
from asyncfed.protocols import HGP, PDBO, SGP
from tests.helpers import files_of
from topologies import ring

SCENARIO = Scenario(quadratic(clients=3), ring(3), SGP(steps=12, lr=0.1, batch=None), evaluate_every=4)


class Listener(Callback):
    """Keeps all it is told, and spoils it."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def on_start(self, start: RunStart) -> None:
        self.heard.append(("start", (start.path.name, start.clients, start.resumed, start.evaluations)))
        start.data.clear()

    def on_evaluation(self, report: EvaluationReport) -> None:
        rows = [dict(row) for row in report.clients]
        self.heard.append(("evaluation", (report.number, dict(report.metrics), rows)))
        report.metrics.clear()
        for row in report.clients:
            row["client"] = None

    def on_phase(self, phase: PhaseStart) -> None:
        self.heard.append(("phase", phase.phase))

    def on_message_summary(self, summary: MessageSummary) -> None:
        self.heard.append(("messages", (summary.totals.sent, summary.since.sent)))

    def on_end(self, result: Result) -> None:
        self.heard.append(("end", result.complete))

    def on_error(self, error: BaseException) -> None:
        self.heard.append(("error", error))

    def of(self, kind: str) -> list[Any]:
        return [what for one, what in self.heard if one == kind]


class Fails(Callback):
    """Fails in one event, at its n-th time."""

    def __init__(self, event: str, after: int = 0) -> None:
        self._left = after
        setattr(self, event, self._fail)

    def _fail(self, what: Any) -> None:
        if self._left == 0:
            raise ValueError("no space left")
        self._left -= 1


def test_callbacks_hear_all_and_change_no_byte(tmp_path: Path) -> None:
    listener, second = Listener(), Listener()
    quiet = run(SCENARIO, out=tmp_path / "quiet")
    result = run(SCENARIO, out=tmp_path / "told", callbacks=[listener, second])
    assert files_of(result.path) == files_of(quiet.path)
    assert listener.of("start") == [("told", ("0", "1", "2"), 0, 0)]
    rows = result.metrics.to_dict("records")
    assert [number for number, _, _ in listener.of("evaluation")] == list(range(len(rows))) == [0, 1, 2, 3]
    told = [metrics for _, metrics, _ in listener.of("evaluation")]
    assert [{**row, "train_loss": None} for row in told] == [{**row, "train_loss": None} for row in rows]
    *_, (_, _, clients) = listener.of("evaluation")
    assert clients == result.clients.to_dict("records")
    assert listener.of("messages") == [(0, 0), (24, 24), (48, 24), (72, 24)]
    assert (listener.of("phase"), listener.of("end"), listener.of("error")) == (["sgp"], [True], [])
    assert [kind for kind, _ in listener.heard] == [kind for kind, _ in second.heard]
    assert second.of("evaluation") == listener.of("evaluation"), "each has its own copy"


def test_phases_come_in_turn_and_clients_by_their_names(tmp_path: Path) -> None:
    listener = Listener()
    method = PDBO(SGP(3, 0.1, batch=None), HGP(2), outer_steps=2, outer_lr=0.1)
    graph = nx.relabel_nodes(ring(3), {0: "ann", 1: "bob", 2: "cid"})
    run(Scenario(bilevel_quadratic(clients=3), graph, method), out=tmp_path / "run", callbacks=[listener])
    assert listener.of("phase")[:3] == ["sgp", "hgp", "sgp"]
    assert [row["client"] for row in listener.of("evaluation")[0][2]] == ["ann", "bob", "cid"]


@pytest.mark.parametrize("event", ["on_start", "on_evaluation", "on_phase", "on_message_summary", "on_end"])
def test_a_callback_that_fails_ends_the_run_readable_and_says_so(event: str, tmp_path: Path) -> None:
    listener = Listener()
    path = tmp_path / "run"
    with pytest.raises(
        CallbackError, match=rf"Fails failed in {event} \(ValueError: no space left\).*resume"
    ):
        run(SCENARIO, out=path, callbacks=[Fails(event), listener])
    if event == "on_end":
        assert load(path).complete
        return
    assert (load(path).status, load(path).manifest["kind"]) == ("failed", "CallbackError")
    assert len(load(path).metrics) == (event != "on_start")
    assert [type(error) for error in listener.of("error")] == [CallbackError]


def test_who_fails_while_a_run_fails_hides_nothing(tmp_path: Path) -> None:
    with (
        pytest.warns(CallbackWarning, match="Fails failed in on_error"),
        pytest.raises(CallbackError, match="on_start"),
    ):
        run(SCENARIO, out=tmp_path / "run", callbacks=[Fails("on_error"), Fails("on_start")])


def test_a_run_that_is_resumed_tells_what_was_not_told(tmp_path: Path) -> None:
    whole = run(SCENARIO, out=tmp_path / "whole")
    with pytest.raises(CallbackError):
        run(SCENARIO, out=tmp_path / "run", callbacks=[Fails("on_evaluation", 2)], checkpoint_every=1)
    listener = Listener()
    result = resume(tmp_path / "run", callbacks=[listener])
    assert files_of(result.path) == files_of(whole.path)
    ((_, _, resumed, before),) = listener.of("start")
    assert (resumed, before > 0) == (1, True)
    assert [number for number, _, _ in listener.of("evaluation")] == list(range(before, 4))
    told = listener.of("messages")
    assert [since for _, since in told[1:]] == [after - at for (at, _), (after, _) in pairwise(told)]
    assert told[-1][0] == 72


def test_every_part_of_a_study_tells(tmp_path: Path) -> None:
    listener = Listener()
    study = Study(
        name="two",
        parts={"a": lambda: SCENARIO, "b": lambda: SCENARIO},
        summarise=lambda results: Summary(),
    )
    run_study(study, out=tmp_path / "study", callbacks=[listener], progress=False)
    assert [name for name, *_ in listener.of("start")] == ["a", "b"]
    assert listener.of("end") == [True, True]


def test_what_is_no_callback_is_refused(tmp_path: Path) -> None:
    for wrong, said in (
        (Listener, "callbacks is .*; it must be a list"),
        ([Listener], "it must be an object whose class derives from asyncfed.Callback"),
        ([print], "it must be an object whose class derives from asyncfed.Callback"),
        ("abc", "callbacks is 'abc'; it must be a list"),
    ):
        with pytest.raises(ScenarioError, match=said):
            run(SCENARIO, out=tmp_path / "run", callbacks=wrong)  # type: ignore[arg-type]
    with pytest.raises(ScenarioError, match="'on_evalution'; did you mean 'on_evaluation'"):
        type("Misspelt", (Callback,), {"on_evalution": lambda self, report: None})
    with pytest.raises(ScenarioError, match="progress is 'yes'; it must be True to show it"):
        run(SCENARIO, out=tmp_path / "run", progress="yes")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


# --- whoever watches -------------------------------------------------------------------------------------


def test_nothing_is_shown_unless_asked_for_where_nobody_looks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[Progress] = []
    for place, progress in enumerate((None, False, told.append)):
        run(SCENARIO, out=tmp_path / str(place), progress=progress)
    assert capfd.readouterr() == ("", "")
    assert told[-1].fraction == 1.0
    run(SCENARIO, out=tmp_path / "shown", progress=True)
    out, err = capfd.readouterr()
    assert (out, err.count("step 12/12")) == ("", 1)


def test_a_terminal_shows_a_bar_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        run(SCENARIO, out=tmp_path / "run")
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert b"step 12/12" in shown
    assert capfd.readouterr() == ("", "")


def test_a_notebook_shows_a_bar_that_goes_when_the_run_ends(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(
                "from tests.test_callbacks import SCENARIO, run\n"
                "from asyncfed.errors import CallbackError\n"
                "from tests.test_callbacks import Fails\n"
                f"result = run(SCENARIO, out={str(tmp_path / 'well')!r})"
            ),
            nbformat.v4.new_code_cell(
                "try:\n"
                f"    run(SCENARIO, out={str(tmp_path / 'ill')!r}, callbacks=[Fails('on_evaluation', 3)])\n"
                "except CallbackError:\n    pass"
            ),
        ]
    )
    NotebookClient(
        notebook, timeout=60, resources={"metadata": {"path": str(Path(__file__).parents[1])}}
    ).execute()
    shown = [[output["data"]["text/html"] for output in cell.outputs] for cell in notebook.cells]
    assert shown[0] == [""]
    assert len(shown[1]) == 1
    assert "<progress max='1' value='" in shown[1][0]
