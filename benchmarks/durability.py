"""What checkpoints cost, how soon a resumed run goes on, and (on demand) hundreds of kills."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from asyncfed import Progress, Scenario, load, resume, run
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP
from benchmarks.kills import Story
from benchmarks.problems import NEVER, reference
from benchmarks.table import Row
from topologies import random_graph


class _Enough(BaseException):
    """Ends a run."""


class _Until:
    """Ends a run when a share of its steps is done, or (with no share) at its first tick; says when."""

    def __init__(self, share: float = 0.0) -> None:
        self._share = share
        self.at = 0.0

    def __call__(self, now: Progress) -> None:
        if now.fraction >= self._share:
            self.at = time.perf_counter()
            raise _Enough


def checkpoints() -> list[Row]:
    """100 clients of 159,010 parameters; and a run of a million client steps, stopped at 90% and resumed."""
    with _folder() as folder:
        whole = run(reference(steps=60), out=folder / "large", checkpoint_every=10)
        taken = whole.manifest["checkpoints"]
        stopped = taken["stopped_seconds"] / taken["taken"]
        scenario = Scenario(
            quadratic(clients=100, dimension=2), random_graph(100, 10, seed=1), SGP(10_000, 0.01),
            evaluate_every=NEVER,
        )  # fmt: skip
        with contextlib.suppress(_Enough):
            run(scenario, out=folder / "long", checkpoint_every=500, progress=_Until(0.9))
        first = _Until()
        began = time.perf_counter()
        with contextlib.suppress(_Enough):
            resume(folder / "long", progress=first)
        waited = first.at - began
    return [
        Row("checkpoint, MLP, n=100: mathematics stopped", f"{stopped:.3f} s", "≤ 0.3 s", stopped <= 0.3),
        Row("resume at 90% of 10⁶ client steps: first step after", f"{waited:.2f} s", "≤ 10 s", waited <= 10),
    ]


def kills(count: int = 200, seed: int = 0) -> list[Row]:
    """The driver, at random instants, over all kinds in turn."""
    from benchmarks.kills import KINDS, Undisturbed, killed_driver

    chance = random.Random(seed)
    with _folder() as folder:
        whole = Undisturbed(folder)
        stories = (killed_driver(kind, whole, folder, chance) for kind in itertools.cycle(KINDS))
        return [_told("the driver killed", stories, count)]


def actor_kills(count: int = 50, seed: int = 0) -> list[Row]:
    """Actors of this machine's Ray, at random ticks."""
    from benchmarks.kills import KINDS, files_of, killed_actors

    chance, expected = random.Random(seed), {}
    kinds = [kind for kind in KINDS if "Ray" in kind.name]
    with _folder() as folder:
        for kind in kinds:
            kind.start(folder / kind.name)
            expected[kind.name] = files_of(folder / kind.name)
        cycle = itertools.cycle(kinds)
        stories = (killed_actors(kind, expected[kind.name], folder, chance) for kind in cycle)
        return [_told("actors killed", stories, count)]


def _told(what: str, stories: Iterator[Story], count: int) -> Row:
    """Stories until so many were killed."""
    killed = runs = same = 0
    while killed < count:
        story = next(stories)
        killed, runs, same = killed + story.kills, runs + 1, same + (not story.wrong)
        print(f"{killed:4d} kills  {story.kind}: {story.wrong or 'the same'}", flush=True)
    return Row(what, f"{killed} kills, {runs} runs, {same} of them the same bytes", "all", same == runs)


def node_kills(count: int = 10) -> list[Row]:
    """Nodes of a cluster of three, in the middle of a run; each comes back afterwards."""
    from benchmarks.kills import difference, files_of
    from tests.runtime.clusters import machines
    from tests.runtime.drivers import Driver

    same = 0
    with (
        _folder() as folder,
        machines(3, cpus=2) as cluster,
        Driver(cluster.address, cluster.environment) as driver,
    ):
        for number in range(count + 1):
            out = folder / f"run {number}"
            driver.begin("peers", out, clients_per_actor=2, checkpoint_every=2)
            lost = None
            if number:  # the first is undisturbed
                away = [one.node for one in cluster.actors() if one.node != cluster.all[0].node]
                lost = cluster.kill(cluster.number(away[number % len(away)]))
            driver.go_on()
            ended = driver.ended()
            wrong = difference(files_of(folder / "run 0"), files_of(out))
            left = cluster.left_over()
            if lost is not None:
                same += ended == "complete" and not wrong and not left
                print(f"{number:4d} nodes  {ended} {wrong or 'the same'}", flush=True)
                cluster.all.remove(lost)
                cluster.add()
    return [Row("nodes killed", f"{count} kills, {same} runs the same bytes", "all", same == count)]


def memory_kills(count: int = 3) -> list[Row]:
    """Memory grows short in the middle of a run, and Ray kills workers until there is enough again."""
    from benchmarks.kills import KINDS, difference, files_of

    kind = next(kind for kind in KINDS if "Ray, packed" in kind.name)
    machine = psutil.virtual_memory()
    threshold = 1 - machine.available / machine.total + 0.15
    os.environ |= {
        "RAY_memory_usage_threshold": f"{threshold:.3f}", "RAY_memory_monitor_refresh_ms": "100",
    }  # fmt: skip
    same = 0
    with _folder() as folder:
        kind.start(folder / "run 0")
        for number in range(1, count + 1):
            hog = _Hog(threshold)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kind.start(folder / f"run {number}", progress=hog)
            recoveries = load(folder / f"run {number}").manifest["recoveries"]
            wrong = difference(files_of(folder / "run 0"), files_of(folder / f"run {number}"))
            same += not wrong and any("low on memory" in one["error"] for one in recoveries)
            print(f"{len(recoveries):4d} recoveries  {wrong or 'the same'}", flush=True)
    said = f"{count} times, {same} runs the same bytes"
    return [Row("Ray kills for want of memory", said, "all", same == count)]


class _Hog:
    """Takes more memory than Ray lets be used, at one tick of a run, for a second."""

    def __init__(self, threshold: float) -> None:
        self._threshold, self._ticks = threshold, 0

    def __call__(self, now: Progress) -> None:
        self._ticks += 1
        if self._ticks == 40:
            machine = psutil.virtual_memory()
            missing = self._threshold - (1 - machine.available / machine.total) + 0.03
            taken = np.ones(int(missing * machine.total), dtype=np.uint8)
            time.sleep(1)
            del taken


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """In memory where that can be had, so that a slow disk is not measured."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)
