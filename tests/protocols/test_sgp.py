"""SGP against methods written by hand, and against closed forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from asyncfed import DivergenceError, Scenario, ScenarioError, TopologyError, load, run
from asyncfed.data import client_data_from_lists
from asyncfed.network import FastestMixing, Given, Metropolis, Uniform
from asyncfed.problems import Problem, average_minimiser, classification, quadratic
from asyncfed.protocols import DSGD, SGP, Diminishing, Local, PeerFedAvg, StepDecay
from tests.helpers import run_tapped, standard_error
from topologies import erdos_renyi, fully_connected, ring, stochastic_directed, stochastic_undirected


def _logistic_gradient(x: torch.Tensor, samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Gradient of the mean cross-entropy of logistic regression, written out: (softmax − onehot) ⊗ input."""
    weight, bias = x[: 10 * 64].view(10, 64), x[10 * 64 :]
    residual = torch.softmax(samples @ weight.T + bias, dim=1) - torch.eye(10, dtype=x.dtype)[labels]
    return torch.cat([(residual.T @ samples).flatten(), residual.sum(0)]) / len(samples)


def test_the_hand_written_gradient_is_the_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(650, dtype=torch.float64, requires_grad=True)
    samples, labels = torch.rand(7, 64, dtype=torch.float64), torch.arange(7)
    cross_entropy(samples @ x[:640].view(10, 64).T + x[640:], labels).backward()
    torch.testing.assert_close(_logistic_gradient(x.detach(), samples, labels), x.grad)


