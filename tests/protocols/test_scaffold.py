"""SCAFFOLD against its algorithm box, and where FedAvg drifts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from asyncfed import Lockstep, Scenario, ScenarioError, VirtualTime, run
from asyncfed.problems import quadratic
from asyncfed.problems.quadratic import average_minimiser
from asyncfed.protocols import Buffered, FedAvg, LocalSteps, Scaffold, Server
from tests.protocols.replayed import Answers, Array, replay
from tests.protocols.served import iterates, serve, watched
from tests.protocols.test_local_steps import SEED, SIZES, Y0, gradient, minibatches, problem
from topologies import star

Option = Literal["I", "II"]
SETS = [[0, 2, 3], [1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("divide", [False, True])
def test_rounds_are_those_of_the_box(divide: bool, option: Option, tmp_path: Path) -> None:
    """An epoch in minibatches of 4, so 2, 1, 3 and 1 local steps; some clients at a time."""
    protocol = Scaffold(
        7,
        LocalSteps(0.3, epochs=1, batch=4, divide=divide),
        server_lr=0.7,
        option=option,
        server=Server(SETS),
    )
    result = serve(problem(), protocol, tmp_path / "run", start={"y": Y0}, seed=SEED)
    x, c = Y0, np.zeros(3)
    c_i = [np.zeros(3)] * 4
    for k in range(7):
        S = SETS[k % 3]
        dy, dc = [], []
        for i in S:
            K = -(-SIZES[i] // 4)
            eta = 0.3 / K if divide else 0.3
            y = x
            for _, index in zip(range(K), minibatches(i, k), strict=False):
                y = y - eta * (gradient(i, y, index) - c_i[i] + c)
            renewed = gradient(i, x) if option == "I" else c_i[i] - c + (x - y) / (K * eta)
            dy.append(y - x)
            dc.append(renewed - c_i[i])
            c_i[i] = renewed
        x = x + 0.7 * np.mean(dy, axis=0)
        c = c + len(S) / 4 * np.mean(dc, axis=0)
    np.testing.assert_allclose(result.final["inner"][0].numpy(), x, rtol=0, atol=1e-10)
    np.testing.assert_allclose(result.final["c"][0].numpy(), c, rtol=0, atol=1e-10)
    np.testing.assert_allclose(result.final["clients/c_i"].numpy(), c_i, rtol=0, atol=1e-10)
    np.testing.assert_allclose(c, np.mean(c_i, axis=0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("server", [Server(), Server([[0, 1], [2, 3, 4], [0, 3]])])
def test_it_finds_the_minimiser_where_fedavg_drifts(server: Server, option: Option, tmp_path: Path) -> None:
    """Different quadratics and ten local steps; also with some clients at a time."""
    given = quadratic(clients=5, dimension=3, seed=4)
    best = average_minimiser(given).numpy()
    local = LocalSteps(0.05, steps=10)
    found = serve(given, Scaffold(600, local, option=option, server=server), tmp_path / "scaffold", every=600)
    np.testing.assert_allclose(found.final["inner"][0].numpy(), best, rtol=0, atol=1e-10)
    drifted = serve(given, FedAvg(600, local, server=server), tmp_path / "fedavg", every=600)
    rests = drifted.final["inner"][0].numpy()
    assert np.abs(rests - best).max() > 0.01
    if server == Server():  # y_i = b_i + (I − ηA_i)^τ (y − b_i), and y is their mean
        A, b = (tensor.numpy() for tensor in given.data.train.tensors)
        M = np.array([np.eye(3) - np.linalg.matrix_power(np.eye(3) - 0.05 * a, 10) for a in A])
        biased = np.linalg.solve(M.sum(0), np.einsum("nij,nj->i", M, b))
        np.testing.assert_allclose(rests, biased, rtol=0, atol=1e-10)


def test_messages_carry_two_vectors_each_way(tmp_path: Path) -> None:
    result = serve(quadratic(clients=3, dimension=4), Scaffold(2, LocalSteps(0.1)), tmp_path / "run")
    assert set(result.trace.to_pandas().bytes) == {2 * 4 * 8}


LATE: dict[str, Any] = {
    "lost": (Server(quorum=2), Lockstep(), 0.6),
    "late, and used": (
        Server(0.8, quorum=2, late="next"),
        VirtualTime(compute="exponential(1.0)", latency="exponential(0.5)", loss=0.2, factors={1: 3.0}),
        1.0,
    ),
    "buffered": (
        Buffered(2, 0.8, "same", max_staleness=4),
        VirtualTime(compute="exponential(1.0)", latency="exponential(0.5)", loss=0.2, factors={1: 3.0}),
        1.0,
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_answers_that_nobody_used_take_their_change_along(name: str, tmp_path: Path) -> None:
    """What the server and the clients have is what the trace says: |S| counts the answers that were used."""
    server, timing, up = LATE[name]
    given = watched(quadratic(clients=5, dimension=2, seed=2))
    A, b = (tensor.numpy() for tensor in given.data.train.tensors)
    scenario = Scenario(
        problem=given,
        topology=star(5, up=up),
        protocol=Scaffold(25, LocalSteps(0.05, steps=3), server=server),
        timing=timing,
        precision="float64",
        seed=1,
        evaluate_every=1,
    )
    result = run(scenario, out=tmp_path / "run")

    def local(
        i: int, round_: int, state: tuple[Array, Array], c_i: Array
    ) -> tuple[tuple[Array, Array], Array]:
        x, c = state
        y = x
        for _ in range(3):
            y = y - 0.05 * (A[i] @ (y - b[i]) - c_i + c)
        renewed = c_i - c + (x - y) / (3 * 0.05)
        return (y - x, renewed - c_i), renewed

    def fold(round_: int, state: tuple[Array, Array], answers: Answers) -> tuple[Array, Array]:
        dy, dc = (np.mean([answer[which] for _, _, answer in answers], axis=0) for which in (0, 1))
        return state[0] + dy, state[1] + len(answers) / 5 * dc

    found = iterates(result, "y")
    states, memories = replay(result, 5, (found[0], np.zeros(2)), np.zeros(2), local, fold)
    np.testing.assert_allclose(found, [x for x, _ in states], rtol=0, atol=1e-10)
    np.testing.assert_allclose(result.final["c"][0].numpy(), states[-1][1], rtol=0, atol=1e-10)
    np.testing.assert_allclose(result.final["clients/c_i"].numpy(), memories, rtol=0, atol=1e-10)
    assert np.abs(states[-1][1] - np.mean(memories, axis=0)).max() > 1e-3
    strict = run(scenario, out=tmp_path / "strict", strict=True)
    for key, value in result.final.items():
        assert torch.equal(strict.final[key], value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"option": "III"}, "Scaffold: option is 'III'; did you mean 'II'"),
        ({"server_lr": float("nan")}, "Scaffold: server_lr is nan; it must be a finite number, at least 0"),
        ({"server": Server(weighted=True)}, r"all clients count the same; use weighted=False"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        Scaffold(1, LocalSteps(0.1), **change)
