"""Clustered FL against its algorithm box (with a linkage written out by hand), and on planted clusters."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncfed import Result, Scenario, ScenarioError, VirtualTime, run
from asyncfed.data import ClientData, client_data_from_lists
from asyncfed.problems import Problem
from asyncfed.problems.quadratic import sample_loss
from asyncfed.protocols import ClusteredFL, FedAvg, LocalSteps, Server
from asyncfed.protocols.clustered_fl import bipartition
from asyncfed.scenario import check
from tests.helpers import files_of
from tests.protocols.replayed import Answers, Array, replay
from tests.protocols.served import serve, watched
from topologies import star

Models = tuple[Array, tuple[int, ...]]  # a row for each cluster, and the cluster of each client
GROUPS = (0, 1, 0, 1, 1, 0, 0)
CENTRES = np.array([[3.0, 0.0, 1.0], [-3.0, 0.5, 1.0]])


def planted(groups: tuple[int, ...] = GROUPS, centres: Array = CENTRES, unequal: bool = True) -> Problem:
    """Quadratics whose minimisers lie about the centres of their groups; 1, 2, 3, 1, … samples each."""
    generator = np.random.default_rng(5)
    d = centres.shape[1]
    shards = []
    for i, group in enumerate(groups):
        root = np.eye(d) + 0.1 * generator.standard_normal((d, d))
        b = centres[group] + 0.05 * generator.standard_normal(d)
        n = 1 + i % 3 if unequal else 1
        shards.append(
            (torch.from_numpy(np.tile(root @ root.T, (n, 1, 1))), torch.from_numpy(np.tile(b, (n, 1))))
        )
    train = client_data_from_lists(shards).train
    return watched(
        Problem(
            name="planted",
            data=ClientData(train, train, train),
            inner_loss=lambda x, lam, batch: sample_loss(x, lam, batch).mean(),
            init_inner=lambda g: torch.zeros(d, dtype=torch.float64),
            metrics={},
        )
    )


def quadratics(problem: Problem) -> tuple[Array, Array, Array]:
    """A, b and number of samples of every client."""
    train = problem.data.train
    first = np.concatenate([[0], np.cumsum(train.sizes)[:-1]])
    A, b = (tensor.numpy()[first] for tensor in train.tensors)
    return A, b, train.sizes.astype(float)


def halves(delta: Array) -> list[set[int]]:
    """Complete linkage on 1 − cos down to two clusters, pair by pair."""
    unit = delta / np.linalg.norm(delta, axis=1, keepdims=True)
    distance = 1 - unit @ unit.T
    parts = [{i} for i in range(len(delta))]
    while len(parts) > 2:
        _, a, b = min(
            (max(distance[i, j] for i, j in product(parts[a], parts[b])), a, b)
            for a in range(len(parts))
            for b in range(a + 1, len(parts))
        )
        parts[a] |= parts.pop(b)
    return sorted(parts, key=min)


class Box:
    """The algorithm, with full gradient steps; `push` are momentum and weight decay."""

    def __init__(
        self,
        problem: Problem,
        lr: float,
        tau: int,
        eps1: float,
        eps2: float,
        first: int,
        push: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.A, self.b, _ = quadratics(problem)
        self.lr, self.tau, self.eps1, self.eps2, self.first = lr, tau, eps1, eps2, first
        self.momentum, self.decay = push

    def local(self, i: int, round_: int, state: Models, memory: Array) -> tuple[Array, Array]:
        models, cluster = state
        start = theta = models[cluster[i]]
        for _ in range(self.tau):
            gradient = self.A[i] @ (theta - self.b[i]) + self.decay * theta
            memory = self.momentum * memory + gradient
            theta = theta - self.lr * memory
        return theta - start, memory

    def fold(self, round_: int, state: Models, answers: Answers) -> Models:
        models, cluster = list(state[0]), list(state[1])
        delta = {i: answer for i, _, answer in answers}
        weight = {i: share for i, share, _ in answers}

        def mean(some: list[int]) -> Array:
            return np.asarray(sum(weight[i] * delta[i] for i in some) / sum(weight[i] for i in some))

        for c in range(len(models)):
            members = [i for i in range(len(cluster)) if cluster[i] == c]
            if round_ < self.first or len(members) <= 2 or not set(members) <= delta.keys():
                continue
            longest = max(np.linalg.norm(delta[i]) for i in members)
            if np.linalg.norm(mean(members)) < self.eps1 and longest > self.eps2:
                _, leaving = halves(np.array([delta[i] for i in members]))
                for place in leaving:
                    cluster[members[place]] = len(models)
                models.append(models[c])
        for c in range(len(models)):
            here = [i for i in sorted(delta) if cluster[i] == c]
            if here:
                models[c] = models[c] + mean(here)
        return np.array(models), tuple(cluster)


def agrees(result: Result, states: list[Models]) -> None:
    """Final models and clusters, what every client is judged by, and the counts in the metrics."""
    models, cluster = states[-1]
    np.testing.assert_allclose(result.final["inner"].numpy(), models, rtol=0, atol=1e-10)
    assert result.final["cluster"][0].tolist() == list(cluster)
    judged = result.clients.sort_values("client")[["y0", "y1", "y2"]].to_numpy()
    np.testing.assert_allclose(judged, models[list(cluster)], rtol=0, atol=1e-10)
    assert result.metrics.clusters.tolist() == [len(models) for models, _ in states]
    assert result.metrics.splits.tolist() == [len(models) - 1 for models, _ in states]


@pytest.mark.parametrize("push", [(0.0, 0.0), (0.5, 0.01)], ids=["plain", "pushed"])
@pytest.mark.parametrize("weighted", [False, True])
def test_rounds_are_those_of_the_box(weighted: bool, push: tuple[float, float], tmp_path: Path) -> None:
    """Three groups, two splits; in every third round some clients are not asked, and no cluster of theirs is
    split. With momentum and weight decay too: momenta stay at the clients.
    """
    centres = np.array([[4.0, 0.0, 1.0], [-4.0, 2.0, 1.0], [-4.0, -2.0, 1.0]])
    given = planted((0, 1, 2, 0, 2, 1, 0, 2, 1), centres)
    everyone = list(range(9))
    sets = [everyone, everyone, [0, 1, 2, 5, 7]]
    protocol = ClusteredFL(
        17,
        LocalSteps(0.2, steps=3),
        eps1=0.4,
        eps2=0.7,
        min_rounds=5,
        server=Server(sets, weighted=weighted),
        momentum=push[0],
        weight_decay=push[1],
    )
    result = serve(given, protocol, tmp_path / "run")
    box = Box(given, 0.2, 3, 0.4, 0.7, 5, push)
    momenta = [np.zeros(3)] * 9
    n_i = quadratics(given)[2] if weighted else np.ones(9)
    state: Models = (np.zeros((1, 3)), (0,) * 9)
    states = [state]
    for k in range(17):
        S = sets[k % 3]
        answers: Answers = []
        for i in S:
            delta, momenta[i] = box.local(i, k, state, momenta[i])
            answers.append((i, n_i[i], delta))
        state = box.fold(k, state, answers)
        states.append(state)
    assert [len(models) for models, _ in states] == sorted(len(models) for models, _ in states)
    assert len(states[-1][0]) == 3
    assert len(states[5][0]) == 1
    agrees(result, states)


def test_it_finds_two_planted_clusters_with_one_split(tmp_path: Path) -> None:
    given = planted()
    protocol = ClusteredFL(120, LocalSteps(0.2, steps=2), eps1=0.1, eps2=0.5, min_rounds=10, server=Server())
    result = serve(given, protocol, tmp_path / "run")
    assert result.final["cluster"][0].tolist() == list(GROUPS)
    assert result.metrics.splits.iloc[-1] == 1
    splits = result.metrics.splits.to_numpy()
    assert (splits[:11] == 0).all()
    judged = result.clients.sort_values("client")[["y0", "y1", "y2"]].to_numpy()
    for group in (0, 1):
        mine = np.flatnonzero(np.array(GROUPS) == group)
        alone = serve(
            given,
            FedAvg(200, LocalSteps(0.2, steps=2), server=Server(mine.tolist())),
            tmp_path / f"group{group}",
            every=200,
        )
        np.testing.assert_allclose(judged[mine], alone.final["inner"].numpy().repeat(len(mine), 0), atol=1e-9)
        assert np.abs(judged[mine] - CENTRES[group]).max() < 0.1


def test_it_splits_nothing_where_clients_are_alike(tmp_path: Path) -> None:
    """Of one group, with the settings that part two."""
    protocol = ClusteredFL(120, LocalSteps(0.2, steps=2), eps1=0.1, eps2=0.5, min_rounds=10, server=Server())
    result = serve(planted((0,) * len(GROUPS)), protocol, tmp_path / "run", every=10)
    assert set(result.metrics.splits) == {0}


def test_without_eps1_it_is_fedavg(tmp_path: Path) -> None:
    local, server = LocalSteps(0.1, epochs=2, batch=1), Server(0.6, weighted=True)
    protocol = ClusteredFL(30, local, eps1=0.0, eps2=0.0, min_rounds=0, server=server)
    result = serve(planted(), protocol, tmp_path / "run", seed=3)
    assert set(result.metrics.splits) == {0}
    expected = serve(planted(), FedAvg(30, local, server=server), tmp_path / "fedavg", seed=3)
    torch.testing.assert_close(result.final["inner"], expected.final["inner"], rtol=0, atol=1e-12)


def test_a_request_carries_one_model_however_many_there_are(tmp_path: Path) -> None:
    protocol = ClusteredFL(8, LocalSteps(0.2, steps=2), eps1=0.3, eps2=0.5, min_rounds=3, server=Server())
    result = serve(planted(), protocol, tmp_path / "run")
    assert len(result.final["inner"]) == 2
    assert set(result.trace.to_pandas().bytes) == {3 * 8}


def test_metrics_show_how_things_stand_and_not_means_over_rounds(tmp_path: Path) -> None:
    protocol = ClusteredFL(12, LocalSteps(0.2, steps=2), eps1=0.3, eps2=0.5, min_rounds=3, server=Server())
    result = serve(planted(), protocol, tmp_path / "run", every=5)
    assert result.metrics.outer_step.tolist() == [0, 5, 10, 12]
    assert result.metrics.clusters.tolist() == [1, 2, 2, 2]


def late(seed: int = 0) -> Scenario:
    return Scenario(
        problem=planted(),
        topology=star(len(GROUPS), up=0.9),
        protocol=ClusteredFL(
            40,
            LocalSteps(0.1, steps=2),
            eps1=0.4,
            eps2=0.5,
            min_rounds=8,
            server=Server(weighted=True, quorum=6, late="next"),
        ),
        timing=VirtualTime(compute="lognormal(1.0, 0.4)", latency="exponential(0.2)", factors={2: 1.5}),
        precision="float64",
        seed=seed,
        evaluate_every=1,
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_quorum_and_late_answers_in_virtual_time(seed: int, tmp_path: Path) -> None:
    """An answer to an older model is a step from the present one, wherever its client is by now."""
    scenario = late(seed)
    result = run(scenario, out=tmp_path / "run")
    box = Box(scenario.problem, 0.1, 2, 0.4, 0.5, 8)
    start: Models = (np.zeros((1, 3)), (0,) * len(GROUPS))
    states, _ = replay(result, len(GROUPS), start, np.zeros(3), box.local, box.fold)
    agrees(result, states)
    rounds = result.trace.rounds()
    assert rounds.used_late.sum() > 0
    assert result.final["cluster"][0].tolist() == list(GROUPS)
    strict = run(scenario, out=tmp_path / "strict", strict=True)
    for key, value in result.final.items():
        assert torch.equal(strict.final[key], value)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_actors_agree(tmp_path: Path) -> None:
    local = run(late(), out=tmp_path / "local")
    other = run(late(), backend="ray", clients_per_actor=4, out=tmp_path / "ray")
    assert other.manifest["placement"]["actors"] == 2
    assert sorted(other.final) == sorted(local.final)
    for key, value in local.final.items():
        torch.testing.assert_close(other.final[key], value, rtol=0, atol=1e-10)
    for column in local.metrics.columns.drop("phase"):
        np.testing.assert_allclose(
            other.metrics[column].astype(float), local.metrics[column].astype(float), rtol=0, atol=1e-10
        )
    np.testing.assert_allclose(other.clients.to_numpy(), local.clients.to_numpy(), rtol=0, atol=1e-10)
    assert files_of(other.path / "trace") == files_of(local.path / "trace")


@pytest.mark.parametrize("seed", range(5))
def test_halves_are_those_of_complete_linkage(seed: int) -> None:
    delta = np.random.default_rng(seed).standard_normal((9, 4))
    found = bipartition(torch.from_numpy(delta))
    assert sorted(({*np.flatnonzero(found == h).tolist()} for h in (0, 1)), key=min) == halves(delta)


def test_updates_of_zero_are_like_nothing() -> None:
    delta = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0], [1.0, 0.1]])
    found = bipartition(delta)
    assert set(found.tolist()) == {0, 1}
    assert found[0] == found[3] != found[2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"eps1": -1}, "ClusteredFL: eps1 is -1; it must be a finite number, at least 0"),
        ({"eps2": None}, "ClusteredFL: eps2 is None; it must be a finite number, at least 0"),
        ({"min_rounds": 1.5}, "ClusteredFL: min_rounds is 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        ClusteredFL(1, LocalSteps(0.1), **change)


@pytest.mark.parametrize("some", [0.6, [0, 1, 2], [[0, 1, 2], [3, 4, 5, 6]]])
def test_a_server_that_never_asks_everybody_is_refused(some: Any) -> None:
    """Nothing would ever be split; at times everybody is enough (as in the box above)."""
    method = ClusteredFL(5, LocalSteps(0.1), server=Server(some))
    with pytest.raises(ScenarioError, match=r"participation .* never asks all 7 of the first one, .* eps1=0"):
        check(Scenario(planted(), star(len(GROUPS)), method))
    check(Scenario(planted(), star(len(GROUPS)), ClusteredFL(5, LocalSteps(0.1), server=Server(0.95))))


def test_the_model_of_a_client_is_its_clusters(tmp_path: Path) -> None:
    protocol = ClusteredFL(12, LocalSteps(0.2, steps=2), eps1=0.3, eps2=0.5, min_rounds=3, server=Server())
    result = serve(planted(), protocol, tmp_path / "run")
    cluster = result.final["cluster"][0].tolist()
    assert set(cluster) == {0, 1}
    for client, c in enumerate(cluster):
        torch.testing.assert_close(result.model(client)["inner"], result.final["inner"][c])
    with pytest.raises(ScenarioError, match="there are 2 models for 7 clients; say whose"):
        result.model()
