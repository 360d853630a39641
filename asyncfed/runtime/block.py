"""A block: k clients whose state stands stacked, and the arithmetic of their steps.

One block of all clients in this process is the local backend; blocks in actors are the Ray backend. A block
knows nothing of either. For each of its clients it keeps the residue ψ of the last step; the payloads φ that
somebody in the block may still absorb stand in a pool, one row each.

    absorb   y = ψ + Σ weight · φ     a dense product where much of the pool is wanted, else a weighted bag
    compute  the phase's step on y    in chunks of clients, whose temporaries the allocator can reuse
    emit     φ into the pool, ψ kept

When a wave is the whole block and nothing older is wanted any more (every lockstep round), no row is copied:
ψ's buffer becomes y, y's (or the work buffer) becomes the new pool, and the old pool becomes the next work
buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from asyncfed.data import ClientShards
from asyncfed.errors import DivergenceError
from asyncfed.network.serials import SerialTable
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.layout import Layout
from asyncfed.problems.problem import Init, Problem
from asyncfed.protocols.phase import Emission, Estimate, Phase, Site, Tensors
from asyncfed.rng import Streams
from asyncfed.runtime.sampling import Batches

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

CHUNK_BYTES = 16 * 2**20  # of parameters, so that temporaries stay below the allocator's 32 MiB threshold
_DENSE_ROWS = 16  # below this many rows a bag of rows beats a product over the whole pool
_DENSE_SHARE = 0.2  # and below this share of non-zero weights


@dataclass(frozen=True, eq=False)
class Incoming:
    """What some clients of a block absorb: rows of its own pool by serial, and rows of payloads from other
    blocks.

    Of payload p from elsewhere, y[remote_rows[a:b]] += remote_weights[a:b] · payload[remote_columns[a:b]]
    with a, b = remote_first[p : p + 2].
    """

    rows: IntArray  # places in the block
    indptr: IntArray
    sources: IntArray
    weights: FloatArray
    matrix: FloatArray | None = None  # instead of the three: weights over the pool of a whole round, in order
    remote_first: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    remote_rows: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    remote_columns: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    remote_weights: FloatArray = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True, eq=False)
class BlockWave:
    """The part of a wave that falls into one block."""

    incoming: Incoming
    steps: IntArray
    emits: IntArray
    released: IntArray


@dataclass(frozen=True, eq=False)
class Measurement:
    """What a block's clients are worth: sums and counts of every metric, and the pieces of their spread."""

    clients: IntArray
    sums: dict[str, FloatArray]
    counts: IntArray
    centre: FloatArray  # mean model of the block
    spread: float  # Σ ‖x_i − centre‖²
    validation: dict[str, FloatArray]  # sums over validation samples, where asked for
    validation_counts: IntArray


@dataclass(frozen=True, eq=False)
class Observation:
    """A step as a bystander may see it (local backend only): for teaching, debugging and tests."""

    clients: IntArray
    steps: IntArray
    absorbed: Tensors
    emission: Emission


Tap = Callable[[Observation], None]


@dataclass(frozen=True, eq=False)
class _Mixing:
    """How rows of the pool are summed: by a matrix, or (with slots) as bags of weighted rows."""

    rows: int
    weights: torch.Tensor
    slots: torch.Tensor | None = None
    offsets: torch.Tensor | None = None


@dataclass
class _Pool:
    """Payload rows by slot."""

    rows: Tensors = field(default_factory=dict)
    slots: SerialTable = field(default_factory=lambda: SerialTable("slot"))
    free: list[int] = field(default_factory=list)
    size: int = 0


