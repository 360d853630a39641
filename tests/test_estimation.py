"""`asyncfed.hypergradient`: every method by object and by name, what it cost, where it was estimated, and on
a problem of a user's own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor

import asyncfed
from asyncfed import (
    HypergradientEstimate,
    Lockstep,
    Scenario,
    ScenarioError,
    VirtualTime,
    run,
)
from asyncfed.data import ClientData, ClientShards
from asyncfed.network import Given, Metropolis, Uniform, Weights
from asyncfed.problems import Problem, bilevel_quadratic
from asyncfed.protocols import (
    HGP,
    PDBO,
    SGP,
    VRHGP,
    EstimateHypergradient,
    ExactBackprop,
    ITDBackward,
    ITDForward,
    Local,
    StepDecay,
)
from asyncfed.truth import (
    InnerMap,
    Point,
    dense_hypergradient,
    expected_matrix,
    neumann_hypergradient,
    stationary_omega,
    stationary_point,
)
from topologies import fully_connected, stochastic_directed, with_links

N, D, D_OUTER = 4, 2, 2
LR, DECAY, T, ROUNDS = 0.3, 0.05, 5, 4
FC, STO_D = fully_connected(N), stochastic_directed(N, probability=(0.4, 0.8), seed=1)
EDGES, NUMBER = N * (N - 1), 8  # directed links of FC, bytes of a number
INNER = SGP(steps=T, lr=LR, batch=None, weight_decay=DECAY)
CASE = bilevel_quadratic(clients=N, dimension=D, outer_dimension=D_OUTER, curved=True)
STEP = InnerMap(LR, "4b", DECAY)
GIVEN = {
    "inner": torch.linspace(-1, 1, N * D, dtype=torch.float64).view(N, D),
    "outer": torch.linspace(0.5, -0.5, N * D_OUTER, dtype=torch.float64).view(N, D_OUTER),
}


def p_bar(graph: nx.Graph, weights: Weights | None = None) -> Tensor:
    network = Lockstep().network(graph)
    return expected_matrix(network, *(weights or Uniform()).prepare(network).expected())


def estimate(out: Path, method: Any = "hgp", graph: nx.Graph = FC, **settings: Any) -> HypergradientEstimate:
    settings = {"problem": CASE, "inner": INNER, "rounds": ROUNDS, "out": out, **settings}
    return asyncfed.hypergradient(settings.pop("problem"), graph, method, **settings)


# --- every method, and what it costs ------------------------------------------------------------------

METHODS = {  # name, object, rounds, numbers in all messages of one link
    "hgp": (HGP(ROUNDS), 2 * ROUNDS, 2 * ROUNDS * D),
    "vr-hgp": (VRHGP(ROUNDS), 2 * ROUNDS, 2 * ROUNDS * 2 * D),
    "exact": (ExactBackprop(ROUNDS), 2 * ROUNDS, 2 * ROUNDS * D),
    "itd-forward": (
        ITDForward(gather=ROUNDS),
        T + ROUNDS,
        T * (N * D_OUTER * D + D + 1) + ROUNDS * (N * D_OUTER + 1),
    ),
    "itd-backward": (ITDBackward(), T, T * D),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_by_object_and_by_name(name: str, tmp_path: Path) -> None:
    method, rounds, numbers = METHODS[name]
    found = estimate(tmp_path / "named", name)
    same = estimate(tmp_path / "object", method, rounds=77)  # of which a method that is given knows nothing
    run_by_hand = run(
        Scenario(
            problem=CASE, topology=FC, protocol=EstimateHypergradient(INNER, method), precision="float64"
        ),
        out=tmp_path / "run",
    )
    assert found.values.shape == (N, D_OUTER)
    assert torch.equal(found.values, same.values)
    assert torch.equal(found.values, run_by_hand.final["hypergradient"])
    assert torch.equal(found.point.x, run_by_hand.final["inner"])
    for one in (found, same):
        assert (one.rounds, one.messages) == (rounds, rounds * EDGES)
        assert one.bytes == NUMBER * numbers * EDGES
    truth = dense_hypergradient(CASE, p_bar(FC), STEP, found.point)
    torch.testing.assert_close(found.truth, truth, rtol=0, atol=1e-13)
    assert found.error == pytest.approx(float((found.values - truth).norm()), abs=1e-13)
    assert found.relative_error == pytest.approx(float((found.values - truth).norm() / truth.norm()))
    assert found.error > 0.001, "four rounds, or five steps, are not the whole series"
    assert found.history is None
    assert f"{N} clients" in repr(found)
    assert f"{rounds} rounds" in repr(found)


@pytest.mark.parametrize("method", ["hgp", "vr-hgp", "exact"])
def test_with_many_rounds_the_error_vanishes(method: str, tmp_path: Path) -> None:
    found = estimate(tmp_path / "run", method, rounds=140)
    assert found.relative_error is not None
    assert found.relative_error < 1e-8


@pytest.mark.parametrize("name", ["itd-forward", "itd-backward"])
def test_where_the_inner_steps_have_come_to_rest_itd_finds_the_truth_too(name: str, tmp_path: Path) -> None:
    """(41) is then the Neumann series with as many terms as there were steps: 0.84^60 = 3e-5 is left out."""
    inner = SGP(steps=60, lr=LR, batch=None, weight_decay=DECAY)
    found = estimate(tmp_path / "run", name, rounds=1, inner=inner)
    assert found.relative_error is not None
    assert found.relative_error < 1e-4


def test_what_the_inner_steps_sent_is_not_counted(tmp_path: Path) -> None:
    found = estimate(tmp_path / "run", HGP(3, sampling="joint"))
    phases = found.result.trace.phases().set_index("kind")
    assert list(phases.index) == ["push", "hypergradient"]
    assert phases.sent["push"] == T * EDGES
    assert found.messages == phases.sent["hypergradient"] == 3 * EDGES
    assert found.result.trace.totals().bytes == found.bytes + T * EDGES * NUMBER * (D + 1)


def test_on_links_that_come_and_go_only_what_was_sent_is_counted(tmp_path: Path) -> None:
    found = estimate(tmp_path / "run", HGP(3), STO_D)
    messages = found.result.trace.to_pandas().query("kind == 'hypergradient' and status != 'link_down'")
    assert 0 < found.messages == len(messages) < 6 * EDGES
    assert found.bytes == len(messages) * NUMBER * D
    assert found.rounds == 6


def test_alone_nothing_is_sent(tmp_path: Path) -> None:
    """Whatever the weights are for: nobody uses them."""
    equal = Given(tuple(map(tuple, np.full((N, N), 1 / N).tolist())))
    alone = Local(steps=T, lr=LR, batch=None, weight_decay=DECAY)
    for k, weights in enumerate((Uniform(), Metropolis(), equal)):
        found = estimate(tmp_path / str(k), HGP(140), inner=alone, weights=weights)
        assert (found.rounds, found.messages, found.bytes) == (0, 0, 0)
        truth = dense_hypergradient(CASE, torch.eye(N, dtype=torch.float64), STEP, found.point)
        torch.testing.assert_close(found.values, truth, rtol=0, atol=1e-8)
        assert found.error is not None
        assert found.error < 1e-8


def test_other_weights(tmp_path: Path) -> None:
    rows = torch.full((N, N), 0.1, dtype=torch.float64)
    rows += torch.diag(torch.full((N,), 0.6, dtype=torch.float64))
    weights = Given(tuple(map(tuple, rows.tolist())))
    found = estimate(tmp_path / "run", HGP(140), weights=weights)
    torch.testing.assert_close(found.values, dense_hypergradient(CASE, rows, STEP, found.point))
    assert found.relative_error is not None
    assert found.relative_error < 1e-8


def test_the_truth_is_that_of_the_rate_the_method_uses(tmp_path: Path) -> None:
    scheduled = SGP(steps=T, lr=StepDecay(LR, at=(2,)), batch=None)
    for name, method, lr in (("first", HGP(140), LR), ("own", HGP(260, lr=0.15), 0.15)):
        found = estimate(tmp_path / name, method, inner=scheduled)
        torch.testing.assert_close(
            found.truth, dense_hypergradient(CASE, p_bar(FC), InnerMap(lr), found.point)
        )
        assert found.relative_error is not None
        assert found.relative_error < 1e-8


def test_the_truth_may_be_left_out_and_is_where_messages_are_lost(tmp_path: Path) -> None:
    lossy = with_links(FC, loss=0.1)
    for name, graph, wanted in (("without", FC, False), ("lossy", lossy, "auto")):
        found = estimate(tmp_path / name, graph=graph, truth=wanted)
        assert found.truth is None
        assert found.error is None
        assert found.relative_error is None
        assert "error" not in repr(found)
    with pytest.raises(ScenarioError, match="there is no dense truth to compare with"):
        estimate(tmp_path / "wanted", graph=lossy, truth=True)
    slow = VirtualTime(compute=1.0, factors={0: 2.0})
    with pytest.raises(ScenarioError, match="clients of the same mean pace"):
        estimate(tmp_path / "slow", HGP(3, sampling="joint"), graph=FC, truth=True, timing=slow)


# --- round by round -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["4a", "4b"])
@pytest.mark.parametrize("sampling", ["alternating", "joint"])
def test_the_history_is_the_series_term_by_term(sampling: Any, order: Any, tmp_path: Path) -> None:
    inner = SGP(steps=T, lr=LR, order=order, batch=None, weight_decay=DECAY)
    found = estimate(tmp_path / "run", HGP(ROUNDS, sampling=sampling), inner=inner, record=True)
    assert found.history is not None
    assert found.history.shape == (ROUNDS, N, D_OUTER)
    assert torch.equal(found.history[-1], found.values)
    for m, recorded in enumerate(found.history, start=1):
        series = neumann_hypergradient(CASE, p_bar(FC), InnerMap(LR, order, DECAY), found.point, m)
        torch.testing.assert_close(recorded, series, rtol=0, atol=1e-13)


@pytest.mark.parametrize("order", ["4a", "4b"])
@pytest.mark.parametrize("sampling", ["alternating", "joint"])
@pytest.mark.parametrize("kind", [HGP, VRHGP])
def test_the_history_is_what_fewer_rounds_would_have_found(
    kind: Any, sampling: Any, order: Any, tmp_path: Path
) -> None:
    """On random links and minibatches, which are the same however many rounds there are."""
    inner = SGP(steps=T, lr=0.1, order=order, batch=2)
    noisy = bilevel_quadratic(clients=N, dimension=D, outer_dimension=D_OUTER, noise=0.3, samples=4)
    common = {"inner": inner, "problem": noisy, "graph": STO_D}
    found = estimate(tmp_path / "all", kind(3, sampling=sampling), record=True, **common)
    assert found.history is not None
    assert torch.equal(found.history[-1], found.values)
    for m in (1, 2):
        fewer = estimate(tmp_path / str(m), kind(m, sampling=sampling), **common)
        torch.testing.assert_close(found.history[m - 1], fewer.values, rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", ["itd-forward", ITDBackward()])
def test_methods_without_a_history_say_so(method: Any, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="has no estimate before its last round; leave out record"):
        estimate(tmp_path / "run", method, record=True)


# --- where --------------------------------------------------------------------------------------------


def test_at_the_stationary_point(tmp_path: Path) -> None:
    found = estimate(tmp_path / "run", HGP(ROUNDS), STO_D, at="stationary")
    point = stationary_point(CASE, p_bar(STO_D), STEP)
    for given, wanted in (
        (found.point.x, point.x),
        (found.point.omega, point.omega),
        (found.point.lam, point.lam),
    ):
        torch.testing.assert_close(given, wanted, rtol=0, atol=1e-14)
    assert set(found.result.trace.to_pandas().kind) == {"hypergradient"}, "nobody steps"
    torch.testing.assert_close(found.truth, dense_hypergradient(CASE, p_bar(STO_D), STEP, point))


@pytest.mark.parametrize("method", [HGP(ROUNDS), VRHGP(ROUNDS, sampling="joint")])
def test_at_given_variables_with_and_without_omega(method: Any, tmp_path: Path) -> None:
    resting = stationary_omega(p_bar(STO_D))
    uneven = torch.tensor([[0.5], [1.5], [0.75], [1.25]], dtype=torch.float64)
    for name, omega in (("resting", None), ("uneven", uneven)):
        at = GIVEN if omega is None else {**GIVEN, "omega": uneven}
        found = estimate(tmp_path / name, method, STO_D, at=at)
        there = Point(GIVEN["inner"], resting if omega is None else uneven, GIVEN["outer"])
        torch.testing.assert_close(found.point.omega, there.omega, rtol=0, atol=1e-14)
        assert torch.equal(found.point.x, there.x)
        assert torch.equal(found.point.lam, there.lam)
        torch.testing.assert_close(found.truth, dense_hypergradient(CASE, p_bar(STO_D), STEP, there))
        exact = type(method)(ROUNDS, sampling=method.sampling, expectations="exact")
        by_hand = run(
            Scenario(
                problem=CASE,
                topology=STO_D,
                protocol=EstimateHypergradient(INNER, exact, solve=False),
                precision="float64",
            ),
            out=tmp_path / f"{name}-run",
            initial={**GIVEN, "omega": there.omega},
        )
        torch.testing.assert_close(found.values, by_hand.final["hypergradient"], rtol=0, atol=1e-14)


def test_what_is_not_given_is_the_problems_own(tmp_path: Path) -> None:
    found = estimate(tmp_path / "run", HGP(140), at={"inner": GIVEN["inner"]})
    assert (found.point.lam == 0).all()
    assert found.relative_error is not None
    assert found.relative_error < 1e-8
    assert found.point.omega.tolist() == pytest.approx(np.ones((N, 1)))


def test_alone_at_given_variables(tmp_path: Path) -> None:
    alone = Local(steps=0, lr=LR, batch=None, weight_decay=DECAY)
    found = estimate(tmp_path / "run", HGP(140), inner=alone, at=GIVEN)
    there = Point(GIVEN["inner"], torch.ones(N, 1), GIVEN["outer"])
    truth = dense_hypergradient(CASE, torch.eye(N, dtype=torch.float64), STEP, there)
    torch.testing.assert_close(found.values, truth, rtol=0, atol=1e-8)
    with pytest.raises(ScenarioError, match="Local has no stationary point in common"):
        estimate(tmp_path / "stationary", HGP(3), inner=alone, at="stationary")


@pytest.mark.parametrize("method", ["itd-forward", "itd-backward", ITDForward(), ITDBackward()])
@pytest.mark.parametrize("at", ["stationary", GIVEN])
def test_itd_cannot_begin_at_the_end(method: Any, at: Any, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"differentiates the inner steps themselves.*use HGP or VRHGP"):
        estimate(tmp_path / "run", method, at=at)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "nearest"),
    [
        ({"method": "vrhgp"}, "vr-hgp"),
        ({"method": "itd-foward"}, "itd-forward"),
        ({"at": "stationery"}, "stationary"),
        ({"at": "solved"}, "solve"),
        ({"at": {"iner": GIVEN["inner"]}}, "inner"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(
    settings: dict[str, Any], nearest: str, tmp_path: Path
) -> None:
    with pytest.raises(ScenarioError, match=f"did you mean '{nearest}'"):
        estimate(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("inner", (N, D + 1), (N, D)),
        ("inner", (D,), (N, D)),
        ("outer", (N + 1, D_OUTER), (N, D_OUTER)),
        ("omega", (N,), (N, 1)),
        ("omega", (N, D), (N, 1)),
    ],
)
def test_variables_of_another_shape_are_refused(
    name: str, shape: tuple[int, ...], wanted: tuple[int, ...], tmp_path: Path
) -> None:
    with pytest.raises(ScenarioError) as raised:
        estimate(tmp_path / "run", at={**GIVEN, name: torch.ones(shape)})
    assert f"initial['{name}'] has the shape {shape}; it must be {wanted}" in str(raised.value)
    assert not (tmp_path / "run").exists()


# --- a user's own problem -----------------------------------------------------------------------------


def own_problem() -> Problem:
    """Ridge regression with a decay and a shift of the labels per client, its inner and outer variables in
    dicts of several shapes; the outer loss is over the validation samples.
    """
    generator = torch.Generator().manual_seed(2)

    def samples(each: int) -> ClientShards:
        inputs = torch.randn(3 * each, 2, generator=generator, dtype=torch.float64)
        labels = inputs @ torch.tensor([1.0, -1.0], dtype=torch.float64)
        return ClientShards((inputs, labels), np.full(3, each))

    def prediction(inner: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return inputs @ inner["w"][0] + inner["b"]

    def inner_loss(inner: dict[str, Tensor], outer: dict[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        inputs, labels = batch
        wrong = prediction(inner, inputs) - labels - inputs @ outer["shift"]
        return 0.5 * wrong.square().mean() + 0.1 * outer["decay"].exp() * inner["w"].square().sum()

    def outer_loss(inner: dict[str, Tensor], outer: dict[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        inputs, labels = batch
        wrong = (prediction(inner, inputs) - labels).square().mean()
        return wrong + 0.01 * (outer["shift"].square().sum() + outer["decay"].square())

    def start(generator: torch.Generator) -> dict[str, Tensor]:
        return {"w": torch.zeros(1, 2, dtype=torch.float64), "b": torch.zeros((), dtype=torch.float64)}

    return Problem(
        name="own ridge",
        data=ClientData(samples(6), samples(4), samples(5)),
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        init_inner=start,
        init_outer=lambda generator: {
            "decay": torch.tensor(1.0, dtype=torch.float64),
            "shift": torch.zeros(2, dtype=torch.float64),
        },
        outer_split="validation",
        metrics={"loss": lambda inner, outer, batch: (prediction(inner, batch[0]) - batch[1]).square()},
    )


def test_a_problem_of_plain_functions_on_dicts(tmp_path: Path) -> None:
    """Its hypergradient, by names; and PDBO on it, whose two outer steps are λ − rate · h by hand."""
    case, inner = own_problem(), SGP(steps=10, lr=0.3, batch=None)
    common = {"problem": case, "inner": inner, "rounds": 140, "graph": fully_connected(3)}
    found = estimate(tmp_path / "first", "vr-hgp", **common)
    assert found.relative_error is not None
    assert found.relative_error < 1e-7
    for client in range(3):
        mine = found.of(client)
        assert isinstance(mine, dict)
        assert {name: tuple(value.shape) for name, value in mine.items()} == {"decay": (), "shift": (2,)}
        assert torch.equal(torch.cat([mine["decay"].view(1), mine["shift"]]), found.values[client])

    rates = torch.tensor([0.5, 2.0, 2.0], dtype=torch.float64)
    begin = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).expand(3, 3)
    lam = begin - rates * found.values
    scenario = Scenario(problem=case, topology=fully_connected(3), protocol=inner, precision="float64")
    x = run(scenario, out=tmp_path / "inner", initial={"outer": lam}).final["inner"]
    second = estimate(tmp_path / "second", "vr-hgp", at={"inner": x, "outer": lam}, **common)
    lam = lam - rates * second.values
    protocol = PDBO(inner, VRHGP(140), 2, {"shift": 2.0, "decay": 0.5}, optimizer="sgd")
    result = run(replace(scenario, protocol=protocol), out=tmp_path / "pdbo")
    torch.testing.assert_close(result.final["outer"], lam, rtol=0, atol=1e-12)
    assert result.metrics.validation_loss.is_monotonic_decreasing
    assert result.best["outer_step"] == 2
