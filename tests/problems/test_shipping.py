"""What goes to a Ray actor with a problem: its functions, and the data of its own clients only."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor

from asyncfed import Scenario, ScenarioError, run
from asyncfed.problems import Derivatives, Problem, quadratic, regularization_tuning
from asyncfed.problems.problem import Batch
from asyncfed.protocols import AggITD, FedAvg, LocalSteps
from asyncfed.registry import registered
from tests.data.test_shakespeare import play, written
from topologies import star

FUNCTIONS = 25_000  # bytes, at most, of a problem's functions; datasets are larger
OURS = [name for name, make in registered("problem").items() if make.__module__.startswith("asyncfed.")]
SMALL: dict[str, dict[str, Any]] = {
    "loss_tuning": {"dataset": "digits", "clients": 10, "model": "logistic", "largest": 150, "ratio": 0.5},
    "hyper_representation": {"dataset": "digits", "clients": 10, "model": "mlp:16"},
    "logistic_pair": {"dataset": "digits", "samples": 50},
    "personalized_characters": {
        "clients": 2, "hidden": 4, "length": 6, "components": 2, "min_characters": 50
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_a_problem_goes_along_with_its_own_data_and_little_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "personalized_characters":
        monkeypatch.setenv("ASYNCFED_DATA", str(written(tmp_path, play())))
    problem: Problem = registered("problem")[name](**SMALL.get(name, {}))
    derivatives = Derivatives.of(problem)
    network = 8 * (derivatives.inner.d + derivatives.outer.d)
    for clients in (0, 1, problem.clients):
        mine = replace(problem, data=problem.data.select(np.arange(clients)))
        splits = (mine.data.train, mine.data.validation, mine.data.test)
        data = sum(tensor.nbytes for split in splits for tensor in split.tensors)
        assert len(cloudpickle.dumps(mine)) < 1.1 * data + network + FUNCTIONS


@pytest.mark.ray
def test_regularization_tuning_does_on_ray_what_it_does_here(ray_cluster: None, tmp_path: Path) -> None:
    scenario = Scenario(
        regularization_tuning(clients=4),
        star(4),
        AggITD(2, LocalSteps(0.1, steps=2), LocalSteps(0.1), inner_rounds=2, scale=0.3),
        precision="float64",
    )
    here = run(scenario, out=tmp_path / "here")
    there = run(scenario, backend="ray", clients_per_actor=2, out=tmp_path / "there")
    assert here.final["outer"].std() > 0, "it was tuned"
    for variable in ("inner", "outer"):
        torch.testing.assert_close(there.final[variable], here.final[variable], rtol=0, atol=1e-10)


@pytest.mark.ray
def test_a_problem_that_cannot_be_sent_is_refused_by_name(ray_cluster: None, tmp_path: Path) -> None:
    lock = threading.Lock()
    plain = quadratic(clients=2)

    def inner_loss(x: Tensor, lam: Any, batch: Batch) -> Tensor:
        with lock:
            return plain.inner_loss(x, lam, batch)

    locked = replace(plain, name="locked", inner_loss=inner_loss, outer_loss=inner_loss)
    scenario = Scenario(locked, star(2), FedAvg(1, LocalSteps(0.1)))
    with pytest.raises(ScenarioError, match=r"problem 'locked' cannot be sent to Ray actors: .*lock"):
        run(scenario, backend="ray", out=tmp_path / "run")
