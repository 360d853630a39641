"""Small things that several tests use."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from asyncfed import Result, Scenario, run
from asyncfed.runtime.block import Observation


@dataclass
class Steps:
    """A tap that keeps what every client absorbed, emitted and kept, by (client, step)."""

    absorbed: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    payload: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    residue: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    order: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, seen: Observation) -> None:
        for row, key in enumerate(zip(seen.clients.tolist(), seen.steps.tolist(), strict=True)):
            self.order.append(key)
            for store, tensors in (
                (self.absorbed, seen.absorbed),
                (self.payload, seen.made.payload),
                (self.residue, seen.made.residue),
            ):
                store[key] = {name: value[row].clone() for name, value in tensors.items()}

    def stacked(self, name: str, step: int, clients: int) -> torch.Tensor:
        return torch.stack([self.absorbed[client, step][name] for client in range(clients)])


def run_tapped(scenario: Scenario, out: Path) -> tuple[Result, Steps]:
    tap = Steps()
    return run(scenario, out=out, tap=tap), tap


def files_of(path: Path) -> dict[str, bytes]:
    """Everything a run wrote that must be a function of the scenario alone."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != "run.json"
    }


def standard_error(values: np.ndarray, batches: int = 20) -> np.ndarray:
    """Standard error of the mean of a correlated series (time first), by batch means."""
    means = np.stack([part.mean(0) for part in np.array_split(values, batches)])
    return np.asarray(means.std(0, ddof=1) / np.sqrt(batches))
