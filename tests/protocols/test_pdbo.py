"""PDBO and CDBO end to end: against loops written by hand on the dense truth, against the closed form of a
quadratic outer problem, and what their runs record.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor

from asyncfed import Lockstep, Result, Scenario, ScenarioError, VirtualTime, load, run
from asyncfed.network import Uniform
from asyncfed.problems import Problem, bilevel_quadratic, personalized_classification
from asyncfed.protocols import (
    CDBO,
    HGP,
    PDBO,
    SGP,
    VRHGP,
    CompareHypergradients,
    EstimateHypergradient,
    Local,
    StepDecay,
)
from asyncfed.truth import InnerMap, Point, dense_hypergradient, expected_matrix
from tests.helpers import run_tapped
from topologies import fully_connected, stochastic_directed

N, D, D_OUTER = 4, 2, 2
LR, DECAY, T = 0.3, 0.05, 5
FC, STO_D = fully_connected(N), stochastic_directed(N, probability=(0.4, 0.8), seed=1)
MANY = HGP(rounds=110, sampling="joint")  # on FC: 0.84^110 = 5e-9 of the series is left out
BEGIN = torch.tensor([1.0, -0.5], dtype=torch.float64).repeat(N, 1)


def problem(**changes: Any) -> Problem:
    return bilevel_quadratic(
        **{"clients": N, "dimension": D, "outer_dimension": D_OUTER, "curved": True, **changes}
    )


def inner(order: str = "4b", **changes: Any) -> SGP:
    settings = {"steps": T, "lr": LR, "order": order, "batch": None, "weight_decay": DECAY}
    return SGP(**{**settings, **changes})


def outcome(protocol: Any, out: Path, graph: nx.Graph = FC, **changes: Any) -> Result:
    options = {key: changes.pop(key) for key in ("initial", "backend", "clients_per_actor") if key in changes}
    scenario = {"problem": problem(), "topology": graph, "protocol": protocol, "precision": "float64"}
    return run(Scenario(**{**scenario, **changes}), out=out, **options)


# --- by hand, on the dense truth ----------------------------------------------------------------------

Mix = Callable[[Tensor], Tensor]


def averaged(rows: Tensor) -> Tensor:
    """One round on FC with weights 1/n, under which ω stays 1."""
    return rows.mean(0).expand_as(rows)


def sgp_by_hand(
    case: Problem, x: Tensor, lam: Tensor, order: str, mix: Mix = averaged, rates: Any = (LR,) * T
) -> Tensor:
    """Eq. 4, with ω = 1."""
    for rate in rates:
        gradient = torch.stack(
            [torch.func.grad(case.inner_loss)(x[i], lam[i], case.data.train.of(i)) for i in range(N)]
        )
        step = -rate * (gradient + DECAY * x)
        x = mix(x + step) if order == "4a" else mix(x) + step
    return x


def truth_by_hand(case: Problem, x: Tensor, lam: Tensor, order: str, p_bar: Tensor | None = None) -> Tensor:
    everywhere = torch.full((N, N), 1 / N, dtype=torch.float64) if p_bar is None else p_bar
    point = Point(x, torch.ones(N, 1, dtype=torch.float64), lam)
    return dense_hypergradient(case, everywhere, InnerMap(LR, order, DECAY), point)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["4a", "4b"])
@pytest.mark.parametrize("start", ["fresh", "warm"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_pdbo_is_a_few_lines_by_hand(optimizer: str, start: str, order: str, tmp_path: Path) -> None:
    """Alg. 1 with torch's optimizer and the dense hypergradient at whatever T steps of SGP have led to."""
    protocol = PDBO(inner(order), MANY, 3, outer_lr=0.3, optimizer=optimizer, betas=(0.8, 0.9), start=start)  # type: ignore[arg-type]
    result = outcome(protocol, tmp_path / "run", initial={"inner": BEGIN})
    case, x = problem(), BEGIN
    lam = torch.nn.Parameter(torch.zeros(N, D_OUTER, dtype=torch.float64))
    adam = torch.optim.Adam([lam], lr=0.3, betas=(0.8, 0.9))
    sgd = torch.optim.SGD([lam], lr=0.3)
    for _ in range(3):
        x = sgp_by_hand(case, BEGIN if start == "fresh" else x, lam.detach(), order)
        lam.grad = truth_by_hand(case, x, lam.detach(), order)
        (adam if optimizer == "adam" else sgd).step()
    x = sgp_by_hand(case, BEGIN if start == "fresh" else x, lam.detach(), order)
    torch.testing.assert_close(result.final["outer"], lam.detach(), rtol=0, atol=1e-7)
    torch.testing.assert_close(result.final["inner"], x, rtol=0, atol=1e-7)
    by_client = [case.outer_loss(x[i], lam.detach()[i], case.data.train.of(i)) for i in range(N)]
    assert result.metrics.outer_loss.iloc[-1] == pytest.approx(float(sum(by_client)) / N, abs=1e-7)


