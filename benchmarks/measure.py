"""Measuring: interleaved, so that a noisy machine is noisy for everybody, and medians of what was seen."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from asyncfed import Scenario
from asyncfed.rng import Streams
from asyncfed.runtime.engine import Tick, execute
from asyncfed.runtime.local import LocalBackend
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


def stepping(scenario: Scenario, out: Path) -> tuple[Callable[[], None], TraceWriter]:
    """A function that makes the next step of a real local run, trace on; for scenarios in lockstep."""
    network = check(scenario)
    writer = TraceWriter(out, nodes=scenario.clients)
    dtype = torch.float64 if scenario.precision == "float64" else torch.float32
    backend = LocalBackend(scenario.problem, seed=scenario.seed, dtype=dtype, device="cpu")
    ticks: Iterator[object] = iter(
        execute(
            scenario.protocol,
            network,
            scenario.timing,
            scenario.weights,
            Streams(scenario.seed),
            backend,
            writer,
            scenario.evaluate_every,
        )
    )

    def step() -> None:
        while not isinstance(next(ticks), Tick):
            pass

    return step, writer
