"""What a server-based method is to the runtime: rounds, each a few pure functions.

The server keeps a *board* of variables. In every round it sends some clients what the round reads from the
board, they compute on their own data and answer, and the mean of the answers, folded, goes back on the board:

    local    (what was sent, own samples) → answers      one row per client, for a whole block at once
    fold     (board, means) → what changes on the board  at the server; by default the means themselves

That is "for i ∈ S in parallel do … end for; aggregate", the block that the algorithm boxes of FedNest (004)
and AggITD (000) are made of. A client keeps nothing between rounds but its data and what it was sent: a
request carries only what the server does not know it to have, so that an aggregate travels back with the next
request, as in the papers' definition of a communication round.

    on the board   x outer variable, y inner variable, q = mean ∇_y g_i, p Hessian-inverse-gradient product,
                   z its beginnings, h hypergradient
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.data import ClientShards
from asyncfed.errors import ScenarioError
from asyncfed.network.server import Server
from asyncfed.plain import plain_fields
from asyncfed.problems.derivatives import Derivatives
from asyncfed.protocols.phase import whole
from asyncfed.rng import Streams

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Tensors = dict[str, Tensor]
Level = Literal["inner", "outer"]

LEVELS: dict[str, Level] = {
    "x": "outer", "h": "outer", "y": "inner", "q": "inner", "p": "inner", "z": "inner",
}  # fmt: skip
"""Whether a variable is as long as the inner or as the outer one."""

_SAMPLES = 4096  # of all clients together, whose activations stay alive at a time


@dataclass(frozen=True)
class Answer:
    """One row per client of every variable answered, and numbers per client for the record."""

    values: Tensors
    report: Tensors = field(default_factory=dict)


class Round:
    """What most rounds answer; a round is a frozen dataclass that says what is particular about it."""

    phase: ClassVar[str]
    kind: ClassVar[str]
    reads: ClassVar[tuple[str, ...]]
    answers: tuple[str, ...] = ()
    cohort: int = 0  # rounds of an iteration with the same number ask the same clients

    @property
    def writes(self) -> tuple[str, ...]:
        """What changes on the board, of what is ever sent."""
        return self.answers

    def work(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        """Local steps of clients with so many samples of either loss."""
        return np.ones(len(clients))

    def local(self, here: Workplace, board: Tensors) -> Answer:
        raise AssertionError("every round says what its clients do")

    def fold(self, board: Tensors, mean: Tensors) -> Tensors:
        return mean


class ServerProtocol(Protocol):
    """A method: its outer iterations, each a sequence of rounds."""

    @property
    def outer_steps(self) -> int: ...

    @property
    def server(self) -> Server: ...

    @property
    def max_rounds(self) -> int | None:
        """End before an iteration that would go beyond so many communication rounds."""

    @property
    def needs_outer(self) -> bool:
        """Whether it makes sense only for a problem with an outer variable."""

    @property
    def start(self) -> str:
        """Where an iteration's inner variable begins: "warm", where the last one ended, or "fresh"."""

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]: ...


def draw_whole(streams: Streams, what: str, iteration: int, below: int) -> int:
    """A number drawn uniformly from 0..below−1, once per iteration: the N' and Q of the papers."""
    return int(streams.uniforms(what, iteration, 0, 1)[0] * below)


@dataclass(frozen=True, eq=False)
class Workplace:
    """Some clients of a block in a round: their data and derivatives.

    `rows` are their places in the block's shards, `clients` their numbers in the run. `number` counts the
    rounds of the run and is, with the client, the address of all that is drawn.
    """

    derivatives: Derivatives
    staged: Derivatives | None
    train: ClientShards
    outer: ClientShards
    rows: IntArray
    clients: IntArray
    streams: Streams
    number: int
    encode: Callable[[Tensor], ClientShards] = field(repr=False)

    def inner(self, x: Tensor) -> Samples:
        """g_i at this outer variable."""
        if self.staged is not None:
            nothing = x.new_zeros(0)
            return Samples(self, self.staged, self.encode(x), np.arange(len(self.rows)), nothing, "inner")
        return Samples(self, self.derivatives, self.train, self.rows, x, "inner")

    def outer_loss(self, y: Tensor, x: Tensor) -> Samples:
        """f_i."""
        return Samples(self, self.derivatives, self.outer, self.rows, x, "outer", y)

    def inner_by_both(self, x: Tensor) -> Samples:
        """g_i as a function of both variables, for its mixed derivatives."""
        return Samples(self, self.derivatives, self.train, self.rows, x, "inner")