def test_a_method_may_have_a_rate_of_its_own(tmp_path: Path) -> None:
    """h is then that of steps with that rate, at the variables that steps with the other led to."""
    protocol = PDBO(inner(), replace(MANY, rounds=300, lr=0.1), 1, outer_lr=0.3, optimizer="sgd")
    result = outcome(protocol, tmp_path / "run", initial={"inner": BEGIN})
    case, lam = problem(), torch.zeros(N, D_OUTER, dtype=torch.float64)
    x = sgp_by_hand(case, BEGIN, lam, "4b")
    point = Point(x, torch.ones(N, 1, dtype=torch.float64), lam)
    everywhere = torch.full((N, N), 1 / N, dtype=torch.float64)
    h = dense_hypergradient(case, everywhere, InnerMap(0.1, "4b", DECAY), point)
    torch.testing.assert_close(result.final["outer"], -0.3 * h, rtol=0, atol=1e-7)


def test_no_outer_step_is_the_inner_steps_alone(tmp_path: Path) -> None:
    found = outcome(PDBO(inner(), MANY, 0), tmp_path / "none")
    assert torch.equal(found.final["inner"], outcome(inner(), tmp_path / "alone").final["inner"])
    assert (found.final["outer"] == 0).all()


# --- the closed form of a quadratic outer problem -----------------------------------------------------


class OuterQuadratic:
    """Of a `bilevel_quadratic` that is not curved, with one sample per client, where x solves the inner
    problem: with M = Σ A_i, J = −M⁻¹ [R_1 … R_n] and x(λ) = M⁻¹ Σ A_i b_i + J λ, λ = (λ_1, …, λ_n),

        Φ(λ) = (1/n) Σ_k [½ ‖x(λ) − t_k‖² + (ρ/2) ‖λ_k − s_k‖²],    ρ = 0.1
        ∇Φ   = Jᵀ (x(λ) − mean t) + (ρ/n) (λ − s)
        ∇²Φ  = JᵀJ + (ρ/n) I,    λ* = (∇²Φ)⁻¹ ((ρ/n) s − Jᵀ (x(0) − mean t))
    """

    def __init__(self, case: Problem) -> None:
        A, b, R, self.t, self.s = case.data.train.tensors
        n, M = len(A), A.sum(0)
        self.J = -torch.linalg.solve(M, torch.cat(list(R), dim=1))
        self.x0 = torch.linalg.solve(M, torch.einsum("nij,nj->i", A, b))
        self.hessian = self.J.T @ self.J + 0.1 / n * torch.eye(self.J.shape[1], dtype=torch.float64)
        pull = 0.1 / n * self.s.flatten() - self.J.T @ (self.x0 - self.t.mean(0))
        self.minimiser = torch.linalg.solve(self.hessian, pull)

    def __call__(self, lam: Tensor) -> float:
        x = self.x0 + self.J @ lam.flatten()
        each = 0.5 * (x - self.t).square().sum(1) + 0.05 * (lam.view_as(self.s) - self.s).square().sum(1)
        return float(each.mean())


WELL = {"clients": 3, "dimension": 3, "outer_dimension": 1, "curvature": (1.0, 1.3), "curved": False}


