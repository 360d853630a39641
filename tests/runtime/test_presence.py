"""Clients that come and go in whole runs: what they remember, who is asked, and that backends agree."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncfed import Lockstep, Scenario, ScenarioError, VirtualTime, load, run
from asyncfed.network import DrawnPresence, GivenPresence
from asyncfed.network.waves import Absorption, Sums, Wave
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP, Buffered, FedAvg, LocalSteps, PushDIGing, Scaffold, Server
from asyncfed.protocols.part import Sizes
from asyncfed.runtime.block import Observation
from asyncfed.runtime.local import LocalBackend
from tests.protocols.served import asked, serve
from topologies import star

AWAY = {1: [(0, 2), (4, math.inf)], 3: [(1, 5), (6.5, math.inf)], 4: [(0, 3.5)]}


@pytest.mark.parametrize("absence", ["pause", "crash"])
def test_scaffold_with_absences_is_its_box_where_a_crash_forgets(absence: Any, tmp_path: Path) -> None:
    """In lockstep round k is from k to k + 1; who is away at its end has not answered."""
    given = quadratic(clients=5, dimension=2, seed=2)
    A, b = (tensor.numpy() for tensor in given.data.train.tensors)
    result = serve(
        given,
        Scaffold(10, LocalSteps(0.05, steps=3)),
        tmp_path / "run",
        start={"y": np.ones(2)},
        timing=Lockstep(presence=GivenPresence(AWAY, absence=absence)),
    )

    def there(i: int, time: float) -> bool:
        return i not in AWAY or any(begin <= time < end for begin, end in AWAY[i])

    x, c, c_i = np.ones(2), np.zeros(2), np.zeros((5, 2))
    forgot = 0
    for k in range(10):
        S = [i for i in range(5) if there(i, k) and there(i, k + 1)]
        assert asked(result)[k] == [i for i in range(5) if there(i, k)]
        dy, dc = [], []
        for i in S:
            was_away = k > 0 and not all(there(i, k - part) for part in (0.25, 0.5, 0.75, 1.0))
            if absence == "crash" and was_away:
                forgot += c_i[i].any()
                c_i[i] = 0.0
            y = x
            for _ in range(3):
                y = y - 0.05 * (A[i] @ (y - b[i]) - c_i[i] + c)
            renewed = c_i[i] - c + (x - y) / (3 * 0.05)
            dy.append(y - x)
            dc.append(renewed - c_i[i])
            c_i[i] = renewed
        x, c = x + np.mean(dy, axis=0), c + len(S) / 5 * np.mean(dc, axis=0)
    np.testing.assert_allclose(result.final["inner"][0].numpy(), x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.final["clients/c_i"].numpy(), c_i, rtol=0, atol=1e-12)
    assert forgot == (2 if absence == "crash" else 0)


@pytest.mark.parametrize("absence", ["pause", "crash"])
def test_scaffold_with_a_server_that_does_not_wait_is_its_box_too(absence: Any, tmp_path: Path) -> None:
    """Along the trace: whose work began from which model, and which answers count in which move."""
    given = quadratic(clients=4, dimension=2, seed=2)
    A, b = (tensor.numpy() for tensor in given.data.train.tensors)
    there = {1: [(0, 4), (4.5, 99)], 2: [(0, 1.5), (2, 7), (7.25, 99)], 3: [(1, 9)]}
    result = serve(
        given,
        Scaffold(20, LocalSteps(0.05, steps=2), server=Buffered(2)),
        tmp_path / "run",
        start={"y": np.ones(2)},
        timing=VirtualTime("exponential(0.5)", presence=GivenPresence(there, absence=absence)),
    )
    steps, messages = result.trace.steps(), result.trace.to_pandas()
    answers = messages[(messages.receiver == 4) & (messages.status == "delivered")]
    x, c, c_i = np.ones(2), np.zeros(2), np.zeros((4, 2))
    moves: dict[tuple[int, float], Any] = {}  # by client and when they are sent
    ended: dict[int, float] = {}
    forgot = 0
    for k in range(20):
        for work in steps[(steps.step == k) & (steps.client < 4)].sort_values("started_at").itertuples():
            i = work.client
            before = ended.get(i, work.started_at)
            crashed = i in there and not any(lo <= before and work.started_at < hi for lo, hi in there[i])
            if absence == "crash" and crashed:
                forgot += c_i[i].any()
                c_i[i] = 0.0
            ended[i] = work.ended_at
            y = x
            for _ in range(2):
                y = y - 0.05 * (A[i] @ (y - b[i]) - c_i[i] + c)
            renewed = c_i[i] - c + (x - y) / (2 * 0.05)
            moves[i, work.ended_at] = y - x, renewed - c_i[i]
            c_i[i] = renewed
        used = [moves[row.sender, row.sent_at] for row in answers[answers.absorbed_step == k].itertuples()]
        assert len(used) == 2
        dy, dc = (np.mean(some, axis=0) for some in zip(*used, strict=True))
        x, c = x + dy, c + 2 / 4 * dc
    np.testing.assert_allclose(result.final["inner"][0].numpy(), x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.final["clients/c_i"].numpy(), c_i, rtol=0, atol=1e-12)
    assert forgot == (3 if absence == "crash" else 0)


@pytest.mark.parametrize(
    "timing",
    [
        Lockstep(presence=DrawnPresence("geometric(0.3)", "geometric(0.5)", absence="crash")),
        VirtualTime(
            compute="exponential(1)",
            latency=0.1,
            presence=DrawnPresence("weibull(4, 0.7)", "exponential(2)", clients=(0, 2), absence="crash"),
        ),
    ],
    ids=["lockstep", "virtual time"],
)
def test_backends_agree_and_the_scenario_is_stored(timing: Any, tmp_path: Path) -> None:
    scenario = Scenario(
        problem=quadratic(clients=4, dimension=2),
        topology=star(4, up=0.8),
        protocol=Scaffold(12, LocalSteps(0.05, steps=2), server=Server(0.75, attempts=1000)),
        timing=timing,
        precision="float64",
        seed=3,
    )
    first = run(scenario, out=tmp_path / "a")
    again = run(load(tmp_path / "a").scenario, out=tmp_path / "b", strict=True)
    for key, value in first.final.items():
        assert (again.final[key] == value).all()
    assert again.trace.to_pandas().equals(first.trace.to_pandas())
    assert first.trace.to_pandas().status.nunique() > 1


def test_who_joins_late_is_asked_from_then_on(tmp_path: Path) -> None:
    presence = GivenPresence({0: [(3, math.inf)], 1: [(0, 5)]})
    protocol = FedAvg(8, LocalSteps(0.1))
    result = serve(quadratic(clients=3), protocol, tmp_path / "run", timing=Lockstep(presence=presence))
    assert asked(result) == [[1, 2]] * 3 + [[0, 1, 2]] * 2 + [[0, 2]] * 3


def test_presences_that_do_not_fit_are_refused_before_the_run(tmp_path: Path) -> None:
    too_many = Lockstep(presence=GivenPresence({3: [(0, 1)]}))
    with pytest.raises(ScenarioError, match="the presence names client 3; the clients are 0 to 2"):
        serve(quadratic(clients=3), FedAvg(1, LocalSteps(0.1)), tmp_path / "run", timing=too_many)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ScenarioError, match=r"presence is \{0: \[\]\}; it must be GivenPresence"):
        Lockstep(presence={0: []})  # type: ignore[arg-type]


# ---- who is born again among peers


def twice(part: Any, reborn: bool) -> tuple[list[Observation], LocalBackend]:
    """Three clients step; then client 1 absorbs half of what client 0 emitted, and the others their own."""
    seen: list[Observation] = []
    backend = LocalBackend(
        quadratic(clients=3, dimension=2), seed=0, dtype=torch.float64, device="cpu", tap=seen.append
    )
    backend.begin(part, 0)
    names, everyone = tuple(part.carries(Sizes(2, 0, 3))), np.arange(3)
    none, zero = np.zeros(0, dtype=np.int64), np.zeros(3, dtype=np.int64)
    nothing = Sums(names, np.zeros(4, dtype=np.int64), none, np.zeros(0), none)
    backend.run(Wave(Absorption(everyone, (nothing,)), zero, everyone, none, 0.0))
    half = Sums(names, np.arange(4), np.array([0, 0, 2]), np.array([0.5, 0.5, 1.0]), np.array([0, 0, 2]))
    again = np.array([1]) if reborn else none
    backend.run(Wave(Absorption(everyone, (half,)), zero + 1, everyone + 3, everyone, 1.0, reborn=again))
    return seen, backend


def test_among_peers_who_is_reborn_has_what_it_absorbs_and_no_more() -> None:
    """SGP (4b) keeps its gradient step at home: that is gone, and of the others nothing is."""
    (first, plain), _ = twice(SGP(3, 0.1, batch=None), reborn=False)
    (_, second), _ = twice(SGP(3, 0.1, batch=None), reborn=True)
    kept = first.made.residue["z"]
    assert kept[1].abs().min() > 0
    for name in ("z", "omega"):
        assert torch.equal(second.absorbed[name][1], 0.5 * first.made.payload[name][0])
        assert torch.equal(second.absorbed[name][[0, 2]], plain.absorbed[name][[0, 2]])
    assert not torch.equal(plain.absorbed["z"][1], second.absorbed["z"][1])


def test_among_peers_who_is_reborn_has_the_memory_that_the_part_began_with() -> None:
    """Push-DIGing remembers its last gradient, zero at first: y = what was absorbed + gradient − that."""
    (first, plain), _ = twice(PushDIGing(3, 0.1, batch=None), reborn=False)
    (_, second), _ = twice(PushDIGing(3, 0.1, batch=None), reborn=True)
    forgotten = first.made.memory["gradient"][1]
    assert forgotten.abs().min() > 0
    torch.testing.assert_close(second.made.payload["y"][1], plain.made.payload["y"][1] + forgotten)
    assert torch.equal(second.made.payload["y"][[0, 2]], plain.made.payload["y"][[0, 2]])
