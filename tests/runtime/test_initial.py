"""Runs that start from given variables: `run(initial=…)`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncfed import Result, Scenario, ScenarioError, UnknownNameError, load, run
from asyncfed.problems import bilevel_quadratic
from asyncfed.protocols import (
    CDBO,
    HGP,
    PDBO,
    SGP,
    CompareHypergradients,
    EstimateHypergradient,
    ITDBackward,
    ITDForward,
)
from topologies import fully_connected, stochastic_directed

N, D, D_OUTER = 4, 2, 3
INNER = SGP(steps=6, lr=0.2, batch=None)
HYPER = HGP(5, sampling="joint", record=True)
GIVEN = {
    "inner": torch.linspace(-1, 1, N * D, dtype=torch.float64).view(N, D),
    "outer": torch.linspace(0.5, -0.5, N * D_OUTER, dtype=torch.float64).view(N, D_OUTER),
}
SCENARIO = Scenario(
    problem=bilevel_quadratic(clients=N, dimension=D, outer_dimension=D_OUTER, curved=True),
    topology=fully_connected(N),
    protocol=INNER,
    precision="float64",
)


def outcome(protocol: Any, out: Path, initial: Any = None, **changes: Any) -> Result:
    return run(replace(SCENARIO, protocol=protocol, **changes), out=out, initial=initial)


def test_everybody_starts_from_its_own_row(tmp_path: Path) -> None:
    """By hand: (4b) on FC, from different models and at different λ."""
    result = outcome(replace(INNER, steps=2), tmp_path / "run", GIVEN)
    case, x = SCENARIO.problem, GIVEN["inner"]
    for _ in range(2):
        gradient = [
            torch.func.grad(case.inner_loss)(x[i], GIVEN["outer"][i], case.data.train.of(i)) for i in range(N)
        ]
        x = x.mean(0) - 0.2 * torch.stack(gradient)
    torch.testing.assert_close(result.final["inner"], x, rtol=0, atol=1e-14)
    assert torch.equal(result.final["outer"], GIVEN["outer"])
    assert result.manifest["initial"] == ["inner", "outer"]
    assert load(result.path).manifest["initial"] == ["inner", "outer"]


def test_without_steps_what_was_given_is_what_comes_out(tmp_path: Path) -> None:
    result = outcome(replace(INNER, steps=0), tmp_path / "run", GIVEN)
    for key, value in GIVEN.items():
        assert torch.equal(result.final[key], value)
    plain = outcome(replace(INNER, steps=0), tmp_path / "plain")
    assert (plain.final["inner"] == plain.final["inner"][0]).all()
    assert (plain.final["outer"] == 0).all()
    assert "initial" not in plain.manifest


def test_what_is_not_given_is_the_problems_own(tmp_path: Path) -> None:
    plain = outcome(replace(INNER, steps=0), tmp_path / "plain").final["inner"]
    result = outcome(replace(INNER, steps=0), tmp_path / "run", {"outer": GIVEN["outer"]})
    assert torch.equal(result.final["inner"], plain)
    assert torch.equal(result.final["outer"], GIVEN["outer"])


def test_given_tensors_stay_as_they_are_and_take_the_precision_of_the_run(tmp_path: Path) -> None:
    given = {key: value.clone().requires_grad_() for key, value in GIVEN.items()}
    protocol = PDBO(replace(INNER, order="4a"), HYPER, 1, start="warm")
    result = outcome(protocol, tmp_path / "run", given, precision="float32")
    assert result.final["inner"].dtype == result.final["outer"].dtype == torch.float32
    assert not result.final["outer"].requires_grad
    for key, value in GIVEN.items():
        assert torch.equal(given[key], value)


def test_a_run_goes_on_where_another_ended(tmp_path: Path) -> None:
    """On FC, where ω stays 1, without minibatches: six steps and then four are ten."""
    first = outcome(INNER, tmp_path / "first")
    second = outcome(replace(INNER, steps=4), tmp_path / "second", first.final)
    whole = outcome(replace(INNER, steps=10), tmp_path / "whole")
    torch.testing.assert_close(second.final["inner"], whole.final["inner"], rtol=0, atol=1e-14)
    saved = run(replace(SCENARIO, protocol=INNER), out=tmp_path / "saved", save_final=True)
    again = outcome(replace(INNER, steps=4), tmp_path / "again", load(saved.path).final)
    assert torch.equal(again.final["inner"], second.final["inner"])


def test_an_estimate_at_the_end_of_another_run(tmp_path: Path) -> None:
    """ω is taken over too, and what was recorded (clients, rounds, d_outer) does no harm."""
    graph = stochastic_directed(N, seed=1)
    exact = replace(HYPER, expectations="exact", record=False)
    solved = outcome(EstimateHypergradient(INNER, HYPER), tmp_path / "solved", topology=graph)
    assert solved.final["history"].shape == (N, 5, D_OUTER)
    there = outcome(
        EstimateHypergradient(INNER, exact, solve=False), tmp_path / "there", solved.final, topology=graph
    )
    assert torch.equal(there.final["omega"], solved.final["omega"])
    assert (there.final["omega"] - 1).abs().max() > 0.1
    only_x = {key: solved.final[key] for key in ("inner", "outer")}
    other = outcome(
        EstimateHypergradient(INNER, exact, solve=False), tmp_path / "other", only_x, topology=graph
    )
    assert not torch.allclose(other.final["hypergradient"], there.final["hypergradient"])


def test_adam_goes_on_with_its_moments(tmp_path: Path) -> None:
    """One outer step and, from all it left but the models, one more: two outer steps with fresh starts."""
    once, twice = (PDBO(INNER, HYPER, steps, outer_lr=0.3) for steps in (1, 2))
    first = outcome(once, tmp_path / "first").final
    left = {key: value for key, value in first.items() if key != "inner"}
    second = outcome(once, tmp_path / "second", left).final
    whole = outcome(twice, tmp_path / "whole").final
    for key in ("outer", "inner", "adam_mean", "adam_square"):
        torch.testing.assert_close(second[key], whole[key], rtol=0, atol=1e-14)
    assert (whole["adam_steps"] == 2).all()
    forgetful = outcome(once, tmp_path / "forgetful", {"outer": first["outer"]}).final
    assert not torch.allclose(forgetful["outer"], whole["outer"])


def test_a_common_lambda_goes_on_with_its_mass(tmp_path: Path) -> None:
    graph = stochastic_directed(N, seed=1)
    protocol = CDBO(INNER, HYPER, 1, outer_lr=0.1)
    first = outcome(protocol, tmp_path / "first", topology=graph).final
    second = outcome(protocol, tmp_path / "second", first, topology=graph, seed=1).final
    moved = second["outer_z"].sum(0) - first["outer_z"].sum(0)
    torch.testing.assert_close(moved, -0.1 * N * second["hypergradient"].sum(0), rtol=0, atol=1e-13)


def test_a_fresh_start_is_where_the_run_was_told_to_begin(tmp_path: Path) -> None:
    """λ hardly moves, so that both inner parts end at the same place."""
    protocol = PDBO(INNER, HYPER, 1, outer_lr=1e-12, optimizer="sgd")
    given = {"inner": GIVEN["inner"]}
    result = outcome(protocol, tmp_path / "run", given)
    once = outcome(INNER, tmp_path / "once", given)
    torch.testing.assert_close(result.final["inner"], once.final["inner"], rtol=0, atol=1e-10)
    warm = outcome(replace(protocol, start="warm"), tmp_path / "warm", given)
    longer = outcome(replace(INNER, steps=12), tmp_path / "longer", given)
    torch.testing.assert_close(warm.final["inner"], longer.final["inner"], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("inner", (N, D + 1), (N, D)),
        ("inner", (N - 1, D), (N, D)),
        ("inner", (D,), (N, D)),
        ("inner", (N, D, 1), (N, D)),
        ("outer", (N, D), (N, D_OUTER)),
        ("omega", (N,), (N, 1)),
        ("adam_mean", (N + 1, D_OUTER), (N, D_OUTER)),
        ("adam_steps", (N,), (N, 1)),
        ("adam_steps", (), (N, 1)),
    ],
)
def test_rows_of_another_shape_are_refused_before_anything_runs(
    name: str, shape: tuple[int, ...], wanted: tuple[int, ...], tmp_path: Path
) -> None:
    with pytest.raises(ScenarioError) as raised:
        outcome(PDBO(INNER, HYPER, 1), tmp_path / "run", {name: torch.ones(shape)})
    assert f"initial['{name}'] has the shape {shape}; it must be {wanted}" in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "nearest"), [("iner", "inner"), ("outre", "outer"), ("adam_means", "adam_mean"), ("x0", None)]
)
def test_a_name_that_nobody_looks_for_is_refused(name: str, nearest: str | None, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError) as raised:
        outcome(PDBO(INNER, HYPER, 1), tmp_path / "run", {name: torch.ones(N, D)})
    assert raised.value.nearest == nearest
    assert f"unknown variable in initial '{name}'" in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "protocol",
    [
        CompareHypergradients(INNER, (HYPER, HGP(2))),
        PDBO(INNER, HYPER, outer_steps=2),
        CDBO(INNER, HYPER, outer_steps=2),
        PDBO(INNER, ITDForward(), outer_steps=1),
        PDBO(INNER, ITDBackward(), outer_steps=1),
    ],
)
def test_all_that_a_run_leaves_behind_may_be_where_another_begins(protocol: Any, tmp_path: Path) -> None:
    first = outcome(protocol, tmp_path / "first")
    assert set(outcome(protocol, tmp_path / "second", first.final).final) == set(first.final)


def test_a_method_says_what_it_may_begin_with(tmp_path: Path) -> None:
    class Own(SGP):
        passes_on = ("momentum",)

    own = Own(steps=1, lr=0.1, batch=None)
    assert outcome(own, tmp_path / "run", {"momentum": torch.ones(N, D), **GIVEN}).complete
    with pytest.raises(UnknownNameError, match="known: inner, momentum, outer"):
        outcome(own, tmp_path / "other", {"adam_mean": torch.ones(N, D)})


def test_something_else_than_a_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ScenarioError, match=r"initial is a Tensor of shape .*; it must be a mapping of names to tensors"
    ):
        outcome(INNER, tmp_path / "run", GIVEN["inner"])
    assert not (tmp_path / "run").exists()