def test_pdbo_with_sgd_is_gradient_descent_on_the_outer_problem(tmp_path: Path) -> None:
    """On FC with (4a) all models are equal and step along −lr · mean gradient, so 8 steps with a factor of
    at most 0.131 each solve the inner problem to 1e-7, and warm starts to more; 8 rounds of HGP leave out
    as much. Then λ(S) − λ* = (I − rate · ∇²Φ)^S (λ(0) − λ*).
    """
    case, steps, rate = problem(**WELL, seed=4), 15, 3.0
    phi = OuterQuadratic(case)
    eigenvalues = torch.linalg.eigvalsh(phi.hessian)
    assert rate * eigenvalues.max() < 2, "so that every step lessens the loss"
    solver = SGP(steps=8, lr=0.87, order="4a", batch=None)
    protocol = PDBO(solver, HGP(8, sampling="joint"), steps, outer_lr=rate, optimizer="sgd", start="warm")
    result = outcome(protocol, tmp_path / "run", fully_connected(3), problem=case)
    shrunk = torch.linalg.matrix_power(torch.eye(3, dtype=torch.float64) - rate * phi.hessian, steps)
    expected = phi.minimiser - shrunk @ phi.minimiser
    torch.testing.assert_close(result.final["outer"].flatten(), expected, rtol=0, atol=1e-7)
    assert (expected - phi.minimiser).norm() < 0.005 * phi.minimiser.norm(), "near the minimiser"
    losses = result.metrics.outer_loss
    assert (losses.diff().iloc[1:] < 0).all()
    assert losses.iloc[0] == pytest.approx(phi(torch.zeros(3, dtype=torch.float64)), abs=1e-5)
    assert losses.iloc[-1] == pytest.approx(phi(phi.minimiser), abs=1e-5)


def test_on_links_that_come_and_go_pdbo_comes_near_the_minimiser(tmp_path: Path) -> None:
    """With a constant inner step the place of rest is 2% of ‖λ*‖ away from the closed form here (measured
    with the dense truth, and proportional to lr), and random links shake every h; a rate of 1 averages over
    1/(rate · smallest eigenvalue) = 9 outer steps. Five seeds ended with 0.4% to 1.8% of the initial gap.
    """
    case = problem(**WELL, seed=4)
    phi, graph = OuterQuadratic(case), stochastic_directed(3, probability=(0.8, 0.95), seed=2)
    method = VRHGP(30, sampling="joint", expectations="exact")
    protocol = PDBO(
        SGP(steps=15, lr=0.1, order="4a", batch=None),
        method,
        20,
        outer_lr=1.0,
        optimizer="sgd",
        start="warm",
    )
    result = outcome(protocol, tmp_path / "run", graph, problem=case)
    least, found = phi(phi.minimiser), phi(result.final["outer"])
    assert least < found < least + 0.05 * (phi(torch.zeros(3, dtype=torch.float64)) - least)
    assert (result.final["outer"].flatten() - phi.minimiser).norm() < 0.25 * phi.minimiser.norm()


# --- every inner part begins anew --------------------------------------------------------------------


