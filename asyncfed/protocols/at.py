"""Where a step is made: what is at hand for some nodes of a block, and never anything of the machine.

`At` offers their minibatches, whole data, derivatives, numbers, step counts and random streams. All that is
drawn is addressed by (seed, purpose, step, client). A `Home` is what all steps of a block have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.data import ClientData, ClientShards
from asyncfed.data.sampling import Sampler
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.problem import Level as Level
from asyncfed.problems.whole import samples_at_once
from asyncfed.rng import Streams

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

JUDGING = 2**62
"""In place of a step's number where clients are judged: what is drawn there no step draws."""

_SAMPLES = 4096  # of all clients together, whose activations stay alive at a time


class Home:
    """A block's data and derivatives; `clients` are the numbers of its nodes, `n` how many the run has."""

    def __init__(
        self,
        derivatives: Derivatives,
        data: ClientData,
        clients: IntArray,
        n: int,
        start: Tensor,
        streams: Streams,
        *,
        server: bool = False,
    ) -> None:
        self.derivatives, self.data, self.clients, self.n = derivatives, data, clients, n
        self.start, self.streams, self.server = start, streams, server
        self.staged, self.mixed = _second_stage(derivatives), derivatives.mixed()
        self.outer = data.validation if derivatives.problem.outer_split == "validation" else data.train
        self.sampler = {
            "inner": Sampler(streams, data.train.sizes, clients),
            "outer": Sampler(streams, self.outer.sizes, clients),
        }
        self._encoded: dict[bytes, ClientShards] = {}
        self._encoded_with = -1
        self.buffers: Tensor | None = None  # of a network, where they stay at their client: a row for each

    def encoded(self, x: Tensor, version: int | None, rows: IntArray) -> ClientShards:
        """The training samples of some clients after the first stage of the inner loss at x; made once for
        each version of x.
        """
        if version is None:
            return self._encode(x, rows)
        if version != self._encoded_with:
            self._encoded, self._encoded_with = {}, version
        key = rows.tobytes()
        if key not in self._encoded:
            self._encoded[key] = self._encode(x, rows)
        return self._encoded[key]

    def _encode(self, x: Tensor, rows: IntArray) -> ClientShards:
        stages = self.derivatives.problem.stages
        assert stages is not None, "asked only where the loss has stages"
        train = self.data.train if len(rows) == self.data.clients else self.data.train.select(rows)
        outer = self.derivatives.outer.views_one(x)
        most = samples_at_once(train)
        pieces = [
            stages.encode(outer, tuple(t[start : start + most] for t in train.tensors))
            for start in range(0, train.total, most)
        ]
        tensors = pieces[0] if len(pieces) == 1 else tuple(map(torch.cat, zip(*pieces, strict=True)))
        return ClientShards(tensors, train.sizes)


def _second_stage(derivatives: Derivatives) -> Derivatives | None:
    """Of the second stage of the inner loss: for many clients at once where that stage says so, though the
    first may not (a perceptron behind convolutions).
    """
    staged, stages = derivatives.staged(), derivatives.problem.stages
    if staged is None or stages is None or stages.vectorize in (None, staged.problem.vectorize):
        return staged
    second = replace(staged.problem, vectorize=stages.vectorize)
    return Derivatives(second, staged.inner, staged.outer)


