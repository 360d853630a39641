"""Gossip with full Hessians: against a literal transcription, against closed forms, what its messages cost,
and what it refuses.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor

from asyncfed import Lockstep, Result, Scenario, ScenarioError, TopologyError, VirtualTime, run
from asyncfed.data import ClientData, ClientShards
from asyncfed.data.sampling import Sampler
from asyncfed.network import Metropolis, Uniform
from asyncfed.problems import Problem, bilevel_quadratic, classification
from asyncfed.problems.problem import Batch
from asyncfed.protocols import Diminishing
from asyncfed.protocols.gossip_bilevel import GossipBilevel, NeumannDivergesError
from asyncfed.rng import Streams
from tests.helpers import run_tapped
from topologies import fully_connected, ring, stochastic_directed, stochastic_undirected

N, D_X, D_Y = 4, 2, 3
GRAPHS = {"full": fully_connected(N), "ring": ring(N)}
W = {  # Metropolis
    "full": torch.full((N, N), 1 / N, dtype=torch.float64),
    "ring": torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]], dtype=torch.float64).div(
        3
    ),
}
ROUNDS = GossipBilevel(5, Diminishing(0.2, after=4), 0.3, Diminishing(0.5, after=9), terms=3, bound=4.0)


def problem(**changes: Any) -> Problem:
    return bilevel_quadratic(**{"clients": N, "dimension": D_Y, "outer_dimension": D_X, **changes})


def uneven() -> Problem:
    """Curved, with another outer loss for every validation sample, and clients of all sizes: the samples are
    the clients of other problems.
    """
    train, validation = (problem(clients=10, seed=seed).data.train.tensors for seed in (1, 2))
    data = ClientData(
        ClientShards(train, np.array([3, 1, 4, 2])),
        ClientShards(validation, np.array([1, 4, 2, 3])),
        ClientShards(validation, np.array([1, 4, 2, 3])),
    )
    return replace(problem(curved=True), data=data, outer_split="validation", recipe=None)


def scenario(protocol: GossipBilevel = ROUNDS, graph: nx.Graph = GRAPHS["ring"], **changes: Any) -> Scenario:
    settings = {"problem": problem(), "weights": Metropolis(), "precision": "float64", **changes}
    return Scenario(topology=graph, protocol=protocol, **settings)


def outcome(out: Path, *given: Any, **changes: Any) -> Result:
    return run(scenario(*given, **changes), out=out)


# --- by hand ------------------------------------------------------------------------------------------


class Agents:
    """The recursions as printed, agent by agent, with matrices as matrices."""

    def __init__(self, case: Problem, w: Tensor, x: Tensor, y: Tensor, b: int, L: float) -> None:
        self.case, self.w, self.b, self.L = case, w, b, L
        self.x, self.y = list(x), list(y)
        self.s, self.h = [torch.zeros_like(row) for row in x], [torch.zeros_like(row) for row in y]
        self.u = [x.new_zeros(D_X, D_Y) for _ in range(N)]
        self.v = [[L * torch.eye(D_Y, dtype=x.dtype) for _ in range(b)] for _ in range(N)]

    def mixed(self, held: list[Tensor], k: int) -> Tensor:
        return sum((self.w[k, j] * held[j] for j in range(N)), torch.zeros_like(held[k]))

    def round(self, samples: list[list[Batch]], alpha: float, gamma: float, beta: float) -> None:
        f, g = self.case.outer_loss, self.case.inner_loss  # of (y, x, samples)
        new: dict[str, list[Any]] = {key: [] for key in "xyshuv"}
        for k in range(N):
            y, x, outer = self.y[k], self.x[k], self.case.data.validation.of(k)
            xi, *xis = samples[k]
            identity = torch.eye(D_Y, dtype=x.dtype)
            Q = identity
            for i in range(self.b):
                Q = identity + (identity - self.v[k][i] / self.L) @ Q
            q = Q / self.L
            new["x"].append(self.mixed(self.x, k) - alpha * (self.s[k] - self.u[k] @ q @ self.h[k]))
            new["y"].append(self.mixed(self.y, k) - gamma * torch.func.grad(g)(y, x, xi))
            f_y, f_x = torch.func.grad(f, argnums=(0, 1))(y, x, outer)
            new["s"].append((1 - beta) * self.mixed(self.s, k) + beta * f_x)
            new["h"].append((1 - beta) * self.mixed(self.h, k) + beta * f_y)
            g_xy = torch.func.jacrev(torch.func.grad(g, argnums=1), argnums=0)(y, x, xi)
            new["u"].append((1 - beta) * self.mixed(self.u, k) + beta * g_xy)
            new["v"].append(
                [
                    (1 - beta) * self.mixed([self.v[j][i] for j in range(N)], k)
                    + beta * torch.func.jacrev(torch.func.grad(g))(y, x, xis[i])
                    for i in range(self.b)
                ]
            )
        self.x, self.y, self.s, self.h, self.u, self.v = (new[key] for key in "xyshuv")


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("graph", GRAPHS)
def test_every_round_is_the_printed_one(graph: str, batch: int | None, tmp_path: Path) -> None:
    case, b = uneven(), ROUNDS.terms
    protocol = replace(ROUNDS, batch=batch)
    result, seen = run_tapped(scenario(protocol, GRAPHS[graph], problem=case, seed=3), tmp_path / "run")
    everyone, train = np.arange(N), case.data.train
    sampler = Sampler(Streams(3), train.sizes, everyone)
    agents = Agents(case, W[graph], seen.stacked("x", 0, N), seen.stacked("y", 0, N), b, ROUNDS.bound)
    for t in range(ROUNDS.steps):
        for key in "xyshuv":
            rows = [torch.stack(row) if key == "v" else row for row in getattr(agents, key)]
            by_hand = torch.stack(rows).flatten(1)
            torch.testing.assert_close(seen.stacked(key, t, N), by_hand, rtol=0, atol=1e-12)
        if batch is None:
            samples = [[train.of(k)] * (b + 1) for k in range(N)]
        else:
            index = sampler.with_replacement(everyone, np.full(N, t), (b + 1) * batch)
            drawn = train.gather(torch.from_numpy(everyone), torch.from_numpy(index))
            parts = [slice(batch * i, batch * (i + 1)) for i in range(b + 1)]
            samples = [[tuple(tensor[k, part] for tensor in drawn) for part in parts] for k in range(N)]
        agents.round(samples, 0.2 / (1 + t / 4), 0.3, 0.5 / (1 + t / 9))
    torch.testing.assert_close(result.final["outer"], torch.stack(agents.x), rtol=0, atol=1e-12)
    torch.testing.assert_close(result.final["inner"], torch.stack(agents.y), rtol=0, atol=1e-12)
    losses = [case.outer_loss(agents.y[k], agents.x[k], case.data.validation.of(k)) for k in range(N)]
    weighed = np.average([float(loss) for loss in losses], weights=case.data.test.sizes)
    assert result.metrics.outer_loss.iloc[-1] == pytest.approx(weighed, abs=1e-12)
    assert result.metrics.phase.iloc[-1] == "gossip-bilevel"


def test_the_mean_moves_by_the_mean_of_what_is_new_whatever_the_links_do(tmp_path: Path) -> None:
    graph = stochastic_undirected(N, probability=0.5, seed=1)
    _, seen = run_tapped(scenario(graph=graph), tmp_path / "run")
    for t in range(ROUNDS.steps - 1):
        beta = 0.5 / (1 + t / 9)
        for key in "xyshuv":
            new = torch.stack([seen.residue[k, t][key] for k in range(N)]).mean(0)
            kept = (1 if key in "xy" else 1 - beta) * seen.stacked(key, t, N).mean(0)
            torch.testing.assert_close(seen.stacked(key, t + 1, N).mean(0), kept + new, rtol=0, atol=1e-12)


# --- closed forms -------------------------------------------------------------------------------------


def solution(case: Problem, q: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x, y) at which y = Ā⁻¹ (mean A_i b_i − R̄ x) and ρ (x − s̄) − R̄ᵀ q (y − t̄) = 0, with ρ = 0.1. With
    q = Ā⁻¹, the default, x is the minimiser of (1/n) Σ F_i(y(x), x), for then dy/dx = −q R̄.
    """
    A, b, R, t, s = case.data.train.tensors
    A_bar, R_bar, Ab_bar = A.mean(0), R.mean(0), torch.einsum("nij,nj->ni", A, b).mean(0)
    q = torch.linalg.inv(A_bar) if q is None else q
    y0, J = torch.linalg.solve(A_bar, Ab_bar), -torch.linalg.solve(A_bar, R_bar)
    left = 0.1 * torch.eye(R.shape[2], dtype=torch.float64) - R_bar.T @ q @ J
    x = torch.linalg.solve(left, 0.1 * s.mean(0) + R_bar.T @ q @ (y0 - t.mean(0)))
    return x, y0 + J @ x


