"""Runs that are killed at random instants and resumed: do they end with the same bytes?

Twenty small scenarios of all kinds (methods, timings, servers, presence; in this process and on Ray). Each is
run once undisturbed. Then it is run again in a process of its own, which gets SIGKILL at a random instant;
what is left is read, resumed, killed again now and then, and compared file by file.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from asyncfed import Progress, RecoveredWarning, Scenario, VirtualTime, load, resume, run
from asyncfed.network import DrawnPresence
from asyncfed.problems import bilevel_quadratic, classification, quadratic
from asyncfed.protocols import (
    HGP,
    PDBO,
    SGP,
    VRHGP,
    AggITD,
    AsyncSGP,
    Buffered,
    EstimateHypergradient,
    FedAvg,
    FedBuff,
    FedNest,
    FedProx,
    LocalSteps,
    Neumann,
    PushDIGing,
    PushPull,
    Scaffold,
    Server,
    SimFBO,
)
from topologies import ring, star, stochastic_directed, stochastic_undirected

CLIENTS = 6
_STEPS = LocalSteps(0.05, steps=2, batch=2)
_QUORUM, _BUFFER = Server(quorum=0.5, late="next"), Buffered(size=2)
_UNEVEN = VirtualTime("uniform(0.9, 1.1)", latency="exponential(0.2)", loss=0.05)
_AWAY = replace(_UNEVEN, presence=DrawnPresence("weibull(20, 0.8)", "exponential(3)"))


@dataclass(frozen=True)
class Kind:
    """A scenario by name, and how it is run."""

    name: str
    make: Callable[[], Scenario]
    options: tuple[tuple[str, Any], ...] = ()

    def start(self, out: Path, **more: Any) -> None:
        run(self.make(), out=out, save_final=True, checkpoint_every=25, **{**dict(self.options), **more})


def _peers(protocol: Any, directed: bool = True, **more: Any) -> Callable[[], Scenario]:
    def make() -> Scenario:
        graph = (stochastic_directed if directed else stochastic_undirected)(CLIENTS, seed=5)
        problem = bilevel_quadratic if protocol.needs_outer else quadratic
        return Scenario(problem(clients=CLIENTS, seed=2), graph, protocol, **more)

    return make


def _served(protocol: Any, **more: Any) -> Callable[[], Scenario]:
    def make() -> Scenario:
        problem = bilevel_quadratic(clients=CLIENTS, seed=2, noise=0.3, samples=5)
        return Scenario(problem, star(CLIENTS, up=0.8, down=0.9), protocol, **more)

    return make


def _digits() -> Scenario:
    problem = classification("digits", clients=CLIENTS, model="mlp:32")
    return Scenario(problem, ring(CLIENTS), SGP(400, 0.1, batch=16))


_PDBO = PDBO(SGP(60, 0.05, batch=2), VRHGP(20, expectations="exact", lr=0.01), outer_steps=3, outer_lr=0.1)
_TWO, _EACH = (("backend", "ray"), ("clients_per_actor", 3)), (("backend", "ray"), ("clients_per_actor", 1))

KINDS = (
    Kind("SGP", _peers(SGP(800, 0.02, batch=2))),
    Kind("SGP in virtual time", _peers(SGP(450, 0.02, batch=2), timing=_UNEVEN)),
    Kind("SGP, clients come and go", _peers(SGP(500, 0.02, batch=2), timing=_AWAY)),
    Kind("SGP on digits", _digits),
    Kind("AsyncSGP", _peers(AsyncSGP(700, 0.02, omega0=0.5, batch=2), timing=_UNEVEN)),
    Kind("Push-DIGing", _peers(PushDIGing(1000, 0.02, batch=2))),
    Kind("Push-Pull", _peers(PushPull(700, 0.02, batch=2), timing=_UNEVEN)),
    Kind("PDBO", _peers(_PDBO)),
    Kind("HGP", _peers(EstimateHypergradient(SGP(400, 0.05, batch=2), HGP(300)))),
    Kind("FedAvg", _served(FedAvg(350, _STEPS))),
    Kind("FedAvg with a quorum", _served(FedAvg(200, _STEPS, server=_QUORUM), timing=_UNEVEN)),
    Kind("FedProx", _served(FedProx(300, _STEPS, mu=0.1))),
    Kind("FedNest", _served(FedNest(60, _STEPS, _STEPS, neumann=Neumann(terms=3, scale=0.3)))),
    Kind("AggITD", _served(AggITD(80, _STEPS, _STEPS, inner_rounds=2, scale=0.3))),
    Kind("SCAFFOLD", _served(Scaffold(400, _STEPS))),
    Kind("FedBuff", _served(FedBuff(200, _STEPS, server=_BUFFER), timing=_UNEVEN)),
    Kind("SimFBO, buffered", _served(SimFBO(200, _STEPS, 0.05, server=_BUFFER), timing=_AWAY)),
    Kind("SGP on Ray, an actor each", _peers(SGP(150, 0.02, batch=2)), _EACH),
    Kind("SGP in virtual time on Ray, packed", _peers(SGP(150, 0.02, batch=2), timing=_UNEVEN), _TWO),
    Kind("FedBuff on Ray, packed", _served(FedBuff(120, _STEPS, server=_BUFFER), timing=_UNEVEN), _TWO),
)  # fmt: skip


# --- killing the driver ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Story:
    """What became of a run that was killed."""

    kind: str
    kills: int
    wrong: str  # "" where it ended as the undisturbed one


class Undisturbed:
    """Every kind run once, and how long that took."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[dict[str, bytes], float]] = {}

    def of(self, kind: Kind) -> tuple[dict[str, bytes], float]:
        """What it leaves, and its seconds."""
        if kind.name not in self._known:
            out = self._folder / f"whole {kind.name}"
            began = time.perf_counter()
            died = ended(begun(_start, kind.name, out, log=self._folder / "log"))
            assert not died, f"{kind.name} ended with {died}; see {self._folder / 'log'}"
            self._known[kind.name] = files_of(out), time.perf_counter() - began
        return self._known[kind.name]


