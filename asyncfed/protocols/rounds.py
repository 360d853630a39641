"""Methods with a server, as rounds: a thin form of parts whose steps are made by clients and server in turn.

The server keeps a *board* of variables. In every round it sends some clients what the round reads from the
board, they compute on their own data and answer, and the mean of the answers, folded, goes back on the board:

    local    (what was sent, own samples, own memory) → answers    one row per client, a whole block at once
    fold     (board, means) → what changes on the board            at the server; by default the means

That is "for i ∈ S in parallel do … end for; aggregate", the block that the algorithm boxes of FedNest (004)
and AggITD (000) are made of. Between rounds a client keeps what the round declares that it `remembers`. A
request carries only what the server does not know the client to have, so that an aggregate travels back with
the next request, as in the papers' definition of a communication round.

    on the board   x outer variable, y inner variable, q = mean ∇_y g_i, p Hessian-inverse-gradient product,
                   z its beginnings, h hypergradient
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.errors import RunError, ScenarioError
from asyncfed.network.buffer import AnyServer
from asyncfed.network.timing import Lockstep
from asyncfed.protocols.at import At, Level
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.part import Act, Inbox, Judged, Scene, Sizes, Step, Tensors, unwritten
from asyncfed.rng import Streams

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

LEVELS: dict[str, Level | int] = {
    "x": "outer", "h": "outer", "y": "inner", "q": "inner", "p": "inner", "z": "inner",
}  # fmt: skip
"""How long the usual variables are: as the inner or as the outer one."""

_STORED = {"x": "outer", "y": "inner"}  # what the run calls the two that every problem has
_LETTERS = {name: letter for letter, name in _STORED.items()}


@dataclass(frozen=True)
class Answer:
    """One row per client of every variable answered, numbers per client for the record, and what changed of
    what the clients remember.
    """

    values: Tensors
    report: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)


class Round(Act):
    """What most rounds answer; a round is a frozen dataclass that says what is particular about it.

    Attributes
    ----------
    phase, kind
        Its name in the trace, and that of its answers.
    reads
        What a request brings up to date.
    answers
        What an answer holds.
    levels
        How long variables are: "inner", "outer" or a number, where they are not the usual ones.
    remembers
        What a client keeps from round to round; zero at first.
    each
        Answers that `fold` looks at one by one, with `mean.each(name)`.
    cohort
        Rounds of an iteration with the same number ask the same clients.
    normalised
        Whether the weights of answers add up to 1, as they must where the answers are values whose mean is
        taken. Where they are moves, an answer that counts less for being stale makes the move smaller.
    """

    asks = True
    phase: ClassVar[str]
    kind: str
    reads: ClassVar[tuple[str, ...]]
    answers: tuple[str, ...] = ()
    levels: ClassVar[Mapping[str, Level | int]] = LEVELS
    remembers: ClassVar[tuple[str, ...]] = ()
    cohort: int = 0
    normalised: ClassVar[bool] = True

    @property
    def writes(self) -> tuple[str, ...]:
        """What changes on the board, of what is ever sent."""
        return self.answers

    @property
    def series(self) -> str:
        """Late answers may be used in the next round of this name: not all that is called p may be mixed."""
        return f"{type(self).__name__} {self.kind}"

    def length(self, name: str, sizes: Sizes) -> int:
        """Of a variable that is ever sent or remembered."""
        if name not in self.levels:
            raise ScenarioError(
                f"{type(self).__name__} sends or remembers {name!r}, and its `levels` do not say how long "
                f"that is; write levels = LEVELS | {{{name!r}: 'inner'}} ('inner', 'outer' or a number)"
            )
        level = self.levels[name]
        if level == "inner":
            return sizes.inner
        return sizes.outer if level == "outer" else int(level)

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {name: self.length(name, sizes) for name in self.answers}

    def remembered(self, sizes: Sizes) -> dict[str, int]:
        return {name: self.length(name, sizes) for name in self.remembers}

    def work(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        """Local steps of clients with so many samples of either loss."""
        return np.ones(len(clients))

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        """Samples that they go over, where compute times are per sample: one counts as often as a step or a
        mean uses it, whatever is computed on it.
        """
        raise ScenarioError(
            f"compute times are per sample, and {type(self).__name__} does not say how many samples it goes "
            "over; write its `samples` (see docs/write-a-method.md), or use VirtualTime(per='step')"
        )

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost | None:
        """What they compute for it; None where that is not known."""
        return None

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        raise unwritten(self, "local")

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        return dict(mean)

    def addressed(self, board: Tensors) -> dict[str, Tensor]:
        """Of variables with several rows on the board: which row is whose, one entry for every client."""
        return {}

    def report(self, board: Tensors) -> dict[str, float]:
        """Numbers for the record, of how things stand at the server: the metrics show the newest."""
        return {}

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        return self._at_server(inbox, memory) if at.server else self._at_clients(at, inbox, memory)

    def _at_clients(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        versions = inbox.versions
        board = inbox.with_values({name: _common(value) for name, value in inbox.items()})
        at.knows({id(value): versions[name] for name, value in board.items() if name in versions})
        answer = self.local(at, board, memory)
        if not isinstance(answer, Answer):
            raise RunError(
                f"local of {type(self).__name__} returned {type(answer).__name__}; it must return Answer(…)"
            )
        return Step(answer.values, report=answer.report, memory=answer.memory)

    def _at_server(self, inbox: Inbox, memory: Tensors) -> Step:
        board = {_LETTERS.get(name, name): _single(value) for name, value in memory.items()}
        changed = self.fold(board, inbox.with_values({name: value[0] for name, value in inbox.items()}))
        if not isinstance(changed, dict):
            raise RunError(
                f"fold of {type(self).__name__} returned {type(changed).__name__}; it must return a dict of "
                "what changes on the board"
            )
        undeclared = [name for name in changed if name in self.levels and name not in self.writes]
        missing = [name for name in self.writes if name not in changed]
        if undeclared or missing:
            raise RunError(
                f"{type(self).__name__} declares that it writes {', '.join(self.writes) or 'nothing'}, and "
                f"wrote {', '.join(changed) or 'nothing'}; name in `writes` what is ever sent and changes"
            )
        rows = {name: value if value.ndim > 1 else value[None] for name, value in changed.items()}
        now = board | changed
        return Step(
            {name: rows[name] for name in self.writes},
            report={name: torch.tensor([value]) for name, value in self.report(now).items()},
            memory={_STORED.get(name, name): value for name, value in rows.items()},
            addressed=self.addressed(now),
        )


def _common(value: Tensor) -> Tensor:
    """A variable that all clients were sent alike as one vector; rows where each has its own."""
    return value[0] if value.stride(0) == 0 or len(value) == 1 else value


def _single(value: Tensor) -> Tensor:
    return value[0] if len(value) == 1 else value


@dataclass(frozen=True)
class Opening(Round):
    """The server says where it begins: nothing is sent yet."""

    asks = False
    phase = kind = "opening"
    reads = ()
    opens: tuple[str, ...] = ("x", "y")

    @property
    def writes(self) -> tuple[str, ...]:
        return self.opens

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        return {name: board[name] for name in self.opens}


@dataclass(frozen=True)
class FreshStart(Round):
    """The inner variable goes back to where the run began."""

    asks = False
    phase = kind = "start"
    reads = ()

    @property
    def writes(self) -> tuple[str, ...]:
        return ("y",)

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        y = at.starting_inner
        return Step({"y": y}, memory={"inner": y})


@dataclass(frozen=True)
class JudgedByServer(Act):
    """Everybody is judged by the server's variables."""

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {}

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(inbox["y"], inbox["x"])