@pytest.mark.parametrize("start", ["fresh", "warm"])
def test_schedules_begin_anew_with_every_inner_part(start: str, tmp_path: Path) -> None:
    step = inner(lr=StepDecay(LR, at=(2,), factor=0.1))
    first = outcome(EstimateHypergradient(step, MANY), tmp_path / "first", initial={"inner": BEGIN})
    x, lam = first.final["inner"], -0.5 * first.final["hypergradient"]
    initial = {"inner": BEGIN if start == "fresh" else x, "outer": lam}
    second = outcome(step, tmp_path / "second", initial=initial)
    protocol = PDBO(step, MANY, 1, outer_lr=0.5, optimizer="sgd", start=start)  # type: ignore[arg-type]
    both = outcome(protocol, tmp_path / "both", initial={"inner": BEGIN})
    torch.testing.assert_close(both.final["outer"], lam, rtol=0, atol=1e-13)
    torch.testing.assert_close(both.final["inner"], second.final["inner"], rtol=0, atol=1e-13)
    rates = (LR, LR, 0.1 * LR, 0.1 * LR, 0.1 * LR)
    by_hand = sgp_by_hand(problem(), initial["inner"], lam, "4b", rates=rates)
    torch.testing.assert_close(both.final["inner"], by_hand, rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch", [2, None])
def test_minibatches_are_drawn_anew_in_every_inner_part(batch: int | None, tmp_path: Path) -> None:
    """λ hardly moves, so that on FC only the minibatches tell the second inner part from the first."""
    case = problem(noise=0.5, samples=8)
    protocol = PDBO(inner(batch=batch), HGP(3), 1, outer_lr=1e-12, optimizer="sgd")
    scenario = Scenario(problem=case, topology=FC, protocol=protocol, precision="float64")
    _, steps = run_tapped(scenario, tmp_path / "run")
    later = T + 2 * 3
    assert torch.equal(steps.stacked("z", 0, N), steps.stacked("z", later, N))
    for t in range(1, T):
        apart = (steps.stacked("z", t, N) - steps.stacked("z", later + t, N)).abs()
        assert (apart < 1e-9).all() if batch is None else (apart > 1e-6).any(dim=1).all()


# --- what is recorded ---------------------------------------------------------------------------------

DIGITS = personalized_classification(
    "digits", clients=3, components=2, limit=150, fractions=(0.5, 0.2, 0.3), partition="dirichlet:0.4"
)
SMALL = PDBO(
    SGP(steps=6, lr=0.5, batch=16), VRHGP(3), 2, outer_lr={"ensemble": 1.0, "labels": 0.1}, start="fresh"
)


def digits(protocol: Any, out: Path, **changes: Any) -> Result:
    scenario = {"problem": DIGITS, "topology": fully_connected(3), "protocol": protocol, **changes}
    return run(Scenario(**scenario), out=out)


def mixture_by_hand(inner: Tensor, outer: Tensor, inputs: Tensor, components: int = 2) -> Tensor:
    """Σ_k softmax(λ.ensemble)_k softmax(W_k s + b_k) of one client."""
    cut = components * 10 * 64
    W, b = inner[:cut].view(components, 10, 64), inner[cut:].view(components, 10)
    logits = torch.einsum("kcd,bd->kbc", W, inputs) + b[:, None]
    share = torch.softmax(outer[:components], 0)[:, None, None]
    return (share * torch.softmax(logits, -1)).sum(0)


def judged_by_hand(result: Result, shards: Any, case: Problem = DIGITS) -> tuple[list[int], list[float]]:
    """How many each client gets right, and its summed loss."""
    correct, loss = [], []
    for i in range(case.clients):
        inputs, labels = shards.of(i)
        p = mixture_by_hand(result.final["inner"][i], result.final["outer"][i], inputs)
        correct.append(int((p.argmax(1) == labels).sum()))
        loss.append(float(-p[torch.arange(len(labels)), labels].log().sum()))
    return correct, loss


def test_every_outer_step_is_judged_on_test_and_validation_samples(tmp_path: Path) -> None:
    result = digits(SMALL, tmp_path / "run")
    metrics = result.metrics
    assert list(metrics.outer_step) == [0, 1, 2]
    assert list(metrics.phase) == ["sgp"] * 3
    assert list(metrics.step) == [6, 18, 30]
    assert not metrics.drop(columns="train_loss").isna().any().any()
    sizes = DIGITS.data.test.sizes
    assert len(set(sizes)) == 3, "or weighing would change nothing"
    correct, loss = judged_by_hand(result, DIGITS.data.test)
    last = metrics.iloc[-1]
    assert last.accuracy == pytest.approx(sum(correct) / sizes.sum(), abs=1e-9)
    assert last.accuracy != pytest.approx(np.mean(correct / sizes), abs=1e-6)
    assert last.accuracy_p10 == pytest.approx(np.percentile(correct / sizes, 10), abs=1e-6)
    assert last.loss == pytest.approx(sum(loss) / sizes.sum(), rel=1e-5)
    assert list(result.clients.accuracy) == pytest.approx(list(correct / sizes), abs=1e-6)
    assert list(result.clients.samples) == list(sizes)
    validation = DIGITS.data.validation.sizes
    correct, loss = judged_by_hand(result, DIGITS.data.validation)
    assert last.validation_accuracy == pytest.approx(sum(correct) / validation.sum(), abs=1e-9)
    assert last.validation_loss == pytest.approx(sum(loss) / validation.sum(), rel=1e-5)
    best = result.best
    assert best["validation_accuracy"] == metrics.validation_accuracy.max()
    assert best["accuracy"] == metrics.accuracy[metrics.validation_accuracy.argmax()]


def test_a_protocol_of_one_level_has_no_outer_steps_to_choose_from(tmp_path: Path) -> None:
    result = digits(SMALL.inner, tmp_path / "run")
    assert not {"outer_step", "validation_accuracy"} & set(result.metrics)
    with pytest.raises(ScenarioError, match="no validation figures to choose by"):
        _ = result.best


COUNTED = {"step": 0, "messages": 0, "bytes": 0}  # what every row of metrics has


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([{"validation_accuracy": a, "validation_loss": -a} for a in (0.5, 0.75, 0.25, 0.75)], 1),
        ([{"validation_accuracy": 0.5, "validation_loss": loss} for loss in (2.0, 1.0)], 0),
        ([{"validation_loss": loss} for loss in (3.0, 2.0, 2.0, 4.0)], 1),
    ],
    ids=["accuracy", "accuracy before loss", "loss"],
)
def test_the_best_is_the_earliest_of_equals(
    rows: list[dict[str, float]], chosen: int, tmp_path: Path
) -> None:
    path = outcome(inner(steps=0), tmp_path / "run").path
    looks = [{"outer_step": k, "accuracy": k / 10, **COUNTED, **row} for k, row in enumerate(rows)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))
    assert load(path).best == looks[chosen]


