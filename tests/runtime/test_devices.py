"""On a pretended GPU every method does what it does on the CPU, and no tensor of one meets one of the other.

There need not be a GPU: see tests/pretended.py, and docs/gpu.md for what this can tell.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncfed import Progress, Result, Scenario, VirtualTime, load, resume, run
from asyncfed.data import client_data_from_lists
from asyncfed.errors import DivergenceError
from asyncfed.estimation import hypergradient
from asyncfed.models import build_model, initial_parameters, outputs
from asyncfed.problems import Derivatives, Problem, bilevel_quadratic
from asyncfed.problems import replay as replay_module
from asyncfed.protocols import CDBO, HGP, SGP, VRHGP, ClusteredFL, EstimateHypergradient, LocalSteps
from asyncfed.protocols.at import At
from asyncfed.protocols.part import Inbox, Step, Tensors
from asyncfed.registry import registered
from asyncfed.runtime import block
from asyncfed.runtime.arrivals import with_arrivals
from asyncfed.runtime.block import Observation
from asyncfed.runtime.exchange import RowsFrom
from tests.apart import Apart, Ranges, played
from tests.data.test_shakespeare import play, written
from tests.laws.changed import with_method, with_samples
from tests.laws.examples import Case, cases, methods
from tests.laws.test_resumed import Killed
from tests.pretended import pretended_gpu
from topologies import fully_connected, ring, star, stochastic_directed

TOGETHER = ((0, 2), (2, 3))  # of three clients, two in one block; alone, gradients are made another way


def _watched(step: Observation) -> None:
    """What a step is handed, and what stays of what it returns, is on the GPU."""
    made = step.made
    for values in (step.absorbed, made.payload, made.residue, made.memory, made.addressed):
        astray = [name for name, value in values.items() if not value.is_cuda]
        assert not astray, f"{', '.join(astray)} of {type(step.part).__name__} is not on the GPU"


def _on_gpu(scenario: Scenario, out: Path, **options: bool) -> Result:
    with pretended_gpu():
        return run(scenario, out=out, device="cuda", tap=_watched, **options)


def _same(there: dict[str, Tensor], here: dict[str, Tensor]) -> None:
    assert there.keys() == here.keys()
    for name, value in here.items():
        assert there[name].device.type == "cpu", f"{name} was left on the GPU"
        torch.testing.assert_close(
            there[name], value, rtol=1e-5, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}"
        )


def _scenario(case: Case, precision: Literal["float32", "float64"]) -> Scenario:
    return replace(case.scenario, precision=precision, evaluate_every=10)


def _of_every_path() -> list[Case]:
    """All examples, among peers in both timings; a server's blocks do the same in either."""
    served = {
        case.example.name for case in cases() if case.example.protocol.server and case.kind == "virtual"
    }
    return [case for case in cases() if case.kind == "virtual" or case.example.name not in served]


@pytest.mark.parametrize("case", _of_every_path(), ids=lambda case: case.name)
def test_a_method_does_on_a_gpu_what_it_does_on_the_cpu(case: Case, tmp_path: Path) -> None:
    scenario = _scenario(case, "float32")  # some variables are in doubles all the same
    here = run(scenario, out=tmp_path / "cpu", device="cpu")
    there = _on_gpu(scenario, tmp_path / "gpu")
    assert there.manifest["placement"]["device"] == "cuda"
    _same(there.final, here.final)
    assert np.allclose(
        there.metrics.select_dtypes("number"), here.metrics.select_dtypes("number"), rtol=1e-4, equal_nan=True
    )


def _first_of_each() -> list[Case]:
    """Of every method, in virtual time where it can, for then blocks wait for others."""
    found: dict[str, Case] = {}
    for case in sorted(cases(), key=lambda case: case.kind, reverse=True):
        found.setdefault(case.method, replace(case, clients=3))
    return [found[method] for method in methods() if method in found]


def _unequal(scenario: Scenario) -> Scenario:
    """Client 1 has one sample only, less than a minibatch; asked by a server, all go over what they have."""

    def over_all(name: str, value: object) -> object:
        return replace(value, steps=None, epochs=1) if isinstance(value, LocalSteps) else value

    few = with_samples(scenario, 1, lambda samples: tuple(tensor[:1] for tensor in samples))
    return with_method(few, over_all) if scenario.protocol.server is not None else few


