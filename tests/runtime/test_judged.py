"""A run does not end as if all were well with a loss that is no number: not even in its last look."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncfed import DivergenceError, Scenario, VirtualTime, load, run
from asyncfed.data import client_data_from_lists
from asyncfed.problems import Problem
from asyncfed.protocols import SGP, Buffered, FedAvg, FedBuff, Local, LocalSteps
from topologies import ring, star

CLIENTS, CULPRIT, EMPTY = 4, 1, 3
WAYS = {
    "peers": (SGP(steps=10, lr=0.01, batch=None), ring(CLIENTS), {}),
    "peers in virtual time": (SGP(steps=10, lr=0.01, batch=None), ring(CLIENTS), {"timing": VirtualTime()}),
    "each alone": (Local(steps=10, lr=0.01, batch=None), ring(CLIENTS), {}),
    "a server": (FedAvg(10, LocalSteps(0.01, steps=1)), star(CLIENTS), {}),
    "a server that does not wait": (
        FedBuff(10, LocalSteps(0.01, steps=1), server=Buffered(CLIENTS, at_work=CLIENTS)), star(CLIENTS), {},
    ),
}  # fmt: skip


def _downhill(x: Tensor, lam: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """A step of length lr at a time, for ever."""
    return -(x * torch.ones_like(batch[0])).mean()


def _steep(x: Tensor, lam: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Beyond all single precision numbers after nine steps, where a sample is 1."""
    return torch.exp(1000 * batch[0][:, 0] * x[0])


def _scenario(way: str, steepness: float = 1.0, **changes: Any) -> Scenario:
    protocol, topology, options = WAYS[way]
    train = [(torch.zeros(2, 1),) for _ in range(CLIENTS)]
    test = [(torch.zeros(2, 1),) for _ in range(CLIENTS)]
    test[CULPRIT][0][:] = steepness
    test[EMPTY] = (torch.zeros(0, 1),)
    problem = Problem(
        name="steep",
        data=client_data_from_lists(train, test=test),
        inner_loss=_downhill,
        init_inner=lambda generator: torch.zeros(1),
        metrics={"loss": _steep},
    )
    given = {"evaluate_every": 5} | options | changes
    return Scenario(problem=problem, topology=topology, protocol=protocol, **given)


def _fails_in_the_end(out: Path, way: str, **options: Any) -> None:
    with pytest.raises(DivergenceError) as caught:
        run(_scenario(way), out=out, **options)
    error = caught.value
    assert (error.client, error.step, error.value) == (CULPRIT, 10, math.inf)
    assert str(error).startswith("loss, as judged, of client 1 became inf at step 10; ")
    left = load(out)
    assert left.status == "failed"
    assert json.loads((out / "run.json").read_text())["error"] == str(error)
    assert len(left.metrics) == 2, "what was judged before stays readable"
    assert all(map(math.isfinite, left.metrics["loss"].tolist()))


@pytest.mark.parametrize("way", WAYS)
def test_a_last_loss_that_is_no_number_ends_the_run_by_name(way: str, tmp_path: Path) -> None:
    _fails_in_the_end(tmp_path / "run", way)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("way", ["peers", "a server"])
def test_so_it_does_on_ray(way: str, tmp_path: Path) -> None:
    _fails_in_the_end(tmp_path / "run", way, backend="ray", clients_per_actor=2)


@pytest.mark.parametrize("way", WAYS)
def test_who_has_no_samples_to_be_judged_by_is_no_failure(way: str, tmp_path: Path) -> None:
    result = run(_scenario(way, steepness=0.5), out=tmp_path / "run")
    assert result.status == "complete"
    assert all(map(math.isfinite, result.metrics["loss"].tolist()))
    assert math.isnan(result.clients["loss"][EMPTY])
