"""Epochs between messages: FedAvg on the full graph, SGP where an epoch is one step; its hypergradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncfed import Lockstep, Scenario, ScenarioError, VirtualTime, hypergradient, run
from asyncfed.data import client_data_from_lists
from asyncfed.problems import Problem, bilevel_quadratic, quadratic
from asyncfed.protocols import (
    HGP,
    PDBO,
    SGP,
    EpochSGP,
    EstimateHypergradient,
    FedAvg,
    ITDBackward,
    LocalEpochs,
    LocalSteps,
    PeerFedEM,
    Server,
    StepDecay,
)
from tests.protocols.served import Quadratics, serve
from tests.protocols.test_local_steps import SEED, SIZES, problem
from topologies import fully_connected, stochastic_directed

RATE = StepDecay(0.3, at=(2,), factor=0.5)
SGDM: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("settings", [{}, SGDM], ids=["sgd", "sgdm"])
def test_on_the_full_graph_it_is_fedavg(settings: dict[str, Any], weighted: bool, tmp_path: Path) -> None:
    method = EpochSGP(4, RATE, batch=4, epochs=2, weighted=weighted, **settings)
    peers = run(
        Scenario(problem(), fully_connected(4), method, precision="float64", seed=SEED),
        out=tmp_path / "peers",
    )
    server = FedAvg(4, LocalSteps(RATE, epochs=2, batch=4), server=Server(weighted=weighted), **settings)
    served = serve(problem(), server, tmp_path / "server", seed=SEED)
    for found in peers.final["inner"]:
        torch.testing.assert_close(found, served.final["inner"][0], rtol=0, atol=1e-12)
    assert peers.clients["gradients"].tolist() == [4 * 2 * -(-size // 4) for size in SIZES]


@pytest.mark.parametrize("timing", [Lockstep(), VirtualTime("exponential(1.0)", latency="exponential(0.4)")])
def test_where_an_epoch_is_one_step_it_is_sgp(timing: Any, tmp_path: Path) -> None:
    """(4a), at each client's own step number, wherever messages are."""
    finals = [
        run(
            Scenario(
                quadratic(clients=4, dimension=3, seed=1),
                stochastic_directed(4, probability=(0.5, 0.9), seed=5),
                method,
                timing=timing,
                precision="float64",
                seed=2,
            ),
            out=tmp_path / type(method).__name__,
        ).final
        for method in (
            SGP(8, RATE, order="4a", batch=None, weight_decay=0.1),
            EpochSGP(8, RATE, batch=None, weight_decay=0.1),
        )
    ]
    for name in ("inner", "z", "omega"):
        torch.testing.assert_close(finals[1][name], finals[0][name], rtol=0, atol=1e-13)


def uneven() -> Problem:
    """Clients with 1, 2, 3 and 4 copies of their sample: what they are, and how much they count, differs."""
    given = bilevel_quadratic(clients=4, dimension=2, outer_dimension=2, seed=1)
    train = [given.data.train.of(i) for i in range(4)]
    repeated = [tuple(t.repeat(i + 1, *[1] * (t.ndim - 1)) for t in own) for i, own in enumerate(train)]
    return replace(given, data=client_data_from_lists(repeated), recipe=None)


@pytest.mark.parametrize("weighted", [False, True])
def test_its_hypergradient_is_that_of_4b_at_the_last_rate(weighted: bool, tmp_path: Path) -> None:
    """z_i ← mean z_j − α s_i ∇f_i(z_i/ω): densely, s_i = n_i over its mean."""
    inner = EpochSGP(3, RATE, batch=None, weighted=weighted)
    assert inner.backward_lr == 0.15
    given = uneven()
    method = EstimateHypergradient(inner, HGP(300, sampling="joint", expectations="exact"))
    scenario = Scenario(given, fully_connected(4), method, precision="float64")
    final = run(scenario, out=tmp_path / "run").final
    by_hand = Quadratics.of(bilevel_quadratic(clients=4, dimension=2, outer_dimension=2, seed=1))
    share = np.array([0.4, 0.8, 1.2, 1.6]) if weighted else np.ones(4)
    x, lam, zero = final["inner"].numpy(), final["outer"].numpy(), np.zeros((2, 2))
    H = [share[i] * by_hand.g_yy(i, lam[i], x[i]) for i in range(4)]
    C = [share[i] * by_hand.g_xy(i, lam[i], x[i]) for i in range(4)]
    A = np.block([[np.eye(2) / 4 - (0.15 * H[i] if i == j else zero) for j in range(4)] for i in range(4)])
    c = np.concatenate([by_hand.f_y(i, lam[i], x[i]) / 4 for i in range(4)])
    u = np.linalg.solve(np.eye(8) - A, c).reshape(4, 2)
    v = np.array([by_hand.f_x(i, lam[i], x[i]) / 4 - 0.15 * C[i] @ u[i] for i in range(4)])
    np.testing.assert_allclose(final["hypergradient"].numpy(), v, rtol=0, atol=1e-9)