@pytest.mark.parametrize("graph", GRAPHS)
def test_unlike_clients_come_to_the_common_solution(graph: str, tmp_path: Path) -> None:
    """With rates that fall like t^−0.9 so does the distance of everybody's x; 13 terms of ratio 0.23 leave
    out 5e-9 of the inverse. Single y stay apart by γ ∇_y g_k, which vanishes only in the mean.
    """
    case = problem(dimension=2, outer_dimension=1, curvature=(1.0, 1.3), seed=7)
    x, y = solution(case)
    falling = {rate: Diminishing(rate, after=30, power=0.9) for rate in (0.3, 0.5)}
    protocol = GossipBilevel(400, falling[0.3], falling[0.5], falling[0.5], terms=12, bound=1.3)
    result, seen = run_tapped(scenario(protocol, GRAPHS[graph], problem=case), tmp_path / "run")
    early = (seen.stacked("x", 100, N) - x).norm(dim=1).max()
    late = (result.final["outer"] - x).norm(dim=1).max()
    assert late < 0.35 * early
    assert late < 0.008 * x.norm()
    assert (result.final["inner"].mean(0) - y).norm() < 0.01 * y.norm()


def test_among_like_clients_only_the_terms_left_out_are_missing(tmp_path: Path) -> None:
    """Constant rates then lead to rest, exactly where the truncated series stands for the inverse."""
    case, L = problem(outer_dimension=1, curvature=(1.0, 1.3), seed=5), 1.5
    case = replace(case, data=case.data.select([0] * N), recipe=None)
    A = case.data.train.tensors[0][0]
    truth = solution(case)[0]
    for terms in (1, 14):
        rest = torch.eye(D_Y, dtype=torch.float64) - A / L
        q = sum(torch.linalg.matrix_power(rest, i) for i in range(terms + 1)) / L
        x, y = solution(case, q)
        protocol = GossipBilevel(200, 0.1, 0.5, 0.5, terms=terms, bound=L)
        result = outcome(tmp_path / f"{terms}", protocol, problem=case)
        torch.testing.assert_close(result.final["outer"], x.expand(N, -1), rtol=0, atol=1e-7)
        torch.testing.assert_close(result.final["inner"], y.expand(N, -1), rtol=0, atol=1e-7)
        gap = (x - truth).norm()
        assert gap > 5e-3 if terms == 1 else gap < 1e-6


