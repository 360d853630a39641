"""The local backend against the bare mathematics, step by step in turns."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.bare import HandBatched, VmappedLoop
from benchmarks.measure import interleaved, stepping
from benchmarks.problems import LR, reference, small
from benchmarks.table import Row


def reference_work(rounds: int = 12) -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        scenario = reference(steps=1 + 3 * (rounds + 1))
        step, writer = stepping(scenario, Path(directory))
        bare = VmappedLoop(scenario.problem, batch=64, lr=LR, chunk=26)
        floor = HandBatched(scenario.problem, batch=64, lr=LR)
        seconds = interleaved({"local": step, "bare": bare.step, "floor": floor.step}, rounds=rounds, steps=3)
        writer.close()
    return [
        Row("MLP, n=100: bare vmapped loop", f"{seconds['bare'] * 1e3:.0f} ms/step"),
        Row("MLP, n=100: hand-batched floor", f"{seconds['floor'] * 1e3:.0f} ms/step"),
        Row("MLP, n=100: local", f"{seconds['local'] * 1e3:.0f} ms/step"),
        Row(
            "local / bare",
            f"{seconds['local'] / seconds['bare']:.2f}",
            "≤ 1.05",
            seconds["local"] / seconds["bare"] <= 1.05,
        ),
        Row("local / hand-batched floor", f"{seconds['local'] / seconds['floor']:.2f}", "reported"),
    ]


def small_model(rounds: int = 40) -> list[Row]:
    """Logistic regression on digits: what the simulator adds to a step of all clients."""
    with tempfile.TemporaryDirectory() as directory:
        scenario = small(steps=1 + 30 * (rounds + 1))
        step, writer = stepping(scenario, Path(directory))
        bare = VmappedLoop(scenario.problem, batch=16, lr=LR, chunk=100)
        seconds = interleaved({"local": step, "bare": bare.step}, rounds=rounds, steps=30)
        writer.close()
    over = (seconds["local"] - seconds["bare"]) * 1e3
    return [
        Row("logistic, n=100: bare loop", f"{seconds['bare'] * 1e3:.2f} ms/step"),
        Row("logistic, n=100: local", f"{seconds['local'] * 1e3:.2f} ms/step"),
        Row("overhead beyond the bare loop", f"{over:.2f} ms/step", "≤ 0.7 ms", over <= 0.7),
    ]
