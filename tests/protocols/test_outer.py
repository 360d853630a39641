"""The steps on λ by themselves, against torch's optimizers and by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncfed import Scenario, ScenarioError, UnknownNameError, run
from asyncfed.problems import Derivatives, bilevel_quadratic, personalized_classification
from asyncfed.protocols import CDBO, HGP, PDBO, SGP
from asyncfed.protocols.at import At, Home
from asyncfed.protocols.outer import OuterPush, OuterStep
from asyncfed.protocols.part import Inbox, Tensors
from asyncfed.rng import Streams
from topologies import fully_connected

K, COMPONENTS, CLASSES = 4, 2, 10
RATES = {"labels": 0.03, "ensemble": 0.5}  # not in the order in which the parts stand in a row
CASE = personalized_classification("digits", clients=K, components=COMPONENTS, limit=100)


def at(steps: list[int] | None = None, n: int = K) -> At:
    """All clients of a block of a run of n, at their steps."""
    start = torch.full((K, 3), 7.0, dtype=torch.float64)
    home = Home(Derivatives.of(CASE), CASE.data, np.arange(K), n, start, Streams(0))
    return At(home, np.arange(K), np.array(steps or [0] * K))


def carried(**changes: torch.Tensor) -> Tensors:
    lam = torch.zeros(K, COMPONENTS + CLASSES, dtype=torch.float64)
    return {"outer": lam, "inner": torch.ones(K, 3, dtype=torch.float64), **changes}


def stepped(part: OuterStep, before: Tensors, hypergradient: torch.Tensor) -> Tensors:
    before = {**before, "hypergradient": hypergradient}
    start = part.start(at(), before)
    assert part.steps == 0
    assert not start.absorbed, "nothing is sent"
    return before | part.finish(at(), Inbox("OuterStep", {}), start.memory)


def hypergradients(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.tensor([1.0, 1e-3, 1e-9, 0.0], dtype=torch.float64)[:, None]  # clients differ a lot
    return [
        sizes * torch.randn(K, COMPONENTS + CLASSES, generator=generator, dtype=torch.float64)
        for _ in range(steps)
    ]


@pytest.mark.parametrize("rates", [0.2, RATES])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.8), (0.0, 0.0)])
def test_adam_is_torchs_with_a_rate_for_each_part(
    betas: tuple[float, float], rates: float | dict[str, float]
) -> None:
    parts = [torch.zeros(K, COMPONENTS), torch.zeros(K, CLASSES)]
    ensemble, labels = (torch.nn.Parameter(part.double()) for part in parts)
    of = rates if isinstance(rates, dict) else dict.fromkeys(RATES, rates)
    groups = [{"params": [ensemble], "lr": of["ensemble"]}, {"params": [labels], "lr": of["labels"]}]
    adam = torch.optim.Adam(groups, betas=betas)
    part, state = OuterStep(rates, "adam", betas), carried()
    for hypergradient in hypergradients(6):
        state = stepped(part, state, hypergradient)
        ensemble.grad, labels.grad = hypergradient[:, :COMPONENTS], hypergradient[:, COMPONENTS:]
        adam.step()
        found = torch.cat([ensemble, labels], dim=1).detach()
        torch.testing.assert_close(state["outer"], found, rtol=1e-12, atol=1e-14)
    assert (state["outer"][3] == 0).all()
    assert (state["outer"][:3] != 0).all()


def test_sgd_is_a_step_along_the_hypergradient() -> None:
    state, expected = carried(), torch.zeros(K, COMPONENTS + CLASSES, dtype=torch.float64)
    rate = torch.tensor([0.5] * COMPONENTS + [0.03] * CLASSES, dtype=torch.float64)
    for hypergradient in hypergradients(3):
        state = stepped(OuterStep(RATES, "sgd"), state, hypergradient)
        expected = expected - rate * hypergradient
        torch.testing.assert_close(state["outer"], expected, rtol=1e-14, atol=0)
    assert not any(name.startswith("adam") for name in state)


def test_a_fresh_start_goes_back_to_where_the_run_began_and_a_warm_one_goes_on() -> None:
    (hypergradient,) = hypergradients(1)
    for begins, value in (("fresh", 7.0), ("warm", 1.0)):
        for optimizer in ("adam", "sgd"):
            part = OuterStep(0.1, optimizer, begins=begins)  # type: ignore[arg-type]
            assert (stepped(part, carried(), hypergradient)["inner"] == value).all()


def test_an_outer_push_brings_the_hypergradient_in_once_and_n_times() -> None:
    """n is that of the run, not of the block; what is carried is z and ω, not λ = z/ω."""
    (hypergradient,) = hypergradients(1)
    z = 1.0 + torch.arange(K * (COMPONENTS + CLASSES), dtype=torch.float64).reshape(K, -1)
    omega = torch.tensor([[0.5], [1.5], [0.25], [1.75]], dtype=torch.float64)
    before = carried(outer=z / omega, outer_z=z, outer_omega=omega, hypergradient=hypergradient)
    part = OuterPush(RATES, steps=2)
    start = part.start(at(n=11), before)
    assert torch.equal(start.absorbed["z"], z)
    assert torch.equal(start.absorbed["omega"], omega)
    rate = torch.tensor([0.5] * COMPONENTS + [0.03] * CLASSES, dtype=torch.float64)
    inbox = Inbox("OuterPush", start.absorbed)
    first = part.step(at([0] * K), inbox, start.memory)
    torch.testing.assert_close(first.residue["z"], -11 * rate * hypergradient, rtol=1e-14, atol=0)
    later = part.step(at([1, 0, 1, 1]), inbox, start.memory)
    assert (later.residue["z"][[0, 2, 3]] == 0).all()
    assert torch.equal(later.residue["z"][1], first.residue["z"][1])
    after = part.finish(at(), Inbox("OuterPush", {"z": 2 * z, "omega": omega}), start.memory)
    torch.testing.assert_close(after["outer"], 2 * z / omega)
    assert torch.equal(after["outer_z"], 2 * z)
    assert (after["inner"] == 7.0).all()


# --- refusals ---------------------------------------------------------------------------------------------

INNER, HYPER = SGP(steps=2, lr=0.1), HGP(rounds=2)


@pytest.mark.parametrize("protocol", [PDBO, CDBO])
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"outer_steps": -1}, "outer_steps is -1; it must be a whole number"),
        ({"start": "cold"}, "start is 'cold'; it must be 'fresh' .* or 'warm'"),
        ({"outer_lr": -0.1}, r"outer_lr is -0\.1; it must be a finite number above 0"),
        ({"outer_lr": 0.0}, "outer_lr is 0.0"),
        ({"outer_lr": float("nan")}, "outer_lr is nan"),
        (
            {"outer_lr": {"labels": 0.1, "ensemble": -2.0}},
            r"outer_lr\[.ensemble.\] is -2\.0; it must be a finite number above 0",
        ),
    ],
)
def test_bad_settings(protocol: Any, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        protocol(**{"inner": INNER, "hypergradient": HYPER, "outer_steps": 1, **settings})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"optimizer": "rmsprop"}, "optimizer is 'rmsprop'; it must be 'adam' or 'sgd'"),
        ({"betas": (0.9,)}, "PDBO: betas is"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0; it must be a number in \[0, 1\)"),
        ({"betas": (-0.1, 0.9)}, r"betas\[0\] is -0.1"),
    ],
)
def test_bad_settings_of_pdbo(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        PDBO(INNER, HYPER, 1, **settings)


def test_consensus_takes_a_round() -> None:
    with pytest.raises(ScenarioError, match="CDBO: consensus is 0; it must be a whole number, at least 1"):
        CDBO(INNER, HYPER, 1, consensus=0)


@pytest.mark.parametrize("protocol", [PDBO, CDBO])
@pytest.mark.parametrize(
    ("rates", "complaint"),
    [
        ({"ensemble": 0.1, "labels": 0.1, "lables": 0.1}, "'lables'; did you mean 'labels'"),
        ({"ensemble": 0.1}, "outer_lr says nothing of labels; give every part a rate"),
        ({}, "outer_lr says nothing of ensemble, labels"),
    ],
)
def test_rates_of_other_parts_are_refused_before_anything_runs(
    rates: dict[str, float], complaint: str, protocol: Any, tmp_path: Path
) -> None:
    scenario = Scenario(
        problem=CASE, topology=fully_connected(K), protocol=protocol(INNER, HYPER, 1, outer_lr=rates)
    )
    with pytest.raises(ScenarioError, match=complaint) as raised:
        run(scenario, out=tmp_path / "run")
    assert isinstance(raised.value, UnknownNameError) == ("lables" in rates)
    assert not (tmp_path / "run").exists()


def test_rates_by_name_need_names(tmp_path: Path) -> None:
    protocol = PDBO(INNER, HYPER, 1, outer_lr={"labels": 0.1})
    scenario = Scenario(problem=bilevel_quadratic(clients=K), topology=fully_connected(K), protocol=protocol)
    with pytest.raises(ScenarioError, match=r"names labels, but the outer variable is a single tensor"):
        run(scenario, out=tmp_path / "run")
