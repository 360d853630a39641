"""Tensors that a method hands on as they are: what is the same at first, or was lent, stays what it was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncfed import Lockstep, Scenario, VirtualTime, run
from asyncfed.problems import quadratic
from asyncfed.protocols import FedAvg, LocalSteps, Server
from asyncfed.protocols.at import At
from asyncfed.protocols.part import AmongPeers, Inbox, Judged, Part, Sizes, Start, Step, Tensors
from asyncfed.protocols.rounds import LEVELS, Answer, Round
from asyncfed.rng import Streams
from topologies import ring, star

N, D = 5, 3
BUSY = VirtualTime(compute="exponential(1.0)", latency="exponential(0.5)", factors={1: 3.0})


@dataclass(frozen=True)
class HandsOn(Part, AmongPeers):
    """Sends what it remembered before, and remembers in a circle."""

    steps: int = 8
    name = "hands on"
    kind = "old"
    batch = None

    def parts(self) -> tuple[Part, ...]:
        return (self,)

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {"z": sizes.inner, "w": sizes.inner}

    def start(self, at: At, carried: Tensors) -> Start:
        x = torch.from_numpy(at.clients).to(carried["inner"])[:, None] + torch.ones_like(carried["inner"])
        return Start({"z": x, "w": x}, {"a": x, "b": x, "c": x, "lam": carried["outer"]})

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        new = inbox["z"] - 0.5 * inbox["w"] + torch.from_numpy(at.steps).to(inbox["z"])[:, None]
        kept = {"b": memory["a"], "c": memory["b"], "a": new}
        return Step({"z": memory["a"], "w": memory["c"]}, {"z": 0.1 * new}, memory=kept)

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(inbox["z"], memory["lam"])

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        return {"inner": inbox["z"], **{name: memory[name] for name in "abc"}}


@dataclass(frozen=True)
class Remembering(Round):
    """Answers what it remembered before, once under each of two names."""

    phase = "inner"
    kind = "old"
    reads = ("x", "y")
    answers = ("y", "q", "p")
    remembers = ("r",)
    levels = LEVELS | {"r": "inner"}

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        old, y = memory["r"], board["y"]
        new = old + torch.from_numpy(at.clients).to(old)[:, None] + at.number
        return Answer({"y": y.expand_as(old), "q": old, "p": old}, memory={"r": new})

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        return {"y": mean["y"] + 0.1 * mean["q"] + 0.01 * mean["p"], "q": mean["q"], "p": mean["p"]}


@dataclass(frozen=True)
class Remembers(FedAvg):
    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        return (Remembering(),)


PEERS = Scenario(
    problem=quadratic(clients=N, dimension=D), topology=ring(N), protocol=HandsOn(), precision="float64"
)
WAITS = Remembers(12, LocalSteps(0.1))
HOLDS = replace(WAITS, server=Server(quorum=2, late="next", requests="all"))
SERVED = replace(PEERS, topology=star(N), protocol=WAITS)


@pytest.mark.parametrize(
    "scenario",
    [
        PEERS,
        replace(PEERS, timing=BUSY),
        SERVED,
        replace(SERVED, protocol=HOLDS, timing=BUSY),
        replace(
            SERVED, protocol=replace(HOLDS, server=Server([0, 2, 3], quorum=1, late="next")), timing=BUSY
        ),
    ],
    ids=["lockstep", "virtual time", "server", "late answers", "some"],
)
def test_what_is_handed_on_is_what_it_was(scenario: Scenario, tmp_path: Path) -> None:
    plain = run(scenario, out=tmp_path / "plain")
    careful = run(scenario, out=tmp_path / "strict", strict=True)  # copies of everything
    for name, value in careful.final.items():
        torch.testing.assert_close(plain.final[name], value, rtol=0, atol=1e-12, msg=name)


def test_the_circle_by_hand(tmp_path: Path) -> None:
    alone = replace(PEERS, problem=quadratic(clients=1, dimension=D), topology=ring(1), timing=Lockstep())
    found = run(replace(alone, protocol=HandsOn(steps=4)), out=tmp_path / "r").final
    z = w = a = b = c = 1.0
    for t in range(4):
        new = z - 0.5 * w + t
        z, w = a + 0.1 * new, c
        a, b, c = new, a, b
    expected: dict[str, Any] = {"inner": z, "a": a, "b": b, "c": c}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], torch.full((1, D), value, dtype=torch.float64))