def test_the_best_is_chosen_among_solved_inner_problems(tmp_path: Path) -> None:
    """`evaluate_every` looks at inner problems on the way, too, which nobody reports."""
    path = outcome(inner(steps=0), tmp_path / "run").path
    looks = [(0, 0.9), (0, 0.5), (1, 0.8), (1, 0.6), (2, 0.7), (2, 0.4)]
    lines = [
        json.dumps({**COUNTED, "outer_step": k, "step": place, "validation_accuracy": a})
        for place, (k, a) in enumerate(looks)
    ]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert load(path).best == {**COUNTED, "outer_step": 1, "step": 3, "validation_accuracy": 0.6}


@pytest.mark.parametrize("kind", [SGP, Local])
def test_a_baseline_of_one_level_keeps_a_uniform_ensemble(kind: type[SGP], tmp_path: Path) -> None:
    """SGP-MTL and Local-MTL."""
    case = personalized_classification("digits", clients=3, components=2, limit=150, personalize="mtl")
    result = digits(kind(steps=6, lr=0.5, batch=16), tmp_path / "run", problem=case)
    assert result.final["outer"].shape == (3, 2)
    assert (result.final["outer"] == 0).all()
    correct, loss = judged_by_hand(result, case.data.test, case)
    total = case.data.test.sizes.sum()
    assert result.metrics.accuracy.iloc[-1] == pytest.approx(sum(correct) / total, abs=1e-9)
    assert result.metrics.loss.iloc[-1] == pytest.approx(sum(loss) / total, rel=1e-5)
    assert (result.trace.totals().sent == 0) == (kind is Local)


# --- CDBO ---------------------------------------------------------------------------------------------


def test_the_mean_of_lambda_moves_by_the_sum_of_the_hypergradients(tmp_path: Path) -> None:
    """λ_i = z_i/ω_i, Σ ω_i = n, and Σ z_i/n moves by −rate · Σ h_i, whatever the links do. Runs with one
    outer step more go on where the shorter ones end.
    """
    mass = torch.zeros(D_OUTER, dtype=torch.float64)
    for steps in (1, 2, 3):
        protocol = CDBO(inner(), HGP(20, sampling="joint"), steps, outer_lr=0.2, consensus=2)
        final = outcome(protocol, tmp_path / str(steps), STO_D).final
        mass = mass - 0.2 * final["hypergradient"].sum(0)
        torch.testing.assert_close(final["outer_z"].mean(0), mass, rtol=0, atol=1e-13)
        assert float(final["outer_omega"].sum()) == pytest.approx(N, abs=1e-12)
        assert final["outer_omega"].std() > 0.01
        torch.testing.assert_close(final["outer"], final["outer_z"] / final["outer_omega"])