def test_every_client_has_its_own_outer_variable(tmp_path: Path) -> None:
    """In epochs of one or two minibatches; samples are copies, so any minibatch is the client's loss."""
    by_hand = Quadratics.of(bilevel_quadratic(clients=4, dimension=2, outer_dimension=2, seed=1))
    lam, x = np.arange(8.0).reshape(4, 2) / 10, np.array([0.3, -0.4])
    result = run(
        Scenario(uneven(), fully_connected(4), EpochSGP(1, 0.2, batch=2), precision="float64"),
        out=tmp_path / "run",
        initial={"outer": torch.from_numpy(lam), "inner": torch.from_numpy(x).repeat(4, 1)},
    )
    ends = []
    for i in range(4):
        own = x
        for _ in range(-(-(i + 1) // 2)):
            own = own - 0.2 * by_hand.g_y(i, lam[i], own)
        ends.append(own)
    np.testing.assert_allclose(result.final["inner"][2].numpy(), np.mean(ends, axis=0), rtol=0, atol=1e-12)


def test_pdbo_communicates_once_per_epoch(tmp_path: Path) -> None:
    inner = EpochSGP(3, 0.2, batch=2)
    method = PDBO(inner, HGP(2, sampling="joint", expectations="exact"), 1)
    result = run(Scenario(uneven(), fully_connected(4), method), out=tmp_path / "run")
    messages = result.trace.to_pandas()
    pushed = messages[messages["phase"] == "epoch-sgp"]
    assert len(pushed) == 2 * 3 * 12  # both inner problems, rounds, links
    assert result.clients["gradients"].tolist() == [2 * 3 * steps + 1 for steps in (1, 1, 2, 2)]


def test_alone_it_is_fedavg_with_oneself(tmp_path: Path) -> None:
    """On whatever network, of which it uses nothing; momenta stay."""
    given = problem()
    method = LocalEpochs(4, RATE, batch=4, epochs=2, **SGDM)
    scenario = Scenario(given, stochastic_directed(4, seed=1), method, precision="float64", seed=SEED)
    result = run(scenario, out=tmp_path / "alone")
    assert len(result.trace.to_pandas()) == 0
    for i in range(4):
        own = FedAvg(4, LocalSteps(RATE, epochs=2, batch=4), server=Server([i]), **SGDM)
        served = serve(given, own, tmp_path / str(i), seed=SEED)
        torch.testing.assert_close(result.final["inner"][i], served.final["inner"][0], rtol=0, atol=1e-12)


def test_what_it_is_not_is_refused() -> None:
    with pytest.raises(ScenarioError, match="order is '4a'; EpochSGP steps before it communicates"):
        EpochSGP(1, 0.1, order="4a")
    with pytest.raises(ScenarioError, match=r"makes whole epochs between two messages; use HGP or VRHGP"):
        PDBO(EpochSGP(1, 0.1), ITDBackward(), 1)
    with pytest.raises(ScenarioError, match=r"inner is PeerFedEM\(…\), which finds the clients' weights"):
        PDBO(PeerFedEM(1, 0.1), HGP(2), 1)
    with pytest.raises(ScenarioError, match=r"EpochSGP\(weighted=True\) has push-sum weights of its own"):
        hypergradient(
            uneven(), fully_connected(4), HGP(2), inner=EpochSGP(1, 0.1, weighted=True), at="stationary"
        )
