"""Tiny scenarios of every registered method, which the laws are tried on.

A method is tried with the arguments that can be guessed for it, and with those in `GIVEN`. It runs on the
hardest of `_networks` that it accepts, in lockstep and in virtual time where it accepts that. So a new method
needs no entry here, unless it has a required argument whose name and type are not in `_GUESSES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, Literal

import networkx as nx
import pytest

from asyncfed import Lockstep, Scenario, VirtualTime
from asyncfed.errors import ScenarioError
from asyncfed.network import Bursts, DrawnPresence, GivenPresence, LinkTimes, Metropolis, Uniform
from asyncfed.problems import (
    Problem,
    bilevel_quadratic,
    compositional,
    minimax_saddle,
    normal_mixture,
    quadratic,
)
from asyncfed.protocols import (
    CDBO,
    HGP,
    PDBO,
    SGP,
    VRHGP,
    AggITD,
    AsyncSGP,
    Buffered,
    ClusteredFL,
    CompareHypergradients,
    Diminishing,
    EpochSGP,
    EstimateHypergradient,
    ExactBackprop,
    FedAsync,
    FedAvg,
    FedAvgS,
    FedBuff,
    FedEM,
    FedNest,
    FedProx,
    GossipBilevel,
    ITDBackward,
    ITDForward,
    LFedNest,
    Local,
    LocalSteps,
    MetaFL,
    Neumann,
    PeerAggITD,
    PeerFedEM,
    PFedMe,
    PolynomialDecay,
    PushDIGing,
    PushPull,
    Scaffold,
    Server,
    SimFBO,
)
from asyncfed.registry import registered
from asyncfed.scenario import check
from topologies import fully_connected, star, stochastic_directed, stochastic_undirected, with_links

Kind = Literal["lockstep", "virtual"]
CLIENTS = 4
every_kind = pytest.mark.parametrize("kind", ["lockstep", "virtual"])


def one_level(clients: int) -> Problem:
    return quadratic(clients=clients, dimension=3, seed=1, noise=0.5, samples=5)


def two_levels(clients: int) -> Problem:
    return bilevel_quadratic(clients=clients, seed=2, noise=0.3, samples=5, curved=True)


def _saddle(clients: int) -> Problem:
    return minimax_saddle(clients=clients, dimension=3, seed=3)


def _composed(clients: int) -> Problem:
    return compositional(clients=clients, dimension=3, outer_dimension=2, seed=4)


def _mixed(clients: int) -> Problem:
    return normal_mixture(clients=clients, components=3, dimension=1, seed=5, samples=5)


@dataclass(frozen=True, eq=False)
class Example:
    """A method with its arguments, and what it is tried on: by default a problem of one or of two levels."""

    protocol: Any
    problem: Callable[[int], Problem] | None = None
    about: str = ""
    changed: Callable[[Scenario], Scenario] = lambda scenario: scenario

    @property
    def name(self) -> str:
        method = type(self.protocol).__name__
        return f"{method} {self.about}".strip()

    def scenario(self, kind: Kind, clients: int = CLIENTS) -> Scenario:
        """On the first network that it accepts; a ScenarioError says why it accepts none."""
        problem = self.problem or (two_levels if self.protocol.needs_outer else one_level)
        refused = []
        for protocol, topology, options in _networks(self.protocol, kind, clients):
            made = Scenario(
                problem(clients), topology, protocol, seed=7, precision="float64", evaluate_every=2, **options
            )
            made = self.changed(made)
            try:
                check(made)
            except ScenarioError as error:
                refused.append(str(error))
            else:
                return made
        raise ScenarioError("; ".join(refused))


def _networks(protocol: Any, kind: Kind, clients: int) -> Iterator[tuple[Any, nx.Graph, Mapping[str, Any]]]:
    """The hardest first: links that come and go one way and lose messages, then less and less of it."""
    lossy = _timing(kind, clients, loss=0.1)
    if protocol.server is not None:
        waiting = {"participation": 0.7} if kind == "lockstep" else {"quorum": 0.6, "late": "next"}
        default = type(protocol).__dataclass_fields__["server"].default_factory()
        if isinstance(default, Buffered):
            waiting = {"size": 2, "at_work": 0.7}
        if protocol.server == default:
            choosy = dataclasses.replace(protocol, server=dataclasses.replace(default, **waiting))
            yield choosy, star(clients, up=0.8, down=0.9), {"timing": lossy}
        yield protocol, star(clients, up=0.8, down=0.9), {"timing": lossy}
        return
    still = _timing(kind, clients, loss=0.0)
    directed = stochastic_directed(clients, probability=(0.5, 0.9), seed=5)
    undirected = stochastic_undirected(clients, probability=(0.5, 0.9), seed=6)
    yield protocol, directed, {"timing": lossy}
    yield protocol, undirected, {"timing": still, "weights": Metropolis()}
    yield protocol, fully_connected(clients), {"timing": still, "weights": Uniform()}


def _timing(kind: Kind, clients: int, loss: float) -> Lockstep | VirtualTime:
    if kind == "lockstep":
        return Lockstep(loss=loss)
    slow = {clients - 1: 2.5}
    latency = "exponential(0.4)"
    return VirtualTime("exponential(1.0)", factors=slow, latency=latency, bandwidth=400.0, loss=loss)


def _links_over_time(scenario: Scenario) -> Scenario:
    """Every second link has a schedule, and all come in bursts."""
    times = LinkTimes([(0, 2), (2.5, 4)], period=5.0)
    marked = with_links(
        scenario.topology, schedule=lambda i, j: times if (i + j) % 2 else None, bursts=Bursts(4, 2, 0.1)
    )
    return dataclasses.replace(scenario, topology=marked)


def _crashing_and_leaving(scenario: Scenario) -> Scenario:
    """One leaves for good, one crashes and is back, one joins late; what is lost comes with a later one."""
    table = {0: [(0, 3.25)], 1: [(0, 1.5), (2.25, 99)], 2: [(1.25, 99)]}
    few = {client: times for client, times in table.items() if client < scenario.clients}
    presence = GivenPresence(few, absence="crash")
    timing: Any = dataclasses.replace(scenario.timing, presence=presence, running_sums=True)
    return dataclasses.replace(scenario, timing=timing)


def _pausing(scenario: Scenario) -> Scenario:
    presence = DrawnPresence("weibull(3, 0.8)", "exponential(1)")
    timing: Any = dataclasses.replace(scenario.timing, presence=presence)
    return dataclasses.replace(scenario, timing=timing)


def _coming_and_going(scenario: Scenario) -> Scenario:
    presence = DrawnPresence("weibull(5, 0.8)", "exponential(2)", absence="crash")
    timing: Any = dataclasses.replace(scenario.timing, presence=presence)
    return dataclasses.replace(scenario, timing=timing)


# --- arguments -----------------------------------------------------------------------------------------

_STEPS = LocalSteps(0.1, steps=2, batch=2)
_INNER = SGP(5, 0.1, batch=2)
_SERIES = Neumann(terms=3, scale=0.3)
_JOINT = VRHGP(2, sampling="joint", expectations="exact", lr=0.01)

_GUESSES: dict[str, Any] = {
    "steps": 5, "outer_steps": 3, "lr": 0.1, "outer_lr": 0.1, "inner_lr": 0.1,
    "tau": 2, "nu": 2, "alpha": 0.1, "beta": 0.1,
    "LearningRate": 0.1, "LocalSteps": _STEPS, "SGP": _INNER, "Estimator": _JOINT,
}  # fmt: skip
"""What a required argument gets, by its name or else by its type."""

GIVEN: dict[str, tuple[Example, ...]] = {
    "SGP": (
        Example(SGP(5, 0.1, batch=2)),
        Example(SGP(5, 0.1, order="4a", batch=None, weight_decay=0.1), about="4a"),
        Example(SGP(5, 0.1, batch=2), about="links over time", changed=_links_over_time),
        Example(SGP(5, 0.1, batch=2), about="crashing and leaving", changed=_crashing_and_leaving),
    ),
    "AsyncSGP": (
        Example(AsyncSGP(5, Diminishing(0.1), per=1.5, batch=2)),
        Example(AsyncSGP(5, 0.1, omega0=0.5, owed="time", batch=None, weight_decay=0.1), about="time"),
    ),
    "PushDIGing": (
        Example(PushDIGing(5, 0.1, batch=2)),
        Example(PushDIGing(5, 0.1, batch=None, omega0=1.0), about="little by little"),
    ),
    "PushPull": (
        Example(PushPull(5, 0.1, batch=2)),
        Example(PushPull(5, 0.1, batch=2), about="pausing", changed=_pausing),
    ),
    "EpochSGP": (
        Example(EpochSGP(4, 0.1, batch=2, momentum=0.5)),
        Example(EpochSGP(4, 0.1, batch=2, weighted=True), two_levels, "weighted"),
    ),
    "PeerFedEM": (Example(PeerFedEM(4, Diminishing(0.1), batch=2, momentum=0.5), _mixed),),
    "FedEM": (
        Example(FedEM(3, _STEPS, momentum=0.5), _mixed),
        Example(FedEM(4, _STEPS, server=Buffered(2)), _mixed, "buffered"),
    ),
    "PFedMe": (
        Example(PFedMe(3, _STEPS, prox_steps=2, lam=2.0)),
        Example(PFedMe(3, _STEPS, "fedem", momentum=0.5), about="FedEM's form"),
    ),
    "ClusteredFL": (Example(ClusteredFL(6, _STEPS, eps1=1e6, eps2=1e-6, min_rounds=1, momentum=0.5)),),
    "MetaFL": (
        Example(MetaFL(3, 2, 2, 0.1, 0.1, 2)),
        Example(MetaFL(3, 3, 2, 0.1, 0.1, 2, "fo"), about="first-order"),
        Example(MetaFL(3, 2, 2, 0.1, 0.1, 2, "hf", delta=0.01), about="Hessian-free"),
    ),
    "FedProx": (Example(FedProx(3, _STEPS, momentum=0.5), about="momentum"),),
    "PDBO": (
        Example(PDBO(_INNER, HGP(2, expectations="exact"), 2), about="HGP"),
        Example(PDBO(_INNER, _JOINT, 2, optimizer="sgd", start="warm"), about="VRHGP joint"),
        Example(PDBO(SGP(4, 0.1, order="4a", batch=None), ExactBackprop(2), 1), about="exact"),
        Example(PDBO(SGP(4, 0.1, order="4a", batch=2), ITDForward(gather=2), 1), about="ITD forward"),
        Example(PDBO(SGP(4, 0.1, order="4a", batch=2), ITDBackward(), 1), about="ITD backward"),
    ),
    "CDBO": (
        Example(CDBO(_INNER, _JOINT, 2, outer_lr=0.005, consensus=2)),
        Example(CDBO(Local(4, 0.1, batch=2), HGP(2), 2), about="alone"),
    ),
    "CompareHypergradients": (
        Example(
            CompareHypergradients(
                SGP(20, 0.02, batch=2), (HGP(2, sampling="joint"), VRHGP(2, sampling="joint", record=True))
            )
        ),
    ),
    "EstimateHypergradient": (
        Example(EstimateHypergradient(_INNER, _JOINT)),
        Example(EstimateHypergradient(_INNER, _JOINT, solve=False), about="at given variables"),
    ),
    "GossipBilevel": (Example(GossipBilevel(4, 0.05, 0.1, 0.3, terms=2, bound=12.0, batch=2)),),
    "FedAvg": (
        Example(FedAvg(3, _STEPS)),
        Example(
            FedAvg(4, _STEPS, Server(deadline=3.0, attempts=50, requests="all", late="drop")),
            about="deadline",
        ),
        Example(FedAvg(4, _STEPS, Server(quorum=0.5, late="drop")), about="drop"),
    ),
    "FedBuff": (
        Example(FedBuff(4, _STEPS)),
        Example(
            FedBuff(4, _STEPS, mu=0.1, momentum=0.5, server=Buffered(2, 0.7, "same", max_staleness=1)),
            about="momentum, the same again, too stale dropped",
        ),
    ),
    "FedAsync": (
        Example(FedAsync(6, _STEPS)),
        Example(
            FedAsync(6, _STEPS, server=Buffered(1, asks="weighted", max_staleness=2, too_stale="wait")),
            about="too stale waited for",
        ),
    ),
    "Scaffold": (
        Example(Scaffold(3, _STEPS)),
        Example(Scaffold(4, _STEPS, server=Buffered(2)), about="buffered"),
        Example(Scaffold(5, _STEPS), about="coming and going", changed=_coming_and_going),
    ),
    "FedAvgS": (Example(FedAvgS(3, LocalSteps(0.1, steps=2), LocalSteps(0.05, steps=2)), _saddle),),
    "FedNest": (
        Example(FedNest(2, _STEPS, _STEPS, neumann=_SERIES, start="fresh")),
        Example(FedNest(2, _STEPS, _STEPS, setting="minimax"), _saddle, "minimax"),
        Example(FedNest(2, _STEPS, _STEPS, setting="compositional"), _composed, "compositional"),
        Example(FedNest(2, _STEPS, setting="single"), one_level, "single"),
        Example(
            FedNest(2, _STEPS, _STEPS, neumann=_SERIES, server=Buffered(2, decay=PolynomialDecay())),
            about="buffered",
        ),
    ),
    "LFedNest": (
        Example(LFedNest(3, _STEPS, _STEPS, neumann=_SERIES)),
        Example(LFedNest(3, _STEPS, _STEPS, setting="minimax"), _saddle, "minimax"),
    ),
    "AggITD": (
        Example(AggITD(2, _STEPS, _STEPS, inner_rounds=2, scale=0.3)),
        Example(AggITD(2, _STEPS, _STEPS, inner_rounds=2, scale=0.3, solver="sgd"), about="sgd"),
        Example(AggITD(2, _STEPS, _STEPS, inner_rounds=2, scale=0.3, server=Buffered(0.5)), about="buffered"),
    ),
    "PeerAggITD": (Example(PeerAggITD(2, _STEPS, 3, _STEPS, scale=0.3, batch=2, start="fresh", timed=True)),),
    "SimFBO": (
        Example(SimFBO(3, _STEPS, 0.05, v_lr=0.2)),
        Example(SimFBO(4, _STEPS, 0.05, v_lr=0.2, server=Buffered(2)), about="buffered"),
    ),
}
"""Instances in place of the guessed one: where that cannot be made, or where there is more to try."""


def methods() -> tuple[str, ...]:
    """Those of the package, and not what another test has registered for itself."""
    return tuple(
        name for name, thing in registered("method").items() if thing.__module__.startswith("asyncfed.")
    )


@cache
def examples_of(method: str) -> tuple[Example, ...]:
    """At least one; a LookupError says what to do where none can be guessed."""
    if method in GIVEN:
        return GIVEN[method]
    thing = registered("method")[method]
    guessed = {}
    for field in dataclasses.fields(thing):
        if field.default is not MISSING or field.default_factory is not MISSING:
            continue
        known = [_GUESSES[key] for key in (field.name, str(field.type)) if key in _GUESSES]
        if not known:
            raise LookupError(
                f"the method {method} has no example: nothing can be guessed for its argument "
                f"`{field.name}: {field.type}`; give an instance in GIVEN of tests/laws/examples.py"
            )
        guessed[field.name] = known[0]
    return (Example(thing(**guessed)),)


@dataclass(frozen=True, eq=False)
class Case:
    """An example in one of the timings that it accepts."""

    example: Example
    kind: Kind
    clients: int = CLIENTS

    @property
    def name(self) -> str:
        return f"{self.example.name}, {self.kind}"

    @property
    def method(self) -> str:
        return type(self.example.protocol).__name__

    @property
    def scenario(self) -> Scenario:
        return self.example.scenario(self.kind, self.clients)


@cache
def examples() -> tuple[Example, ...]:
    """All of them; methods without one are left to the test that says so."""
    found: list[Example] = []
    for method in methods():
        try:
            found += examples_of(method)
        except LookupError:
            continue
    return tuple(found)


@cache
def cases() -> tuple[Case, ...]:
    return tuple(
        Case(example, kind)
        for example in examples()
        for kind in ("lockstep", "virtual")
        if refusal(example, kind) is None
    )


@cache
def refusal(example: Example, kind: Kind) -> str | None:
    """Why an example does not run in a timing."""
    try:
        example.scenario(kind)
    except ScenarioError as error:
        return str(error)
    return None
