"""Who gets which sample: partitions of labelled samples over clients.

A partition is a small frozen value with one method, `split`: labels in, one sorted array of sample numbers
per client out, none empty and (but for `OverlappingDirichlet` and `Bootstrap`) disjoint. All randomness
comes from the stream "partition" of the seed; a redraw (Dirichlet partitions can leave a client with nothing)
is the next row of that stream, so it moves nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from asyncfed.checks import NonNegativeInt, PositiveFloat, PositiveInt, checked, fitting
from asyncfed.data.superclasses import CIFAR100_SUPERCLASSES
from asyncfed.errors import DataError, UnknownNameError
from asyncfed.registry import register
from asyncfed.rng import Streams

IntArray = npt.NDArray[np.int64]
_ATTEMPTS = 100
_MOST_SAMPLES = 2**28
_EMNIST_CLASSES = 62  # more than any named dataset but CIFAR-100 has


@runtime_checkable
class Partition(Protocol):
    """Anything that deals samples to clients."""

    def split(self, labels: npt.NDArray[Any], clients: int, streams: Streams) -> list[IntArray]:
        """One sorted array of sample numbers per client, none empty."""


@register("partition")
@dataclass(frozen=True)
class IID:
    """Every client gets a random share of the same size (sizes differ by at most one)."""

    def split(self, labels: npt.NDArray[Any], clients: int, streams: Streams) -> list[IntArray]:
        _check_clients(len(labels), clients)
        order = streams.generator("partition").permutation(len(labels))
        return [np.sort(share) for share in np.array_split(order, clients)]


@register("partition")
@dataclass(frozen=True)
class LabelShards:
    """Sort by label, cut into clients·per_client equal shards (±1), deal `per_client` to each client."""

    per_client: PositiveInt = 2

    def split(self, labels: npt.NDArray[Any], clients: int, streams: Streams) -> list[IntArray]:
        _check_clients(len(labels), clients)
        count = clients * self.per_client
        _require(
            count <= len(labels),
            f"{clients} clients with {self.per_client} shards each need {count} samples, "
            f"there are {len(labels)}; use fewer clients or a smaller per_client",
        )
        generator = streams.generator("partition")
        mixed = generator.permutation(len(labels))  # so that a shard is a random part of its label
        by_label = mixed[np.argsort(labels[mixed], kind="stable")]
        shards = np.array_split(by_label, count)
        dealt = generator.permutation(count).reshape(clients, self.per_client)
        return [np.sort(np.concatenate([shards[shard] for shard in hand])) for hand in dealt]


@register("partition")
@dataclass(frozen=True)
class DirichletOverClients:
    """For every class, draw proportions over the clients from Dirichlet(alpha) and cut the class accordingly.

    The partition of the PDBO experiments. A small alpha gives each class to few clients. Redrawn as a whole,
    up to 100 times, until every client has `min_samples`.
    """

    alpha: PositiveFloat
    min_samples: PositiveInt = 1

    def split(self, labels: npt.NDArray[Any], clients: int, streams: Streams) -> list[IntArray]:
        _check_clients(len(labels), clients, self.min_samples)
        members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        for attempt in range(_ATTEMPTS):
            owner = self._owners(members, len(labels), clients, streams.generator("partition", row=attempt))
            sizes = np.bincount(owner, minlength=clients)
            if sizes.min() >= self.min_samples:
                return np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])
        client = int(np.argmin(sizes))
        raise DataError(
            f"client {client} got {sizes[client]} samples, fewer than min_samples={self.min_samples}, "
            f"in the last of {_ATTEMPTS} draws of Dirichlet({self.alpha}) over {clients} clients; "
            "use a larger alpha, fewer clients, more samples or a smaller min_samples"
        )

    def _owners(
        self, members: list[npt.NDArray[np.intp]], total: int, clients: int, generator: np.random.Generator
    ) -> IntArray:
        owner = np.empty(total, dtype=np.int64)
        for samples in members:
            proportions = generator.dirichlet(np.full(clients, self.alpha))
            cuts = np.floor(np.cumsum(proportions)[:-1] * len(samples)).astype(np.int64).clip(0, len(samples))
            counts = np.diff(cuts, prepend=0, append=len(samples))
            owner[generator.permutation(samples)] = np.repeat(np.arange(clients), counts)
        return owner


@register("partition")
@dataclass(frozen=True)
class DirichletOverClasses:
    """Every client draws its own class distribution from Dirichlet(alpha), and its samples from that.

    Clients are served in a random order, without replacement. A client draws all its labels at once; where a
    class runs out, the client takes what is left of it and draws the rest again from its distribution over
    the classes that remain (once its own classes are all exhausted: in proportion to what is left). So
    everybody gets exactly `samples` samples, and those served last may be less concentrated than alpha says.
    `samples=None` deals out everything, in sizes that differ by at most one.
    """

    alpha: PositiveFloat
    samples: PositiveInt | None = None

    def split(self, labels: npt.NDArray[Any], clients: int, streams: Streams) -> list[IntArray]:
        def hand(left: IntArray, amount: int, generator: np.random.Generator) -> IntArray:
            return _take(generator.dirichlet(np.full(len(left), self.alpha)), left, amount, generator)

        return _served_in_turn(labels, clients, self.samples, streams, hand)


@register("partition")
@dataclass(frozen=True)
class Pachinko:
    """Two stages: every client draws a distribution over coarse labels from Dirichlet(alpha), for each of
    these one over its fine labels from Dirichlet(beta), and its samples from them, without replacement.

    Pachinko allocation (Li and McCallum 2006) as Reddi et al. (2021) made CIFAR-100 a federated dataset with
    it, and PDBO's experiments, with 0.4 and 10. Clients are served in a random order, as those of
    `DirichletOverClasses` are. Where a fine label has run out, others of the same coarse one are drawn
    instead; where all of these have, another coarse label.

    Parameters
    ----------
    samples
        How many each client gets; None deals out everything, in sizes that differ by at most one.
    coarse
        The coarse label of each fine label 0, 1, …; None for those of CIFAR-100.
    """

    alpha: PositiveFloat
    beta: PositiveFloat
    samples: PositiveInt | None = None
    coarse: Sequence[NonNegativeInt] | None = None

    def split(self, labels: npt.NDArray[Any], clients: int, streams: Streams) -> list[IntArray]:
        fine = np.unique(labels)
        over = self._coarse_of(fine)
        groups = [np.flatnonzero(over == label) for label in np.unique(over)]

        def hand(left: IntArray, amount: int, generator: np.random.Generator) -> IntArray:
            of_groups = np.array([left[group].sum() for group in groups])
            wish = generator.dirichlet(np.full(len(groups), self.alpha))
            taken = np.zeros_like(left)
            for group, number in zip(groups, _take(wish, of_groups, amount, generator), strict=True):
                within = generator.dirichlet(np.full(len(group), self.beta))
                taken[group] = _take(within, left[group], int(number), generator)
            return taken

        return _served_in_turn(labels, clients, self.samples, streams, hand)

    def _coarse_of(self, fine: npt.NDArray[Any]) -> IntArray:
        """The coarse labels of the fine ones that occur."""
        largest = int(fine[-1]) if len(fine) else 0
        if self.coarse is None:
            _require(
                _EMNIST_CLASSES <= largest < len(CIFAR100_SUPERCLASSES),
                f"the labels go up to {largest}, so they are not those of CIFAR-100, whose coarse labels "
                "Pachinko uses unless told; give it `coarse`, the coarse label of each label",
            )
        else:
            _require(
                largest < len(self.coarse),
                f"Pachinko: coarse has {len(self.coarse)} values, and the labels go up to {largest}; give "
                f"the coarse label of each of the labels 0 to {largest}",
            )
        table = CIFAR100_SUPERCLASSES if self.coarse is None else self.coarse
        return np.array(table, dtype=np.int64)[fine.astype(np.int64)]


def _served_in_turn(
    labels: npt.NDArray[Any],
    clients: int,
    samples: int | None,
    streams: Streams,
    hand: Callable[[IntArray, int, np.random.Generator], IntArray],
) -> list[IntArray]:
    """Clients in a random order take samples off a pile; `hand` says how many of each label one takes, given
    what is left and how many in all.
    """
    _check_clients(len(labels), clients, samples or 1)
    generator = streams.generator("partition")
    queues = [generator.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    left = np.array([len(queue) for queue in queues])
    each, over = (samples, 0) if samples is not None else divmod(len(labels), clients)
    shares: list[IntArray] = [np.empty(0, dtype=np.int64)] * clients
    for place, client in enumerate(generator.permutation(clients)):
        taken = hand(left, each + (place < over), generator)
        picked = [queue[have - take : have] for queue, have, take in zip(queues, left, taken, strict=True)]
        left -= taken
        shares[client] = np.sort(np.concatenate(picked))
    return shares


def _take(
    wish: npt.NDArray[np.float64], left: IntArray, amount: int, generator: np.random.Generator
) -> npt.NDArray[np.int64]:
    """How many samples of each class: `amount` in all, never more of a class than is left."""
    taken = np.zeros_like(left)
    while (missing := amount - int(taken.sum())) > 0:
        room = left - taken
        weights = np.where(room > 0, wish, 0.0)
        if weights.sum() <= 1e-12:
            weights = room.astype(np.float64)
        taken += np.minimum(generator.multinomial(missing, weights / weights.sum()), room)
    return taken


@register("partition")
@dataclass(frozen=True)
class OverlappingDirichlet:
    """Every client draws its own class distribution from Dirichlet(alpha), and its samples from that, whoever
    else has them: without replacement within a client, so that two clients may hold the same sample.

    The partition of the experiments on meta federated learning. A client that wishes for more of a class than
    there is takes all of it and draws the rest again from its distribution over its other classes (once these
    are all exhausted: in proportion to what is left). What a client gets depends on nobody else, but that
    `samples=None` is as many for each as would go around: all there are, divided by the clients.
    """

    alpha: PositiveFloat
    samples: PositiveInt | None = None

    def split(self, labels: npt.NDArray[Any], clients: int, streams: Streams) -> list[IntArray]:
        fitting(clients, PositiveInt, "clients", DataError)
        each = self.samples or len(labels) // clients
        if self.samples is None:
            _check_clients(len(labels), clients)
        _require(
            each <= len(labels),
            f"{each} samples for each client, none twice, cannot be drawn from {len(labels)}; use fewer",
        )
        _check_room(clients, each)
        members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        sizes = np.array([len(samples) for samples in members])
        shares = []
        for client in range(clients):
            generator = streams.generator("partition", row=client)
            taken = _take(generator.dirichlet(np.full(len(members), self.alpha)), sizes, each, generator)
            picked = [
                generator.choice(members[label], size=taken[label], replace=False)
                for label in np.flatnonzero(taken)
            ]
            shares.append(np.sort(np.concatenate(picked)))
        return shares


@register("partition")
@dataclass(frozen=True)
class Bootstrap:
    """Every client draws `samples` of them for itself, so clients share samples: for more clients than a
    dataset has room for.
    """

    samples: PositiveInt

    def split(self, labels: npt.NDArray[Any], clients: int, streams: Streams) -> list[IntArray]:
        fitting(clients, PositiveInt, "clients", DataError)
        _check_room(clients, self.samples)
        drawn = streams.generator("partition").integers(0, len(labels), (clients, self.samples))
        return list(np.sort(drawn, axis=1))


def _pachinko(value: str) -> Pachinko:
    alpha, _, rest = value.partition(",")
    return Pachinko(float(alpha), *_number_and_samples(rest))


def _number_and_samples(value: str) -> tuple[float, int | None]:
    number, comma, samples = value.partition(",")
    return float(number), int(samples) if comma else None


# By name: an example, and what makes it of the text after the colon.
_TEXTS: dict[str, tuple[str, Callable[[str], Partition]]] = {
    "iid": ("iid", lambda value: IID()),
    "shards": ("shards:2", lambda value: LabelShards(int(value or 2))),
    "dirichlet": ("dirichlet:0.4", lambda value: DirichletOverClients(float(value))),
    "dirichlet-classes": (
        "dirichlet-classes:0.4",
        lambda value: DirichletOverClasses(*_number_and_samples(value)),
    ),
    "dirichlet-overlapping": (
        "dirichlet-overlapping:0.01,1000",
        lambda value: OverlappingDirichlet(*_number_and_samples(value)),
    ),
    "pachinko": ("pachinko:0.4,10", _pachinko),
    "bootstrap": ("bootstrap:16", lambda value: Bootstrap(int(value))),
}


@checked(error=DataError)
def parse_partition(text: str) -> Partition:
    """The partition that a text names: "iid", "shards:2", "dirichlet:0.4", "dirichlet-classes:0.4",
    "dirichlet-overlapping:0.01", "pachinko:0.4,10" (of CIFAR-100) or "bootstrap:16".

    The three whose clients draw over classes take a number of samples for each client after a comma:
    "dirichlet-overlapping:0.01,1000", "pachinko:0.4,10,2500".
    """
    kind, _, value = text.partition(":")
    if kind not in _TEXTS:
        raise UnknownNameError("partition", kind, _TEXTS)
    _require(kind != "iid" or not value, f"partition {text!r}: {value!r} is not expected; write just 'iid'")
    example, made_of = _TEXTS[kind]
    try:
        return made_of(value)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(
            f"partition {text!r}: {value!r} is not understood; write for instance {example!r}"
        ) from error


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise DataError(message)


def _check_room(clients: int, each: int) -> None:
    _require(
        clients * each <= _MOST_SAMPLES,
        f"{clients} clients that draw {each} samples each need {clients * each:,}, more "
        f"than {_MOST_SAMPLES:,}; use fewer of either",
    )


def _check_clients(samples: int, clients: int, each: int = 1) -> None:
    fitting(clients, PositiveInt, "clients", DataError)
    _require(
        clients * each <= samples,
        f"{clients} clients with at least {each} samples each need {clients * each}, there are {samples}; "
        "use fewer clients or more samples",
    )