def test_with_many_rounds_lambda_is_common_to_all(tmp_path: Path) -> None:
    protocol = CDBO(inner(), HGP(20, sampling="joint"), 1, outer_lr=0.2, consensus=60)
    final = outcome(protocol, tmp_path / "run", STO_D).final
    wanted = -0.2 * final["hypergradient"].sum(0)
    assert wanted.norm() > 0.01
    torch.testing.assert_close(final["outer"], wanted.expand(N, -1), rtol=0, atol=1e-9)


def test_rounds_of_consensus_are_pushes_along_the_links_of_the_trace(tmp_path: Path) -> None:
    protocol = CDBO(inner(), HGP(20, sampling="joint"), 1, outer_lr=0.2, consensus=3)
    result = outcome(protocol, tmp_path / "run", STO_D)
    messages = result.trace.to_pandas().query("kind == 'outer-push'")
    assert messages.step.max() - messages.step.min() == 2
    assert set(messages[messages.status == "delivered"].bytes) == {8 * (D_OUTER + 1)}
    z, omega = torch.zeros(N, D_OUTER, dtype=torch.float64), torch.ones(N, 1, dtype=torch.float64)
    for turn, (_, sent) in enumerate(messages.groupby("step")):
        P = torch.zeros(N, N, dtype=torch.float64)  # (receiver, sender)
        for row in sent[sent.status == "delivered"].itertuples():
            P[row.receiver, row.sender] = row.weight
        P += torch.diag(1 - P.sum(0))
        z, omega = P @ z, P @ omega
        if turn == 0:
            z = z - N * 0.2 * result.final["hypergradient"]
    torch.testing.assert_close(result.final["outer"], z / omega, rtol=0, atol=1e-7)  # weights are float32


@pytest.mark.parametrize("start", ["fresh", "warm"])
def test_cdbo_local_sends_lambda_and_nothing_else(start: str, tmp_path: Path) -> None:
    alone = Local(steps=T, lr=LR, batch=None, weight_decay=DECAY)
    protocol = CDBO(alone, MANY, 2, outer_lr=0.2, consensus=1, start=start)  # type: ignore[arg-type]
    result = outcome(protocol, tmp_path / "run", initial={"inner": BEGIN})
    phases = result.trace.phases()
    assert list(phases.kind) == ["outer-push"]
    assert list(phases.sent) == [2 * N * (N - 1)]
    case, x = problem(), BEGIN
    lam, nobody = torch.zeros(N, D_OUTER, dtype=torch.float64), torch.eye(N, dtype=torch.float64)
    for _ in range(2):
        x = sgp_by_hand(case, BEGIN if start == "fresh" else x, lam, "4b", mix=lambda rows: rows)
        lam = averaged(lam) - 0.2 * N * truth_by_hand(case, x, lam, "4b", nobody)
    x = sgp_by_hand(case, BEGIN if start == "fresh" else x, lam, "4b", mix=lambda rows: rows)
    torch.testing.assert_close(result.final["outer"], lam, rtol=0, atol=1e-7)
    torch.testing.assert_close(result.final["inner"], x, rtol=0, atol=1e-7)
    assert list(result.metrics.outer_step) == [0, 1, 2]


@pytest.mark.parametrize("protocol", [PDBO(inner(), HGP(2), 1), CDBO(inner(), HGP(2), 1)])
def test_a_horizon_does_not_go_with_several_parts(protocol: Any, tmp_path: Path) -> None:
    timing = VirtualTime(compute="exponential(1.0)", horizon=20.0)
    with pytest.raises(ScenarioError, match=r"a horizon of 20.0 would cut a protocol of 4 parts"):
        outcome(protocol, tmp_path / "run", timing=timing)
    assert not (tmp_path / "run").exists()


# --- several methods at one point ---------------------------------------------------------------------