class At:
    """Some nodes of a block at a step.

    `rows` are their places in the block, `steps` their own step counts within the part (for a method with a
    server: the number of the round), `elapsed` the virtual time since each began its step before in this part
    (0 for its first, and with a server), `room` offers tensors that a residue may be written to.
    """

    __slots__ = (
        "_batch", "_beside", "_moved", "_size", "_versions", "elapsed", "home", "numbers", "room", "rows",
        "steps",
    )  # fmt: skip

    def __init__(
        self,
        home: Home,
        rows: IntArray,
        steps: IntArray,
        numbers: IntArray | None = None,
        size: int | None = 1,
        room: dict[str, Tensor] | None = None,
        elapsed: FloatArray | None = None,
    ) -> None:
        self.home, self.rows, self.steps = home, rows, steps
        self.elapsed = np.zeros(len(rows)) if elapsed is None else elapsed
        self.numbers = steps if numbers is None else numbers  # of the steps in the run: what draws go by
        self._size = size
        self._batch: tuple[Tensor, ...] | None = None
        self.room = {} if room is None else room
        self._versions: dict[int, int] = {}
        self._beside: tuple[Tensor, ...] | None = None
        self._moved: Tensor | None = None

    @property
    def derivatives(self) -> Derivatives:
        return self.home.derivatives

    @property
    def data(self) -> ClientData:
        """Of all clients of the block; those here are its `rows`."""
        return self.home.data

    @property
    def streams(self) -> Streams:
        return self.home.streams

    @property
    def n(self) -> int:
        """Clients in the run."""
        return self.home.n

    @property
    def clients(self) -> IntArray:
        """Their numbers in the run."""
        return self.home.clients[self.rows]

    @property
    def server(self) -> bool:
        """Whether this is the server, which has no data."""
        return self.home.server

    @property
    def starting_inner(self) -> Tensor:
        """The inner variables that the run began with."""
        return self.home.start[_index(self.rows, self.home.start)]

    @property
    def number(self) -> int:
        """The number of the round."""
        return int(self.numbers[0])

    @property
    def train(self) -> ClientShards:
        return self.home.data.train.with_beside(*self._beside_samples())

    @property
    def outer(self) -> ClientShards:
        """The samples of the outer loss."""
        return self.home.outer.with_beside(*self._beside_samples())

    # --- random draws and buffers of a network -------------------------------------------------------

    def gradient(
        self, x: Tensor, lam: Tensor, scale: float | Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """∇f of each client on its `batch`, to train by, times `scale`; and the losses. What a network notes
        of the samples that it is trained on (local buffers) is noted.
        """
        if self.home.buffers is None:
            return self.derivatives.inner_gradient(x, lam, self.batch, scale, out)
        moved = self.buffers.clone()
        found = self.derivatives.inner_gradient(x, lam, self.batch, scale, out, moved)
        self.buffers = moved
        return found

    def descent(
        self,
        x: Tensor,
        lam: Tensor,
        alpha: float | Tensor,
        weight_decay: float = 0.0,
        omega: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """−α(∇f + decay · x) of each client on its `batch`, and the losses. Buffers that are averaged are no
        parameters: they move to what the network makes of them, times the push-sum weight ω.
        """
        tail = self.derivatives.problem.averaged_buffers
        if not tail:
            found, loss = self.gradient(x, lam, -alpha, out)
        else:
            moved = x.new_empty(len(x), tail)
            found, loss = self.derivatives.inner_gradient(x, lam, self.batch, -alpha, out, moved)
        if weight_decay:
            found -= (weight_decay * x).mul_(alpha)  # so rounded alike, whether α is a number or a tensor
        if tail:
            found[:, -tail:] = (moved - x[:, -tail:]) * (1.0 if omega is None else omega.to(x))
        return found, loss

    @property
    def buffers(self) -> Tensor:
        """Those of these clients, as they stand in this step (k, b)."""
        if self._moved is None:
            assert self.home.buffers is not None, "asked only where there are some"
            return self.home.buffers[_index(self.rows, self.home.buffers)]
        return self._moved

    @buffers.setter
    def buffers(self, moved: Tensor) -> None:
        self._moved, self._beside = moved, None

    @property
    def moved_buffers(self) -> Tensor | None:
        """The same, where this step has moved them."""
        return self._moved

    def keys(self, places: IntArray, first: int = 0, count: int = 1, purpose: str = "keys") -> Tensor:
        """(count, r) keys for the draws of clients at `places`, for that many minibatches of this step."""
        drawn = [
            self.streams.uniforms(purpose, int(self.numbers[place]), first, first + count, lane=int(client))
            for place, client in zip(places, self.clients[places], strict=True)
        ]
        whole = (np.stack(drawn, axis=1) * 2.0**53).astype(np.int64)
        return torch.from_numpy(whole).to(self.home.start.device)

    def _beside_samples(self) -> tuple[Tensor, ...]:
        """What stands beside the samples of every client of the block, with what is particular to this step
        in the rows of those here.
        """
        problem = self.derivatives.problem
        if not problem.draws and self.home.buffers is None:
            return ()
        if self._beside is None:
            rows: list[Tensor] = []
            where = torch.from_numpy(self.rows).to(self.home.start.device)
            if problem.draws:
                keys = torch.zeros(len(self.home.clients), dtype=torch.int64, device=where.device)
                rows.append(keys.index_copy_(0, where, self.keys(np.arange(len(self.rows)))[0]))
            if self.home.buffers is not None:
                now = self.home.buffers
                rows.append(now if self._moved is None else now.index_copy(0, where, self._moved))
            self._beside = tuple(rows)
        return self._beside

    @property
    def batch(self) -> tuple[Tensor, ...]:
        """A minibatch of each client's training samples at its step (k, B, …), drawn with replacement, of the
        size that the part says; or all of its samples.
        """
        if self._batch is None:
            size = self._size
            self._batch = self.train.whole(self.rows) if size is None else self.minibatch(size)
        return self._batch

    def minibatch(self, size: int, purpose: str = "batches") -> tuple[Tensor, ...]:
        """Another one, independent of those for other purposes."""
        index = self.home.sampler["inner"].with_replacement(self.rows, self.numbers, size, purpose)
        return self._gathered(index, self.rows)

    def different(self, size: int, purpose: str) -> Iterator[tuple[IntArray, tuple[Tensor, ...]]]:
        """A minibatch of different samples of each client (all it has, where it has fewer): who, by place
        here, and the samples, those who have equally many together.
        """
        sampler = self.home.sampler["inner"]
        yield from self._alike(
            [
                sampler.without_replacement(int(row), int(step), size, purpose)
                for row, step in zip(self.rows, self.numbers, strict=True)
            ]
        )

    def by_epoch(self, size: int, purpose: str = "epochs") -> Iterator[tuple[IntArray, tuple[Tensor, ...]]]:
        """The same where a client goes over its samples epoch by epoch, each in an order of its own: the
        minibatch of its step, of which the last of an epoch may be short.
        """
        sampler = self.home.sampler["inner"]
        chosen = []
        for row, step in zip(self.rows.tolist(), self.numbers.tolist(), strict=True):
            epoch, within = divmod(step, -(-int(self.train.sizes[row]) // size))
            order = sampler.in_order(row, 0, epoch, purpose)
            chosen.append(order[within * size : (within + 1) * size])
        yield from self._alike(chosen)

    def _alike(self, chosen: list[IntArray]) -> Iterator[tuple[IntArray, tuple[Tensor, ...]]]:
        lengths = np.array([len(own) for own in chosen])
        for length in np.unique(lengths):
            places = np.flatnonzero(lengths == length)
            yield places, self._gathered(np.stack([chosen[place] for place in places]), self.rows[places])

    def uniforms(self, purpose: str, start: int = 0, count: int = 1) -> npt.NDArray[np.float64]:
        """(k, count): random numbers of each client at its step."""
        drawn = [
            self.streams.uniforms(purpose, int(step), start, start + count, lane=int(client))
            for step, client in zip(self.numbers, self.clients, strict=True)
        ]
        return np.stack(drawn)

    def inner(self, x: Tensor) -> Samples:
        """f_i (g_i of the methods with a server) at an outer variable that all share."""
        if self.home.staged is not None:
            nothing = x.new_zeros(0)
            shards = self.home.encoded(x, self._version_of(x), self.rows)
            return Samples(self, self.home.staged, shards, np.arange(len(self.rows)), nothing, "inner")
        return self.inner_by_both(x)

    def inner_by_both(self, x: Tensor) -> Samples:
        """The same as a function of both variables, for its mixed derivatives."""
        return Samples(self, self.derivatives, self.train, self.rows, x, "inner")

    def mixture(self, q: Tensor) -> Samples:
        """The loss of a mixture, with weights q (total, K) of all training samples of the block."""
        assert self.home.mixed is not None, "asked only of a problem that is a mixture"
        train = self.home.data.train
        shards = ClientShards((*train.tensors, q), train.sizes)
        return Samples(self, self.home.mixed, shards, self.rows, q.new_zeros(0), "inner")

    def outer_loss(self, y: Tensor, x: Tensor) -> Samples:
        """The outer loss, at inner variable y."""
        return Samples(self, self.derivatives, self.outer, self.rows, x, "outer", y)

    def knows(self, versions: dict[int, int]) -> None:
        """Which tensors (by identity) are which versions of the server's variables."""
        self._versions = versions

    def _version_of(self, x: Tensor) -> int | None:
        return self._versions.get(id(x))

    def _gathered(self, index: IntArray, rows: IntArray) -> tuple[Tensor, ...]:
        shards = self.train
        device = shards.tensors[0].device
        return shards.gather(torch.from_numpy(rows).to(device), torch.from_numpy(index).to(device))


def _index(rows: IntArray, like: Tensor) -> slice | Tensor:
    if len(rows) and int(rows[-1] - rows[0]) == len(rows) - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(like.device)


@dataclass(frozen=True, eq=False)
class Samples:
    """A loss of each of some clients, over samples to be chosen.

    `lam` is the outer variable, common to all or a row for each; for the outer loss `y` is the inner one.
    """

    at: At = field(repr=False)
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

    def batch(self, places: IntArray, index: IntArray) -> tuple[Tensor, ...]:
        """Samples `index` (r, B) of the clients at `places` (r,)."""
        device = self.lam.device
        rows = torch.from_numpy(self.rows[places]).to(device)
        return self.shards.gather(rows, torch.from_numpy(np.ascontiguousarray(index)).to(device))

    def shuffled(self, place: int, epoch: int) -> IntArray:
        """The order in which a client goes over its samples in an epoch."""
        row, number = int(self.at.rows[place]), int(self.at.numbers[place])
        return self._sampler.in_order(row, number, epoch, f"shuffle {self.level}")

    def among(self, places: IntArray) -> Samples:
        """What the clients at `places` differentiate: with their own outer variables, where each has one."""
        if self.lam.ndim == 1 or len(places) == len(self.lam):
            return self
        return replace(self, lam=self.lam[torch.from_numpy(places).to(self.lam.device)])

    def drawn(self, size: int, purpose: str) -> tuple[Tensor, ...]:
        """An independent minibatch of every client, with a key of its own where the network draws."""
        everyone = np.arange(self.k)
        batch = self.batch(everyone, self.independent(everyone, size, purpose))
        if not self.derivatives.problem.draws:
            return batch
        place = len(batch) - (1 if self.at.home.buffers is None else 2)
        (keys,) = self.at.keys(everyone, purpose=f"keys, {purpose}")
        return (*batch[:place], keys, *batch[place + 1 :])

    def independent(self, places: IntArray, size: int, purpose: str) -> IntArray:
        """(r, size): a minibatch of the clients at `places`, drawn with replacement and independently of what
        is drawn for other purposes.
        """
        return self._sampler.with_replacement(self.at.rows[places], self.at.numbers[places], size, purpose)

    def gradient(
        self, v: Tensor, batch: tuple[Tensor, ...], out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Of each row of v with its batch, in `out` where given: for the inner loss in y, for the outer in x;
        and the losses.
        """
        if self.level == "inner":
            return self.derivatives.inner_gradient(v, self.lam.expand(len(v), -1), batch, out=out)
        assert self.y is not None
        return self.derivatives.outer_gradient(self.y.expand(len(v), -1), v, batch, "outer", out=out)

    def descend(
        self,
        v: Tensor,
        batch: tuple[Tensor, ...],
        rate: float | Tensor,
        into: Tensor | None = None,
        moved: Tensor | None = None,
    ) -> Tensor:
        """A step of each row of v along its gradient, in place (or added to `into`, and v stays); returns the
        losses before it. In `moved`, where given, the buffers after it.
        """
        if self.level == "inner":
            lam = self.lam.expand(len(v), -1)
            return self.derivatives.descend("inner", v, lam, batch, rate, into, moved)
        assert self.y is not None
        return self.derivatives.descend("outer", self.y.expand(len(v), -1), v, batch, rate, into)

    def chosen(self, batch: int | None, what: str) -> Iterator[tuple[IntArray, IntArray, float]]:
        """(places, index, share): a minibatch of each client, drawn without replacement, or all it has in
        pieces of bounded memory; `share` is the part of a client's samples that the piece is.
        """
        sizes = self.sizes
        if batch is not None:
            taken = np.minimum(batch, sizes)
            number, rows = self.at.number, self.at.rows
            for size in np.unique(taken):
                places = np.flatnonzero(taken == size)
                draws = [
                    self._sampler.without_replacement(int(rows[p]), number, int(size), f"minibatch {what}")
                    for p in places
                ]
                yield places, np.stack(draws), 1.0
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

    @property
    def _sampler(self) -> Sampler:
        return self.at.home.sampler[self.level]
