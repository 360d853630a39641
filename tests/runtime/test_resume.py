"""What `resume` goes on with, to the same bytes, and what it refuses: with words that say what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncfed import (
    DivergenceError,
    Progress,
    RecoveredWarning,
    RunExistsError,
    Scenario,
    ScenarioError,
    Study,
    Summary,
    VirtualTime,
    load,
    resume,
    run,
    run_study,
)
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP
from tests.helpers import files_of
from topologies import ring, stochastic_directed

ROOT = Path(__file__).parents[2]
UNEVEN = VirtualTime("uniform(0.8, 1.2)", latency="exponential(0.3)", loss=0.05)


def scenario(steps: int = 60, **more: Any) -> Scenario:
    problem = quadratic(clients=4, dimension=3, noise=0.5, samples=5)
    method = SGP(steps, 0.02, batch=2)
    return Scenario(problem, stochastic_directed(4, seed=1), method, evaluate_every=7, timing=UNEVEN, **more)


class Enough(BaseException):
    """Nobody catches it."""


class Ending:
    """Ends a run after so many ticks."""

    def __init__(self, ticks: int) -> None:
        self._left = ticks

    def __call__(self, now: Progress) -> None:
        self._left -= 1
        if not self._left:
            raise Enough


def ended(out: Path, of: Scenario | None = None, ticks: int = 60, **options: Any) -> Path:
    """A run that did not come to its end, with checkpoints."""
    with pytest.raises(Enough):
        run(of or scenario(), out=out, progress=Ending(ticks), **{"checkpoint_every": 5, **options})
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the undisturbed run leaves."""
    return files_of(run(scenario(), out=tmp_path_factory.mktemp("whole") / "run").path)


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# --- what is refused -------------------------------------------------------------------------------------


def test_a_complete_run_is_refused(tmp_path: Path) -> None:
    run(scenario(5), out=tmp_path / "run")
    before = files_of(tmp_path / "run")
    with pytest.raises(ScenarioError, match="is complete; there is nothing to go on with"):
        resume(tmp_path / "run")
    assert files_of(tmp_path / "run") == before
    assert load(tmp_path / "run").complete


def test_a_run_that_diverged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError):
        run(Scenario(quadratic(clients=3), ring(3), SGP(400, 1e30)), out=tmp_path / "run", checkpoint_every=1)
    with pytest.raises(ScenarioError, match=r"would fail again.*lower the learning rate"):
        resume(tmp_path / "run")
    assert load(tmp_path / "run").status == "failed"


def test_other_versions_are_refused(tmp_path: Path) -> None:
    out = ended(tmp_path / "run")
    versions = json.loads((out / "scenario.json").read_text())["versions"]
    changed(out / "scenario.json", versions=versions | {"torch": "1.0.0"})
    with pytest.raises(ScenarioError, match=r"torch 1\.0\.0 then and .* now.*start it anew"):
        resume(out)


def test_another_scenario_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    out = ended(tmp_path / "run")
    with pytest.raises(ScenarioError, match=r"another scenario: protocol\.steps is 60 there and 61 now"):
        resume(out, scenario=scenario(61))
    assert load(out).status == "failed", "nothing was begun"


# --- one process at a time -------------------------------------------------------------------------------

WAITING = """
import sys
from asyncfed import run
from tests.runtime.test_resume import scenario

ticks = 0
def progress(now):
    global ticks
    ticks += 1
    if ticks == 60:
        print("here", flush=True)
        sys.stdin.read()

run(scenario(), out=sys.argv[1], checkpoint_every=5, progress=progress)
"""


def test_a_run_at_work_is_refused_and_a_killed_one_goes_on(tmp_path: Path, whole: dict[str, bytes]) -> None:
    out = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, str(out)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        with pytest.raises(RunExistsError, match=rf"process {process.pid} on .* is at work .* stop it first"):
            resume(out)
        os.kill(process.pid, signal.SIGKILL)
    assert (out / "run.lock").exists()
    assert load(out).status == "running"
    assert files_of(resume(out).path) == whole
    assert not (out / "run.lock").exists()