def test_methods_are_compared_at_one_point_with_what_the_inner_steps_showed(tmp_path: Path) -> None:
    """The first is as if it were alone. The others differ in links and minibatches only: p̄ and δ̄ are those
    of the inner steps for all, not of the rounds of the method before.
    """
    step, case = inner(steps=20, batch=2), problem(noise=0.3, samples=4)
    methods = (
        HGP(3, record=True),
        VRHGP(2),
        HGP(2, expectations="exact"),
        HGP(3, sampling="joint", batch=None, lr=0.1),
    )
    result = outcome(CompareHypergradients(step, methods), tmp_path / "all", STO_D, problem=case)
    alone = outcome(EstimateHypergradient(step, methods[0]), tmp_path / "one", STO_D, problem=case)
    for key in ("hypergradient", "history"):
        assert torch.equal(result.final[f"{key}/0"], alone.final[key])
    assert set(result.final) == {
        "inner", "outer", "z", "omega", "history/0",
        *(f"{what}/{k}" for what in ("hypergradient", "direct") for k in range(4)),
    }  # fmt: skip
    for key in ("inner", "outer", "omega"):
        assert torch.equal(result.final[key], alone.final[key])

    messages = result.trace.to_pandas()
    delivered = messages[messages.status == "delivered"]
    push, later = delivered[delivered.kind == "push"], delivered[delivered.kind == "hypergradient"]
    starts = np.cumsum([20, 6, 4, 4, 3])
    method = np.searchsorted(starts, later.step.to_numpy(), side="right") - 1
    assert list(np.bincount(method) > 0) == [True] * 4
    network = Lockstep().network(STO_D)
    p_bar = expected_matrix(network, *Uniform().prepare(network).expected())
    for row, k in zip(later.itertuples(), method.tolist(), strict=True):
        j, i = row.sender, row.receiver
        back = push[(push.sender == i) & (push.receiver == j)].weight.sum() / 20
        heard = len(push[(push.sender == j) & (push.receiver == i)]) / 20
        wanted = float(p_bar[i, j]) / STO_D.edges[j, i]["probability"] if k == 2 else back / heard
        assert row.weight == pytest.approx(wanted, rel=1e-6)


def test_compared_methods_are_those_of_runs_of_their_own_where_nothing_is_random(tmp_path: Path) -> None:
    methods = (HGP(4), VRHGP(5, sampling="joint"), HGP(6, lr=0.1), VRHGP(3, alpha=0.5, beta=0.5))
    result = outcome(CompareHypergradients(inner("4a"), methods), tmp_path / "all")
    for k, method in enumerate(methods):
        alone = outcome(EstimateHypergradient(inner("4a"), method), tmp_path / str(k))
        torch.testing.assert_close(
            result.final[f"hypergradient/{k}"], alone.final["hypergradient"], rtol=0, atol=1e-14
        )


@pytest.mark.parametrize(
    "timing",
    [
        Lockstep(),
        Lockstep(loss=0.2, running_sums=True),
        VirtualTime("exponential(1.0)", latency="exponential(0.2)", loss=0.1),
    ],
    ids=str,
)
def test_outer_steps_may_repeat_their_minibatches_links_and_times(timing: Any, tmp_path: Path) -> None:
    """With λ hardly moving, an outer step that sees what the first saw ends where the first did."""
    case = problem(noise=0.3, samples=4)
    step, estimator = inner(steps=6, batch=2, lr=0.1), HGP(2, sampling="joint", lr=0.05)
    ends = {}
    for draws in ("fresh", "repeated"):
        method = PDBO(step, estimator, outer_steps=2, outer_lr=1e-9, draws=draws)
        result = outcome(method, tmp_path / draws, STO_D, problem=case, timing=timing, seed=1)
        ends[draws] = result.metrics.groupby("outer_step")["loss"].last().to_numpy()
        if draws == "fresh":
            continue
        sent = result.trace.to_pandas()
        columns, period = ["sender", "receiver", "step", "status"], 6 + 2
        ours = [sent[sent["step"].between(first, first + 5)][columns] for first in (0, period, 2 * period)]
        counted = [
            part.assign(step=part["step"] - number * period).sort_values(columns[:3]).reset_index(drop=True)
            for number, part in enumerate(ours)
        ]
        assert len(counted[0])
        assert counted[0].equals(counted[1])
        assert counted[0].equals(counted[2])
    np.testing.assert_allclose(ends["repeated"], ends["repeated"][0], rtol=1e-7)
    assert len(set(ends["fresh"])) == 3
