"""Measuring: interleaved, so that a noisy machine is noisy for everybody, and medians of what was seen."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from asyncfed import Scenario
from asyncfed.rng import Streams
from asyncfed.runtime.evaluation import Evaluation
from asyncfed.runtime.local import LocalBackend
from asyncfed.runtime.loop import execute
from asyncfed.runtime.stage import Stage, Tick
from asyncfed.scenario import check
from asyncfed.trace import TraceWriter


def interleaved(contestants: dict[str, Callable[[], object]], *, rounds: int, steps: int) -> dict[str, float]:
    """Median over rounds of the seconds per step of each contestant, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        contestant()
    for _ in range(rounds):
        for name, contestant in contestants.items():
            started = time.perf_counter()
            for _ in range(steps):
                contestant()
            times[name].append((time.perf_counter() - started) / steps)
    return {name: statistics.median(values) for name, values in times.items()}


def local_stage(scenario: Scenario, out: Path) -> tuple[Stage, LocalBackend, TraceWriter]:
    """A real local run, trace on, without the runner around it."""
    scene = check(scenario)
    server = scenario.protocol.server is not None
    writer = TraceWriter(out, nodes=scene.network.n, server=scene.network.server if server else None)
    dtype = torch.float64 if scenario.precision == "float64" else torch.float32
    backend = LocalBackend(scenario.problem, seed=scenario.seed, dtype=dtype, device="cpu", server=server)
    stage = Stage(
        scene=scene,
        streams=Streams(scenario.seed),
        backend=backend,
        recorder=writer,
        itemsize=dtype.itemsize,
        evaluate_every=scenario.evaluate_every,
        enough=lambda evaluation: False,
    )
    return stage, backend, writer


def stepping(scenario: Scenario, out: Path, ticks: int = 1) -> tuple[Callable[[], None], TraceWriter]:
    """A function that makes the next steps of a real local run (in lockstep), or the next server rounds."""
    stage, _, writer = local_stage(scenario, out)
    items: Iterator[Tick | Evaluation] = iter(execute(scenario.protocol, stage))

    def step() -> None:
        made = 0
        while made < ticks:
            made += isinstance(next(items), Tick)

    return step, writer
