"""Torch modules as problems: dropout and BatchNorm included, against a plain loop of torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncfed import Lockstep, OneByOneWarning, Scenario, ScenarioError, VirtualTime, adapt, load, resume, run
from asyncfed.data import client_data_from_lists
from asyncfed.data.sampling import Sampler
from asyncfed.network import GivenPresence
from asyncfed.problems import Problem, from_module
from asyncfed.problems.draws import drawn_from, normals, uniforms
from asyncfed.protocols import (
    HGP,
    PDBO,
    SGP,
    AsyncSGP,
    Buffered,
    ClusteredFL,
    EpochSGP,
    FedAsync,
    FedAvg,
    FedAvgPlus,
    FedBuff,
    FedProx,
    LocalSteps,
    MetaFL,
    PFedMe,
    PushDIGing,
    PushPull,
    Scaffold,
    Server,
)
from asyncfed.rng import Streams
from tests.helpers import files_of
from tests.pretended import pretended_gpu
from topologies import fully_connected, ring, star

CLIENTS, SAMPLES = 6, 12


class Net(nn.Module):
    """A small convolutional network with everything that is awkward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(12, 4)
        self.register_buffer("scale", torch.tensor(0.5))
        self.fixed = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.max_pool2d(functional.relu(self.norm(self.conv(images))), 2)
        out: Tensor = self.head(self.drop(hidden.flatten(1))) * self.scale * self.fixed
        return out


class Smooth(nn.Module):
    """Linear, with BatchNorm and without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(36)
        self.head = nn.Linear(36, 4)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(images.flatten(1)))
        return out


class Flat(nn.Module):
    """The same without convolutions: clients are computed together."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(36, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(functional.relu(self.norm(self.body(images.flatten(1))))))
        return out


def data() -> Any:
    generator = torch.Generator().manual_seed(1)

    def some(count: int) -> list[tuple[Tensor, Tensor]]:
        return [
            (
                torch.randn(count, 1, 6, 6, generator=generator) + client / 3,
                torch.randint(4, (count,), generator=generator),
            )
            for client in range(CLIENTS)
        ]

    return client_data_from_lists(some(SAMPLES), some(5), some(7))


def peers(problem: Problem, steps: int = 9, **more: Any) -> Scenario:
    return Scenario(
        problem=problem,
        topology=ring(CLIENTS),
        protocol=SGP(steps, 0.1, batch=4),
        precision="float64",
        evaluate_every=3,
        **more,
    )


def served(problem: Problem, **more: Any) -> Scenario:
    return Scenario(
        problem=problem,
        topology=star(CLIENTS),
        protocol=FedAvg(4, LocalSteps(0.1, steps=3, batch=4), Server(0.5)),
        precision="float64",
        evaluate_every=2,
        **more,
    )


KINDS = [
    pytest.param(module, kept, method, id=f"{module.__name__}-{kept}-{method.__name__}")
    for module in (Net, Flat)
    for kept in ("local", "averaged", "frozen")
    for method in (peers, served)
]


# --- a plain loop ----------------------------------------------------------------------------------------


