"""What a part names in `exact` is in doubles wherever it goes, and the rest in the run's precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncfed import RunError, Scenario, VirtualTime, run
from asyncfed.problems import bilevel_quadratic, quadratic
from asyncfed.protocols import HGP, SGP, EstimateHypergradient, PushDIGing
from asyncfed.protocols.at import At
from asyncfed.protocols.part import Inbox, Step, Tensors
from asyncfed.runtime.block import Observation
from topologies import ring, stochastic_directed

CLIENTS, D = 8, 3
SCENARIO = Scenario(
    problem=quadratic(clients=CLIENTS, dimension=D, seed=1),
    topology=stochastic_directed(CLIENTS, probability=(0.4, 0.8), seed=1),
    protocol=SGP(steps=60, lr=0.01, batch=None),
)
EVERYWHERE = pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(SCENARIO, id="a matrix of all"),
        pytest.param(
            replace(SCENARIO, topology=stochastic_directed(ring(CLIENTS), probability=0.7, seed=1)),
            id="bags of few",
        ),
        pytest.param(
            replace(
                SCENARIO,
                problem=quadratic(clients=24, dimension=D, seed=1),
                topology=stochastic_directed(24, probability=0.9, seed=1),
                timing=VirtualTime(compute=1.0, latency=0.0),
            ),
            id="a matrix of the pool",
        ),
        pytest.param(
            replace(SCENARIO, timing=VirtualTime(compute="exponential(1.0)", latency=0.3)), id="virtual time"
        ),
    ],
)


@EVERYWHERE
def test_the_weights_of_a_float32_run_are_those_of_a_float64_run(scenario: Scenario, tmp_path: Path) -> None:
    single, double = (
        run(replace(scenario, precision=precision), out=tmp_path / precision, strict=True).final
        for precision in ("float32", "float64")
    )
    assert {name: value.dtype for name, value in single.items()} == {
        "inner": torch.float32, "outer": torch.float32, "z": torch.float32, "omega": torch.float64,
    }  # fmt: skip
    torch.testing.assert_close(single["omega"], double["omega"], rtol=1e-13, atol=0)
    torch.testing.assert_close(single["inner"].double(), double["inner"], rtol=1e-3, atol=1e-4)
    assert torch.equal(single["inner"], single["z"] / single["omega"].float())


def test_mass_does_not_drift(tmp_path: Path) -> None:
    """In float32 it drifts by 1.5e-3 in 10⁵ steps."""
    steps = 2_000
    scenario = replace(SCENARIO, protocol=SGP(steps=steps, lr=0.01, batch=None), evaluate_every=steps)
    omega = run(scenario, out=tmp_path / "run").final["omega"]
    assert abs(float(omega.sum()) - CLIENTS) < 1e-12
    assert float(omega.std()) > 0.01, "every ω is 1, where nothing could be rounded"


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_actors_keep_and_send_doubles(tmp_path: Path) -> None:
    scenario = replace(SCENARIO, timing=VirtualTime(compute="exponential(1.0)", latency=0.3))
    here = run(scenario, out=tmp_path / "here").final
    there = run(scenario, backend="ray", clients_per_actor=3, out=tmp_path / "there").final
    assert {name: value.dtype for name, value in there.items()} == {
        name: value.dtype for name, value in here.items()
    }
    torch.testing.assert_close(there["omega"], here["omega"], rtol=1e-13, atol=0)
    torch.testing.assert_close(there["inner"], here["inner"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "numbers"),
    [(SGP(2, 0.01, batch=None), 4 * D + 8), (PushDIGing(2, 0.01, batch=None), 2 * 4 * D + 8)],
)
def test_a_message_is_as_long_as_what_it_carries(
    method: SGP | PushDIGing, numbers: int, tmp_path: Path
) -> None:
    trace = run(replace(SCENARIO, protocol=method), out=tmp_path / "run").trace.to_pandas()
    assert set(trace[trace.status == "delivered"].bytes) == {numbers}


def test_weights_that_a_run_begins_with_keep_their_precision(tmp_path: Path) -> None:
    """What a run left, another may begin with: here HGP's, at z/ω."""
    method = EstimateHypergradient(SGP(0, 0.01, batch=None), HGP(3, expectations="exact"), solve=False)
    assert method.exact == ("omega",)
    problem = bilevel_quadratic(clients=CLIENTS, seed=1)
    omega = torch.linspace(0.5, 1.5, CLIENTS, dtype=torch.float64)[:, None]
    final = run(
        replace(SCENARIO, problem=problem, protocol=method), initial={"omega": omega}, out=tmp_path / "run"
    ).final
    assert torch.equal(final["omega"], omega)
    assert final["hypergradient"].dtype == torch.float32


@dataclass(frozen=True)
class Promoting(SGP):
    """Forgets that ω is in doubles."""

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        made = super().step(at, inbox, memory)
        return replace(made, payload=made.payload | {"z": inbox["z"] * inbox["omega"]})


def test_a_step_that_promotes_is_stopped_by_name(tmp_path: Path) -> None:
    method = Promoting(2, 0.01, batch=None)
    with pytest.raises(RunError, match=r"Promoting sends 'z' in torch\.float64; here it is torch\.float32"):
        run(replace(SCENARIO, protocol=method), out=tmp_path / "run")


def test_each_variable_is_summed_in_its_own_precision(tmp_path: Path) -> None:
    seen: list[Observation] = []
    result = run(SCENARIO, out=tmp_path / "run", tap=seen.append, strict=True)
    trace = result.trace.to_pandas()
    for step, (before, after) in enumerate(pairwise(seen)):
        W = np.zeros((CLIENTS, CLIENTS))
        rows = trace[(trace.step == step) & (trace.status == "delivered")]
        W[rows.receiver, rows.sender] = rows.weight
        W[range(CLIENTS), range(CLIENTS)] = 1 - W.sum(0)
        sent, weights = before.made.payload, torch.from_numpy(W)
        z = before.made.residue["z"] + weights.float() @ sent["z"]
        torch.testing.assert_close(after.absorbed["z"], z, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(after.absorbed["omega"], weights @ sent["omega"], rtol=1e-14, atol=0)