class WithServer:
    """What methods with a server have in common; they are frozen dataclasses with `outer_steps`, `server`,
    `max_rounds` and `rounds`.
    """

    outer_steps: int
    server: AnyServer
    max_rounds: int | None = None
    start: Literal["warm", "fresh"] = "warm"
    opening: ClassVar[Round] = Opening()
    judging: ClassVar[Act] = JudgedByServer()
    passes_on: ClassVar[tuple[str, ...]] = ("h", "p", "q", "z", "sum")
    exact: ClassVar[tuple[str, ...]] = ()
    moves_buffers: ClassVar[tuple[str, ...]] = ()

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        """The rounds of an outer iteration."""
        raise unwritten(self, "rounds")

    @property
    def planned(self) -> int:
        return self.outer_steps

    @property
    def needs_outer(self) -> bool:
        return True

    def iterations(self, streams: Streams) -> Iterator[tuple[Round, ...]]:
        for iteration in range(self.outer_steps):
            fresh = (FreshStart(),) if self.start == "fresh" and iteration else ()
            rounds = self.rounds(iteration, streams)
            if isinstance(rounds, Round):
                raise ScenarioError(
                    f"rounds of {type(self).__name__} returned a single {type(rounds).__name__}; it "
                    "must return a tuple of rounds: (Round(…),)"
                )
            yield (*fresh, *rounds)

    def model_of(self, client: int, final: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The server's variables, unless clients keep what they are judged by."""
        inner, outer = final["inner"], final["outer"]
        kept = self.judging.remembered(Sizes(inner.shape[1], outer.shape[1], 1))
        if kept:
            raise ScenarioError(
                f"clients of {type(self).__name__} are judged by what they remember ({', '.join(kept)}), and "
                "it does not say what their models are; write its `model_of` (see "
                "docs/personalized-methods.md)"
            )
        return inner[0], outer[0]

    def check(self, scene: Scene) -> None:
        """Refuse a network without a server and settings that cannot be met."""
        horizon = getattr(scene.timing, "horizon", None)
        if horizon is not None:
            raise ScenarioError(
                f"a horizon of {horizon} would cut an outer iteration somewhere in the middle; leave it out "
                "and give the protocol outer_steps or max_rounds"
            )
        self.server.check(scene.network, isinstance(scene.timing, Lockstep))
        for name in ("inner", "outer", "local"):
            fits = getattr(getattr(self, name, None), "fits", None)
            if fits is not None:
                fits(scene.sizes.clients)


def taken(batch: int | None, sizes: IntArray) -> FloatArray:
    """Samples in a minibatch of each client; None for all it has."""
    return (sizes if batch is None else np.minimum(batch, sizes)).astype(float)


def draw_whole(streams: Streams, what: str, iteration: int, below: int) -> int:
    """A number drawn uniformly from 0..below−1, once per iteration: the N' and Q of the papers."""
    return int(streams.uniforms(what, iteration, 0, 1)[0] * below)
