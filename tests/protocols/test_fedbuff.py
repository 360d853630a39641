"""FedBuff and FedAsync against their formulas, done by hand along the trace; and buffered rounds of everybody
against rounds that wait.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from asyncfed import Lockstep, Result, Scenario, ScenarioError, VirtualTime, run
from asyncfed.problems import bilevel_quadratic, quadratic
from asyncfed.protocols import (
    AggITD,
    Buffered,
    ClusteredFL,
    FedAsync,
    FedAvg,
    FedBuff,
    FedNest,
    FedProx,
    HingeDecay,
    LocalSteps,
    Neumann,
    PolynomialDecay,
    Scaffold,
    Server,
)
from tests.protocols.replayed import Array
from tests.protocols.served import iterates, watched
from topologies import star

CLIENTS = 5
BUSY = VirtualTime(
    "exponential(1.0)", latency="exponential(0.3)", loss=0.1, factors={1: 4.0}, bandwidth=200.0
)
STEPS = LocalSteps(0.1, steps=2, batch=2)


# --- everybody, at equal paces -------------------------------------------------------------------------

WAITING: dict[str, Any] = {
    "FedAvg": lambda server: FedAvg(4, STEPS, server),
    "FedProx": lambda server: FedProx(4, STEPS, momentum=0.5, server=server),
    "FedBuff": lambda server: FedBuff(4, STEPS, server_lr=0.7, server=server),
    "FedAsync": lambda server: FedAsync(4, STEPS, server=server),
    "Scaffold": lambda server: Scaffold(4, STEPS, server=server),
    "FedNest": lambda server: FedNest(
        3, STEPS, STEPS, neumann=Neumann(3, 0.3), sampling="iteration", batch=2, server=server
    ),
    "AggITD": lambda server: AggITD(
        3, STEPS, STEPS, inner_rounds=2, scale=0.3, solver="sgd", batch=2, server=server
    ),
}


@pytest.mark.parametrize("timing", [Lockstep(), VirtualTime(2.0, latency=0.5, bandwidth=100.0)])
@pytest.mark.parametrize("name", WAITING)
def test_a_buffer_for_everybody_at_equal_paces_is_waiting_bit_by_bit(
    name: str, timing: Any, tmp_path: Path
) -> None:
    weighted = name != "Scaffold"
    servers = Server(weighted=weighted), Buffered(1.0, weighted=weighted, decay=_decay_of(name))
    waits, moves = (
        run(
            Scenario(
                bilevel_quadratic(clients=CLIENTS, seed=2, noise=0.3, samples=5, curved=True),
                star(CLIENTS),
                WAITING[name](server),
                timing=timing,
                seed=3,
                evaluate_every=1,
            ),
            out=tmp_path / type(server).__name__,
        )
        for server in servers
    )
    assert waits.final.keys() == moves.final.keys()
    assert all(torch.equal(value, moves.final[key]) for key, value in waits.final.items())
    pd.testing.assert_frame_equal(waits.metrics, moves.metrics, check_exact=True)
    rows = [one.trace.to_pandas().drop(columns="staleness") for one in (waits, moves)]
    pd.testing.assert_frame_equal(*rows, check_exact=True)


def _decay_of(name: str) -> Any:
    return Buffered().decay if name == "Scaffold" else PolynomialDecay(0.7)


# --- by hand -------------------------------------------------------------------------------------------


def busy(protocol: Any, out: Path, timing: Any = BUSY) -> tuple[Result, Array, Array]:
    """A run on quadratics of full gradients, whose variables can be seen after every move; and A, b."""
    given = watched(quadratic(clients=CLIENTS, dimension=2, seed=2))
    A, b = (tensor.numpy() for tensor in given.data.train.tensors)
    scenario = Scenario(
        given, star(CLIENTS), protocol, timing=timing, precision="float64", seed=1, evaluate_every=1
    )
    return run(scenario, out=out), A, b


def used_by_move(result: Result) -> list[pd.DataFrame]:
    rows = result.trace.to_pandas()
    used = rows[(rows.receiver == CLIENTS) & (rows.status == "delivered")]
    return [some for _, some in used.groupby("absorbed_step")]


def stepped(A: Array, b: Array, i: int, theta: Array, mu: float = 0.0) -> Array:
    """Three steps of 0.05."""
    own = theta
    for _ in range(3):
        own = own - 0.05 * (A[i] @ (own - b[i]) + mu * (own - theta))
    return own


@pytest.mark.parametrize("mu", [0.0, 2.0])
@pytest.mark.parametrize(
    ("server", "w"),
    [
        (Buffered(3), lambda s: 1.0),
        (Buffered(2, 4, "same", decay=PolynomialDecay(0.5)), lambda s: (1 + s) ** -0.5),
        (Buffered(2, max_staleness=2), lambda s: 1.0),
        (
            Buffered(1, asks="weighted", decay=HingeDecay(3.0, 1.0)),
            lambda s: 1.0 if s <= 1 else 1 / (3 * (s - 1) + 1),
        ),
    ],
)
def test_fedbuff_moves_along_the_mean_of_the_moves(
    server: Buffered, w: Any, mu: float, tmp_path: Path
) -> None:
    """θ ← θ + η_g (1/K) Σ w(s_i) Δ_i, Δ_i of the model that client i was sent."""
    protocol = FedBuff(25, LocalSteps(0.05, steps=3), server_lr=0.6, mu=mu, server=server)
    result, A, b = busy(protocol, tmp_path / "run")
    seen = iterates(result, "y")
    thetas, stale = [seen[0]], []
    for move in used_by_move(result):
        K = server.needed(CLIENTS)
        assert len(move) == K
        total = np.zeros(2)
        for row in move.itertuples():
            s = row.absorbed_step - row.step
            assert row.staleness == s
            stale.append(s)
            read = thetas[row.step]
            total += w(s) * (stepped(A, b, int(row.sender), read, mu) - read)
        thetas.append(thetas[-1] + 0.6 / K * total)
    np.testing.assert_allclose(seen, thetas, rtol=0, atol=1e-12)
    assert max(stale) >= 2, "else nothing is tried"


def test_fedasync_mixes_every_answer_in(tmp_path: Path) -> None:
    """θ ← (1 − a w(s)) θ + a w(s) θ_i; which is FedBuff's move and a w(s) (θ_read − θ) beside it."""
    server = Buffered(1, decay=PolynomialDecay(0.5))
    result, A, b = busy(FedAsync(40, LocalSteps(0.05, steps=3), mixing=0.5, server=server), tmp_path / "run")
    seen = iterates(result, "y")
    thetas, beside = [seen[0]], []
    for (_, row), theta in zip(pd.concat(used_by_move(result)).iterrows(), seen[:-1], strict=True):
        a = 0.5 * (1 + row.staleness) ** -0.5
        read = seen[row.step]
        own = stepped(A, b, int(row.sender), read)
        thetas.append((1 - a) * thetas[-1] + a * own)
        fedbuff = theta + a * (own - read)
        beside.append(a * (read - theta))
        np.testing.assert_allclose(thetas[-1] - fedbuff, beside[-1], rtol=0, atol=1e-12)
    np.testing.assert_allclose(seen, thetas, rtol=0, atol=1e-12)
    assert np.abs(beside).max() > 0.1, "with five at work the two are not the same method"