# --- what it costs, and what it refuses ---------------------------------------------------------------


def test_a_message_carries_every_matrix(tmp_path: Path) -> None:
    trace = outcome(tmp_path / "run", precision="float32").trace.to_arrow().to_pandas()
    numbers = 2 * D_X + 2 * D_Y + D_X * D_Y + ROUNDS.terms * D_Y**2
    assert set(trace.bytes) == {4 * numbers}
    assert set(trace.kind) == {"gossip"}
    assert len(trace) == 2 * N * ROUNDS.steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": -1}, "steps is -1"),
        ({"lr": 0.0}, "lr is 0.0; it must be a finite number above 0"),
        ({"inner_lr": float("inf")}, "inner_lr is inf"),
        ({"mixing": 1.5}, "mixing begins with 1.5; it must be at most 1"),
        ({"mixing": Diminishing(2.0)}, "mixing begins with 2.0"),
        ({"terms": 0}, "terms is 0"),
        ({"terms": 2.5}, "terms is 2.5"),
        ({"bound": 0.0}, "bound is 0.0"),
        ({"batch": 0}, "batch is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        replace(ROUNDS, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"timing": VirtualTime()}, ScenarioError, r"needs everybody in step.*timing=Lockstep\(\)"),
        (
            {"topology": stochastic_directed(N, seed=1), "weights": Uniform()},
            TopologyError,
            "needs doubly stochastic weights",
        ),
        ({"timing": Lockstep(loss=0.1)}, TopologyError, "needs doubly stochastic weights"),
        ({"problem": classification("digits", clients=N)}, ScenarioError, "has no outer variable"),
        (
            {"problem": problem(dimension=1200, curvature=(1.0, 1.0))},
            ScenarioError,
            "2 × 1200 mixed derivatives and 3 Hessians of 1200 × 1200.*at most 4,000,000.*FedNest or AggITD",
        ),
        (
            {"problem": problem(dimension=10, outer_dimension=400_000, clients=1), "topology": ring(1)},
            ScenarioError,
            "400000 × 10 mixed derivatives.*FedNest or AggITD",
        ),
    ],
)
def test_what_does_not_suit_it_is_refused(
    changes: dict[str, Any], error: type[ScenarioError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        run(replace(scenario(), **changes), out=tmp_path / "run")


def test_a_series_that_diverges_says_which_bound_was_too_low(tmp_path: Path) -> None:
    protocol = GossipBilevel(100, 1e-3, 0.1, 0.5, terms=8, bound=0.4)  # 1 − 2/0.4 = −4 at worst
    with pytest.raises(NeumannDivergesError, match=r"raise bound \(it is 0.4\)") as caught:
        outcome(tmp_path / "run", protocol, problem=problem(curvature=(1.5, 2.0)))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.growth > 10