class Block:
    """The clients `clients` (their numbers in the run) of a problem that holds the data of exactly these."""

    def __init__(
        self,
        problem: Problem,
        clients: IntArray,
        *,
        seed: int,
        dtype: torch.dtype,
        device: str = "cpu",
        tap: Tap | None = None,
        n: int | None = None,
        initial: Tensors | None = None,
    ) -> None:
        self.clients = clients
        self._n = len(clients) if n is None else n  # in the run
        self._data = problem.data.to(dtype, device)
        self._derivatives = Derivatives.of(problem)
        self._streams = Streams(seed)
        self._dtype, self._device, self._tap = dtype, torch.device(device), tap
        self.carried: Tensors = {
            "inner": self._initial(problem.init_inner, self._derivatives.inner, "initial inner"),
            "outer": self._initial(problem.init_outer, self._derivatives.outer, "initial outer"),
        }
        for key, given in (initial or {}).items():
            self.carried[key] = given.to(self._device, self._dtype)
        self._start_inner = self.carried["inner"]

    @property
    def k(self) -> int:
        return len(self.clients)

    def begin(self, phase: Phase, first_step: int = 0) -> int:
        """Open a phase; returns the bytes of one message of it."""
        site = Site(self._derivatives, self._data, self.clients, self._n, self._start_inner)
        opening = phase.begin(site, self.carried)
        self._phase, self._first_step = phase, first_step
        self._residue: dict[str, torch.Tensor | None] = dict(opening.absorbed)
        self._memory = opening.memory
        self._pool = _Pool()
        self._spare: dict[str, list[torch.Tensor]] = {key: [] for key in opening.absorbed}
        self._batches = Batches(self._data.train, self.clients, phase.batch, self._streams, self._device)
        row_bytes = sum(t[:1].nbytes for t in opening.absorbed.values())
        self._chunk = max(1, CHUNK_BYTES // max(1, row_bytes))
        return row_bytes

    def run(self, wave: BlockWave, remote: Sequence[Tensors] = ()) -> tuple[Tensors, dict[str, FloatArray]]:
        """Absorb, compute, emit. Returns the payload rows of the wave, for other blocks, and the phase's
        report.
        """
        incoming = wave.incoming
        whole = len(incoming.rows) == self.k
        absorbed = self._absorb(incoming, remote, consume=whole)
        self._release(wave.released)
        if whole:
            payload, report = self._compute_whole(absorbed, wave)
        else:
            payload, report = self._compute_some(absorbed, wave)
        return payload, report

    def peek(self, incoming: Incoming, remote: Sequence[Tensors] = ()) -> Tensors:
        """What all clients would absorb; changes nothing."""
        return self._absorb(incoming, remote, consume=False)

    def measure(
        self, incoming: Incoming, remote: Sequence[Tensors] = (), *, validation: bool = False
    ) -> Measurement:
        """Judge everybody's present estimate on the test samples (where there are none, on the next best),
        and on the validation samples too where that is asked for.
        """
        estimate = self._phase.estimate(self.peek(incoming, remote), self._memory)
        shards = next((s for s in (self._data.test, self._data.validation) if s.total), self._data.train)
        centre, spread = _centre_and_spread(estimate.inner, self._chunk)
        return Measurement(
            self.clients,
            self._judged(estimate, shards),
            shards.sizes,
            centre.cpu().numpy(),
            spread,
            self._judged(estimate, self._data.validation) if validation else {},
            self._data.validation.sizes,
        )

    def _judged(self, estimate: Estimate, shards: ClientShards) -> dict[str, FloatArray]:
        found = self._derivatives.evaluate(estimate.inner, estimate.outer, shards)
        return {name: sums.double().cpu().numpy() for name, (sums, _) in found.items()}

    def finish(self, incoming: Incoming, steps: IntArray, remote: Sequence[Tensors] = ()) -> Tensors:
        """Close the phase: absorb what has arrived, compute once more where the phase wants it, and carry
        the outcome to the next phase. `steps` says how many steps each client has begun.
        """
        absorbed = self.peek(incoming, remote)
        if self._phase.closing:
            everyone = np.arange(self.k)
            for places, rows in self._batches.chunks(everyone, self._chunk):
                emission = self._step(absorbed, places, rows, steps, {})
                self._note(emission, places, rows, {}, self.k)
        self.carried = self.carried | self._phase.finish(absorbed, self._memory)
        return self.carried

    # --- absorbing ---------------------------------------------------------------------------------

    def _absorb(self, incoming: Incoming, remote: Sequence[Tensors], *, consume: bool) -> Tensors:
        mixing = self._mixing(incoming)
        result: Tensors = {}
        for key in self._residue:
            start = self._start(key, incoming.rows, consume=consume)
            own = self._own_sum(key, mixing, start)
            if len(own) == 1:
                _add_single_rows(own[0], incoming, [payload[key] for payload in remote])
            else:
                for place, payload in enumerate(remote):
                    _add_rows(own, incoming, slice(*incoming.remote_first[place : place + 2]), payload[key])
            result[key] = own
        return result

    def _mixing(self, incoming: Incoming) -> _Mixing | None:
        """The weights over the pool's rows: a matrix where it is well filled, else the lists that make it."""
        rows = len(incoming.rows)
        if incoming.matrix is not None:
            return _Mixing(rows, torch.from_numpy(incoming.matrix).to(self._device, self._dtype))
        if not len(incoming.sources):
            return None
        slots = self._pool.slots.get("slot", incoming.sources)
        if rows >= _DENSE_ROWS and len(slots) >= _DENSE_SHARE * rows * self._pool.size:
            matrix = np.zeros(
                (rows, self._pool.size), dtype=np.float32 if self._dtype == torch.float32 else np.float64
            )
            row_starts = np.repeat(np.arange(0, matrix.size, self._pool.size), np.diff(incoming.indptr))
            matrix.reshape(-1)[row_starts + slots] = incoming.weights
            return _Mixing(rows, torch.from_numpy(matrix).to(self._device))
        return _Mixing(
            rows,
            torch.from_numpy(incoming.weights).to(self._device, self._dtype),
            self._index(slots),
            self._index(incoming.indptr),
        )

    def _start(self, key: str, rows: IntArray, *, consume: bool) -> torch.Tensor | None:
        residue = self._residue[key]
        if residue is None:
            return None
        if len(rows) == self.k:
            return residue if consume else residue.clone()
        return residue.index_select(0, self._index(rows))

    def _own_sum(self, key: str, mixing: _Mixing | None, start: torch.Tensor | None) -> torch.Tensor:
        if mixing is None:
            assert start is not None, "only a client that has not stepped yet absorbs nothing of its own"
            return start
        pool = self._pool.rows[key]
        if mixing.slots is None:
            if start is not None:
                return start.addmm_(mixing.weights, pool)
            return torch.mm(mixing.weights, pool, out=self._buffer(key, mixing.rows, pool.shape[1]))
        total = torch.nn.functional.embedding_bag(
            mixing.slots,
            pool,
            mixing.offsets,
            mode="sum",
            per_sample_weights=mixing.weights,
            include_last_offset=True,
        )
        return total if start is None else start.add_(total)

    def _buffer(self, key: str, rows: int, dims: int) -> torch.Tensor:
        if rows == self.k and self._spare[key]:
            return self._spare[key].pop()
        return torch.empty(rows, dims, dtype=self._dtype, device=self._device)

    # --- computing and emitting --------------------------------------------------------------------

    def _compute_whole(self, absorbed: Tensors, wave: BlockWave) -> tuple[Tensors, dict[str, FloatArray]]:
        """Every client of the block steps: results are written where they will stay."""
        room = {key: self._buffer(key, self.k, y.shape[1]) for key, y in absorbed.items()}
        payload: Tensors = {}
        residue: dict[str, torch.Tensor | None] = dict.fromkeys(absorbed)
        without: dict[str, list[slice | torch.Tensor]] = {key: [] for key in absorbed}
        reports: dict[str, FloatArray] = {}
        for places, rows in self._batches.chunks(wave.incoming.rows, self._chunk):
            emission = self._step(absorbed, places, rows, wave.steps, room)
            for key in absorbed:
                home = () if residue[key] is room[key] else (room[key],)
                payload[key] = self._keep(
                    emission.payload[key], places, payload.get(key), (absorbed[key], *home)
                )
                if key in emission.residue:
                    home = () if payload[key] is room[key] else (room[key],)
                    residue[key] = self._keep(
                        emission.residue[key], places, residue[key], home, like=absorbed[key]
                    )
                else:
                    without[key].append(places)
            self._note(emission, places, rows, reports, len(wave.emits))
        for key, kept in residue.items():
            if kept is not None:
                for places in without[key]:
                    kept[places] = 0.0
        if not self._pool.slots.alive:  # nothing older is wanted: the payload itself becomes the pool
            old = self._pool.rows
            self._pool.rows, self._pool.size, self._pool.free = payload, self.k, []
            self._pool.slots.add(wave.emits, slot=np.arange(self.k))
            in_use = [*payload.values(), *(r for r in residue.values() if r is not None)]
            for key in absorbed:
                candidates = [absorbed[key], room[key]] + (
                    [old[key]] if key in old and len(old[key]) == self.k else []
                )
                free = [t for t in candidates if not any(t.data_ptr() == used.data_ptr() for used in in_use)]
                self._spare[key] = free[:2]
        else:
            self._store(payload, wave.emits)
        self._residue = residue
        return payload, reports

    def _compute_some(self, absorbed: Tensors, wave: BlockWave) -> tuple[Tensors, dict[str, FloatArray]]:
        """Some clients of the block step: their rows are copied to where they belong."""
        payload: Tensors = {}
        reports: dict[str, FloatArray] = {}
        for places, rows in self._batches.chunks(wave.incoming.rows, self._chunk):
            emission = self._step(absorbed, places, rows, wave.steps, {})
            at = self._index(rows)
            for key in absorbed:
                payload[key] = self._keep(emission.payload[key], places, payload.get(key), (absorbed[key],))
                old = self._residue[key]
                if key in emission.residue:
                    if old is None:
                        old = self._residue[key] = torch.zeros(
                            self.k, absorbed[key].shape[1], dtype=self._dtype, device=self._device
                        )
                    old.index_copy_(0, at, emission.residue[key])
                elif old is not None:
                    old.index_fill_(0, at, 0.0)
            self._note(emission, places, rows, reports, len(wave.emits))
        self._store(payload, wave.emits)
        return payload, reports

    def _step(
        self, absorbed: Tensors, places: slice | torch.Tensor, rows: IntArray, steps: IntArray, room: Tensors
    ) -> Emission:
        if len(rows) == len(steps):  # the whole wave in one chunk, in order or all of equal size
            y, space = absorbed, room
        else:
            steps = steps[places if isinstance(places, slice) else places.cpu().numpy()]
            y = {key: value[places] for key, value in absorbed.items()}
            space = {key: value[places] for key, value in room.items()} if isinstance(places, slice) else {}
        together = int(rows[-1] - rows[0]) == len(rows) - 1
        at = slice(int(rows[0]), int(rows[-1]) + 1) if together else self._index(rows)
        memory = {key: value[at] for key, value in self._memory.items()}
        within = steps - self._first_step
        batch = self._batches.draw(rows, self._first_step + self._phase.samples_of(within))
        seen = {key: value.clone() for key, value in y.items()} if self._tap is not None else {}
        emission = self._phase.step(self._derivatives, y, memory, batch, within, space)
        self._check_finite(emission, y, rows, steps)
        if self._tap is not None:
            self._tap(Observation(self.clients[rows], steps, seen, emission))
        return emission

    def _keep(
        self,
        chunk: torch.Tensor,
        places: slice | torch.Tensor,
        target: torch.Tensor | None,
        homes: Sequence[torch.Tensor],
        like: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The full-size tensor that holds the chunk: `target`, where the chunks before it stand; for the
        first chunk the home that it is already part of; or a new one (as large as a home, or `like`).
        """
        if isinstance(places, slice):
            for home in homes if target is None else (target,):
                if home[places].data_ptr() == chunk.data_ptr():
                    return home
        if target is None or any(target is home for home in homes):
            size = homes[0] if homes else like
            assert size is not None
            fresh = torch.empty(len(size), chunk.shape[1], dtype=self._dtype, device=self._device)
            if target is not None:
                fresh.copy_(target)
            target = fresh
        target[places] = chunk
        return target

    def _note(
        self,
        emission: Emission,
        places: slice | torch.Tensor,
        rows: IntArray,
        reports: dict[str, FloatArray],
        count: int,
    ) -> None:
        for key, value in emission.memory.items():
            self._remember(key, rows, value)
        here = places if isinstance(places, slice) else places.cpu().numpy()
        for key, value in emission.report.items():
            reports.setdefault(key, np.empty(count))[here] = value.detach().cpu().numpy()

    def _remember(self, key: str, rows: IntArray, value: torch.Tensor) -> None:
        memory = self._memory[key]
        if int(rows[-1] - rows[0]) != len(rows) - 1:
            memory[self._index(rows)] = value
            return
        mine = memory[int(rows[0]) : int(rows[-1]) + 1]
        if mine.data_ptr() != value.data_ptr():  # else the step wrote to it where it stands
            mine.copy_(value)

    # --- the pool ----------------------------------------------------------------------------------

    def _store(self, payload: Tensors, emits: IntArray) -> None:
        pool, wanted = self._pool, len(emits)
        if len(pool.free) < wanted:
            more = max(wanted - len(pool.free), pool.size // 2, self.k)
            for key, value in payload.items():
                old = pool.rows.get(key)
                grown = torch.empty(pool.size + more, value.shape[1], dtype=self._dtype, device=self._device)
                if old is not None:
                    grown[: pool.size] = old
                grown[pool.size :] = 0.0  # unused rows meet zero weights, and the product must be zero
                pool.rows[key] = grown
            pool.free.extend(range(pool.size + more - 1, pool.size - 1, -1))
            pool.size += more
        slots = np.array([pool.free.pop() for _ in range(wanted)], dtype=np.int64)
        for key, value in payload.items():
            pool.rows[key].index_copy_(0, self._index(slots), value)
        pool.slots.add(emits, slot=slots)

    def _release(self, serials: IntArray) -> None:
        if len(serials) == self._pool.slots.alive:  # a whole round: the next payload takes its place
            self._pool.free = list(range(self._pool.size))
            self._pool.slots.clear()
        elif len(serials):
            self._pool.free.extend(self._pool.slots.get("slot", serials)[::-1].tolist())
            self._pool.slots.forget(serials)

    # --- small things ------------------------------------------------------------------------------

    def _initial(self, init: Init, layout: Layout, stream: str) -> torch.Tensor:
        """Everybody starts from the same values, drawn from the run's seed."""
        generator = torch.Generator().manual_seed(self._streams.seed_for(stream))
        row = layout.flatten(init(generator)).detach().to(self._device, self._dtype)
        return row.expand(self.k, layout.d).clone()

    def _index(self, rows: IntArray) -> torch.Tensor:
        return torch.from_numpy(rows).to(self._device)

    def _check_finite(self, emission: Emission, absorbed: Tensors, rows: IntArray, steps: IntArray) -> None:
        """What a step reports, and whatever it made anew, must be finite: so whoever made it is named, in the
        very step, before anybody absorbs it.
        """
        for quantity, values in emission.report.items():
            self._require_finite(quantity, values, rows, steps)
        for key, value in emission.residue.items():
            self._require_finite(key, value, rows, steps)
        for key, value in emission.payload.items():
            if value is not absorbed.get(key):
                self._require_finite(key, value, rows, steps)

    def _require_finite(self, quantity: str, values: torch.Tensor, rows: IntArray, steps: IntArray) -> None:
        if math.isfinite(values.sum().item()):  # one number says that all are; only otherwise look closer
            return
        for row, own in enumerate(values):
            wrong = own[~torch.isfinite(own)]
            if wrong.numel():  # the sum of large numbers may overflow where they do not
                client = int(self.clients[rows[row]])
                raise DivergenceError(client, int(steps[row]), quantity, float(wrong.flatten()[0]))


def _centre_and_spread(x: torch.Tensor, chunk: int) -> tuple[torch.Tensor, float]:
    """Mean of the rows and the sum of their squared distances from it, in doubles, piece by piece."""
    pieces = torch.split(x, chunk)
    centre = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    for piece in pieces:
        centre += piece.sum(0, dtype=torch.float64)
    centre /= len(x)
    return centre, float(sum((piece - centre).square().sum() for piece in pieces))


def _add_single_rows(total: torch.Tensor, incoming: Incoming, payloads: Sequence[torch.Tensor]) -> None:
    """For a single client: one row after the other, without a matrix around it."""
    first = incoming.remote_first
    of = np.repeat(np.arange(len(payloads)), np.diff(first)).tolist()
    columns, weights = incoming.remote_columns.tolist(), incoming.remote_weights.tolist()
    for place, column, weight in zip(of, columns, weights, strict=True):
        total.add_(payloads[place][column].to(total.device), alpha=weight)


def _add_rows(total: torch.Tensor, incoming: Incoming, part: slice, payload: torch.Tensor) -> None:
    payload = payload.to(total.device)
    matrix = np.zeros((len(total), len(payload)))
    matrix[incoming.remote_rows[part], incoming.remote_columns[part]] = incoming.remote_weights[part]
    total.addmm_(torch.from_numpy(matrix).to(total), payload)
