"""Studies: run whole, in parts, interrupted and continued; what they refuse, and what they leave behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from asyncfed import (
    Result,
    RunError,
    RunExistsError,
    Scenario,
    ScenarioError,
    Study,
    StudyProgress,
    Summary,
    SummaryTable,
    TraceError,
    UnknownNameError,
    load,
    load_study,
    run,
    run_study,
)
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP, Local
from asyncfed.report import draw_curves
from asyncfed.runtime.directory import RunDirectory
from asyncfed.study.directory import WAITING, Ledger
from asyncfed.study.summary import as_text, text_columns
from tests.helpers import files_of
from topologies import edgeless, stochastic_directed

NAMES = ["Local", "StoD/SGP", "StoD/SGP-4a&b"]


def scenario(kind: str = "SGP", steps: int = 6, lr: float = 0.1, seed: int = 0) -> Scenario:
    local = kind == "Local"
    return Scenario(
        problem=quadratic(clients=3, dimension=2),
        topology=edgeless(3) if local else stochastic_directed(3, seed=1),
        protocol=Local(steps=steps, lr=lr) if local else SGP(steps=steps, lr=lr),
        seed=seed,
    )


def summarise(results: Mapping[str, Result]) -> Summary:
    rows = [{"part": name, "loss": result.metrics["loss"].iloc[-1]} for name, result in results.items()]
    return Summary(
        tables=[SummaryTable("Final loss", pd.DataFrame(rows), "of the last evaluation")],
        findings=[("all are here", np.bool_(len(results) == 3)), ("nothing more to say", None)],
        pictures={
            "loss": lambda path: draw_curves(
                path,
                {name: (result.metrics["step"], result.metrics["loss"]) for name, result in results.items()},
                xlabel="step",
                ylabel="loss",
            )
        },
    )


def small(**changes: Any) -> Study:
    """Three parts: nobody talks; SGP; SGP again, with `last` for its learning rate."""
    last, steps = changes.pop("last", 0.2), changes.pop("steps", 6)
    parts: dict[str, Callable[[], Scenario]] = {
        "Local": lambda: scenario("Local", steps),
        "StoD/SGP": lambda: scenario(steps=steps),
        "StoD/SGP-4a&b": lambda: scenario(steps=steps, lr=last),
    }
    return Study(**({"name": "small", "parts": parts, "summarise": summarise} | changes))


class Watch:
    """Keeps what it is told; stops the study, as Ctrl-C would, in the middle of a part."""

    def __init__(self, stop_in: str | None = None) -> None:
        self.told: list[tuple[str, str]] = []
        self.places: set[tuple[str, int, int]] = set()
        self._stop_in = stop_in

    def __call__(self, progress: StudyProgress) -> None:
        self.places.add((progress.part, progress.number, progress.total))
        if progress.run is None:
            self.told.append((progress.part, progress.status))
        elif progress.part == self._stop_in and progress.run.fraction > 0.4:
            raise KeyboardInterrupt

    def of(self, *statuses: str) -> list[tuple[str, str]]:
        return [told for told in self.told if told[1] in statuses]


def test_a_study_runs_every_part_and_summarises(tmp_path: Path) -> None:
    watch = Watch()
    result = run_study(small(note="A note."), out=tmp_path / "s", progress=watch)
    assert watch.of("running", "complete") == [(n, s) for n in NAMES for s in ("running", "complete")]
    assert watch.told[:3] == [(name, "checking") for name in NAMES]
    assert watch.places == {(name, place + 1, 3) for place, name in enumerate(NAMES)}
    assert result.complete
    assert list(result.results) == NAMES
    for name in NAMES:
        assert load(tmp_path / "s" / name).complete
    expected = [result.results[name].metrics["loss"].iloc[-1] for name in NAMES]
    assert result.table()["loss"].tolist() == expected
    assert result.results["Local"].manifest["scenario"] == "Local"
    again = load_study(tmp_path / "s")
    assert again.table("Final loss").to_dict() == result.table().to_dict()
    assert again.summary.findings == (("all are here", True), ("nothing more to say", None))
    assert again.summary.tables[0].notes == ("of the last evaluation",)
    assert again.summarised == NAMES
    assert pd.read_csv(tmp_path / "s" / "tables" / "final-loss.csv")["part"].tolist() == NAMES
    text = (tmp_path / "s" / "summary.txt").read_text()
    for words in ("small\nA note.\n", "Final loss", "StoD/SGP-4a&b", "yes  all are here", "evaluation"):
        assert words in text
    assert [path.name for path in again.pictures] == ["loss.png"]
    assert imread(again.pictures[0]).shape[1] > 400
    assert not list((tmp_path / "s").rglob(".*"))


def test_without_a_directory_it_goes_under_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCFED_RUNS", str(tmp_path))
    assert run_study(small(steps=2), pictures=False).path == tmp_path / "small-0001"
    assert not (tmp_path / "small-0001" / "pictures").exists()


def test_parts_are_built_one_at_a_time(tmp_path: Path) -> None:
    """Each once to be checked and once to be run, and none is kept."""
    built: list[str] = []

    def part(name: str) -> Callable[[], Scenario]:
        def build() -> Scenario:
            built.append(name)
            return scenario(steps=2)

        return build

    study = small(parts={name: part(name) for name in NAMES})
    assert built == []
    run_study(study, out=tmp_path / "s", pictures=False)
    assert built == NAMES + NAMES


def test_an_interrupted_study_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = run_study(small(), out=tmp_path / "whole")
    path = tmp_path / "s"
    with pytest.raises(KeyboardInterrupt):
        run_study(small(), out=path, progress=Watch(stop_in="StoD/SGP"))
    stopped = load_study(path)
    assert stopped.status == "interrupted"
    assert [state["status"] for state in stopped.parts.values()] == ["complete", "interrupted", "waiting"]
    assert list(stopped.results) == ["Local"]
    assert stopped.summary.tables == ()
    before = (path / "Local" / "run.json").stat().st_mtime_ns
    watch = Watch()
    result = run_study(small(), out=path, progress=watch)
    assert watch.of("kept", "running") == [
        ("Local", "kept"),
        ("StoD/SGP", "running"),
        ("StoD/SGP-4a&b", "running"),
    ]
    assert (path / "Local" / "run.json").stat().st_mtime_ns == before
    assert result.complete
    assert result.table().equals(whole.table())
    for name in NAMES:
        assert files_of(path / name) == files_of(tmp_path / "whole" / name)
    assert not list(path.rglob(".*"))


def test_a_kill_between_the_end_of_a_part_and_its_record_loses_nothing(tmp_path: Path) -> None:
    run_study(small(), out=tmp_path)
    content = json.loads((tmp_path / "study.json").read_text())
    content["parts"]["StoD/SGP"] = {"status": "running"}
    (tmp_path / "study.json").write_text(json.dumps(content | {"status": "running"}))
    watch = Watch()
    assert run_study(small(), out=tmp_path, progress=watch).complete
    assert watch.of("kept", "running") == [(name, "kept") for name in NAMES]


def test_an_interruption_just_after_a_part_keeps_it(tmp_path: Path) -> None:
    ledger = Ledger(RunDirectory(tmp_path), small(), dict.fromkeys(NAMES, WAITING))
    ledger.mark("Local", "running")
    run(scenario("Local"), out=tmp_path / "Local")
    ledger.close("interrupted", KeyboardInterrupt())
    stopped = load_study(tmp_path)
    assert stopped.status == "interrupted"
    assert stopped.parts["Local"] == {"status": "complete"}


def test_a_complete_study_is_only_summarised_again(tmp_path: Path) -> None:
    run_study(small(), out=tmp_path, pictures=False)
    watch = Watch()
    other = small(summarise=lambda results: Summary(findings=[("another summary", True)]))
    result = run_study(other, out=tmp_path, progress=watch)
    assert not watch.of("running")
    assert load_study(tmp_path).summary.findings == result.summary.findings == (("another summary", True),)


def test_a_study_may_grow(tmp_path: Path) -> None:
    run_study(small(), out=tmp_path, pictures=False)
    more = {**small().parts, "StoD/SGP-slow": scenario(lr=0.01)}
    watch = Watch()
    assert len(run_study(small(parts=more), out=tmp_path, progress=watch).results) == 4
    assert watch.of("running") == [("StoD/SGP-slow", "running")]
    with pytest.raises(RunExistsError, match=r"parts that this study does not have \(StoD/SGP-slow\)"):
        run_study(small(), out=tmp_path)


def test_a_part_that_diverges_does_not_stop_the_others(tmp_path: Path) -> None:
    parts = dict(reversed(small(last=1e30, steps=200).parts.items()))
    watch = Watch()
    result = run_study(small(parts=parts), out=tmp_path, progress=watch)
    assert watch.of("failed", "complete") == [
        ("StoD/SGP-4a&b", "failed"),
        ("StoD/SGP", "complete"),
        ("Local", "complete"),
    ]
    assert result.complete
    assert "lower the learning rate" in result.parts["StoD/SGP-4a&b"]["error"]
    assert result.table()["part"].tolist() == ["StoD/SGP", "Local"]
    assert result.summary.findings[0] == ("all are here", False)
    assert "failed  StoD/SGP-4a&b: " in (tmp_path / "summary.txt").read_text()
    assert load(tmp_path / "StoD" / "SGP-4a&b").status == "failed"


def test_what_diverged_is_summarised_too_where_the_study_asks_for_it(tmp_path: Path) -> None:
    def judge(results: Mapping[str, Result]) -> Summary:
        rows = [
            {"part": name, "complete": result.complete, "evaluations": len(result.metrics)}
            for name, result in results.items()
        ]
        return Summary([SummaryTable("Ends", pd.DataFrame(rows))])

    study = small(last=1e30, steps=200, summarise=judge, with_diverged=True)
    result = run_study(study, out=tmp_path, only=NAMES[1:])
    table = result.table().set_index("part")
    assert table["complete"].to_dict() == {"StoD/SGP": True, "StoD/SGP-4a&b": False}
    assert 1 <= table["evaluations"]["StoD/SGP-4a&b"] < table["evaluations"]["StoD/SGP"]
    assert list(result.results) == ["StoD/SGP"]
    assert load_study(tmp_path).summarised == NAMES[1:]
    assert "failed  StoD/SGP-4a&b: " in (tmp_path / "summary.txt").read_text()


def test_what_diverged_is_tried_again_only_where_asked_for_or_changed(tmp_path: Path) -> None:
    run_study(small(last=1e30, steps=100), out=tmp_path)

    def rerun(**options: Any) -> list[tuple[str, str]]:
        watch = Watch()
        last = options.pop("last", 1e30)
        run_study(small(last=last, steps=100), out=tmp_path, progress=watch, **options)
        return watch.of("running")

    assert rerun() == []
    assert rerun(only=[NAMES[2]]) == [(NAMES[2], "running")]
    assert rerun(last=0.2) == [(NAMES[2], "running")]
    assert load_study(tmp_path).parts[NAMES[2]] == {"status": "complete"}


def test_where_every_part_diverges_the_study_fails(tmp_path: Path) -> None:
    study = small(parts={"a": scenario(lr=1e30, steps=200)})
    with pytest.raises(RunError, match="no part came to its end: a: "):
        run_study(study, out=tmp_path)
    assert load_study(tmp_path).status == "failed"


def test_any_other_error_stops_the_study(tmp_path: Path) -> None:
    def stop(progress: StudyProgress) -> None:
        if progress.run is not None and progress.part == "StoD/SGP":
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        run_study(small(), out=tmp_path, progress=stop)
    result = load_study(tmp_path)
    assert (result.status, result.manifest["error"]) == ("failed", "the disk is full")
    assert [state["status"] for state in result.parts.values()] == ["complete", "failed", "waiting"]
    assert run_study(small(), out=tmp_path).complete


def test_only_some_parts(tmp_path: Path) -> None:
    result = run_study(small(), out=tmp_path, only=["StoD/SGP"])
    assert result.status == "partial"
    assert result.table()["part"].tolist() == ["StoD/SGP"]
    result = run_study(small(), out=tmp_path, only=["Local"])
    assert result.table()["part"].tolist() == ["Local", "StoD/SGP"]
    assert run_study(small(), out=tmp_path).complete
    with pytest.raises(UnknownNameError, match="did you mean 'StoD/SGP'"):
        run_study(small(), only=["StoD/SPG"])


@pytest.mark.parametrize("missing", [True, False])
def test_a_summary_that_fails_loses_no_part(tmp_path: Path, missing: bool) -> None:
    study = small(summarise=lambda results: Summary(findings=[(str(results["nobody"]), None)]))
    if missing:
        result = run_study(study, out=tmp_path, only=["Local"])
        assert result.summary.findings == (
            ("no summary without StoD/SGP, StoD/SGP-4a&b: KeyError: 'nobody'", None),
        )
        return
    with pytest.raises(RunError, match=r"KeyError: 'nobody'.*no complete part is run twice"):
        run_study(study, out=tmp_path)
    assert load_study(tmp_path).status == "failed"
    watch = Watch()
    assert run_study(small(), out=tmp_path, progress=watch).complete
    assert not watch.of("running")


def test_what_summarise_must_return(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="returned None, and not a Summary"):
        run_study(small(summarise=lambda results: None), out=tmp_path)


def test_a_picture_may_be_a_figure_and_one_that_fails_is_named(tmp_path: Path) -> None:
    pictures: dict[str, Any] = {"figure": Figure()}
    study = small(parts={"a": scenario()}, summarise=lambda results: Summary(pictures=pictures))
    assert run_study(study, out=tmp_path).pictures == [tmp_path / "pictures" / "figure.png"]
    pictures["nothing"] = lambda path: None
    with pytest.raises(RunError, match="a picture could not be drawn: FileNotFoundError"):
        run_study(study, out=tmp_path)


def test_final_variables_are_kept_where_the_study_needs_them(tmp_path: Path) -> None:
    def norms(results: Mapping[str, Result]) -> Summary:
        frame = pd.DataFrame({"rows": {name: len(result.final["inner"]) for name, result in results.items()}})
        return Summary([SummaryTable("Rows", frame)])

    study = small(summarise=norms, save_final=True)
    assert run_study(study, out=tmp_path).table()["rows"].tolist() == [3, 3, 3]


def test_other_settings_are_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    run_study(small(), out=tmp_path)
    before = files_of(tmp_path)
    with pytest.raises(RunExistsError, match=r"protocol\.steps is 6 there and 7 now"):
        run_study(small(steps=7), out=tmp_path)
    with pytest.raises(RunExistsError, match=r"protocol\.steps is 6 there and 7 now"):
        run_study(small(steps=7), out=tmp_path, only=["StoD/SGP"])
    with pytest.raises(RunExistsError, match="already holds the study 'small'"):
        run_study(small(name="other"), out=tmp_path)
    assert files_of(tmp_path) == before


def test_a_directory_with_runs_of_its_own_is_refused(tmp_path: Path) -> None:
    run(scenario(), out=tmp_path / "run")
    with pytest.raises(RunExistsError, match="already holds a run"):
        run_study(small(), out=tmp_path / "run")
    run(scenario(), out=tmp_path / "s" / "StoD" / "SGP")
    with pytest.raises(RunExistsError, match="not of this study"):
        run_study(small(), out=tmp_path / "s")
    assert not (tmp_path / "s" / "study.json").exists()


def test_a_complete_part_that_was_damaged_is_not_removed(tmp_path: Path) -> None:
    run_study(small(), out=tmp_path)
    (tmp_path / "Local" / "run.json").write_text("")
    with pytest.raises(TraceError, match="was complete, but"):
        run_study(small(), out=tmp_path)
    assert (tmp_path / "Local" / "metrics.jsonl").exists()


def test_two_processes_do_not_share_a_study(tmp_path: Path) -> None:
    run_study(small(), out=tmp_path)
    hold = (
        "import sys; from pathlib import Path; from asyncfed.study.directory import alone\n"
        "with alone(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunExistsError, match="another process is running the study"):
            run_study(small(), out=tmp_path)
    assert run_study(small(), out=tmp_path).complete


def test_a_mistake_in_the_last_part_is_told_before_the_first_runs(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {"fine": scenario(), "wrong": lambda: "no scenario"}
    with pytest.raises(ScenarioError, match="the part 'wrong' of the study 'small' is 'no scenario'"):
        run_study(small(parts=wrong), out=tmp_path / "s")
    with pytest.raises(ScenarioError, match="did you mean 'ray'"):
        run_study(small(), out=tmp_path / "s", backend="rey")  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "name",
    ["", "/a", "a/", "a//b", "..", "../a", "a/../b", ".a", "a b", "a\\b", "a\n", "study.json", "trace/a", 3],
)
def test_bad_names_of_parts(name: Any) -> None:
    with pytest.raises(
        ScenarioError, match=r"(a part cannot be called|Study: parts is .*; it must be a mapping from text)"
    ):
        small(parts={name: scenario()})


@pytest.mark.parametrize(
    ("names", "words"),
    [(["a", "A"], "capitals only"), (["a/b", "a"], "inside the part 'a'"), ([], "no parts")],
)
def test_names_of_parts_that_do_not_go_together(names: list[str], words: str) -> None:
    with pytest.raises(ScenarioError, match=words):
        small(parts=dict.fromkeys(names, scenario()))


def test_what_is_no_study(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there is no study"):
        load_study(tmp_path / "nothing")
    with pytest.raises(TraceError, match=r"it has no study\.json"):
        load_study(tmp_path)
    for text, words in [("{", "cannot be read"), ("[]", "is not a study's"), ("{}", "not the study.json")]:
        (tmp_path / "study.json").write_text(text)
        with pytest.raises(TraceError, match=words):
            load_study(tmp_path)
    (tmp_path / "study.json").write_text('{"format": "asyncfed-study", "version": 99}')
    with pytest.raises(TraceError, match="version 99"):
        load_study(tmp_path)


def test_tables_are_asked_for_by_title_or_place(tmp_path: Path) -> None:
    result = run_study(small(steps=2), out=tmp_path, pictures=False)
    assert result.table(-1) is result.table("Final loss")
    with pytest.raises(ScenarioError, match="no table 1"):
        result.table(1)
    with pytest.raises(UnknownNameError, match="did you mean 'Final loss'"):
        result.table("final los")


def test_a_table_is_flat_and_its_title_is_its_own() -> None:
    frame = pd.DataFrame(
        {("loss", "mean"): [1.0], ("loss", "sd"): [0.5]}, index=pd.Index(["SGP"], name="method")
    )
    assert list(SummaryTable("x", frame).frame.columns) == ["method", "loss mean", "loss sd"]
    assert list(SummaryTable("x", pd.DataFrame({"a": [1]}, index=["SGP"])).frame.columns) == ["", "a"]
    assert list(SummaryTable("x", pd.DataFrame({"a": [2, 1]}).sort_values("a")).frame.columns) == ["a"]
    with pytest.raises(ScenarioError, match="a title of its own"):
        Summary([SummaryTable("x!", frame), SummaryTable("X", frame)])
    with pytest.raises(ScenarioError, match="must be a pandas DataFrame"):
        SummaryTable("x", {"a": 1})  # type: ignore[arg-type]
    with pytest.raises(ScenarioError, match="a picture cannot be called 'a/b'"):
        Summary(pictures={"a/b": Figure()})


def test_numbers_of_a_column_share_their_decimals() -> None:
    frame = pd.DataFrame(
        {
            "method": ["PDBO", "4b SGP"],
            "accuracy": [0.93125, 0.9],
            "error": [1e-9, 2.0],
            "bytes": [12_345_678, 9],
            "range": ["0.9 ± 0.1", "–"],
            "gone": [None, 1.5],
            "holds": [True, False],
        }
    )
    columns = {name: (texts, right) for name, texts, right in text_columns(frame)}
    assert columns["method"] == (["PDBO", "4b SGP"], False)
    assert columns["accuracy"] == (["0.9313", "0.9000"], True)
    assert columns["error"] == (["1.00e-09", "2.00e+00"], True)
    assert columns["bytes"] == (["12,345,678", "9"], True)
    assert columns["range"] == (["0.9 ± 0.1", "–"], True)
    assert columns["gone"] == (["", "1.500"], True)
    assert columns["holds"] == (["yes", "no"], False)
    text = as_text(Summary([SummaryTable("T", frame[["method", "accuracy"]])]), "name", {})
    assert text == "name\n\nT\n\nmethod  accuracy\nPDBO      0.9313\n4b SGP    0.9000\n"


@pytest.mark.parametrize("log", [False, True])
def test_curves_are_drawn_with_and_without_a_band(tmp_path: Path, log: bool) -> None:
    x = np.arange(12)
    y = np.linspace(-0.1, 1, 12)
    series: dict[str, Any] = {f"method {k}": (x, y + k) for k in range(10)}
    series |= {"band": (x, y, y - 0.1, y + 0.1), "gone": (x, np.full(12, np.nan)), "list": ([1], [2.0])}
    path = draw_curves(
        tmp_path / "a.png", series, xlabel="step", ylabel="loss", title="t", logx=log, logy=log
    )
    assert imread(path).shape[:2] == (504, 864)
    draw_curves(tmp_path / "b.png", {"gone": series["gone"]}, xlabel="", ylabel="", logx=log, logy=log)
    for wrong in ((x,), (x, y[1:]), (x, y, y)):
        with pytest.raises(ScenarioError, match="the curve 'a' has values of shapes"):
            draw_curves(tmp_path / "c.png", {"a": wrong}, xlabel="", ylabel="")  # type: ignore[dict-item]
