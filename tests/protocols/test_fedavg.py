"""FedAvg at a server: the same as among peers where it should be, and averages by hand where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncfed import Scenario, ScenarioError, TopologyError, run
from asyncfed.data import client_data_from_lists
from asyncfed.problems import Problem, classification, quadratic
from asyncfed.protocols import SGP, FedAvg, LocalSteps, PeerFedAvg, Server
from asyncfed.rng import Streams
from tests.protocols.served import asked, serve
from topologies import fully_connected


@pytest.mark.parametrize(
    "peers", [PeerFedAvg(steps=15, lr=0.4, batch=None), SGP(steps=15, lr=0.4, order="4a", batch=None)]
)
@pytest.mark.parametrize("shards", ["one", "unequal"])
def test_with_one_full_step_it_is_fedavg_among_peers(shards: str, peers: SGP, tmp_path: Path) -> None:
    problem = (
        quadratic(clients=5, dimension=4, seed=2)
        if shards == "one"
        else classification("digits", clients=5, partition="dirichlet:0.5", limit=200, seed=3)
    )
    if shards == "unequal":
        assert len(set(problem.data.train.sizes)) > 1
    full = fully_connected(5)
    scenario = Scenario(problem=problem, topology=full, protocol=peers, precision="float64", seed=6)
    expected = run(scenario, out=tmp_path / "peers").final["inner"]
    served = serve(problem, FedAvg(15, LocalSteps(0.4), server=Server()), tmp_path / "server", seed=6)
    torch.testing.assert_close(served.final["inner"].expand(5, -1), expected, rtol=0, atol=1e-12)


def unequal() -> Problem:
    """½‖y − a‖² over 1, 2 and 5 samples a of each client."""
    shards = [
        (torch.tensor([[4.0, 0.0]]),),
        (torch.tensor([[0.0, 2.0], [0.0, 4.0]]),),
        (torch.tensor([[-1.0, -1.0]] * 5),),
    ]
    return Problem(
        name="unequal shards",
        data=client_data_from_lists(shards).to(torch.float64),
        inner_loss=lambda y, x, batch: 0.5 * (y - batch[0]).square().sum(1).mean(),
        init_inner=lambda g: torch.zeros(2, dtype=torch.float64),
        metrics={},
    )


def test_answers_weigh_as_their_clients_have_samples_unless_told_otherwise(tmp_path: Path) -> None:
    """One step of 0.5 from 0 leads to half of each client's mean: (2, 0), (0, 1.5) and (−0.5, −0.5)."""
    local = LocalSteps(0.5)
    weighted = serve(unequal(), FedAvg(1, local), tmp_path / "weighted")
    assert weighted.final["inner"][0].tolist() == pytest.approx([(2 - 2.5) / 8, (3 - 2.5) / 8], abs=1e-15)
    plain = serve(unequal(), FedAvg(1, local, server=Server()), tmp_path / "plain")
    assert plain.final["inner"][0].tolist() == pytest.approx([1.5 / 3, 1 / 3], abs=1e-15)
    some = Server(weighted=True, participation=[1, 2])
    two = serve(unequal(), FedAvg(1, local, server=some), tmp_path / "two")
    assert two.final["inner"][0].tolist() == pytest.approx([-2.5 / 7, (3 - 2.5) / 7], abs=1e-15)
    answers = two.trace.to_pandas().query("receiver == 3")
    assert answers.weight.tolist() == pytest.approx([2 / 7, 5 / 7])


def test_it_asks_exactly_the_clients_it_draws_and_averages_these(tmp_path: Path) -> None:
    problem = quadratic(clients=6, dimension=2, seed=4)
    A, b = (tensor.numpy() for tensor in problem.data.train.tensors)
    protocol = FedAvg(8, LocalSteps(0.3, steps=2), server=Server(participation=0.5))
    result = serve(problem, protocol, tmp_path / "run", start={"y": np.ones(2)}, seed=9)
    y, sets = np.ones(2), asked(result)
    for k in range(8):
        uniforms = Streams(9).uniforms("participation", k, 0, 6)
        assert sets[k] == sorted(np.argsort(uniforms)[:3].tolist())
        ends = []
        for i in sets[k]:
            y_i = y
            for _ in range(2):
                y_i = y_i - 0.3 * A[i] @ (y_i - b[i])
            ends.append(y_i)
        y = np.mean(ends, axis=0)
    np.testing.assert_allclose(result.final["inner"][0].numpy(), y, rtol=0, atol=1e-13)
    assert result.trace.rounds().answered.tolist() == [3] * 8
    assert len({tuple(some) for some in sets}) > 3


@pytest.mark.parametrize(
    ("participation", "expected"),
    [([3, 1], [[1, 3]] * 4), ([[0, 2], [5], [1, 3, 4]], [[0, 2], [5], [1, 3, 4], [0, 2]])],
)
def test_named_clients_are_asked_always_or_in_turn(
    participation: Any, expected: list[list[int]], tmp_path: Path
) -> None:
    problem = quadratic(clients=6, dimension=2)
    protocol = FedAvg(4, LocalSteps(0.1), server=Server(participation=participation))
    assert asked(serve(problem, protocol, tmp_path / "run")) == expected


def test_it_ends_before_it_would_need_too_many_rounds(tmp_path: Path) -> None:
    protocol = FedAvg(10, LocalSteps(0.1), max_rounds=4)
    result = serve(quadratic(clients=2), protocol, tmp_path / "run")
    assert result.trace.communication_rounds() == 4
    assert result.metrics.outer_step.tolist() == [0, 1, 2, 3, 4]


def test_it_needs_a_server_and_local_steps(tmp_path: Path) -> None:
    scenario = Scenario(
        problem=quadratic(clients=4), topology=fully_connected(4), protocol=FedAvg(1, LocalSteps(0.1))
    )
    with pytest.raises(
        TopologyError, match=r"needs a server, and the topology has none; use topologies\.star"
    ):
        run(scenario, out=tmp_path / "never")
    with pytest.raises(ScenarioError, match=r"local is 0\.1; it must be LocalSteps"):
        FedAvg(1, 0.1)  # type: ignore[arg-type]
    with pytest.raises(ScenarioError, match="outer_steps is -1; it must be a whole number, at least 0"):
        FedAvg(-1, LocalSteps(0.1))
