"""FedEM against its algorithm box in numpy, Bayes' rule, FedAvg, and a mixture whose truth is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncfed import Result, Scenario, ScenarioError, run
from asyncfed.data import client_data_from_lists
from asyncfed.network import Metropolis
from asyncfed.problems import (
    Mixture,
    Problem,
    mixture_truth,
    normal_mixture,
    personalized_classification,
    quadratic,
)
from asyncfed.protocols import EpochSGP, FedAvg, FedEM, LocalSteps, PeerFedEM, Server, StepDecay
from tests.protocols.served import Array, serve
from tests.protocols.test_fedprox import SETS
from tests.protocols.test_local_steps import SEED, SIZES, D, data, minibatches
from topologies import fully_connected, ring, star

K = 2
THETA0 = np.array([[0.5, -1.0, 0.2], [-0.3, 0.8, 0.6]])


def component_losses(theta: Array, a: Array, t: Array) -> Array:
    """(K, B): softplus(a·θ_k − t)"""
    return np.asarray(np.logaddexp(0, theta @ a.T - t))


def problem() -> Problem:
    """K models of `test_local_steps`, whose penalty is not part of a sample's loss."""

    def losses(theta: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        a, t = batch
        return torch.nn.functional.softplus(theta @ a.mT - t)

    def penalty(theta: Tensor) -> Tensor:
        return 0.05 * theta.square().sum()

    def each(theta: Tensor, lam: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        return -torch.logsumexp(torch.log_softmax(lam, -1)[:, None] - losses(theta, batch), 0)

    tensors = [tuple(torch.from_numpy(part) for part in one) for one in data()]
    return Problem(
        name="two models",
        data=client_data_from_lists(tensors),
        inner_loss=lambda theta, lam, batch: each(theta, lam, batch).mean() + penalty(theta),
        init_inner=lambda g: torch.from_numpy(THETA0),
        init_outer=lambda g: torch.zeros(K, dtype=torch.float64),
        metrics={"loss": each},
        mixture=Mixture(K, losses, penalty),
    )


def weighted_gradient(i: int, theta: Array, q: Array, index: Array) -> Array:
    """Of mean_s Σ_k q_k(s) ℓ(θ_k; s) + ½ · 0.1 ‖θ‖²"""
    a, t = (part[index] for part in data()[i])
    slopes = q[index].T / (1 + np.exp(t - theta @ a.T))
    return np.asarray(slopes @ a / len(t) + 0.1 * theta)


def client(
    i: int, round_: int, theta: Array, pi: Array, m: Array, lr: float, beta: float, w: float
) -> tuple[Array, Array, Array]:
    """One client's E and M step: an epoch in minibatches of 4."""
    joint = pi * np.exp(-component_losses(theta, *data()[i]).T)  # π_k p_k(s), a row for each sample
    q = joint / joint.sum(1, keepdims=True)
    pi = q.mean(0)
    for _, index in zip(range(-(-SIZES[i] // 4)), minibatches(i, round_), strict=False):
        m = beta * m + weighted_gradient(i, theta, q, index) + w * theta
        theta = theta - lr * m
    return theta, pi, m


def rounds(count: int, sets: list[list[int]], beta: float, w: float) -> tuple[Array, list[Array]]:
    theta, pi, m = THETA0, [np.full(K, 1 / K)] * 4, [np.zeros((K, D))] * 4
    for k in range(count):
        S, ends = sets[k % len(sets)], []
        for i in S:
            end, pi[i], m[i] = client(i, k, theta, pi[i], m[i], 0.3 if k < 3 else 0.15, beta, w)
            ends.append(end)
        theta = np.average(ends, axis=0, weights=[SIZES[i] for i in S])
    return theta, pi


LR = StepDecay(0.3, at=(3,), factor=0.5)


def check(result: Result, theta: Array, pi: list[Array], log_pi: Tensor) -> None:
    for found in result.final["inner"].numpy():
        np.testing.assert_allclose(found.reshape(K, D), theta, rtol=0, atol=1e-12)
    np.testing.assert_allclose(log_pi.exp().numpy(), pi, rtol=0, atol=1e-12)
    for i, row in enumerate(result.clients.to_dict("records")):
        mixed = np.exp(-component_losses(theta, *data()[i])).T @ pi[i]
        assert row["loss"] == pytest.approx(-np.log(mixed).mean(), abs=1e-12)


@pytest.mark.parametrize(("beta", "w"), [(0.0, 0.0), (0.9, 0.2)])
def test_rounds_are_those_of_the_box(beta: float, w: float, tmp_path: Path) -> None:
    """Shards of 7, 4, 10 and 3 samples; some clients at a time. It is judged by Σ_k π_ik p_k."""
    local = LocalSteps(LR, epochs=1, batch=4)
    method = FedEM(5, local, beta, w, server=Server(SETS, weighted=True))
    result = serve(problem(), method, tmp_path / "run", seed=SEED)
    check(result, *rounds(5, SETS, beta, w), result.final["clients/log_pi"])


def test_with_one_model_it_is_fedavg(tmp_path: Path) -> None:
    given = personalized_classification(
        "digits", clients=4, personalize="mtl", components=1, limit=200, l2=0.01
    )
    local = LocalSteps(0.1, epochs=1, batch=16)
    settings: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01, "server": Server(0.5, weighted=True)}
    results = [
        serve(given, method, tmp_path / type(method).__name__)
        for method in (FedEM(4, local, **settings), FedAvg(4, local, **settings))
    ]
    em, fedavg = results
    torch.testing.assert_close(em.final["inner"], fedavg.final["inner"], rtol=0, atol=1e-12)
    assert em.metrics["accuracy"].tolist() == fedavg.metrics["accuracy"].tolist()
    assert em.metrics["gradients"].tolist() == fedavg.metrics["gradients"].tolist()


def test_the_likelihood_never_falls_and_the_mixture_is_found(tmp_path: Path) -> None:
    """One full step of length 1 moves the means no further than the M step would: generalized EM."""
    given = normal_mixture(clients=5, components=2, dimension=2, seed=0, samples=400)
    means, shares = mixture_truth(given)
    assert (means[0] - means[1]).norm() > 4, "so that they hardly overlap"
    result = serve(given, FedEM(60, LocalSteps(1.0, steps=1), server=Server()), tmp_path / "run")
    # Judged is θ with the π of the E step before: both are steps uphill, so this must not fall either.
    assert (np.diff(result.metrics["loss"]) <= 1e-12).all()
    found = result.final["inner"][0].view(2, 2)
    pi = result.final["clients/log_pi"].exp()
    order = (found[:, None] - means).norm(dim=-1).argmin(0)
    assert sorted(order.tolist()) == [0, 1]
    # Standard errors: 1/√(samples of a model), at most 0.05 here, and √(p(1−p)/400), at most 0.025.
    torch.testing.assert_close(found[order], means, rtol=0, atol=4 * 0.05)
    torch.testing.assert_close(pi[:, order], shares, rtol=0, atol=4 * 0.025)


def test_only_models_travel(tmp_path: Path) -> None:
    seen: list[Any] = []
    scenario = Scenario(problem(), star(4), FedEM(2, LocalSteps(0.1)), precision="float64")
    result = run(scenario, out=tmp_path / "run", tap=seen.append, strict=True)
    assert {name for o in seen for name in o.made.payload} == {"x", "y"}, "x: the opening of the board"
    assert {name for o in seen if 4 not in o.clients for name in o.absorbed} == {"y"}
    messages = result.trace.to_pandas()
    assert messages["bytes"].unique().tolist() == [K * D * 8]
    assert len(messages) == 2 * 2 * 4


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("weighted", [False, True])
def test_among_peers_on_the_full_graph_it_is_the_same(weighted: bool, beta: float, tmp_path: Path) -> None:
    method = PeerFedEM(5, LR, batch=4, momentum=beta, weight_decay=0.2, weighted=weighted)
    scenario = Scenario(problem(), fully_connected(4), method, precision="float64", seed=SEED)
    result = run(scenario, out=tmp_path / "peers")
    with_server = FedEM(5, LocalSteps(LR, epochs=1, batch=4), beta, 0.2, server=Server(weighted=weighted))
    served = serve(problem(), with_server, tmp_path / "server", seed=SEED)
    assert result.trace.to_pandas()["bytes"].unique().tolist() == [(K * D + 1) * 8], "K models and ω"
    for found in result.final["inner"]:
        torch.testing.assert_close(found, served.final["inner"][0], rtol=0, atol=1e-12)
    torch.testing.assert_close(result.final["outer"], served.final["clients/log_pi"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.clients["loss"], served.clients["loss"], rtol=0, atol=1e-12)
    assert result.clients["gradients"].tolist() == served.clients["gradients"].tolist()


def test_among_peers_it_mixes_by_its_weights(tmp_path: Path) -> None:
    """Decentralized FedEM: Θ_i ← Σ_j w_ij Θ_j after everybody's epoch."""
    method = PeerFedEM(3, 0.3, batch=4)
    scenario = Scenario(problem(), ring(4), method, weights=Metropolis(), precision="float64", seed=SEED)
    result = run(scenario, out=tmp_path / "run")
    W = (np.eye(4) + np.roll(np.eye(4), 1, 0) + np.roll(np.eye(4), -1, 0)) / 3
    theta, pi = np.stack([THETA0] * 4), [np.full(K, 1 / K)] * 4
    for k in range(3):
        ends = []
        for i in range(4):
            end, pi[i], _ = client(i, k, theta[i], pi[i], np.zeros((K, D)), 0.3, 0.0, 0.0)
            ends.append(end)
        theta = np.einsum("ij,jkd->ikd", W, np.stack(ends))
    np.testing.assert_allclose(result.final["inner"].numpy(), theta.reshape(4, -1), rtol=0, atol=1e-12)


def test_other_problems_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"fits a mixture of models, and problem 'quadratic' is none"):
        serve(quadratic(clients=4), FedEM(1, LocalSteps(0.1)), tmp_path / "run")
    both = personalized_classification("digits", clients=4, personalize="mtl+da", limit=200)
    with pytest.raises(ScenarioError, match=r"use personalized_classification\(…, personalize='mtl'\)"):
        serve(both, FedEM(1, LocalSteps(0.1)), tmp_path / "run")
    with pytest.raises(ScenarioError, match="components is 0; it must be a whole number in"):
        personalized_classification("digits", clients=4, personalize="mtl", components=0, limit=200)
    with pytest.raises(ScenarioError, match="epochs is 0; it must be a whole number, at least 1"):
        EpochSGP(1, 0.1, epochs=0)