@dataclass(frozen=True, eq=False)
class Samples:
    """A loss of each of some clients, over samples to be chosen.

    `lam` is the outer variable, common to all; for the outer loss `y` is the inner one.
    """

    place: Workplace
    derivatives: Derivatives
    shards: ClientShards
    rows: IntArray
    lam: Tensor
    level: Level
    y: Tensor | None = None

    @property
    def k(self) -> int:
        return len(self.rows)

    @property
    def parameters(self) -> int:
        """Numbers that a sample meets on its way to the loss."""
        return self.derivatives.inner.d + self.derivatives.outer.d

    @property
    def sizes(self) -> IntArray:
        return self.shards.sizes[self.rows]

    def batch(self, places: IntArray, index: npt.NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Samples `index` (r, B) of the clients at `places` (r,)."""
        device = self.lam.device
        rows = torch.from_numpy(self.rows[places]).to(device)
        return self.shards.gather(rows, torch.from_numpy(np.ascontiguousarray(index)).to(device))

    def gradient(self, v: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Of each row of v with its batch: for g in y, for f in x; and the losses."""
        if self.level == "inner":
            return self.derivatives.inner_gradient(v, self.lam.expand(len(v), -1), batch)
        assert self.y is not None
        return self.derivatives.outer_gradient(self.y.expand(len(v), -1), v, batch, "outer")

    def descend(self, v: Tensor, batch: tuple[Tensor, ...], rate: float | Tensor) -> Tensor:
        """A step of each row of v along its gradient, in place; returns the losses before it."""
        if self.level == "inner":
            return self.derivatives.descend("inner", v, self.lam.expand(len(v), -1), batch, rate)
        assert self.y is not None
        return self.derivatives.descend("outer", self.y.expand(len(v), -1), v, batch, rate)

    def chosen(self, batch: int | None, what: str) -> Iterator[tuple[IntArray, IntArray, float]]:
        """(places, index, share): a minibatch of each client, drawn without replacement, or all it has in
        pieces of bounded memory; `share` is the part of a client's samples that the piece is.
        """
        sizes = self.sizes
        if batch is not None:
            taken = np.minimum(batch, sizes)
            for size in np.unique(taken):
                places = np.flatnonzero(taken == size)
                index = np.stack([self._drawn(int(p), int(sizes[p]), int(size), what) for p in places])
                yield places, index, 1.0
            return
        for size in np.unique(sizes):
            places = np.flatnonzero(sizes == size)
            length = min(int(size), _SAMPLES)
            together = max(1, _SAMPLES // length)
            for first in range(0, len(places), together):
                some = places[first : first + together]
                for start in range(0, int(size), length):
                    stop = min(start + length, int(size))
                    index = np.tile(np.arange(start, stop), (len(some), 1))
                    yield some, index, (stop - start) / int(size)

    def mean(
        self,
        batch: int | None,
        what: str,
        compute: Callable[[IntArray, tuple[Tensor, ...]], tuple[Tensor, ...]],
        lengths: tuple[int, ...],
    ) -> tuple[Tensor, ...]:
        """What `compute` returns (rows per client), averaged over the samples chosen."""
        totals = tuple(self.lam.new_zeros(self.k, length) for length in lengths)
        whole = tuple[Tensor, ...]()
        for places, index, share in self.chosen(batch, what):
            found = compute(places, self.batch(places, index))
            if share == 1.0 and len(places) == self.k:
                whole = found
                continue
            at = torch.from_numpy(places).to(self.lam.device)
            for total, value in zip(totals, found, strict=True):
                total.index_add_(0, at, value.view(len(places), -1) * share)
        return tuple(value.view(self.k, -1) for value in whole) if whole else totals

    def _drawn(self, place: int, size: int, count: int, what: str) -> IntArray:
        if count == size:
            return np.arange(size, dtype=np.int64)
        here = self.place
        drawn = here.streams.uniforms(
            f"minibatch {what}", here.number, 0, size, lane=int(here.clients[place])
        )
        return np.sort(np.argsort(drawn, kind="stable")[:count]).astype(np.int64)


def check_server_protocol(protocol: object) -> None:
    """Refuse what no server-based method can have."""
    plain_fields(protocol)
    for name, least in (("outer_steps", 0), ("inner_rounds", 1), ("max_rounds", 1), ("batch", 1)):
        value = getattr(protocol, name, None)
        if value is not None and (not whole(value) or value < least):
            raise ScenarioError(f"{name} is {value!r}; it must be a whole number, at least {least}")
    if getattr(protocol, "start", "warm") not in ("warm", "fresh"):
        raise ScenarioError(
            f"start is {getattr(protocol, 'start', None)!r}; it must be 'warm' (from where the last inner "
            "problem ended) or 'fresh' (from the same initial values)"
        )
    for name in ("inner", "outer", "local"):
        value = getattr(protocol, name, None)
        if value is not None and type(value).__name__ != "LocalSteps":
            raise ScenarioError(f"{name} is {value!r}; it must be LocalSteps(…)")
    server = getattr(protocol, "server", None)
    if not isinstance(server, Server):
        raise ScenarioError(f"server is {server!r}; it must be Server(…)")
