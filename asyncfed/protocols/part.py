"""What a method is to the runtime: iterations, each a sequence of *parts*, each a few pure functions.

A part sees nodes (clients, or the server) stacked along a leading axis, so that one call serves a block of
them; never which machine they are on, nor how many there are elsewhere. Nearly every method here exchanges
weighted sums. In each step of a part among peers a client

    absorbs    y = residue + Σ weight · payload     what arrived, and the share of its own that it kept
    computes   step(y, minibatch) → payload φ(y), residue ψ(y)
    emits      φ, which the network weighs and delivers; ψ stays at home as it is

which is the paper's y_i ← Σ_j p_ji φ_j(y_j) + ψ_i(y_i) (001, Eq. 2): z has shape (k, d), ω (k, 1), and the
lines read as in the paper. Those who need the single messages ask for them (`each`, `Inbox.each`).

Tensors that are not exchanged (the outer variable, a running estimate) live in `memory`: handed to every step
and never changed in place, what changes is returned. A part receives what the parts before it left behind
(`carried`) and adds to it for the next. What a part exchanges it declares (`carries`): the runtime hands over
exactly that, and the bytes in the trace are its bytes.

A method with a server is written as rounds: see `rounds`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.errors import RunError, ScenarioError
from asyncfed.network.buffer import AnyServer
from asyncfed.network.expectations import Expectations
from asyncfed.network.links import Network
from asyncfed.network.timing import Timing
from asyncfed.network.weights import Mixing, Uniform, Weights
from asyncfed.problems.problem import Problem
from asyncfed.protocols.at import At
from asyncfed.protocols.cost import Cost
from asyncfed.rng import Streams

Tensors = dict[str, Tensor]
Steps = npt.NDArray[np.int64]
Reports = list[dict[str, npt.NDArray[np.float64]]]
PartT = TypeVar("PartT", bound="Part")


@dataclass(frozen=True)
class Sizes:
    """How long the variables are that a part's own are made of."""

    inner: int
    outer: int
    clients: int


@dataclass(frozen=True, eq=False)
class Scene:
    """What a method is to run on: all that it may have assumptions about."""

    problem: Problem
    sizes: Sizes
    network: Network
    weights: Weights
    timing: Timing

    def silent(self) -> Scene:
        """The same where nobody sends anything."""
        return replace(self, network=self.network.silent(), weights=Uniform())


class Declared(Tensors):
    """Variables by name, of which only those declared are there."""

    def __init__(self, whose: str, values: Tensors) -> None:
        super().__init__(values)
        self._whose = whose

    def __missing__(self, name: str) -> Tensor:
        raise RunError(
            f"{self._whose} reads {name!r}, which it does not declare; it declares "
            f"{', '.join(self) or 'nothing'}"
        )


@dataclass(frozen=True, eq=False)
class Messages:
    """Single messages to a block: message m reached the node at `rows[m]` from `senders[m]`."""

    rows: Steps
    senders: Steps
    weights: npt.NDArray[np.float64]
    values: Tensor  # (m, d)

    def to(self, places: Steps) -> Messages:
        """Those to the nodes at some of the rows, which are 0, 1, … then (and in ascending order now)."""
        mine = np.flatnonzero(np.isin(self.rows, places))
        rows = np.searchsorted(places, self.rows[mine])
        values = self.values[torch.from_numpy(mine).to(self.values.device)]
        return Messages(rows, self.senders[mine], self.weights[mine], values)


class Inbox(Declared):
    """What some nodes absorbed, by name: the weighted sums (k, d). They are the step's own, to overwrite and
    to return as payload.

    At a server the sums are means over the clients in `senders`, each named as often as it is in them, of
    `clients` that the run has. The weights of what is in them add up to `weight`: 1, unless stale answers
    count less (`Round.normalised`).
    """

    def __init__(
        self,
        whose: str,
        totals: Tensors,
        each: Callable[[str], Messages] | None = None,
        versions: dict[str, int] | None = None,
        senders: Steps | None = None,
        clients: int = 0,
        weight: float = 1.0,
    ) -> None:
        super().__init__(whose, totals)
        self._each = each
        self.versions = versions or {}  # of variables that came from the server: which payload brought them
        self.senders = np.zeros(0, dtype=np.int64) if senders is None else senders
        self.clients = clients
        self.weight = weight

    def with_values(self, values: Tensors) -> Inbox:
        """The same with its sums in another form."""
        return Inbox(self._whose, values, self._each, self.versions, self.senders, self.clients, self.weight)

    def of(self, places: slice | Tensor) -> Inbox:
        """What the nodes at some of the rows absorbed, in ascending order."""
        some = self.with_values({name: value[places] for name, value in self.items()})
        every = self._each
        if every is not None:
            rows = np.arange(places.stop)[places] if isinstance(places, slice) else places.cpu().numpy()
            some._each = lambda name: every(name).to(rows)
        return some

    def each(self, name: str) -> Messages:
        """The single messages, for parts that declare so in `each`."""
        if self._each is None:
            raise RunError(
                f"{self._whose} looks at single messages of {name!r}; name it in the part's `each`, so that "
                "they are kept apart"
            )
        return self._each(name)