def killed_driver(kind: Kind, whole: Undisturbed, folder: Path, chance: random.Random) -> Story:
    """Kill the driver at a random instant (and what goes on from there, one time in three), then resume."""
    expected, seconds = whole.of(kind)
    out, log = folder / "run", folder / "log"
    shutil.rmtree(out, ignore_errors=True)
    kills, process = 0, begun(_start, kind.name, out, log=log)
    while True:
        time.sleep(chance.uniform(0, seconds))
        kills += killed(process)
        if not (out / "run.json").exists():  # before it had begun
            shutil.rmtree(out, ignore_errors=True)
            process = begun(_start, kind.name, out, log=log)
            continue
        if load(out).complete:
            break
        process = begun(_gone_on_with, out, log=log)
        if chance.random() < 0.67:
            died = ended(process)
            if died:
                return Story(kind.name, kills, f"resume ended with {died}; see {log}")
            break
    return Story(kind.name, kills, difference(expected, files_of(out)))


def _start(name: str, out: Path) -> None:
    next(kind for kind in KINDS if kind.name == name).start(out)


def _gone_on_with(out: Path) -> None:
    load(out).trace.edges()  # what a kill left can be read
    resume(out)


# --- killing actors --------------------------------------------------------------------------------------


class ActorKiller:
    """Kills one of this process's actors at some ticks of a run."""

    def __init__(self, at: list[int], chance: random.Random) -> None:
        self._at, self._chance, self._ticks = sorted(at), chance, 0
        self.killed = 0

    def __call__(self, now: Progress) -> None:
        self._ticks += 1
        if self._at and self._ticks >= self._at[0]:
            self._at.pop(0)
            os.kill(self._chance.choice(sorted(actors())), signal.SIGKILL)
            self.killed += 1


def actors() -> list[int]:
    """The processes of this process's actors."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (process.cmdline() or [""])[0].startswith("ray::Node"):
                found.append(process.pid)
    return found


def actors_left() -> list[int]:
    """Those that are still there; killed ones take a moment to be gone."""
    for _ in range(100):
        if not (found := actors()):
            return []
        time.sleep(0.1)
    return found


def killed_actors(kind: Kind, expected: dict[str, bytes], folder: Path, chance: random.Random) -> Story:
    """Kill two actors of a run at random ticks; it goes on by itself."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    killer = ActorKiller([chance.randint(1, 80), chance.randint(1, 80)], chance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecoveredWarning)
        kind.start(out, progress=killer)
    wrong = difference(expected, files_of(out))
    left = actors_left()
    return Story(kind.name, killer.killed, wrong or (f"{len(left)} actors are left" if left else ""))


# --- processes -------------------------------------------------------------------------------------------


_SERVER = multiprocessing.get_context("forkserver")  # a clean process that forks: ours may have a Ray
_SERVER.set_forkserver_preload(["benchmarks.kills"])


def begun(target: Callable[..., None], *arguments: Any, log: Path) -> BaseProcess:
    """Do something in a process of its own, which says to `log` what goes wrong."""
    process = _SERVER.Process(target=_logged, args=(str(log), target, *arguments))
    process.start()
    return process


def _logged(log: str, target: Callable[..., None], *arguments: Any) -> None:
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    target(*arguments)


def killed(process: BaseProcess) -> int:
    """End a process on the spot; 1 if it was still there."""
    process.kill()
    process.join()
    return int(process.exitcode == -signal.SIGKILL)


def ended(process: BaseProcess) -> int | None:
    """How a process ended by itself: 0 if well."""
    process.join()
    return process.exitcode


def files_of(path: Path) -> dict[str, bytes]:
    """All that a run leaves, except for how it went."""
    found = (file for file in sorted(path.rglob("*")) if file.is_file() and file.name != "run.json")
    return {str(file.relative_to(path)): file.read_bytes() for file in found}


def difference(expected: dict[str, bytes], found: dict[str, bytes]) -> str:
    """The files that differ, or are there on one side only; "" where there are none."""
    names = sorted(expected.keys() | found.keys())
    return ", ".join(name for name in names if expected.get(name) != found.get(name))
