"""Methods of several parts, as HGP and PDBO are. Here: push twice, the second time from ω = 1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from asyncfed import Lockstep, Scenario, VirtualTime, run
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP
from asyncfed.protocols.part import AmongPeers, Part
from tests.helpers import run_tapped
from topologies import stochastic_directed


@dataclass(frozen=True)
class Second(SGP):
    name = "second"
    kind = "again"


@dataclass(frozen=True)
class Twice(AmongPeers):
    first: SGP
    second: SGP

    def parts(self) -> tuple[Part, ...]:
        return self.first, self.second


BUSY = VirtualTime(compute="exponential(1.0)", latency="exponential(0.5)")


@pytest.mark.parametrize("timing", [Lockstep(), BUSY])
def test_the_second_part_starts_from_what_the_first_left(
    timing: Lockstep | VirtualTime, tmp_path: Path
) -> None:
    problem, graph = quadratic(clients=5, dimension=2), stochastic_directed(5, seed=1)
    first, second = SGP(steps=7, lr=0.1, batch=None), Second(steps=4, lr=0.05, batch=None)
    common = {"problem": problem, "topology": graph, "timing": timing, "precision": "float64"}
    alone = run(Scenario(protocol=first, **common), out=tmp_path / "alone")  # type: ignore[arg-type]
    both, steps = run_tapped(Scenario(protocol=Twice(first, second), **common), tmp_path / "both")  # type: ignore[arg-type]

    left = torch.stack([steps.absorbed[client, 7]["z"] for client in range(5)])
    torch.testing.assert_close(left, alone.final["inner"], rtol=0, atol=1e-12)
    assert all(float(steps.absorbed[client, 7]["omega"]) == 1.0 for client in range(5))

    messages = both.trace.to_pandas()
    assert set(messages[messages.phase == "sgp"].step) == set(range(7))
    assert set(messages[messages.phase == "second"].step) == set(range(7, 11))
    older, newer = messages[messages.phase == "sgp"], messages[messages.phase == "second"]
    assert older.absorbed_step.max() <= 7, "nothing of the first part is absorbed in the second"
    assert newer.sent_at.min() > older.sent_at.max()
    phases = both.trace.phases()
    assert list(phases.phase) == ["sgp", "second"]
    assert list(phases.steps) == [7, 4]
    assert both.metrics.step.iloc[-1] == 11