@dataclass(frozen=True)
class Start:
    """How a part starts: y(0), and what a client remembers beside it."""

    absorbed: Tensors
    memory: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What a step returns. A key missing from `residue` means zero; `report` holds one number per node;
    `memory` what changed of it.

    Where a payload holds more rows than there are senders, `addressed` says which row is for whom: one entry
    for every client.
    """

    payload: Tensors
    residue: Tensors = field(default_factory=dict)
    report: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
    addressed: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Judged:
    """The variables that clients are to be judged by (k, d); with a stride of 0 where all share one.

    `also` holds others to judge them by, beside these: what is found by the point "tuned_0" stands in columns
    of its own, loss_tuned_0 for instance.
    """

    inner: Tensor
    outer: Tensor
    also: dict[str, Judged] = field(default_factory=dict)


class Act:
    """What nodes do, as far as a block sees it: a `Part` among peers, or a `Round` with a server."""

    asks: bool = False  # whether a server asks clients for it
    tunes: bool = False  # whether `judge` makes variables for each client anew: for some clients at a time
    batch: int | None = 1
    each: tuple[str, ...] = ()

    def carries(self, sizes: Sizes) -> dict[str, int]:
        """What a message holds: names and lengths."""
        raise unwritten(self, "carries")

    def remembered(self, sizes: Sizes) -> dict[str, int]:
        """What a client keeps from round to round (of what judges it: what that reads of it), of methods with
        a server: names and lengths.
        """
        return {}

    def samples_of(self, steps: Steps) -> Steps:
        """Whose minibatch a step uses: its own, unless it goes back over older steps."""
        return steps

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        raise unwritten(self, "step")

    def explain(self, inbox: Inbox, row: int) -> str | None:
        """Why a value of the node at `row` stopped being finite, and what to do, where what it absorbed
        tells; None where nothing is known but that a learning rate may be too large.
        """
        return None

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        """What its clients are to be judged by."""
        raise unwritten(self, "judge")


class Part(Act):
    """What most parts among peers answer; a part is a frozen dataclass that says what is particular about it.

    Attributes
    ----------
    name, kind
        The part's name in the trace, and that of its messages.
    steps
        Of each client.
    batch
        Minibatch size of `At.batch`; None for all of a client's training data.
    sends
        Whether anything travels.
    each
        Variables whose single messages are wanted beside their sum.
    closing
        Whether what the last round brought is computed on once more, with nothing sent.
    judged
        Whether its variables are worth evaluating.
    estimates
        Whether it weighs messages by what the clients saw of the network in the inner steps before.
    needs_outer
        Whether it makes sense only for a problem with an outer variable.
    ends_outer_step
        Whether the outer variable has been stepped when it is over.
    passes_on
        What it takes from or leaves to other parts, beside the inner and the outer variable.
    exact
        Variables, of those exchanged or passed on, that are kept, summed and sent in double precision,
        whatever the run's: push-sum weights, whose rounding errors would add up for ever.
    conserves
        Whether its sums are right only if nothing of what is sent is lost for good: whatever a sender gave
        away must reach somebody, some time.
    tracks
        Whether its sums hold a gradient of everybody, which each takes back when it has a new one.
    moves_buffers
        Which buffers of networks its steps move, "local" or "averaged" ones; none, where it does not train.
    moves_by_weight
        Whether a model moves by lr/ω with ω a push-sum weight, so that a small ω is a long step.
    draws_from
        Which step of the run's its first one draws like: minibatches, links, losses and times are those of
        the steps from there on. None for its own; see `drawing_from`.
    """

    name: str
    kind: str
    steps: int
    sends: bool = True
    closing: bool = False
    judged: bool = True
    estimates: bool = False
    needs_outer: bool = False
    ends_outer_step: bool = False
    passes_on: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    conserves: bool = False
    tracks: bool = False
    moves_buffers: tuple[str, ...] = ()
    draws_from: int | None = None

    @property
    def moves_by_weight(self) -> bool:
        return False

    def message_bytes(self, sizes: Sizes, itemsize: int) -> int:
        """Of what a message carries, where a number has so many bytes; doubles have eight."""
        lengths = self.carries(sizes)
        return sum(length * (8 if name in self.exact else itemsize) for name, length in lengths.items())

    def samples_per_step(self, problem: Problem) -> npt.NDArray[np.float64]:
        """Of each client: what its step takes as long as, where compute times are per sample."""
        sizes = problem.data.train.sizes
        return sizes.astype(float) if self.batch is None else np.full(len(sizes), float(self.batch))

    def cost(self, scene: Scene, steps: Steps) -> Cost | None:
        """What each client has computed when it has made so many steps; None where that is not known."""
        return None

    def check(self, scene: Scene) -> None:
        """Refuse a problem, network or timing that breaks an assumption."""

    def mixing(self, scene: Scene, learned: Expectations | None) -> Mixing:
        """How what it exchanges is weighed: by default all of it by the scenario's weights."""
        return ((tuple(self.carries(scene.sizes)), scene.weights.prepare(scene.network)),)

    def start(self, at: At, carried: Tensors) -> Start:
        raise unwritten(self, "start")

    def watch(self, reports: Reports, clients: int) -> None:
        """Stop a part that goes wrong: called now and then with what its steps have reported so far."""

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        """What the next part, or the result, gets beside what was carried before."""
        return {}


