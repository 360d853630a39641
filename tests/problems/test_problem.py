"""Problems: plain functions in, defaults filled, and a recipe that builds the same problem again."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from asyncfed import Scenario, run
from asyncfed.data import (
    IID,
    DirichletOverClasses,
    DirichletOverClients,
    LabelShards,
    Partition,
    client_data_from_lists,
)
from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.problems import (
    Problem,
    classification,
    personalized_classification,
    problem_factory,
    problem_from_recipe,
    quadratic,
    recipe_type,
)
from asyncfed.problems.problem import OWN_COLUMNS
from asyncfed.protocols import HGP, PDBO, SGP, EstimateHypergradient
from topologies import fully_connected

DATA = client_data_from_lists([(torch.ones(2, 3),), (torch.zeros(4, 3),)])


def loss(inner: torch.Tensor, outer: object, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (batch[0] - inner).square().mean()


def plain_problem() -> Problem:
    return Problem(name="mine", data=DATA, inner_loss=loss, init_inner=lambda g: torch.zeros(3))


def test_a_single_level_problem_needs_four_things() -> None:
    problem = plain_problem()
    assert problem.outer_loss is problem.inner_loss
    assert problem.init_outer(torch.Generator()) == {}
    assert problem.clients == 2
    assert problem.vectorize
    assert problem.recipe is None
    assert dict(problem.metrics) == {}


@pytest.mark.parametrize(
    "name",
    ["step", "phase", "train_loss", "messages", "accuracy_p10", "outer_step", "validation_loss", "client"],
)
def test_a_metric_called_like_a_column_of_every_run_is_refused(name: str) -> None:
    with pytest.raises(ScenarioError, match=f"a metric of problem 'mine' is called '{name}'"):
        replace(plain_problem(), metrics={"loss": loss, name: loss})


@pytest.mark.parametrize(
    "protocol",
    [
        PDBO(SGP(steps=4, lr=0.1), HGP(2), outer_steps=1),
        EstimateHypergradient(SGP(steps=4, lr=0.1), HGP(2, expectations="exact"), solve=False),
    ],
)
def test_what_a_run_writes_is_its_metrics_and_the_columns_that_no_metric_can_have(
    protocol: PDBO | EstimateHypergradient, tmp_path: Path
) -> None:
    problem = personalized_classification("digits", clients=3, limit=90, partition=IID())
    result = run(Scenario(problem, fully_connected(3), protocol), out=tmp_path / "run")
    metrics = {*problem.metrics, *(f"validation_{name}" for name in problem.metrics)}
    assert {*result.metrics, *result.clients} - metrics <= OWN_COLUMNS
    assert {*result.metrics, *result.clients} >= OWN_COLUMNS - {"outer_step"}


@pytest.mark.parametrize(
    "partition",
    ["shards:2", IID(), LabelShards(3), DirichletOverClients(0.5, min_samples=4), DirichletOverClasses(0.1)],
)
def test_a_recipe_builds_the_same_problem_again(partition: Partition | str) -> None:
    first = classification(clients=8, partition=partition, seed=3, l2=0.01, fractions=(0.5, 0.25, 0.25))
    assert first.recipe is not None
    again = problem_from_recipe(json.loads(json.dumps(first.recipe.as_dict())))
    assert again.recipe == first.recipe
    for split in ("train", "validation", "test"):
        a, b = getattr(first.data, split), getattr(again.data, split)
        assert a.sizes.tolist() == b.sizes.tolist()
        assert all(torch.equal(s, t) for s, t in zip(a.tensors, b.tensors, strict=True))


def test_a_recipe_holds_every_argument_defaults_included() -> None:
    recipe = classification(clients=5, seed=1, partition=DirichletOverClients(0.4)).recipe
    assert recipe is not None
    assert recipe.factory == "classification"
    assert recipe.arguments == {
        "dataset": "digits",
        "clients": 5,
        "model": "logistic",
        "partition": {"type": "DirichletOverClients", "alpha": 0.4, "min_samples": 1},
        "seed": 1,
        "fractions": [0.6, 0.2, 0.2],
        "limit": None,
        "l2": 0.0,
        "part": None,
        "download": False,
        "extra_test": 0,
        "pixels": "normalised",
    }


def test_arguments_that_cannot_be_written_down_leave_no_recipe() -> None:
    class Mine:
        def split(self, labels, clients, streams):  # type: ignore[no-untyped-def]
            return IID().split(labels, clients, streams)

    assert classification(clients=3, partition=Mine()).recipe is None


def test_a_users_factory_and_argument_type_can_join() -> None:
    @recipe_type
    @dataclass(frozen=True)
    class Shift:
        by: float

    @problem_factory
    def shifted(shift: Shift, notes: dict[str, int] | None = None) -> Problem:
        return Problem(
            name=f"shift {shift.by}", data=DATA, inner_loss=loss, init_inner=lambda g: torch.zeros(3)
        )

    recipe = shifted(Shift(2.5), notes={"a": 1}).recipe
    assert recipe is not None
    assert recipe.arguments == {"shift": {"type": "Shift", "by": 2.5}, "notes": {"a": 1}}
    assert problem_from_recipe(recipe.as_dict()).name == "shift 2.5"


def test_recipes_that_name_unknown_things_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown problem 'quadratc'; did you mean 'quadratic'"):
        problem_from_recipe({"factory": "quadratc", "arguments": {}})
    with pytest.raises(
        UnknownNameError, match="unknown argument of problem 'quadratic' 'dimensions'; did you mean"
    ):
        problem_from_recipe({"factory": "quadratic", "arguments": {"dimensions": 3}})
    with pytest.raises(UnknownNameError, match="unknown type in a recipe 'Dirichlet'"):
        problem_from_recipe({"factory": "classification", "arguments": {"partition": {"type": "Dirichlet"}}})
    with pytest.raises(UnknownNameError, match="unknown field of LabelShards 'each'"):
        problem_from_recipe(
            {"factory": "classification", "arguments": {"partition": {"type": "LabelShards", "each": 2}}}
        )
    with pytest.raises(ScenarioError, match="a recipe has the keys"):
        problem_from_recipe({"name": "quadratic"})


def test_quadratic_has_a_recipe_too() -> None:
    problem = quadratic(4, 3, seed=2, noise=0.1)
    assert problem.recipe is not None
    again = problem_from_recipe(problem.recipe.as_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(problem.data.train.tensors, again.data.train.tensors, strict=True)
    )
