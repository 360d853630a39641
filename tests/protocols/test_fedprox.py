"""FedProx against its algorithm box, and its clients' momenta against everything that happens to messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncfed import Lockstep, Scenario, ScenarioError, VirtualTime, run
from asyncfed.problems import Problem, classification, quadratic
from asyncfed.protocols import FedAvg, FedProx, LocalSteps, Server
from tests.protocols.replayed import Answers, Array, replay
from tests.protocols.served import iterates, serve, watched
from tests.protocols.test_local_steps import SEED, SIZES, Y0, gradient, minibatches, problem
from topologies import star

SETS = [[0, 2, 3], [1, 2], [0, 1, 2, 3]]


def proximal_steps(
    y: Array, m: Array, i: int, round_: int, count: int, lr: float, mu: float, decay: float, beta: float
) -> tuple[Array, Array]:
    """On the minibatches of `test_local_steps`."""
    theta = y
    for _, index in zip(range(count), minibatches(i, round_), strict=False):
        g = gradient(i, theta, index) + decay * theta + mu * (theta - y)
        m = beta * m + g
        theta = theta - lr * m
    return theta, m


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.0, 0.2), (0.9, 0.2), (0.5, 0.0)])
@pytest.mark.parametrize("weighted", [False, True])
def test_rounds_are_those_of_the_box(weighted: bool, decay: float, momentum: float, tmp_path: Path) -> None:
    """Two epochs in minibatches of 4, of shards with 7, 4, 10 and 3 samples; some clients at a time."""
    protocol = FedProx(
        6,
        LocalSteps(0.3, epochs=2, batch=4),
        mu=0.4,
        momentum=momentum,
        weight_decay=decay,
        server=Server(SETS, weighted=weighted),
    )
    result = serve(problem(), protocol, tmp_path / "run", start={"y": Y0}, seed=SEED)
    y, m = Y0, [np.zeros(3)] * 4
    for k in range(6):
        S = SETS[k % 3]
        p = np.array([SIZES[i] if weighted else 1.0 for i in S])
        ends = []
        for i in S:
            count = 2 * -(-SIZES[i] // 4)
            theta, m[i] = proximal_steps(y, m[i], i, k, count, 0.3, 0.4, decay, momentum)
            ends.append(theta)
        y = p @ np.array(ends) / p.sum()
    np.testing.assert_allclose(result.final["inner"][0].numpy(), y, rtol=0, atol=1e-10)
    if momentum:
        np.testing.assert_allclose(result.final["clients/m"].numpy(), m, rtol=0, atol=1e-10)
    else:
        assert "clients/m" not in result.final


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_without_term_and_momentum_it_is_fedavg_bit_by_bit(precision: Any, tmp_path: Path) -> None:
    local, server = LocalSteps(0.1, epochs=1, batch=16), Server(0.5, weighted=True)
    finals = [
        run(
            Scenario(
                problem=classification("digits", clients=6, partition="dirichlet:0.5", limit=300),
                topology=star(6),
                protocol=protocol,
                precision=precision,
                seed=3,
            ),
            out=tmp_path / type(protocol).__name__,
        ).final["inner"]
        for protocol in (FedAvg(4, local, server), FedProx(4, local, mu=0.0, server=server))
    ]
    assert torch.equal(*finals)


def test_a_strong_pull_keeps_everybody_near(tmp_path: Path) -> None:
    """With full steps μ → ∞ (and α(L + μ) < 1) no client gets further than ‖∇f_i(θ)‖ / μ."""
    given = quadratic(clients=4, dimension=3, seed=1)
    A, b = (tensor.numpy() for tensor in given.data.train.tensors)
    protocol = FedProx(1, LocalSteps(0.005, steps=400), mu=100.0)
    result = serve(given, protocol, tmp_path / "run", start={"y": np.ones(3)})
    exact = [np.linalg.solve(A[i] + 100 * np.eye(3), A[i] @ b[i] + 100 * np.ones(3)) for i in range(4)]
    np.testing.assert_allclose(result.final["inner"][0].numpy(), np.mean(exact, axis=0), rtol=0, atol=1e-10)


LATE: dict[str, Any] = {
    "lost in lockstep, and asked again": (Server(quorum=3), Lockstep(), 0.6, 1.0),
    "late, and used": (
        Server(quorum=2, late="next"),
        VirtualTime(compute="exponential(1.0)", latency="exponential(0.5)", loss=0.2, factors={1: 3.0}),
        1.0,
        1.0,
    ),
    "late, and dropped": (
        Server(quorum=2),
        VirtualTime(compute="exponential(1.0)", latency=0.3, loss=0.2, factors={1: 6.0}),
        1.0,
        0.8,
    ),
    "all requests worked off": (
        Server(quorum=2, late="next", requests="all"),
        VirtualTime(compute="exponential(1.0)", factors={1: 3.0, 4: 2.0}, loss=0.2),
        1.0,
        1.0,
    ),
    "waiting for a deadline": (
        Server(quorum=3, deadline=1.0),
        VirtualTime(compute="exponential(1.0)", latency="exponential(0.2)", loss=0.3),
        1.0,
        1.0,
    ),
}


def small(seed: int = 2) -> Problem:
    return watched(quadratic(clients=5, dimension=2, seed=seed))


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_client_that_worked_has_changed_its_momentum_whatever_became_of_its_answer(
    name: str, seed: int, tmp_path: Path
) -> None:
    server, timing, up, down = LATE[name]
    given = small()
    A, b = (tensor.numpy() for tensor in given.data.train.tensors)
    scenario = Scenario(
        problem=given,
        topology=star(5, up=up, down=down),
        protocol=FedProx(30, LocalSteps(0.05, steps=2), mu=0.3, momentum=0.8, server=server),
        timing=timing,
        precision="float64",
        seed=seed,
        evaluate_every=1,
    )
    result = run(scenario, out=tmp_path / "run")

    def local(i: int, round_: int, y: Array, m: Array) -> tuple[Array, Array]:
        theta = y
        for _ in range(2):
            m = 0.8 * m + A[i] @ (theta - b[i]) + 0.3 * (theta - y)
            theta = theta - 0.05 * m
        return theta, m

    def fold(round_: int, y: Array, answers: Answers) -> Array:
        return np.asarray(sum(weight * theta for _, weight, theta in answers))

    found = iterates(result, "y")
    states, memories = replay(result, 5, found[0], np.zeros(2), local, fold)
    np.testing.assert_allclose(found, states, rtol=0, atol=1e-10)
    np.testing.assert_allclose(result.final["clients/m"].numpy(), memories, rtol=0, atol=1e-10)
    messages = result.trace.to_pandas()
    answers = messages[messages.receiver == 5]
    assert not answers.status.eq("delivered").all()
    strict = run(scenario, out=tmp_path / "strict", strict=True)
    for key, value in result.final.items():
        assert torch.equal(strict.final[key], value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mu": -0.1}, "FedProx: mu is -0"),
        ({"momentum": 1.0}, "FedProx: momentum is 1"),
        ({"weight_decay": "much"}, "FedProx: weight_decay is 'much'; it must be a finite number, at least 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        FedProx(1, LocalSteps(0.1), **change)