def drawing_from(part: PartT, step: int) -> PartT:
    """The same part, all of whose draws are those of the run's steps from `step` on."""
    same = copy.copy(part)
    object.__setattr__(same, "draws_from", step)
    return same


class AmongPeers:
    """What methods without a server have in common; they say what their `parts` are."""

    server = None
    planned = 1

    def parts(self) -> tuple[Part, ...]:
        raise unwritten(self, "parts")

    def iterations(self, streams: Streams) -> Iterator[tuple[Part, ...]]:
        yield self.parts()

    def model_of(self, client: int, final: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return final["inner"][client], final["outer"][client]

    @property
    def needs_outer(self) -> bool:
        return any(part.needs_outer for part in self.parts())

    @property
    def passes_on(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts() for name in part.passes_on)

    @property
    def exact(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts() for name in part.exact)

    @property
    def moves_buffers(self) -> tuple[str, ...]:
        return tuple(kind for part in self.parts() for kind in part.moves_buffers)

    def check(self, scene: Scene) -> None:
        check_parts(self.parts(), scene)


def check_parts(parts: tuple[Part, ...], scene: Scene) -> None:
    """What every part assumes, and what they assume of one another."""
    horizon = getattr(scene.timing, "horizon", None)
    if len(parts) > 1 and horizon is not None:
        raise ScenarioError(
            f"a horizon of {horizon} would cut a protocol of {len(parts)} parts somewhere in the middle of "
            "one; leave the horizon out, the protocol says how many steps are made"
        )
    for before, part in pairwise(parts):
        if part.estimates and before.judged and before.sends and not before.steps:
            raise ScenarioError(
                f"{part.name} is to estimate p̄ and δ̄ from the inner steps, but {before.name} makes none; "
                "give it steps, or the method expectations='exact'"
            )
    different: list[Part] = []
    for part in parts:  # an outer loop repeats its parts
        if part not in different:
            different.append(part)
            part.check(scene if part.sends else scene.silent())


@runtime_checkable
class Method(Protocol):
    """What a scenario's protocol is."""

    @property
    def server(self) -> AnyServer | None:
        """How its server asks and waits; None for a method among peers."""

    @property
    def planned(self) -> int:
        """Outer iterations, at most."""

    @property
    def needs_outer(self) -> bool:
        """Whether it makes sense only for a problem with an outer variable."""

    @property
    def passes_on(self) -> tuple[str, ...]:
        """The variables beside inner and outer that a run of it leaves, or may begin with."""

    @property
    def exact(self) -> tuple[str, ...]:
        """Those that are in double precision, whatever the run's."""

    @property
    def moves_buffers(self) -> tuple[str, ...]:
        """Which buffers of networks ("local", "averaged") it moves as it trains."""

    def check(self, scene: Scene) -> None:
        """Refuse what it cannot run on, naming the reason and a remedy."""

    def iterations(self, streams: Streams) -> Iterator[tuple[Any, ...]]:
        """Its parts or rounds in order, an outer iteration at a time."""

    def model_of(self, client: int, final: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """A client's inner and outer variable, flat, in what a run left: those that it is judged by, or that
        it tunes before it is judged.
        """


def unwritten(whose: object, function: str) -> ScenarioError:
    """What to raise where a method lacks a function that every method of its kind has."""
    return ScenarioError(
        f"{type(whose).__name__} has no function {function}, and every method of its kind needs one; "
        "write it as docs/write-a-method.md shows"
    )