def test_the_lock_of_another_machine_counts_while_it_is_fresh(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    out = ended(tmp_path / "run")
    lock = out / "run.lock"
    lock.write_text(json.dumps({"pid": 4711, "host": "elsewhere.example"}))
    with pytest.raises(RunExistsError, match=r"process 4711 on elsewhere\.example is at work"):
        resume(out)
    assert json.loads(lock.read_text())["pid"] == 4711, "it is not ours to take away"
    os.utime(lock, (time.time() - 3600,) * 2)
    assert files_of(resume(out).path) == whole


# --- problems of one's own -------------------------------------------------------------------------------

OWN = """
import torch
from asyncfed import Scenario
from asyncfed.data import client_data_from_lists
from asyncfed.problems import Problem
from asyncfed.protocols import SGP
from topologies import ring

DECAY = 0.01


def weighted(weight):
    def loss(inner, outer, batch):
        return weight * (batch[0] - inner).square().mean() + penalty(inner)

    return loss


def penalty(inner):
    return DECAY * inner.square().sum() * 0.5


def scenario():
    data = client_data_from_lists([(torch.full((2, 3), 1.0 + client),) for client in range(3)])
    problem = Problem(
        name="mine", data=data, inner_loss=weighted(2.0), init_inner=lambda generator: torch.zeros(3)
    )
    return Scenario(problem, ring(3), SGP(40, 0.05), evaluate_every=7)
"""


def own(folder: Path, old: str = "", new: str = "") -> Scenario:
    """The scenario of a file in which something was changed."""
    assert old in OWN
    file = folder / "mine.py"
    file.write_text(OWN.replace(old, new) if old else OWN)
    spec = importlib.util.spec_from_file_location("mine", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(file.read_text(), file, "exec"), vars(module))  # no stale bytecode of the same second
    made: Scenario = module.scenario()
    return made


def test_a_problem_of_ones_own_goes_on_where_it_is_given(tmp_path: Path) -> None:
    undisturbed = files_of(run(own(tmp_path), out=tmp_path / "whole").path)
    out = ended(tmp_path / "run", own(tmp_path), 20)
    with pytest.raises(ScenarioError, match=r"resume\(path, scenario=…\).*--scenario FILE\.py"):
        resume(out)
    assert files_of(resume(out, scenario=own(tmp_path)).path) == undisturbed


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("* 0.5", "* 0.25", "the problem's code"),
        ("weighted(2.0)", "weighted(2.5)", "the problem's code"),
        ("DECAY = 0.01", "DECAY = 0.02", "the problem's code"),
        ("1.0 + client", "1.5 + client", "the problem's data"),
    ],
)
def test_a_problem_that_changed_meanwhile_is_refused(old: str, new: str, named: str, tmp_path: Path) -> None:
    out = ended(tmp_path / "run", own(tmp_path), 20)
    with pytest.raises(ScenarioError, match=rf"^{named} changed since .* go back to what it was"):
        resume(out, scenario=own(tmp_path, old, new))
    assert load(out).status == "failed"


# --- what goes on ----------------------------------------------------------------------------------------


def test_a_run_that_began_with_given_variables_goes_on(tmp_path: Path) -> None:
    initial = {"inner": torch.arange(12.0).reshape(4, 3)}
    undisturbed = files_of(run(scenario(), out=tmp_path / "whole", initial=initial).path)
    out = ended(tmp_path / "run", initial=initial)
    assert files_of(resume(out).path) == undisturbed
    begun_anew = ended(tmp_path / "anew", initial=initial, checkpoint_every=None)
    assert files_of(resume(begun_anew).path) == undisturbed