def test_fedasync_with_several_at_a_time_is_their_weighted_mean(tmp_path: Path) -> None:
    server = Buffered(3, weighted=True, decay=PolynomialDecay(1.0))
    result, A, b = busy(FedAsync(12, LocalSteps(0.05, steps=3), mixing=0.5, server=server), tmp_path / "run")
    seen = iterates(result, "y")
    thetas = [seen[0]]
    for move in used_by_move(result):
        parts = [(1 / (1 + row.staleness) / 3, int(row.sender), row.step) for row in move.itertuples()]
        mean = sum(w * stepped(A, b, i, seen[step]) for w, i, step in parts)
        thetas.append((1 - 0.5 * sum(w for w, _, _ in parts)) * thetas[-1] + 0.5 * mean)
    np.testing.assert_allclose(seen, thetas, rtol=0, atol=1e-12)


def test_with_one_at_work_nothing_is_stale_and_fedbuff_of_one_is_fedasync(tmp_path: Path) -> None:
    local, server = LocalSteps(0.05, steps=3), Buffered(1, at_work=1)
    one, _, _ = busy(FedAsync(30, local, mixing=0.4, server=server), tmp_path / "fedasync")
    other, _, _ = busy(FedBuff(30, local, server_lr=0.4, server=server), tmp_path / "fedbuff")
    np.testing.assert_allclose(iterates(one, "y"), iterates(other, "y"), rtol=0, atol=1e-13)
    rows = one.trace.to_pandas()
    assert (rows.staleness.dropna() == 0).all()


def test_who_is_asked_twice_for_the_same_model_looks_at_other_samples(tmp_path: Path) -> None:
    """One client fills the buffer alone: its two answers to each model are different ones."""
    given = quadratic(clients=2, dimension=2, seed=2, noise=1.0, samples=50)
    protocol = FedBuff(3, LocalSteps(0.1, batch=5), server=Buffered(2, at_work=1, asks="same"))
    answers: dict[tuple[int, int], list[list[float]]] = {}

    def tap(seen: Any) -> None:
        for client, step in zip(seen.clients.tolist(), seen.steps.tolist(), strict=True):
            if "dy" in seen.made.payload:
                answers.setdefault((client, step), []).extend(seen.made.payload["dy"].tolist())

    run(Scenario(given, star(2), protocol, seed=1), out=tmp_path / "run", tap=tap)
    assert len(answers) == 3
    for first, second in answers.values():
        assert first != second


def test_bytes_are_those_of_what_is_sent(tmp_path: Path) -> None:
    """A move costs K answers of a model, and each request a model unless the client is known to have it."""
    result, _, _ = busy(FedBuff(20, LocalSteps(0.05), server=Buffered(2)), tmp_path / "run")
    rows = result.trace.to_pandas()
    sent = rows[rows.status != "link_down"]
    assert set(sent[sent.receiver == CLIENTS].bytes) == {16}
    assert set(sent[sent.sender == CLIENTS].bytes) <= {0, 16}
    assert result.metrics.bytes.iloc[-1] == sent.bytes.sum()
    assert result.metrics.messages.iloc[-1] == len(sent)


# --- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: FedAvg(3, STEPS, server="soon"), r"it must be Server\(…\) or Buffered\(…\)"),
        (lambda: FedBuff(3, STEPS, server_lr=-1.0), "server_lr is -1.0"),
        (lambda: FedBuff(3, STEPS, momentum=1.0), "momentum is 1.0"),
        (lambda: FedAsync(3, STEPS, mixing=0.0), r"FedAsync: mixing is 0"),
        (lambda: FedAsync(3, STEPS, mixing=1.5), "mixing is 1.5"),
        (lambda: ClusteredFL(3, STEPS, server=Buffered(2)), "ClusteredFL: server is Buffered"),
        (lambda: Scaffold(3, STEPS, server=Buffered(2, weighted=True)), r"Buffered\(weighted=True\)"),
        (lambda: Scaffold(3, STEPS, server=Buffered(2, decay=PolynomialDecay())), r"use decay=NoDecay\(\)"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make: Any, says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        make()
