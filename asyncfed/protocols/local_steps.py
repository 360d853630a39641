"""The local steps of a client between two messages: gradient steps on minibatches of its own samples.

    plain (SGD)   v ← v − α_i (∇_i(v; ζ) + t_i(v))              t a term of the method's own, where it has one
    momentum      m ← β m + ∇_i(v; ζ) + t_i(v), v ← v − α_i m
    corrected     v ← v − α_i (∇_i(v; ζ) − ∇_i(v⁰; ζ) + d)      local SVRG: d is the mean gradient at v⁰

An epoch is a pass over the samples in an order drawn anew, cut into minibatches. Steps go on over as many
epochs as it takes. Minibatches of one epoch are not independent of each other: where they are to be, each is
drawn on its own, with replacement (`independent`). In the first corrected step v is still v⁰, so it is
v⁰ − α_i d and costs no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.checks import PositiveInt
from asyncfed.errors import ScenarioError
from asyncfed.problems.layout import aligned_rows
from asyncfed.problems.threads import worthwhile_threads
from asyncfed.protocols.at import Samples
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.noted import Noted
from asyncfed.protocols.schedules import LearningRate, rate_at, rates
from asyncfed.protocols.settings import Batch
from asyncfed.registry import register

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Rows = slice | Tensor
Term = Callable[[Tensor, Rows], Tensor]
"""What is added to each gradient at v (r, d), of the clients at those of the rows: (r, d)."""

_BLOCK_BYTES = 16 * 2**20  # of gradients at v⁰, or of samples, made for several steps at once


@register("option")
@dataclass(frozen=True)
class LocalSteps:
    """How a client steps on its own.

    Parameters
    ----------
    lr
        Step size: a number, or a schedule over the outer iterations (`StepDecay`, `Diminishing`).
    steps
        τ: a number for all, or one for each client. By default 1.
    epochs
        Instead of steps: so many passes over a client's samples.
    batch
        Minibatch size; None for all of a client's samples in every step.
    divide
        Divide the step size by a client's number of steps, as the papers' theorems do: α_i = α/τ_i.
    independent
        Draw every minibatch on its own, with replacement, in place of the pieces of an epoch.
    """

    lr: LearningRate
    steps: PositiveInt | Sequence[PositiveInt] | None = None
    epochs: PositiveInt | None = None
    batch: Batch = None
    divide: bool = False
    independent: bool = False

    def __post_init__(self) -> None:
        if self.independent and self.batch is None:
            raise ScenarioError(
                "independent minibatches are wanted, and batch is None: all of a client's samples in every "
                "step; give a batch"
            )
        if self.steps is not None and self.epochs is not None:
            raise ScenarioError(
                f"steps is {self.steps} and epochs is {self.epochs}; give one of the two, the other follows"
            )
        if self.steps == ():
            raise ScenarioError("steps is an empty list; give a number for each client, or one for all")

    def fits(self, clients: int) -> None:
        """Refuse numbers of steps for other clients than there are."""
        if isinstance(self.steps, tuple) and len(self.steps) != clients:
            raise ScenarioError(
                f"{len(self.steps)} numbers of steps are given for {clients} clients; give one each, or one "
                "for all"
            )

    def counts(self, sizes: IntArray, clients: IntArray) -> IntArray:
        """τ_i of clients with so many samples."""
        if self.epochs is not None:
            return self.epochs * self._per_epoch(sizes)
        if isinstance(self.steps, tuple):
            return np.array(self.steps, dtype=np.int64)[clients]
        assert self.steps is None or isinstance(self.steps, int)
        return np.full(len(sizes), self.steps or 1, dtype=np.int64)

    def samples(self, sizes: IntArray, clients: IntArray) -> FloatArray:
        """Samples in the minibatches of all of these steps."""
        counts = self.counts(sizes, clients)
        if self.batch is None or self.independent:
            return (counts * (self.batch or sizes)).astype(float)
        epochs, steps = np.divmod(counts, self._per_epoch(sizes))
        total: IntArray = epochs * sizes + steps * self.batch  # the last of an epoch may be short
        return total.astype(float)

    def cost(self, sizes: IntArray, clients: IntArray) -> Cost:
        """A gradient for each."""
        return Cost(self.counts(sizes, clients))

    def corrected_cost(self, sizes: IntArray, clients: IntArray) -> Cost:
        """Of corrected steps: two gradients each, and none for the first."""
        return Cost(2 * (self.counts(sizes, clients) - 1))

    def rates(self, counts: IntArray, iteration: int | IntArray, like: Tensor) -> Tensor:
        """α_i of clients that make so many steps (k, 1), in the same iteration or each in its own."""
        if not isinstance(iteration, int):
            own = rates(self.lr, iteration, like)
            if isinstance(own, Tensor):
                return own / torch.from_numpy(counts).to(like)[:, None] if self.divide else own
            iteration = int(iteration[0])
        rate = rate_at(self.lr, iteration)
        if not self.divide:
            return like.new_full((1, 1), rate).expand(len(counts), 1)
        return torch.from_numpy(rate / counts).to(like)[:, None]

    def plain(
        self, samples: Samples, start: Tensor, iteration: int | IntArray, term: Term | None = None
    ) -> tuple[Tensor, Tensor]:
        """Where plain steps from `start` lead each client, and the mean loss on the way."""
        return self._run(samples, start, None, iteration, None if term is None else _Pushed(term))

    def with_momentum(
        self,
        samples: Samples,
        start: Tensor,
        velocity: Tensor,
        momentum: float,
        iteration: int | IntArray,
        term: Term | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same with momentum β, from the clients' m (k, d): where it leads, m after it, and the loss."""
        pushed = _Pushed(term, momentum, velocity.clone())
        v, loss = self._run(samples, start, None, iteration, pushed)
        assert pushed.velocity is not None
        return v, pushed.velocity, loss

    def remembering(
        self,
        samples: Samples,
        start: Tensor,
        memory: Mapping[str, Tensor],
        momentum: float,
        iteration: int | IntArray,
        term: Term | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """With momentum from memory["m"] where there is one, plain without: where it leads, the loss, and
        what changes of the memory.
        """
        if not momentum:
            return *self.plain(samples, start, iteration, term), {}
        v, m, loss = self.with_momentum(samples, start, memory["m"], momentum, iteration, term)
        return v, loss, {"m": m}

    def corrected(
        self, samples: Samples, start: Tensor, direction: Tensor, iteration: int
    ) -> tuple[Tensor, Tensor]:
        """The same with local SVRG steps; the loss is NaN where a single step needs no gradient."""
        return self._run(samples, start, direction, iteration)

    def _run(
        self,
        samples: Samples,
        start: Tensor,
        direction: Tensor | None,
        iteration: int | IntArray,
        pushed: _Pushed | None = None,
    ) -> tuple[Tensor, Tensor]:
        counts = self.counts(samples.sizes, samples.at.clients)
        rate = self.rates(counts, iteration, start)
        v = aligned_rows(samples.k, start).copy_(start)
        losses = start.new_zeros(samples.k)
        first = 0
        if direction is not None:
            v.addcmul_(rate, direction.expand_as(v), value=-1.0)
            first = 1
        for places, batches, step, length in self._blocks(samples, counts, first, start):
            work = batches[0].shape[1] * batches[0].shape[2] * samples.parameters
            noted = Noted(samples, places, v)
            batches = noted.keyed(batches, step, length)
            with worthwhile_threads(work):
                self._stretch(
                    samples, places, batches, length, start, direction, v, rate, losses, pushed, noted
                )
            noted.end()
        return v, losses.div_(torch.from_numpy(counts - first).to(losses))

    def _stretch(
        self,
        samples: Samples,
        places: IntArray,
        batches: tuple[Tensor, ...],
        length: int,
        start: Tensor,
        direction: Tensor | None,
        v: Tensor,
        rate: Tensor,
        losses: Tensor,
        pushed: _Pushed | None,
        noted: Noted,
    ) -> None:
        """`length` steps of the clients at `places`, on v; adds up their losses."""
        samples = samples.among(places)
        at = None if len(places) == len(v) else torch.from_numpy(places).to(v.device)
        own, alpha = (v, rate) if at is None else (v.index_select(0, at), rate.index_select(0, at))
        anchors = None if direction is None else _anchors(samples, start, direction, batches, alpha, length)
        own_losses = own.new_zeros(len(own))
        step = alpha if bool((alpha != alpha[0]).any()) else float(alpha[0])
        for j in range(length):
            batch = noted.now(tuple(tensor[j] for tensor in batches))
            if pushed is None:
                own_losses.add_(samples.descend(own, batch, step, moved=noted.moved))
            else:
                rows = slice(None) if at is None else at
                own_losses.add_(pushed.step(samples, own, batch, step, rows, noted.moved))
            if anchors is not None:
                own.add_(anchors[min(j, len(anchors) - 1)])
            noted.after(own)
        if at is None:
            losses.add_(own_losses)
        else:
            v.index_copy_(0, at, own)
            losses.index_add_(0, at, own_losses)

    def stretches(self, samples: Samples, like: Tensor) -> Iterator[tuple[IntArray, tuple[Tensor, ...], int]]:
        """The minibatches of all of these steps, for methods that use them in a way of their own: stretches
        of steps in which the same clients use minibatches of one size, as (who they are, their batches
        (steps, clients, B, …), how many steps).
        """
        counts = self.counts(samples.sizes, samples.at.clients)
        for places, batches, first, length in self._blocks(samples, counts, 0, like):
            yield places, Noted(samples, places, like).keyed(batches, first, length), length

    def _blocks(
        self, samples: Samples, counts: IntArray, first: int, like: Tensor
    ) -> Iterator[tuple[IntArray, tuple[Tensor, ...], int, int]]:
        """Stretches of steps in which the same clients use minibatches of one size: who they are, their
        batches (steps, clients, B, …), the first step, and how many.
        """
        sizes = samples.sizes
        if self.batch is None and (sizes == sizes[0]).all() and (counts == counts[0]).all():
            steps = int(counts[0]) - first
            if steps:  # everybody with all of its samples in every step
                whole = samples.shards.whole(samples.rows)
                yield np.arange(len(sizes)), tuple(t.expand(steps, *t.shape) for t in whole), first, steps
            return
        orders = _Orders(samples, self.batch, self.independent)
        per_epoch = self._per_epoch(sizes)
        sample_bytes = sum(t[:1].nbytes for t in samples.shards.tensors)
        step = first
        last = int(counts.max(initial=0))
        while step < last:
            active = np.flatnonzero(counts > step)
            lengths = orders.lengths(active, step, per_epoch)
            stop = step + 1
            if (lengths == lengths[0]).all():
                row = max(like.shape[-1] * like.element_size(), int(lengths[0]) * sample_bytes)
                most = max(1, int(_BLOCK_BYTES // (row * len(active))))
                if not self.independent and (self.batch is None or (self.batch >= sizes[active]).all()):
                    most = last  # the same samples in every step: gathered once
                while (
                    stop < last
                    and stop - step < most
                    and (counts[active] > stop).all()
                    and np.array_equal(orders.lengths(active, stop, per_epoch), lengths)
                ):
                    stop += 1
                yield active, orders.batches(active, step, stop, per_epoch), step, stop - step
            else:
                for length in np.unique(lengths):
                    some = active[lengths == length]
                    yield some, orders.batches(some, step, stop, per_epoch), step, 1
            step = stop

    def _per_epoch(self, sizes: IntArray) -> IntArray:
        if self.batch is None:
            return np.ones(len(sizes), dtype=np.int64)
        return -(-sizes // self.batch)


def decay(rate: float) -> Term | None:
    """Weight decay, as a term: `rate` times v; None where it is zero."""
    return (lambda v, rows: rate * v) if rate else None


def update(step: int) -> str:
    """The purpose for which the independent minibatch of a local step is drawn."""
    return f"update {step}"


@dataclass(frozen=True, eq=False)
class _Pushed:
    """Steps along more than the gradient; `velocity` (of all clients) is changed in place."""

    term: Term | None
    momentum: float = 0.0
    velocity: Tensor | None = None

    def step(
        self,
        samples: Samples,
        v: Tensor,
        batch: tuple[Tensor, ...],
        rate: float | Tensor,
        rows: Rows,
        moved: Tensor | None,
    ) -> Tensor:
        """Of the clients at `rows`, whose variables v are; returns their losses."""
        push = None if self.term is None else self.term(v, rows)
        if self.velocity is None:
            assert push is not None
            loss = samples.descend(v, batch, rate, moved=moved)
            v.sub_(push * rate)
            return loss
        m = self.velocity[rows] * self.momentum
        if push is not None:
            m.add_(push)
        loss = samples.descend(v, batch, -1.0, into=m, moved=moved)
        v.sub_(m * rate)
        self.velocity[rows] = m
        return loss


def _anchors(
    samples: Samples,
    start: Tensor,
    direction: Tensor,
    batches: tuple[Tensor, ...],
    alpha: Tensor,
    length: int,
) -> Tensor:
    """α_i (∇_i(v⁰; ζ) − d) for every step of a stretch (steps, clients, d); one where all steps are alike."""
    alike = all(tensor.stride(0) == 0 for tensor in batches) and length > 1
    steps = 1 if alike else length
    k = len(alpha)
    flat = tuple(tensor[:steps].reshape(steps * k, *tensor.shape[2:]) for tensor in batches)
    found, _ = samples.gradient(start.expand(steps * k, -1), flat)
    return found.view(steps, k, -1).sub_(direction).mul_(alpha)


class _Orders:
    """In which order each client goes over its samples, epoch by epoch; or its independent minibatches."""

    def __init__(self, samples: Samples, batch: int | None, independent: bool) -> None:
        self._samples, self._batch, self._independent = samples, batch, independent
        self._sizes = samples.sizes
        self._known: dict[tuple[int, int], IntArray] = {}

    def lengths(self, places: IntArray, step: int, per_epoch: IntArray) -> IntArray:
        """Samples in the minibatch of each at that step."""
        sizes = self._sizes[places]
        if self._batch is None:
            return sizes
        if self._independent:
            return np.full_like(sizes, self._batch)
        left: IntArray = sizes - (step % per_epoch[places]) * self._batch
        return np.minimum(self._batch, left)

    def batches(self, places: IntArray, first: int, stop: int, per_epoch: IntArray) -> tuple[Tensor, ...]:
        """(steps, clients, B, …)"""
        steps = stop - first
        if not self._independent and (self._batch is None or (per_epoch[places] == 1).all()):
            whole = self._samples.shards.whole(self._samples.rows[places])
            return tuple(t.expand(steps, *t.shape) for t in whole)
        index = np.stack([self._indices(places, step, per_epoch) for step in range(first, stop)])
        flat = self._samples.batch(np.tile(places, steps), index.reshape(steps * len(places), -1))
        return tuple(t.view(steps, len(places), *t.shape[1:]) for t in flat)

    def _indices(self, places: IntArray, step: int, per_epoch: IntArray) -> IntArray:
        """(clients, B) of one step."""
        if self._independent:
            assert self._batch is not None
            return self._samples.independent(places, self._batch, update(step))
        return np.stack([self._index(int(p), step, int(per_epoch[p])) for p in places])

    def _index(self, place: int, step: int, per_epoch: int) -> IntArray:
        assert self._batch is not None
        epoch, within = divmod(step, per_epoch)
        order = self._known.get((place, epoch))
        if order is None:
            order = self._known[place, epoch] = self._samples.shuffled(place, epoch)
        return order[within * self._batch : (within + 1) * self._batch]