LONGER = '''"""Takes some seconds."""
from asyncfed import Scenario, VirtualTime
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP
from topologies import stochastic_directed

def scenario():
    problem = quadratic(clients=4, dimension=3, noise=0.5, samples=5)
    timing = VirtualTime("uniform(0.8, 1.2)", latency="exponential(0.3)", loss=0.05)
    method = SGP(700, 0.02, batch=2)
    return Scenario(problem, stochastic_directed(4, seed=1), method, evaluate_every=7, timing=timing)
'''


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(run(scenario(700), out=tmp_path_factory.mktemp("longer") / "run").path)


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGINT, 130, "stopped by the user"),
        (signal.SIGTERM, 143, "stopped by SIGTERM"),
        (signal.SIGHUP, 129, "stopped by SIGHUP"),
    ],
)
def test_a_signal_ends_a_run_where_it_can_be_gone_on_with(
    number: signal.Signals, code: int, words: str, tmp_path: Path, longer: dict[str, bytes]
) -> None:
    file, out = tmp_path / "scenario.py", tmp_path / "run"
    file.write_text(LONGER)
    command = [sys.executable, "-m", "asyncfed", "run", str(file), "--out", str(out)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        while not (out / "metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(process.pid, number)
        said = process.communicate()[1]
    assert process.returncode == code, said
    assert words in said
    assert f"asyncfed resume {out}" in said
    partial = load(out)
    assert partial.status == "interrupted"
    assert partial.manifest["error"] == words
    assert len(partial.metrics) >= 1
    assert len(list((out / "checkpoints").iterdir())) == 1, "though none was due for a minute"
    result = resume(out)
    assert files_of(result.path) == longer
    assert result.manifest["resumed"] == 1


# --- how often -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["60", "0s", "", "1d", "-5s", "nans", 0, -1, 2.5, True])
def test_a_checkpoint_every_that_means_nothing_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"checkpoint_every is .* it must be a time such as '60s'"):
        run(scenario(), out=tmp_path / "run", checkpoint_every=value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("every", "least"), [(5, 2), ("0.01s", 1), (None, 0), ("60s", 0)])
def test_checkpoints_come_by_steps_or_by_time_and_two_are_kept(
    every: Any, least: int, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    most, names = 0, set[str]()

    def progress(now: Progress) -> None:
        nonlocal most
        time.sleep(0.002)
        found = {path.name for path in (tmp_path / "run" / "checkpoints").glob("0*.safetensors")}
        names.update(found)
        most = max(most, len(found))

    result = run(scenario(), out=tmp_path / "run", checkpoint_every=every, progress=progress)
    assert len(names) >= least
    assert most <= 3, "two, and for a moment the new one"
    assert bool(names) == bool(least)
    assert files_of(result.path) == whole, "no checkpoint is left"


def test_of_a_run_that_was_ended_the_last_two_are_there(tmp_path: Path) -> None:
    out = ended(tmp_path / "run")
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert len(names) == 2
    assert int(names[1][:8]) == int(names[0][:8]) + 1 > 2
    assert not (ended(tmp_path / "none", checkpoint_every=None) / "checkpoints").exists()


def test_what_a_kill_left_of_a_checkpoint_is_gone_at_the_end(tmp_path: Path, whole: dict[str, bytes]) -> None:
    out = ended(tmp_path / "run")
    folder = out / "checkpoints" / ".00000099.safetensors.part"
    folder.mkdir()
    (folder / ".tmpAbCdEf").write_bytes(b"half")
    assert files_of(resume(out).path) == whole


# --- studies ---------------------------------------------------------------------------------------------


def study(steps: int = 60) -> Study:
    return Study(
        name="two",
        parts={"first": lambda: scenario(10), "second": lambda: scenario(steps)},
        summarise=lambda results: Summary(findings=[(f"{len(results)} parts", None)]),
    )


class EndingPart:
    """Ends a study in the middle of its second part."""

    def __init__(self) -> None:
        self._ticks = Ending(60)

    def __call__(self, now: Any) -> None:
        if now.part == "second" and now.run is not None:
            self._ticks(now.run)


def ended_study(out: Path) -> Path:
    with pytest.raises(Enough):
        run_study(study(), out=out, checkpoint_every=5, progress=EndingPart())
    return out


def test_a_study_goes_on_in_the_middle_of_a_part(tmp_path: Path, whole: dict[str, bytes]) -> None:
    out = ended_study(tmp_path / "study")
    seen: list[int] = []

    def watch(now: Any) -> None:
        if now.run is not None:
            seen.append(now.run.steps_done)

    result = run_study(study(), out=out, progress=watch)
    assert result.complete
    assert result.results["second"].manifest["resumed"] == 1
    assert min(seen) > 20, "not from its beginning"
    undisturbed = run_study(study(), out=tmp_path / "whole")
    assert files_of(out / "second") == files_of(undisturbed.path / "second")
    assert "resumed" not in result.results["first"].manifest


@pytest.mark.parametrize("what", ["study", "version"])
def test_a_part_that_would_come_to_another_end_is_run_afresh(what: str, tmp_path: Path) -> None:
    out = ended_study(tmp_path / "study")
    steps = 61 if what == "study" else 60
    words = r"protocol\.steps is 60 there and 61 now" if what == "study" else r"numpy 1\.0 then"
    if what == "version":
        told = out / "second" / "scenario.json"
        changed(told, versions=json.loads(told.read_text())["versions"] | {"numpy": "1.0"})
    with pytest.warns(RecoveredWarning, match=rf"second is run afresh: .*{words}"):
        result = run_study(study(steps), out=out)
    assert "resumed" not in result.results["second"].manifest
    undisturbed = run_study(study(steps), out=tmp_path / "whole")
    assert files_of(out / "second") == files_of(undisturbed.path / "second")
