"""Clients that a run never saw: what each method lets them do with its model, done by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncfed import ScenarioError, adapt, load, run
from asyncfed.data import client_data_from_lists
from asyncfed.problems import Problem, bilevel_quadratic, mixture_truth, normal_mixture, quadratic
from asyncfed.protocols import (
    CDBO,
    HGP,
    PDBO,
    SGP,
    ClusteredFL,
    FedAvg,
    FedAvgPlus,
    FedEM,
    Local,
    LocalSteps,
    MetaFL,
    PeerFedEM,
    PFedMe,
    StepDecay,
)
from asyncfed.protocols.at import JUDGING
from asyncfed.scenario import Scenario
from tests.protocols.served import Array, Quadratics, serve, watched
from tests.protocols.test_local_steps import SEED, data, gradient, minibatches, problem
from tests.protocols.test_meta_fl import ALPHA, BATCH, BETA, drawn
from topologies import fully_connected, star

LOCAL = LocalSteps(0.3, epochs=1, batch=4)
WITH_SERVER = {
    "FedAvg": FedAvg(3, LOCAL),
    "FedAvgPlus": FedAvgPlus(3, LOCAL, momentum=0.9),
    "MetaFL": MetaFL(3, 2, 1, ALPHA, BETA, BATCH),
}


def loss_of(i: int, y: Array) -> float:
    a, t = data()[i]
    return float(np.logaddexp(0, a @ y - t).mean() + 0.05 * y @ y)


@pytest.mark.parametrize("name", WITH_SERVER)
def test_the_runs_own_clients_are_judged_as_they_were(name: str, tmp_path: Path) -> None:
    """They make the same steps on the same draws; and so they do where fewer of them are asked."""
    result = serve(problem(), WITH_SERVER[name], tmp_path / "run", seed=SEED)
    for opened in (result, _saved(name, tmp_path / "saved")):
        adapted = adapt(opened, problem())
        for column in ("client", "samples", *(c for c in result.clients if c.startswith("loss"))):
            assert adapted.clients[column].tolist() == result.clients[column].tolist(), column
        last = result.metrics.iloc[-1]
        assert adapted.metrics == {column: last[column] for column in adapted.metrics}
    few = replace(problem(), data=client_data_from_lists([problem().data.train.of(i) for i in (0, 1)]))
    np.testing.assert_allclose(adapt(result, few).clients, adapted.clients.iloc[:2], rtol=0, atol=1e-12)


def _saved(name: str, out: Path) -> Any:
    scenario = Scenario(problem(), star(4), WITH_SERVER[name], precision="float64", seed=SEED)
    run(scenario, out=out, save_final=True)
    return load(out)


def test_the_model_of_fedavg_is_taken_as_it_is_or_as_another_method_does(tmp_path: Path) -> None:
    result = serve(problem(), WITH_SERVER["FedAvg"], tmp_path / "run", seed=SEED)
    y = result.final["inner"][0].numpy()
    adapted = adapt(result, problem())
    np.testing.assert_allclose(adapted.clients["loss"], [loss_of(i, y) for i in range(4)], atol=1e-13)
    tuned = adapt(result, problem(), method=MetaFL(1, 0, 1, ALPHA, BETA, BATCH), steps=2)
    for i in range(4):
        own = y
        for step in range(2):
            own = own - ALPHA * gradient(i, own, drawn(i, JUDGING, f"tuning {step}"))
        assert tuned.clients["loss"][i] == pytest.approx(loss_of(i, own), abs=1e-12)


def test_peers_leave_their_mean(tmp_path: Path) -> None:
    given = watched(quadratic(clients=3, dimension=2, seed=1))
    result = run(Scenario(given, fully_connected(3), SGP(2, 0.1, batch=None)), out=tmp_path / "run")
    adapted = adapt(result, watched(quadratic(clients=5, dimension=2, seed=2)))
    mean = result.final["inner"].mean(0)
    assert adapted.clients["y0"].tolist() == pytest.approx([float(mean[0])] * 5)
    assert len(adapted.clients) == 5


@pytest.mark.parametrize("peers", [False, True])
def test_new_clients_of_fedem_find_their_weights(peers: bool, tmp_path: Path) -> None:
    """By E and π steps at models that stay; the shares that their samples were drawn with, in the end."""
    settings: dict[str, Any] = {"components": 2, "dimension": 2, "seed": 0}
    train = normal_mixture(clients=3, samples=300, **settings)
    method: Any = PeerFedEM(1, 0.01, batch=None) if peers else FedEM(1, LocalSteps(0.01))
    means, _ = mixture_truth(train)
    topology = fully_connected(3) if peers else star(3)
    start = means.reshape(1, -1).repeat(3 if peers else 1, 1)
    result = run(
        Scenario(train, topology, method, precision="float64"), out=tmp_path / "run", initial={"inner": start}
    )
    new = normal_mixture(clients=4, samples=500, **settings)
    theta = result.final["inner"].mean(0).view(2, 2).numpy()
    _, shares = mixture_truth(new)
    for steps in (0, 3, 100):
        adapted = adapt(result, new, steps=steps)
        for i in range(4):
            points = new.data.train.of(i)[0].numpy()
            p = np.exp(-0.5 * np.square(points[:, None] - theta).sum(-1))
            pi = np.full(2, 0.5)
            for _ in range(steps):
                pi = (pi * p / (p @ pi)[:, None]).mean(0)
            assert adapted.clients["loss"][i] == pytest.approx(-np.log(p @ pi).mean(), abs=1e-12)
    np.testing.assert_allclose(pi, shares[3], atol=4 * np.sqrt(0.25 / 500))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_new_clients_of_pdbo_step_their_outer_variable_only(optimizer: Any, tmp_path: Path) -> None:
    """Of the hypergradient ∂_λ F_i / n is left, with the n of the run."""

    def made(clients: int, seed: int) -> Problem:
        return bilevel_quadratic(clients=clients, dimension=2, outer_dimension=2, seed=seed)

    method = PDBO(SGP(2, 0.1, batch=None), HGP(2, expectations="exact"), 3, outer_lr=0.5, optimizer=optimizer)
    scenario = Scenario(watched(made(3, 1)), fully_connected(3), method, precision="float64")
    result = run(scenario, out=tmp_path / "run")
    adapted = adapt(result, watched(made(5, 2)))
    assert adapted.clients["y0"].tolist() == [float(result.final["inner"].mean(0)[0])] * 5
    by_hand = Quadratics.of(made(5, 2))
    lam0 = adapt(result, watched(made(5, 2)), steps=0).clients[["x0", "x1"]].to_numpy()
    for i in range(5):
        lam = torch.tensor(lam0[i], requires_grad=True)
        rule = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]([lam], lr=0.5)
        for _ in range(3):
            lam.grad = torch.from_numpy(by_hand.f_x(i, lam.detach().numpy(), np.zeros(2)) / 3)
            rule.step()
        found = adapted.clients[["x0", "x1"]].to_numpy()[i]
        np.testing.assert_allclose(found, lam.detach().numpy(), rtol=0, atol=1e-10)


def test_new_clients_of_pfedme_do_the_work_of_one_round(tmp_path: Path) -> None:
    method = PFedMe(2, LocalSteps(0.1, steps=2, batch=4), lam=2.0, prox_lr=0.2, prox_steps=3)
    result = serve(problem(), method, tmp_path / "run", seed=SEED)
    adapted = adapt(result, problem())
    w = result.final["inner"][0].numpy()
    for i in range(4):
        w_i, theta = w, w
        for _, index in zip(range(2), minibatches(i, JUDGING), strict=False):
            for _ in range(3):
                theta = theta - 0.2 * (gradient(i, theta, index) + 2.0 * (theta - w_i))
            w_i = w_i - 0.1 * 2.0 * (w_i - theta)
        assert adapted.clients["loss"][i] == pytest.approx(loss_of(i, theta), abs=1e-12)
        assert adapted.clients["loss_global"][i] == pytest.approx(loss_of(i, w), abs=1e-12)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    fedavg = serve(problem(), WITH_SERVER["FedAvg"], tmp_path / "fedavg")
    with pytest.raises(ScenarioError, match="steps is 2, and new clients of FedAvg make none; leave it out"):
        adapt(fedavg, problem(), steps=2)
    with pytest.raises(ScenarioError, match="steps is -1; it must be a whole number, at least 0, or None"):
        adapt(fedavg, problem(), steps=-1)
    with pytest.raises(ScenarioError, match=r"'quadratic' has 5 numbers, and that of .* has 3; give"):
        adapt(fedavg, quadratic(clients=2))
    with pytest.raises(ScenarioError, match="FedEM fits a mixture of models, and problem 'softplus' is none"):
        adapt(fedavg, problem(), method=FedEM(1, LOCAL))
    alone = run(Scenario(problem(), fully_connected(4), Local(1, 0.1)), out=tmp_path / "local")
    apart = ClusteredFL(2, LocalSteps(0.1), eps1=1e9, eps2=0.0, min_rounds=0)
    clusters = serve(problem(), apart, tmp_path / "clusters")
    for method in (None, SGP(1, 0.1), WITH_SERVER["FedAvgPlus"]):  # whoever adapts it
        with pytest.raises(ScenarioError, match="clients of Local are alone: there is no model"):
            adapt(alone, problem(), method=method)
        with pytest.raises(ScenarioError, match=r"ClusteredFL left . models, and which of them a new client"):
            adapt(clusters, problem(), method=method)
    with pytest.raises(ScenarioError, match="run with save_final=True"):
        adapt(load(tmp_path / "fedavg"), problem())


def test_peers_that_never_mix_their_models_have_none_for_others(tmp_path: Path) -> None:
    """Though their outer variables travel."""
    given = bilevel_quadratic(clients=3, dimension=2, outer_dimension=2, seed=1)
    method = CDBO(Local(2, 0.1, batch=None), HGP(2, expectations="exact"), 1)
    result = run(Scenario(given, fully_connected(3), method), out=tmp_path / "run")
    with pytest.raises(ScenarioError, match="clients of CDBO are alone: there is no model"):
        adapt(result, given)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (FedAvgPlus(1, LocalSteps(StepDecay(0.1, [2]))), "say how clients tune, as in tuning=LocalSteps"),
        (FedAvgPlus(1, LOCAL, tuning=LocalSteps(0.1, steps=(1, 2))), "2 numbers of steps are given for 4"),
        (PFedMe(1, LocalSteps(0.1, steps=(1, 2, 3))), "3 numbers of steps are given for 4 clients"),
    ],
    ids=["FedAvgPlus", "tuning", "PFedMe"],
)
def test_a_method_that_replaces_the_runs_is_checked_as_in_a_run(
    method: Any, said: str, tmp_path: Path
) -> None:
    fedavg = serve(problem(), WITH_SERVER["FedAvg"], tmp_path / "fedavg")
    with pytest.raises(ScenarioError, match=said):
        adapt(fedavg, problem(), method=method)


def test_the_model_of_peers_is_tuned_as_that_of_a_server(tmp_path: Path) -> None:
    peers = run(
        Scenario(problem(), fully_connected(4), SGP(2, 0.1, batch=None), precision="float64", seed=SEED),
        out=tmp_path / "run",
    )
    y = peers.final["inner"].mean(0).numpy()
    tuned = adapt(peers, problem(), method=MetaFL(1, 0, 1, ALPHA, BETA, BATCH), steps=1)
    for i in range(4):
        own = y - ALPHA * gradient(i, y, drawn(i, JUDGING, "tuning 0"))
        assert tuned.clients["loss"][i] == pytest.approx(loss_of(i, own), abs=1e-12)


def test_new_clients_of_pfedme_work_at_the_rate_of_the_last_round(tmp_path: Path) -> None:
    def method(rate: Any) -> PFedMe:
        return PFedMe(3, LocalSteps(rate, steps=2, batch=4), lam=2.0, prox_lr=0.2, prox_steps=3)

    result = serve(problem(), method(StepDecay(0.1, [2])), tmp_path / "run", seed=SEED)
    as_last = adapt(result, problem(), method=method(0.1 * 0.1))
    assert adapt(result, problem()).metrics == as_last.metrics
    assert adapt(result, problem(), method=method(0.1)).metrics != as_last.metrics