class Plain:
    """FedAvg as one would write it with torch: a module for each client, in double precision."""

    def __init__(self, module: nn.Module, kept: str) -> None:
        self.server = copy.deepcopy(module).double()
        self.kept, self.streams = kept, Streams(0)
        self.noted = [
            {name: value.clone() for name, value in self.server.named_buffers()} for _ in range(CLIENTS)
        ]
        self.data = data().to(torch.float64)

    def round(self, number: int, asked: list[int]) -> None:
        answers = [self.client(number, client) for client in asked]
        with torch.no_grad():
            for name, value in self.server.named_parameters():
                value.copy_(sum(dict(answer.named_parameters())[name] for answer in answers) / len(asked))
            for name, value in self.server.named_buffers():
                if self.kept == "averaged" and value.is_floating_point():
                    value.copy_(sum(dict(answer.named_buffers())[name] for answer in answers) / len(asked))

    def client(self, number: int, client: int) -> nn.Module:
        own = copy.deepcopy(self.server).train()
        if self.kept == "local":
            for name, value in own.named_buffers():
                value.copy_(self.noted[client][name])
        if self.kept == "frozen":
            own.norm.eval()  # type: ignore[union-attr, operator]
        images, labels = self.data.train.of(client)
        sampler = Sampler(self.streams, np.full(CLIENTS, SAMPLES), np.arange(CLIENTS))
        order = sampler.in_order(client, number, 0, "shuffle inner")
        optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=0.1)
        for step in range(3):
            chosen = torch.from_numpy(order[4 * step : 4 * step + 4])
            key = self.streams.uniforms("keys", number, step, step + 1, lane=client)[0]
            optimizer.zero_grad()
            with drawn_from(torch.tensor(int(key * 2.0**53))):
                functional.cross_entropy(own(images[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if self.kept == "local":
            self.noted[client] = {name: value.clone() for name, value in own.named_buffers()}
        return own


@pytest.mark.parametrize("kept", ["local", "averaged", "frozen"])
@pytest.mark.parametrize("module", [Net, Flat])
def test_fedavg_does_what_a_plain_loop_does(module: type[nn.Module], kept: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    net = module()
    plain = Plain(net, kept)
    asked: list[list[int]] = []
    scenario = served(from_module(net, data(), buffers=kept))
    result = run(scenario, out=tmp_path / "run", tap=lambda seen: asked.append(seen.clients.tolist()))
    answered = [clients for clients in asked if max(clients) < CLIENTS]
    assert len(answered) == 4
    for number, clients in enumerate(answered):
        plain.round(number, clients)
    for client in range(CLIENTS):
        model = result.model(client)
        expected = {**plain.server.state_dict(), **(plain.noted[client] if kept == "local" else {})}
        assert list(model) == list(net.state_dict())
        for name, value in model.items():
            if value.is_floating_point():
                torch.testing.assert_close(value.double(), expected[name].double(), rtol=0, atol=1e-10)
        module().load_state_dict(model)
    test, images = result.metrics.iloc[-1]["loss"], plain.data.test
    losses = []
    for client in range(CLIENTS):
        judged = copy.deepcopy(plain.server).eval()
        if kept == "local":
            judged.load_state_dict({**judged.state_dict(), **plain.noted[client]})
        own, labels = images.of(client)
        losses.append(functional.cross_entropy(judged(own), labels).item())
    assert test == pytest.approx(np.mean(losses), abs=1e-10)


# --- the same bytes --------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("module", "kept", "method"), KINDS)
def test_it_is_the_same_twice_and_packed_otherwise(
    module: Any, kept: Any, method: Any, tmp_path: Path
) -> None:
    scenario = method(from_module(module, data(), buffers=kept))
    first = run(scenario, out=tmp_path / "first", save_final=True)
    assert files_of(run(scenario, out=tmp_path / "again", save_final=True).path) == files_of(first.path)
    other = run(scenario, out=tmp_path / "ray", backend="ray", clients_per_actor=4)
    for name, value in first.final.items():
        torch.testing.assert_close(other.final[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", [peers, served])
def test_a_run_that_was_stopped_goes_on_with_its_buffers(method: Any, tmp_path: Path) -> None:
    scenario = method(from_module(Flat, data()))
    whole = run(scenario, out=tmp_path / "whole", save_final=True)

    class Enough(BaseException): ...

    def stop(now: Any) -> None:
        if now.fraction > 0.5:
            raise Enough

    with pytest.raises(Enough):
        run(scenario, out=tmp_path / "run", checkpoint_every=1, save_final=True, progress=stop)
    assert files_of(resume(tmp_path / "run", scenario=scenario).path) == files_of(whole.path)


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    scenario = peers(from_module(Flat, data()))
    often = run(Scenario(**{**vars(scenario), "evaluate_every": 1}), out=tmp_path / "often")
    rarely = run(Scenario(**{**vars(scenario), "evaluate_every": 9}), out=tmp_path / "rarely")
    for name, value in often.final.items():
        assert torch.equal(value, rarely.final[name]), name
    moved = often.final["buffers"]
    assert (moved[0] != moved[1]).any(), "each client has its own"


def test_who_comes_back_after_a_crash_has_noted_nothing(tmp_path: Path) -> None:
    presence = GivenPresence({0: [(0.0, 2.5), (3.5, 100.0)]}, absence="crash")
    timing = VirtualTime(1.0, presence=presence)
    scenario = Scenario(
        problem=from_module(Flat, data()),
        topology=star(CLIENTS),
        protocol=FedAvg(6, LocalSteps(0.1, steps=1, batch=4), Server(quorum=2)),
        timing=timing,
    )
    result = run(scenario, out=tmp_path / "run")
    count = -1  # num_batches_tracked is the last buffer
    others = result.final["clients/buffers"][1:, count]
    assert result.final["clients/buffers"][0, count] < others.min()


_STEPS = LocalSteps(0.05, steps=2, batch=4)
METHODS = {
    "AsyncSGP": (AsyncSGP(4, 0.05, batch=4), VirtualTime("uniform(0.5, 1.5)")),
    "PushDIGing": (PushDIGing(4, 0.05, batch=4), Lockstep()),
    "PushPull": (PushPull(4, 0.05, batch=4), VirtualTime("uniform(0.5, 1.5)")),
    "FedProx": (FedProx(3, _STEPS, mu=0.1, momentum=0.5), Lockstep()),
    "Scaffold": (Scaffold(3, _STEPS), Lockstep()),
    "ClusteredFL": (ClusteredFL(3, _STEPS), Lockstep()),
    "FedBuff": (FedBuff(3, _STEPS, server=Buffered(2)), VirtualTime("uniform(0.5, 1.5)")),
    "FedAsync": (FedAsync(8, _STEPS), VirtualTime("uniform(0.5, 1.5)")),
    "FedAvgPlus": (FedAvgPlus(3, _STEPS, momentum=0.5), Lockstep()),
    "PFedMe": (PFedMe(3, _STEPS, "fedem"), Lockstep()),
    "MetaFL": (MetaFL(3, 1, 2, 0.05, 0.05, 4), Lockstep()),
    "EpochSGP": (EpochSGP(4, 0.05, batch=6), Lockstep()),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kept", ["local", "averaged"])
def test_who_says_that_it_moves_buffers_moves_them(method: str, kept: Any, tmp_path: Path) -> None:
    protocol, timing = METHODS[method]
    topology = ring(CLIENTS) if protocol.server is None else star(CLIENTS)
    problem = from_module(Flat, data(), buffers=kept)
    scenario = Scenario(problem=problem, topology=topology, protocol=protocol, timing=timing)
    if kept not in protocol.moves_buffers:
        with pytest.raises(ScenarioError, match="does not move such"):
            run(scenario, out=tmp_path / "run")
        return
    result = run(scenario, out=tmp_path / "run", strict=True)
    steps = result.clients["steps"].to_numpy()
    noted = [result.model(client)["norm.num_batches_tracked"].item() for client in range(CLIENTS)]
    assert (np.array(noted)[steps > 0] > 0).all()
    if kept == "local":
        each = 2 if protocol.server is not None or method == "EpochSGP" else 1
        begun = np.array(noted) // each - steps  # with a buffer, some are at work when the run ends
        assert (begun == 0).all() or (method in ("FedBuff", "FedAsync") and set(begun) <= {0, 1})
    again = run(scenario, out=tmp_path / "again")
    for name, value in result.final.items():
        torch.testing.assert_close(again.final[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("kept", ["local", "averaged", "frozen"])
@pytest.mark.parametrize("method", [peers, served])
def test_on_a_pretended_gpu_nothing_of_the_cpu_meets_it(method: Any, kept: Any, tmp_path: Path) -> None:
    scenario = method(from_module(Flat, data(), buffers=kept))
    here = run(scenario, out=tmp_path / "cpu")
    with pretended_gpu():
        there = run(scenario, out=tmp_path / "gpu", device="cuda")
    for name, value in here.final.items():
        torch.testing.assert_close(there.final[name], value, rtol=1e-9, atol=1e-9)


def test_tuned_models_are_judged_with_the_statistics_of_their_tuning(tmp_path: Path) -> None:
    """By a plain epoch of torch from the server's model and the client's own statistics; new clients begin
    with the mean of those.
    """
    tuning = LocalSteps(0.2, epochs=1)  # one step with all samples, so that no order matters
    problem, module = from_module(Smooth, data(), buffers="local"), Smooth().double()
    protocol = FedAvgPlus(3, LocalSteps(0.1, steps=2, batch=4), tuning=tuning)
    result = run(Scenario(problem, star(CLIENTS), protocol, precision="float64"), out=tmp_path / "run")
    samples = data().to(torch.float64)

    def judged(state: dict[str, Tensor], client: int) -> tuple[float, float]:
        module.load_state_dict(state)
        images, labels = samples.test.of(client)
        before = functional.cross_entropy(module.eval()(images), labels).item()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
        inputs, targets = samples.train.of(client)
        functional.cross_entropy(module.train()(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        return before, functional.cross_entropy(module.eval()(images), labels).item()

    states = [result.model(client) for client in range(CLIENTS)]
    expected = [judged(state, client) for client, state in enumerate(states)]
    found = result.clients[["loss_tuned_0", "loss"]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    mean = {name: torch.stack([state[name].double() for state in states]).mean(0) for name in states[0]}
    mean["norm.num_batches_tracked"] = mean["norm.num_batches_tracked"].long()
    new = adapt(result, problem).clients[["loss_tuned_0", "loss"]]
    np.testing.assert_allclose(new, [judged(mean, client) for client in range(CLIENTS)], rtol=0, atol=1e-12)


def test_every_independent_minibatch_has_a_key_of_its_own(tmp_path: Path) -> None:
    """A loss whose gradient is the key: what meta FL moves by is the sum of those of its local updates."""
    samples = client_data_from_lists([(torch.zeros(3, 1, dtype=torch.float64),) for _ in range(2)])
    problem = Problem(
        name="keys",
        data=samples,
        inner_loss=lambda x, lam, batch: (x * batch[1].double()).sum() * 2.0**-53 + batch[0].mean(),
        init_inner=lambda generator: torch.zeros(1, dtype=torch.float64),
        metrics={"loss": lambda x, lam, batch: batch[0][:, 0] + x},
        draws=True,
    )
    protocol = MetaFL(1, 0, 3, 0.1, 1.0, 2)
    result = run(Scenario(problem, star(2), protocol, precision="float64"), out=tmp_path / "run")
    keys = [[Streams(0).uniforms(f"keys, update {t}", 0, 0, 1, lane=i)[0] for t in range(3)] for i in (0, 1)]
    assert result.final["inner"].item() == pytest.approx(-np.mean(np.sum(keys, axis=1)), abs=1e-12)


# --- bilevel ---------------------------------------------------------------------------------------------


def test_a_head_may_be_the_outer_variable_of_pdbo(tmp_path: Path) -> None:
    problem = from_module(Flat, data(), outer="head")
    assert sorted(problem.init_outer(torch.Generator())) == ["head.bias", "head.weight"]
    protocol = PDBO(SGP(4, 0.02, batch=4), HGP(3), outer_steps=3, outer_lr=0.5)
    scenario = Scenario(
        problem=problem, topology=fully_connected(CLIENTS), protocol=protocol, precision="float64"
    )
    result = run(scenario, out=tmp_path / "run")
    heads = result.final["outer"]
    assert (heads[0] != heads[1]).any(), "every client has a head of its own"
    Flat().load_state_dict(result.model(2))
    assert files_of(run(scenario, out=tmp_path / "again").path) == files_of(result.path)


# --- what is drawn ---------------------------------------------------------------------------------------


def test_what_is_drawn_has_the_moments_it_should() -> None:
    like = torch.empty(0, dtype=torch.float64)
    count = 1_000_000
    drawn = uniforms(torch.tensor(2**40 + 17), 3, (count,), like)
    error = (1 / 12 / count) ** 0.5
    assert abs(drawn.mean() - 0.5) < 4 * error
    assert abs(drawn.var() - 1 / 12) < 4 * (1 / 180 / count) ** 0.5
    gauss = normals(torch.tensor(5), 1, (count,), like)
    assert abs(gauss.mean()) < 4 / count**0.5
    assert abs(gauss.var() - 1) < 4 * (2 / count) ** 0.5
    others = [uniforms(torch.tensor(2**40 + key), call, (count,), like) for key, call in ((18, 3), (17, 4))]
    for other in (*others, drawn.roll(1)):
        assert abs(torch.corrcoef(torch.stack((drawn, other)))[0, 1]) < 4 / count**0.5


def test_dropout_keeps_the_mean_and_drops_its_share() -> None:
    ones = torch.ones(400, 50, 3)
    for layer, per in ((nn.Dropout(0.3), 60_000), (nn.Dropout1d(0.3), 20_000)):
        with drawn_from(torch.tensor(99)):
            out = layer(ones)
        error = (0.3 * 0.7 / per) ** 0.5
        assert abs((out == 0).double().mean() - 0.3) < 4 * error
        torch.testing.assert_close(out.unique(), torch.tensor([0.0, 1 / 0.7]))
    with drawn_from(torch.tensor(99)):
        assert torch.equal(nn.Dropout(0.3).eval()(ones), ones)


# --- mistakes --------------------------------------------------------------------------------------------


def test_mistakes_are_told_before_anything_runs() -> None:
    class Unrepeatable(Flat):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) * torch.randint(2, (1,))

    for given, words in (
        ({"module": Flat()}, None),
        ({"module": Flat(), "loss": "mean_squared"}, "loss is 'mean_squared'; it must be 'cross_entropy'"),
        ({"module": 3}, "from_module: module is 3; it must be a torch module"),
        ({"module": lambda n: Flat()}, "without arguments"),
        ({"module": lambda: 3}, "makes a int"),
        ({"module": Flat, "outer": "neck"}, "outer names 'neck', and no parameter begins with that"),
        ({"module": Flat, "outer": lambda name: True}, "takes all parameters"),
        ({"module": Flat, "buffers": "mine"}, "buffers is 'mine'"),
        ({"module": Flat, "loss": lambda out, target: out.sum()}, "one number for each sample"),
        ({"module": Unrepeatable}, "random numbers by randint"),
        ({"module": nn.Linear(3, 2)}, "cannot be called with two samples"),
    ):
        if words is None:
            from_module(data=data(), **given)
            continue
        with pytest.raises(ScenarioError, match=words):
            from_module(data=data(), **given)
    with pytest.raises(ScenarioError, match=r"data is .*; it must be ClientData: asyncfed\.data"):
        from_module(Flat, [1])  # type: ignore[arg-type]
    problem = from_module(Flat, data(), buffers="averaged")
    with pytest.raises(ScenarioError, match="PushPull does not move such; give from_module buffers='local'"):
        run(Scenario(problem=problem, topology=ring(CLIENTS), protocol=PushPull(3, 0.1)))


def test_what_cannot_be_vmapped_runs_one_by_one_and_says_so(tmp_path: Path) -> None:
    class Looks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            flat = super().forward(input.flatten(1))
            return flat if flat.sum() > 0 else -flat

    with pytest.warns(OneByOneWarning, match="Looks cannot be run for many clients at once"):
        problem = from_module(lambda: Looks(36, 4), data())
    assert not problem.vectorize
    run(peers(problem), out=tmp_path / "run")


def test_a_loaded_run_needs_its_problem_for_a_model(tmp_path: Path) -> None:
    problem = from_module(Flat, data())
    run(served(problem), out=tmp_path / "run", save_final=True)
    loaded = load(tmp_path / "run")
    with pytest.raises(ScenarioError, match="made of a user's own functions"):
        loaded.model(0)
    Flat().load_state_dict(loaded.model(0, problem=problem))
    with pytest.raises(ScenarioError, match="each client's own"):
        loaded.model(problem=problem)
    with pytest.raises(ScenarioError, match="there is no client 9; they are 0 to 5"):
        loaded.model(9, problem=problem)