@pytest.mark.parametrize(
    "protocol", [PeerFedAvg(steps=12, lr=0.5, batch=None), SGP(steps=12, lr=0.5, order="4a", batch=None)]
)
def test_on_the_full_graph_it_is_fedavg_step_by_step(protocol: SGP, tmp_path: Path) -> None:
    problem = classification("digits", clients=5, seed=3)
    scenario = Scenario(problem=problem, topology=fully_connected(5), protocol=protocol, precision="float64")
    result, steps = run_tapped(scenario, tmp_path / "run")

    x = steps.absorbed[0, 0]["z"]
    for t in range(12):
        for client in range(5):
            torch.testing.assert_close(steps.absorbed[client, t]["z"], x, rtol=0, atol=1e-10)
        local = []
        for client in range(5):
            samples, labels = problem.data.train.of(client)
            local.append(x - 0.5 * _logistic_gradient(x, samples.double(), labels))
        x = torch.stack(local).mean(0)
    torch.testing.assert_close(result.final["inner"], x.expand(5, -1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("weights", [Metropolis(), FastestMixing()])
@pytest.mark.parametrize("order", ["4a", "4b"])
def test_on_a_fixed_undirected_graph_it_is_dsgd_step_by_step(
    weights: object, order: str, tmp_path: Path
) -> None:
    n = 8
    problem = quadratic(clients=n, dimension=4, seed=1)
    graph = erdos_renyi(n, 0.4, seed=2)
    protocol = DSGD(steps=25, lr=0.1, order=order, batch=None, weight_decay=0.01)  # type: ignore[arg-type]
    scenario = Scenario(
        problem=problem, topology=graph, protocol=protocol, weights=weights, precision="float64"
    )  # type: ignore[arg-type]
    result, steps = run_tapped(scenario, tmp_path / "run")

    edges = result.trace.to_pandas()
    W = np.zeros((n, n))  # the matrix that was really used, checked to be symmetric and doubly stochastic
    for row in edges[edges.step == 0].itertuples():
        W[row.receiver, row.sender] = row.weight
    W[np.diag_indices(n)] = 1 - W.sum(0)
    np.testing.assert_allclose(W, W.T, atol=1e-12)
    np.testing.assert_allclose(W.sum(1), 1, atol=1e-12)
    if isinstance(weights, Metropolis):
        i, j = next(iter(graph.edges))
        assert W[i, j] == pytest.approx(1 / (1 + max(graph.degree[i], graph.degree[j])), abs=1e-15)

    A = torch.stack([problem.data.train.of(i)[0][0] for i in range(n)])
    b = torch.stack([problem.data.train.of(i)[1][0] for i in range(n)])
    P = torch.from_numpy(W)
    x = steps.stacked("z", 0, n)
    for t in range(25):
        torch.testing.assert_close(steps.stacked("z", t, n), x, rtol=0, atol=1e-10)
        torch.testing.assert_close(
            steps.stacked("omega", t, n), torch.ones(n, 1, dtype=torch.float64), rtol=0, atol=1e-10
        )
        gradient = torch.einsum("ijk,ik->ij", A, x - b) + 0.01 * x
        x = P @ (x - 0.1 * gradient) if order == "4a" else P @ x - 0.1 * gradient
    torch.testing.assert_close(result.final["inner"], x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("order", ["4a", "4b"])
def test_with_a_diminishing_step_everybody_reaches_the_minimiser_of_the_average_loss(
    order: str, tmp_path: Path
) -> None:
    """What keeps a client from consensus is what was not mixed yet: the last few −α∇f_i/ω_i, so a small
    multiple of α_T·G with G the largest gradient at the minimiser. The bound 6·α_T·G must hold at two very
    different times, so the gap shrinks with the step.
    """
    problem = quadratic(clients=6, dimension=3, seed=5)
    truth = average_minimiser(problem)
    G = max(float((A[0] @ (truth - b[0])).norm()) for A, b in (problem.data.train.of(i) for i in range(6)))
    gaps = []
    for steps in (1_000, 8_000):
        schedule = Diminishing(0.5, after=200)
        protocol = SGP(steps=steps, lr=schedule, order=order, batch=None)  # type: ignore[arg-type]
        scenario = Scenario(
            problem=problem,
            topology=stochastic_directed(6, seed=4),
            protocol=protocol,
            precision="float64",
            evaluate_every=steps,
        )
        x = run(scenario, out=tmp_path / f"run{steps}").final["inner"]
        gaps.append(float((x - truth).norm(dim=1).max()))
        assert gaps[-1] < 6 * schedule.rates(np.array([steps]))[0] * G
    assert gaps[1] < gaps[0] / 4


def test_with_a_constant_step_the_average_stands_at_the_fixed_point_of_the_expected_iteration(
    tmp_path: Path,
) -> None:
    """f_i = ½‖x − b_i‖²: summing (4b) over clients, mass conservation makes the mean of E x_i exactly the
    mean of b_i at stationarity, which the fixed point z* = P̄z* − α(z*/ω* − b), ω* = P̄ω* shares. Where each
    single client stands differs from that fixed point only through the fluctuation of ω: to within 5% of the
    spread of the b_i here (measured 1.3%).
    """
    n, alpha = 5, 0.05
    problem = quadratic(clients=n, dimension=2, seed=7, curvature=(1.0, 1.0))
    graph = stochastic_directed(n, seed=8)
    protocol = SGP(steps=6_000, lr=alpha, batch=None)
    scenario = Scenario(
        problem=problem, topology=graph, protocol=protocol, precision="float64", evaluate_every=6_000
    )
    seen: list[np.ndarray] = []
    run(
        scenario,
        out=tmp_path / "run",
        tap=lambda step: seen.append((step.absorbed["z"] / step.absorbed["omega"]).numpy()),
    )
    x = np.stack(seen[500:])
    b = torch.stack([problem.data.train.of(i)[1][0] for i in range(n)]).numpy()

    everybody = x.mean(1)
    error = standard_error(
        everybody
    )  # over batches of 275 steps, far longer than the 1/α = 20 steps of memory
    assert (np.abs(everybody.mean(0) - b.mean(0)) < 4 * error).all()

    P = _expected_weights(load(tmp_path / "run"), n)
    values, vectors = np.linalg.eig(P)
    omega = np.real(vectors[:, np.argmax(np.real(values))])
    omega *= n / omega.sum()
    z = np.linalg.solve(np.eye(n) - P + alpha * np.diag(1 / omega), alpha * b)
    spread = np.linalg.norm(b - b.mean(0), axis=1).max()
    assert np.linalg.norm(x.mean(0) - z / omega[:, None], axis=1).max() < 0.05 * spread


def _expected_weights(result: object, n: int) -> np.ndarray:
    """Column-stochastic P̄[receiver, sender], from what the trace says was sent."""
    messages = result.trace.to_pandas()  # type: ignore[attr-defined]
    P = np.zeros((n, n))
    sums = messages.groupby(["sender", "receiver"]).weight.sum()
    for (sender, receiver), weight in sums.items():
        P[receiver, sender] = weight / (messages.step.max() + 1)
    P[np.diag_indices(n)] = 1 - P.sum(0)
    return P


def test_local_is_everybody_alone_and_sends_nothing(tmp_path: Path) -> None:
    problem = quadratic(clients=4, dimension=3, seed=2)
    scenario = Scenario(
        problem=problem,
        topology=stochastic_directed(4, seed=0),
        protocol=Local(steps=400, lr=0.3, batch=None),
        precision="float64",
    )
    result = run(scenario, out=tmp_path / "run")
    own = torch.stack([problem.data.train.of(i)[1][0] for i in range(4)])
    torch.testing.assert_close(result.final["inner"], own, rtol=0, atol=1e-10)
    assert len(result.trace) == 0
    assert result.metrics.messages.iloc[-1] == 0


def test_weight_decay_pulls_towards_zero_exactly_as_written(tmp_path: Path) -> None:
    problem = quadratic(clients=1, dimension=2, seed=0)
    A, b = (t[0] for t in problem.data.train.of(0))
    scenario = Scenario(
        problem=problem,
        topology=fully_connected(1),
        protocol=Local(steps=2000, lr=0.1, batch=None, weight_decay=0.3),
        precision="float64",
    )
    x = run(scenario, out=tmp_path / "run").final["inner"][0]
    expected = torch.linalg.solve(A + 0.3 * torch.eye(2, dtype=torch.float64), A @ b)
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-10)


def test_schedules_are_read_at_the_clients_own_step() -> None:
    steps = np.array([0, 499, 500, 549, 550, 600])
    np.testing.assert_allclose(
        StepDecay(0.05, at=(500, 550)).rates(steps), [0.05, 0.05, 0.005, 0.005, 0.0005, 0.0005]
    )
    np.testing.assert_allclose(Diminishing(1.0, after=10).rates(np.array([0, 10, 90])), [1, 0.5, 0.1])


def test_a_schedule_changes_the_step_from_its_step_on(tmp_path: Path) -> None:
    problem = quadratic(clients=2, dimension=2, seed=0)
    graph = fully_connected(2)

    def run_with(lr: object, name: str) -> torch.Tensor:
        protocol = SGP(steps=3, lr=lr, batch=None)  # type: ignore[arg-type]
        _, steps = run_tapped(
            Scenario(problem=problem, topology=graph, protocol=protocol, precision="float64"), tmp_path / name
        )
        return torch.stack([steps.residue[0, t]["z"] for t in range(3)])

    constant, decayed = run_with(0.1, "constant"), run_with(StepDecay(0.1, at=(2,), factor=0.5), "decayed")
    torch.testing.assert_close(decayed[:2], constant[:2], rtol=0, atol=0)
    torch.testing.assert_close(decayed[2], constant[2] * 0.5)


def test_dsgd_refuses_weights_that_are_not_doubly_stochastic(tmp_path: Path) -> None:
    problem = quadratic(clients=6, dimension=2)
    for topology, weights in (
        (stochastic_directed(6, seed=0), Uniform()),
        (erdos_renyi(6, 0.5, seed=1), Uniform()),
    ):
        scenario = Scenario(
            problem=problem, topology=topology, protocol=DSGD(steps=1, lr=0.1), weights=weights
        )
        with pytest.raises(TopologyError, match="doubly stochastic"):
            run(scenario, out=tmp_path / "never")
    lopsided = Given(((0.5, 0.5), (0.2, 0.8)))
    with pytest.raises(TopologyError, match="doubly stochastic"):
        run(
            Scenario(
                problem=quadratic(clients=2),
                topology=ring(2),
                protocol=DSGD(steps=1, lr=0.1),
                weights=lopsided,
            ),
            out=tmp_path / "never",
        )
    assert not (tmp_path / "never").exists()


def test_fedavg_refuses_anything_but_the_full_graph(tmp_path: Path) -> None:
    for topology in (ring(6), stochastic_undirected(6, seed=0)):
        scenario = Scenario(
            problem=quadratic(clients=6), topology=topology, protocol=PeerFedAvg(steps=1, lr=0.1)
        )
        with pytest.raises(TopologyError, match="fully_connected"):
            run(scenario, out=tmp_path / "never")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": -1}, "steps is -1"),
        ({"lr": 0.0}, "SGP: lr is 0"),
        ({"lr": float("nan")}, "SGP: lr is nan; it must be a finite number above 0, StepDecay"),
        ({"order": "4c"}, "order is '4c'"),
        ({"batch": 0}, "batch is 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
    ],
)
def test_bad_settings_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        SGP(**({"steps": 1, "lr": 0.1} | change))  # type: ignore[arg-type]


def test_divergence_names_client_step_and_quantity_and_leaves_a_readable_partial_run(tmp_path: Path) -> None:
    problem = quadratic(clients=4, dimension=2, seed=0)
    scenario = Scenario(
        problem=problem,
        topology=stochastic_directed(4, seed=1),
        protocol=SGP(steps=5000, lr=50.0, batch=None),
        evaluate_every=5,
    )
    with pytest.raises(
        DivergenceError, match=r"loss of client \d became (inf|nan) at step \d+; lower the learning rate"
    ) as caught:
        run(scenario, out=tmp_path / "run")
    partial = load(tmp_path / "run")
    assert partial.status == "failed"
    assert "loss of client" in partial.manifest["error"]
    assert 0 < len(partial.metrics) <= caught.value.step // 5 + 1
    recorded = partial.trace.to_pandas()
    assert recorded.step.max() == caught.value.step - 1
    assert len(recorded) == 12 * caught.value.step


def _steep(n: int, culprit: int) -> Problem:
    """Everybody is flat but for one client, whose gradient overflows float32 in its first step."""
    data = [(torch.tensor([[1e30 if i == culprit else 1.0]]),) for i in range(n)]
    return Problem(
        name="one steep client",
        data=client_data_from_lists(data),
        inner_loss=lambda x, lam, batch: (batch[0] * (x - 1)).sum() * 1e3,
        init_inner=lambda generator: torch.zeros(1),
    )


@pytest.mark.parametrize("order", ["4a", "4b"])
@pytest.mark.parametrize("steps", [1, 5])
def test_whoever_diverges_is_named_in_the_step_it_happens_even_the_last(
    order: str, steps: int, tmp_path: Path
) -> None:
    topology = stochastic_directed(20, probability=(0.3, 0.4), seed=1)
    protocol = SGP(steps=steps, lr=1e10, batch=None, order=order)  # type: ignore[arg-type]
    scenario = Scenario(problem=_steep(20, 5), topology=topology, protocol=protocol)
    with pytest.raises(DivergenceError, match="z of client 5 became -inf at step 0"):
        run(scenario, out=tmp_path / "run")
    assert load(tmp_path / "run").status == "failed"