@pytest.mark.parametrize("case", _first_of_each(), ids=lambda case: case.name)
def test_in_actors_with_gpus_a_method_does_the_same(case: Case) -> None:
    """As on Ray: what travels comes in arrays of the CPU, and the server is there too. Clients that share an
    actor have unequal data. Wherever a checkpoint could be taken, the actors with GPUs are replaced by it.
    """
    scenario = _unequal(_scenario(case, "float64"))
    judged, here = played(scenario, Apart(scenario, TOGETHER, "cpu"))
    with pretended_gpu():
        backend = Apart(scenario, TOGETHER, "cuda")
        again, there = played(scenario, backend, at_rest=backend.replace_nodes)
        assert backend.replaced
        for node in backend.nodes[: len(TOGETHER)]:
            assert all(value.is_cuda for value in node._block.store.values())
            assert not any(value.is_cuda for value in node._block.state().tensors.values())
    _same(there, here)
    for mine, other in zip(again, judged, strict=True):
        assert mine.sums.keys() == other.sums.keys()
        assert all(np.allclose(mine.sums[name], values) for name, values in other.sums.items())


# --- what no example is large or unlucky enough for -------------------------------------------------------

N, D = 18, 40


def _regression(sizes: list[int]) -> Problem:
    generator = torch.Generator().manual_seed(0)
    rows = [
        (torch.randn(size, D, generator=generator), torch.randn(size, generator=generator)) for size in sizes
    ]

    def losses(x: Tensor, lam: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        return (batch[0] @ x - batch[1]).square()

    return Problem(
        name="regression",
        data=client_data_from_lists(rows),
        inner_loss=lambda x, lam, batch: losses(x, lam, batch).mean() + lam.exp().sum() * x.square().sum(),
        outer_loss=lambda x, lam, batch: losses(x, lam, batch).mean(),
        init_inner=lambda g: torch.zeros(D),
        init_outer=lambda g: torch.zeros(2),
        metrics={"loss": losses},
    )


_EQUAL = Scenario(
    problem=_regression([4] * N),
    topology=stochastic_directed(N, probability=0.9, seed=1),
    protocol=SGP(steps=3, lr=0.01, batch=None),
)
_SLOW = VirtualTime(compute="exponential(1.0)", latency=0.3)
_ESTIMATED = EstimateHypergradient(SGP(2, 0.01, batch=None), VRHGP(2, sampling="joint", lr=0.001))
_CLUSTERS = ClusteredFL(3, LocalSteps(0.1, steps=2, batch=2), eps1=1e9, eps2=0.0, min_rounds=0)
RARE = {
    "a matrix of a round": _EQUAL,
    "a matrix of the pool": replace(_EQUAL, timing=VirtualTime(compute=1.0, latency=0.0)),
    "bags of few": replace(_EQUAL, topology=stochastic_directed(ring(N), probability=0.7, seed=1)),
    "virtual time": replace(_EQUAL, timing=_SLOW),
    "unequal data": replace(_EQUAL, problem=_regression([3, 5] * (N // 2)), protocol=_ESTIMATED),
    "unequal data in virtual time": replace(
        _EQUAL, problem=_regression([3, 5] * (N // 2)), protocol=_ESTIMATED, timing=_SLOW
    ),
    "one client after the other": replace(_EQUAL, problem=replace(_EQUAL.problem, vectorize=False)),
    "rows addressed to clients": replace(_EQUAL, topology=star(N), protocol=_CLUSTERS),
    "a recorded gradient": replace(_EQUAL, protocol=SGP(steps=27, lr=0.01, batch=2)),
}


@pytest.mark.parametrize("scenario", RARE.values(), ids=RARE)
def test_what_large_runs_do_they_do_on_a_gpu(scenario: Scenario, tmp_path: Path) -> None:
    here = run(scenario, out=tmp_path / "cpu", device="cpu")
    _same(_on_gpu(scenario, tmp_path / "gpu").final, here.final)


@pytest.mark.parametrize("name", ["a matrix of a round", "unequal data", "virtual time"])
def test_so_they_do_in_pieces(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "CHUNK_BYTES", 4 * 4 * D)
    test_what_large_runs_do_they_do_on_a_gpu(RARE[name], tmp_path)


def test_clusters_part_in_the_run_that_addresses_rows_to_them(tmp_path: Path) -> None:
    found = run(RARE["rows addressed to clients"], out=tmp_path / "run").final["cluster"]
    assert int(found.max()) > 0


class OneByOne(SGP):
    """Puts its sums together from single messages."""

    each = ("z",)

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        single = inbox.each("z")
        like = inbox["z"]
        weighed = torch.from_numpy(single.weights).to(like)[:, None] * single.values
        rows = torch.from_numpy(single.rows).to(like.device)
        if (at.steps > 0).all():  # order 4a keeps no residue: the sum is all there is
            torch.testing.assert_close(torch.zeros_like(like).index_add_(0, rows, weighed), like)
        return super().step(at, inbox, memory)


@pytest.mark.parametrize("ranges", [((0, 4),), ((0, 2), (2, 4))], ids=["one actor", "two"])
def test_single_messages_are_on_the_gpu(ranges: Ranges) -> None:
    """In chunks of clients with equally many samples."""
    scenario = Scenario(
        _regression([3, 5, 3, 5]), fully_connected(4), OneByOne(3, 0.01, order="4a", batch=None), timing=_SLOW
    )
    here = played(scenario, Apart(scenario, ranges, "cpu"))[1]
    with pretended_gpu():
        there = played(scenario, Apart(scenario, ranges, "cuda"))[1]
    _same(there, here)


def test_rows_that_come_where_nothing_was_are_brought_to_the_gpu() -> None:
    rows = RowsFrom(
        0, np.array([0, 2]), np.array([0, 1]), np.array([1, 0]), np.array([0.5, 2.0]), np.array([3, 4])
    )
    parcel = {"z": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    with pretended_gpu():
        total = with_arrivals("z", None, (rows,), [parcel], 2, torch.device("cuda"))
        assert total is not None
        assert total.is_cuda
    assert total.tolist() == [[1.5, 2.0], [2.0, 4.0]]


def test_derivatives_are_recorded_and_run_again_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "_WORTH_IT", 2)
    problem = bilevel_quadratic(clients=3, dimension=4, noise=0.3, curved=True)
    with pretended_gpu():
        data = problem.data.to(torch.float64, "cuda").train
        derivatives = Derivatives.of(problem)
        batch = data.gather(torch.arange(3, device="cuda"), torch.arange(2, device="cuda").repeat(3, 1))
        x, lam, u = (torch.full((3, d), 0.3, dtype=torch.float64, device="cuda") for d in (4, 2, 4))
        found = [
            (
                derivatives.inner_gradient(x, lam, batch)[0],
                derivatives.outer_gradient(x, lam, batch, "outer")[0],
                derivatives.inner_hessian_vector(x, lam, batch, u),
                derivatives.descend("outer", x, lam.clone(), batch, 0.1),
            )
            for _ in range(4)
        ]
        assert all(torch.equal(first, last) for first, last in zip(found[0], found[-1], strict=True))
        for replay in derivatives._replayed.values():
            assert [form.recorded is not None for form in replay._forms.values()] == [True]


_DATA: dict[str, object] = {"dataset": "digits", "limit": 200}
_OWN: dict[str, dict[str, object]] = {
    "logistic_pair": {"samples": 10},
    "loss_tuning": {"largest": 60, "ratio": 0.5, "model": "mlp:5"},
    "personalized_characters": {"clients": 2, "hidden": 4, "length": 6, "min_characters": 50},
}
_SHIPPED = [name for name, make in registered("problem").items() if make.__module__.startswith("asyncfed.")]


@pytest.mark.parametrize("name", _SHIPPED)
def test_a_problem_is_computed_on_a_gpu_as_on_the_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCFED_DATA", str(written(tmp_path, play())))
    make = registered("problem")[name]
    known = {key: value for key, value in _DATA.items() if key in signature(make).parameters}
    problem = make(**{"clients": 4, **known, **_OWN.get(name, {})})
    inner = SGP(2, 0.01, batch=4)
    bilevel = Derivatives.of(problem).outer.d > 0
    method = CDBO(inner, HGP(1, expectations="exact"), 1) if bilevel else inner
    scenario = Scenario(problem, fully_connected(problem.clients), method)
    here = run(scenario, out=tmp_path / "cpu", device="cpu")
    _same(_on_gpu(scenario, tmp_path / "gpu").final, here.final)


@pytest.mark.parametrize("spec", ["cnn", "lenet"])
def test_a_network_with_convolutions_is_computed_on_a_gpu_as_on_the_cpu(spec: str) -> None:
    module = build_model(spec, (1, 28, 28), 10)
    parameters = initial_parameters(module, torch.Generator().manual_seed(0))
    images = torch.linspace(-1, 1, 2 * 28 * 28).reshape(2, 1, 28, 28)

    def gradients(device: str) -> list[Tensor]:
        own = {name: value.to(device).requires_grad_() for name, value in parameters.items()}
        loss = outputs(module, own, images.to(device)).square().sum()
        return [value.cpu() for value in torch.autograd.grad(loss, list(own.values()))]

    with pretended_gpu():
        found = gradients("cuda")
    torch.testing.assert_close(found, gradients("cpu"))


@pytest.mark.parametrize("case", _first_of_each(), ids=lambda case: case.name)
def test_a_run_that_diverges_on_a_gpu_says_what_it_says_on_the_cpu(case: Case, tmp_path: Path) -> None:
    def huge(samples: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.fill_(1e200) for tensor in samples)

    scenario = with_samples(case.scenario, 1, huge)
    said = []
    for device, machine in (("cpu", nullcontext()), ("cuda", pretended_gpu())):
        with machine, pytest.raises(DivergenceError) as caught:
            run(scenario, out=tmp_path / device, device=device)
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("name", ["a recorded gradient", "unequal data", "rows addressed to clients"])
def test_a_run_that_was_stopped_is_resumed_on_a_gpu(name: str, tmp_path: Path) -> None:
    scenario, stopped = RARE[name], tmp_path / "gpu"
    ticks = count(1)

    def stop(now: Progress) -> None:
        """When there is a checkpoint: another thread writes it, and by the third tick has begun to."""
        patience = time.monotonic() + (10 if next(ticks) >= 3 else 0)
        while not list(stopped.glob("checkpoints/*.safetensors")):
            if time.monotonic() >= patience:
                return
            time.sleep(0.01)
        raise Killed

    here = run(scenario, out=tmp_path / "cpu", device="cpu")
    with pretended_gpu():
        with pytest.raises(Killed):
            run(scenario, out=stopped, device="cuda", checkpoint_every=1, progress=stop)
        there = resume(stopped, scenario=scenario)
    assert there.manifest["placement"]["device"] == "cuda"
    _same(there.final, here.final)


def test_a_run_goes_on_from_another_and_is_kept(tmp_path: Path) -> None:
    first = _on_gpu(_EQUAL, tmp_path / "first", save_final=True)
    kept = load(tmp_path / "first").final
    _same(kept, first.final)
    with pretended_gpu():
        initial = kept | {"inner": kept["inner"].to("cuda")}
        there = run(_EQUAL, out=tmp_path / "gpu", device="auto", initial=initial, strict=True)
    assert there.manifest["placement"]["device"] == "cuda"
    _same(there.final, run(_EQUAL, out=tmp_path / "cpu", device="cpu", initial=kept).final)


def test_a_hypergradient_of_a_gpu_is_compared_with_the_truth(tmp_path: Path) -> None:
    problem = bilevel_quadratic(clients=4)
    with pretended_gpu():
        found = hypergradient(
            problem, fully_connected(4), VRHGP(20), inner=SGP(20, 0.2, batch=None), out=tmp_path / "run"
        )
    assert found.result.manifest["placement"]["device"] == "cuda"
    assert found.relative_error is not None
    assert found.relative_error < 0.1
