"""A problem whose functions return something else than they should is refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncfed import Scenario
from asyncfed.data import client_data_from_lists
from asyncfed.errors import DataError, ScenarioError
from asyncfed.problems import Problem
from asyncfed.protocols import SGP
from asyncfed.scenario import check
from topologies import ring

DATA = [(torch.zeros(5, 3),) for _ in range(3)]


def scenario(**functions: Any) -> Scenario:
    given: dict[str, Any] = {
        "name": "own",
        "data": client_data_from_lists(DATA),
        "inner_loss": lambda x, lam, batch: (batch[0] - x).square().mean(),
        "init_inner": lambda generator: torch.zeros(3),
    }
    return Scenario(problem=Problem(**(given | functions)), topology=ring(3), protocol=SGP(steps=1, lr=0.1))


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        (
            {"inner_loss": lambda x, lam, batch: (batch[0] - x).square().mean(1)},
            r"inner_loss of problem 'own' returns a tensor of shape \(2,\); it must be .* one number",
        ),
        ({"inner_loss": lambda x, lam, batch: 0.5}, "inner_loss of problem 'own' returns a float"),
        (
            {"outer_loss": lambda x, lam, batch: batch[0] - x},
            r"outer_loss of problem 'own' returns a tensor of shape \(2, 3\)",
        ),
        (
            {"metrics": {"far": lambda x, lam, batch: (batch[0] - x).norm()}},
            r"metric 'far' of problem 'own' returns a tensor of shape \(\) for 2 samples",
        ),
        (
            {"metrics": {"far": lambda x, lam, batch: batch[0] - x}},
            r"metric 'far' of problem 'own' returns a tensor of shape \(2, 3\) for 2 samples",
        ),
        ({"init_inner": lambda generator: [0.0]}, "init_inner of problem 'own' returns a list"),
        ({"init_inner": lambda generator: {"x": 0.0}}, "init_inner of problem 'own' returns a dict"),
    ],
)
def test_a_function_that_returns_something_else_is_named(functions: dict[str, Any], said: str) -> None:
    check(scenario())
    with pytest.raises(ScenarioError, match=said):
        check(scenario(**functions))


def test_precisions_may_differ_between_samples_and_initial_values() -> None:
    check(scenario(init_inner=lambda generator: torch.zeros(3, dtype=torch.float64)))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_sample_that_is_no_number_is_named(split: str, value: float) -> None:
    """By split, client, tensor and sample; a client without samples is nobody's."""
    labels = torch.arange(5)
    splits = {name: [(torch.zeros(5, 3), labels) for _ in range(3)] for name in ("train", split)}
    if split != "train":
        splits[split][1] = (torch.zeros(0, 3), labels[:0])
    splits[split][2][0][3, 1] = value
    own = scenario(data=client_data_from_lists(**splits))
    said = (
        f"the {split} samples of client 2 of problem 'own' are not all finite: tensor 0 of its sample 3 "
        rf"holds {value} \(1 such samples in all\)"
    )
    with pytest.raises(DataError, match=said):
        check(own)


def test_large_numbers_are_numbers() -> None:
    """Also where their sum is none."""
    huge = torch.full((5, 3), 3e38)
    check(scenario(data=client_data_from_lists([(huge,) for _ in range(3)])))
