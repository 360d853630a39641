"""AggITD without a server: every mean that its server makes is made by the clients among themselves, by R
rounds of push-sum over whatever links there are.

AggITD is a sequence of rounds "every client computes u_i; the server makes the mean" (see `aggitd`). Here

    s_i ← u_i, ω_i ← 1;   R times:   [s_i; ω_i] ← Σ_j p_ji [s_j; ω_j];   mean at client i: s_i / ω_i

and every client goes on with its own copy of x, y, z, p and h, each made of means at that client. Averaged
are exactly the contributions of a round (q_i and z_i in one message, y_i, z_i, h_i, x_i), never the copies of
what was averaged before. So copies that drift apart are pulled together only by the next mean of the same
variable, of local steps that began at them. They differ by the error of push-sum, which falls geometrically
with R. R → ∞ gives AggITD with everybody asked, on the same draws of Q and the same samples. On a full graph
with weights 1/n in lockstep R = 1 is enough. In virtual time a mean ends when everybody has made its R
rounds; the fast have stopped sending by then, so uneven paces need more of them.

| 000, Alg. 1–4  | here              |                                                          |
|----------------|-------------------|----------------------------------------------------------|
| "aggregate"    | PushSumMean       | a part of R steps for every round of `AggITD`            |
| R, ω           | mean_rounds, omega | rounds of push-sum for a mean, and its weights          |

A client computes at its own copies, so clients are computed one after another: nothing is shared but code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch

from asyncfed.checks import NonNegativeInt, PositiveFloat, PositiveInt
from asyncfed.errors import ScenarioError
from asyncfed.network.links import require_strongly_connected
from asyncfed.protocols.aggitd import AggITD
from asyncfed.protocols.at import At
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.part import (
    AmongPeers,
    Inbox,
    Judged,
    Part,
    Scene,
    Sizes,
    Start,
    Step,
    Steps,
    Tensors,
    check_parts,
)
from asyncfed.protocols.rounds import Round
from asyncfed.protocols.settings import Batch, OuterSteps, StartFrom
from asyncfed.registry import register
from asyncfed.rng import Streams

_STORED = {"x": "outer", "y": "inner"}  # what the run calls the variables of a board


@register("method")
@dataclass(frozen=True)
class PeerAggITD(AmongPeers):
    """FBO-AggITD among peers, everybody taking part: `AggITD` with its arguments, and two more.

    Parameters
    ----------
    mean_rounds
        R: rounds of push-sum for every mean.
    timed
        Let local steps take time, in virtual time: before a mean of what τ local steps lead to, everybody
        makes τ − 1 steps in which nothing is sent. Without it only the rounds of push-sum take time.
    """

    outer_steps: OuterSteps
    inner: LocalSteps
    mean_rounds: PositiveInt
    outer: LocalSteps = field(default_factory=lambda: LocalSteps(0.01))
    inner_rounds: PositiveInt = 1
    scale: PositiveFloat = 0.01
    q: NonNegativeInt | Literal["random"] = "random"
    solver: Literal["svrg", "sgd"] = "svrg"
    batch: Batch = None
    start: StartFrom = "warm"
    timed: bool = False
    moves_buffers: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        self.with_server()  # refuses what it refuses
        local = (self.inner, self.outer)
        if self.timed and any(steps.epochs or isinstance(steps.steps, tuple) for steps in local):
            raise ScenarioError(
                "timed is True, and local steps are given in epochs or for each client; all make equally "
                "many there: give LocalSteps(steps=…) one number, or timed=False"
            )

    def with_server(self) -> AggITD:
        """The same with a server that asks everybody."""
        return AggITD(
            self.outer_steps,
            self.inner,
            self.outer,
            self.inner_rounds,
            self.scale,
            self.q,
            self.solver,
            self.batch,
            self.start,
        )

    @property
    def needs_outer(self) -> bool:
        return True

    @property
    def passes_on(self) -> tuple[str, ...]:
        return ("h", "p", "q", "z")

    @property
    def exact(self) -> tuple[str, ...]:
        return ()  # ω is of one mean, and not passed on

    def iterations(self, streams: Streams) -> Iterator[tuple[Part, ...]]:
        number = 0
        for rounds in self.with_server().iterations(streams):
            means = [one for one in rounds if one.asks]
            yield (Standing(fresh=len(means) < len(rounds)), *self._means(means, number))
            number += len(means)
        yield (Standing(),)

    def _means(self, rounds: list[Round], number: int) -> Iterator[Part]:
        """What stands for the rounds of an iteration, the first of which has that number in the run."""
        one = np.ones(1, dtype=np.int64)
        for place, made in enumerate(rounds):
            silent = int(made.work({"inner": one, "outer": one}, one)[0]) - 1 if self.timed else 0
            if silent:
                yield Working(silent)
            yield PushSumMean(
                made, self.mean_rounds, number + place, made.phase, made.kind, made is rounds[-1]
            )

    def check(self, scene: Scene) -> None:
        for steps in (self.inner, self.outer):
            steps.fits(scene.sizes.clients)
        check_parts(next(self.iterations(Streams(0))), scene)


@dataclass(frozen=True)
class PushSumMean(Part):
    """The mean of what a round's clients compute, at every client, by `steps` rounds of push-sum."""

    made: Round
    steps: int
    number: int  # of the round in a run with a server: what samples are drawn by
    name: str
    kind: str
    ends_outer_step: bool = False

    judged = False
    needs_outer = True
    conserves = True  # the mean is wrong where shares are lost for good
    exact = ("omega",)

    def check(self, scene: Scene) -> None:
        require_strongly_connected(scene.network)

    def cost(self, scene: Scene, steps: Steps) -> Cost | None:
        """What the round's clients compute, when the mean begins."""
        return self.made.cost(scene.problem.sample_sizes, np.arange(scene.sizes.clients))

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {**self.made.carries(sizes), "omega": 1}

    def start(self, at: At, carried: Tensors) -> Start:
        board = {name: carried[_STORED.get(name, name)] for name in self.made.reads}
        answers = [self._answer(at, place, board) for place in range(len(at.rows))]
        sums = {name: torch.cat([answer[name] for answer in answers]) for name in self.made.answers}
        return Start({**sums, "omega": torch.ones_like(carried["inner"][:, :1])}, board)

    def _answer(self, at: At, place: int, board: Tensors) -> Tensors:
        """Of one client, from its own copies."""
        here = slice(place, place + 1)
        own = At(at.home, at.rows[here], at.steps[here], np.full(1, self.number))
        return self.made.local(own, {name: value[place] for name, value in board.items()}, {}).values

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        return Step(dict(inbox))

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        means = {name: inbox[name] / inbox["omega"].to(inbox[name]) for name in self.made.answers}
        changed = self.made.fold(dict(memory), inbox.with_values(means))
        return {_STORED.get(name, name): value for name, value in changed.items()}


@dataclass(frozen=True)
class Working(Part):
    """Time that local steps take; what they lead to is computed where its mean begins."""

    steps: int

    name = "local steps"
    kind = "none"
    sends = False
    judged = False

    def cost(self, scene: Scene, steps: Steps) -> Cost:
        return Cost()

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {}

    def start(self, at: At, carried: Tensors) -> Start:
        return Start({})

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        return Step({})


@dataclass(frozen=True)
class Standing(Part):
    """Between iterations everybody is judged by its own x and y; then y may go back to where it began."""

    fresh: bool = False

    name = "iteration"
    kind = "none"
    steps = 0
    sends = False
    needs_outer = True

    def cost(self, scene: Scene, steps: Steps) -> Cost:
        return Cost()

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {"x": sizes.outer, "y": sizes.inner}

    def start(self, at: At, carried: Tensors) -> Start:
        return Start({"x": carried["outer"], "y": carried["inner"]})

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(inbox["y"], inbox["x"])

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        return {"inner": at.starting_inner} if self.fresh else {}
