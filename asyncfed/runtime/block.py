"""A block: k nodes whose state stands stacked, and the arithmetic of their steps.

One block of all clients in this process is the local backend; blocks in actors are the Ray backend; a server
is a block of one node. A block knows nothing of any of it. Its nodes keep what lasts in a *store*, rows by
name; within a part among peers each also has the residue ψ of its last step and the part's memory. The
payloads φ that somebody may still absorb stand in a pool.

    absorb   y = ψ + Σ weight · φ     a dense product where much of the pool is wanted, else a weighted bag
    compute  the part's step on y     in chunks of nodes, whose temporaries the allocator can reuse
    emit     φ into the pool, ψ kept

When a wave is the whole block and nothing older is wanted any more (every lockstep round), no row is copied:
ψ's buffer becomes y, y's (or the work buffer) becomes the new pool, and the old pool becomes the next work
buffer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.errors import DivergenceError
from asyncfed.network.waves import Common, MatrixSums, Sums
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.layout import Layout
from asyncfed.problems.problem import Init, Problem
from asyncfed.protocols.at import JUDGING, At, Home
from asyncfed.protocols.part import Act, Declared, Inbox, Judged, Messages, Part, Sizes, Start, Step, Tensors
from asyncfed.rng import Streams
from asyncfed.runtime.arrivals import senders_of, single_messages, weight_of, with_arrivals
from asyncfed.runtime.exchange import (
    BlockWave,
    CommonFrom,
    Incoming,
    Sum,
    Taken,
)
from asyncfed.runtime.guards import (
    require_declared,
    require_kind,
    require_numbers,
    require_precision,
    require_remembered,
    require_rows,
    require_same_samples,
    require_untouched,
)
from asyncfed.runtime.judging import Measurement, measured, together
from asyncfed.runtime.pool import Mixing, Pool
from asyncfed.runtime.state import State, copied, joined

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Reports = dict[str, FloatArray]

CHUNK_BYTES = 16 * 2**20  # of parameters, so that temporaries stay below the allocator's 32 MiB threshold
_ROUNDS = 2**40  # more than any run has
_WHOSE = " of whom"  # beside a payload with rows for different clients: which row is whose


@dataclass(frozen=True, eq=False)
class Observation:
    """A step as a bystander may see it (local backend only): for teaching, debugging and tests."""

    clients: IntArray  # numbers of the nodes
    steps: IntArray
    absorbed: Tensors
    made: Step
    part: Act


Tap = Callable[[Observation], None]


class Block:
    """The nodes `clients` (their numbers in the run) of a problem that holds the data of exactly these.

    `strict` hands out copies to every step and spoils them afterwards: what a method changed in place, or
    kept without returning it, shows.
    """

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
        server: bool = False,
        strict: bool = False,
    ) -> None:
        self.clients = clients
        n = len(clients) if n is None else n  # clients in the run
        self._data = problem.data.to(dtype, device)
        derivatives = self._derivatives = Derivatives.of(problem)
        self._sizes = Sizes(derivatives.inner.d, derivatives.outer.d, n)
        self._lengths = {"inner": self._sizes.inner, "outer": self._sizes.outer}
        self._streams = Streams(seed)
        self._dtype, self._device, self._tap, self._strict = dtype, torch.device(device), tap, strict
        self.store: Tensors = {
            "inner": self._initial(problem.init_inner, derivatives.inner, "initial inner"),
            "outer": self._initial(problem.init_outer, derivatives.outer, "initial outer"),
        }
        if problem.local_buffers is not None and not server:
            self.store["buffers"] = self._first_buffers()
        for key, given in (initial or {}).items():
            self.store[key] = given.to(self._device)
        self._home = Home(
            derivatives, self._data, clients, n, self.store["inner"], self._streams, server=server
        )
        self._home.buffers = self.store.get("buffers")
        self._first_outer = self.store["outer"]
        self._samples = (*self._data.train.tensors, *self._home.outer.tensors)
        self._part: Part | None = None
        self._first_step = 0
        self._turn = 0
        self._pool = Pool(self.k, dtype, self._device)
        self._boards: dict[int, Tensors] = {}  # a server's payloads, by serial
        self._residue: dict[str, Tensor | None] = {}
        self._memory: Tensors = {}
        self._borrowed: set[str] = set()  # of the memory: what also stands in the store
        self._kept: set[str] = set()  # of the store: what clients remember between rounds
        self._carries: dict[str, int] = {}
        self._emitted: tuple[str, ...] = ()  # variables of the last payload
        self._exact: tuple[str, ...] = ()  # of the open part: what is in doubles
        self._spare: dict[str, list[Tensor]] = {}
        self._chunk = 1

    @property
    def k(self) -> int:
        return len(self.clients)

    def begin(self, part: Part, first_step: int = 0) -> None:
        """Open a part among peers."""
        everyone = np.arange(self.k, dtype=np.int64)
        start = part.start(At(self._home, everyone, np.zeros(self.k, dtype=np.int64)), self.store)
        require_kind(part, "start", start, Start)
        require_rows(part, "starts with", start.memory, self.k, {})
        self._carries, self._exact = part.carries(self._sizes), part.exact
        require_declared(part, self._carries, start.absorbed, "starts with", self.k)
        self._part, self._first_step = part, first_step
        self._memory = dict(start.memory)
        # What is written to in place must be nobody else's: of what is absorbed at once, of memory in time.
        lent = Counter({_storage(t): 1 for t in (*self.store.values(), self._home.start, *self._samples)})
        lent.update(map(_storage, self._memory.values()))
        self._borrowed = {key for key, value in self._memory.items() if lent[_storage(value)] > 1}
        self._residue = {}
        absorbed = {key: value.to(self._precision(key)) for key, value in start.absorbed.items()}
        for key, value in absorbed.items():
            self._residue[key] = value.clone() if lent[_storage(value)] else value
            lent[_storage(value)] += 1
        self._pool = Pool(self.k, self._dtype, self._device)
        self._spare = {key: [] for key in absorbed}
        begins = Inbox(type(part).__name__, absorbed)
        for key, value in absorbed.items():
            self._require_finite(part, key, value, begins, everyone, np.full(self.k, first_step))
        row_bytes = sum(t[:1].nbytes for t in absorbed.values())
        self._chunk = max(1, CHUNK_BYTES // max(1, row_bytes))

    def run(self, wave: BlockWave, parcels: Sequence[Tensors] = (), part: Act | None = None) -> Reports:
        """Absorb, compute, emit; returns the part's report. `part` is a round; None for the open part."""
        self._part_of(part)
        self._turn = wave.turn
        incoming = wave.incoming
        if len(wave.reborn):
            self._forget(wave.reborn)
        whole = len(incoming.rows) == self.k and part is None and not wave.leaving
        inbox = self._absorb(incoming, parcels, consume=whole)
        if self._home.server:
            return self._compute_server(inbox, wave)
        self._pool.release(wave.released)
        if wave.leaving:
            return self._hand_over(inbox, wave)
        if whole:
            return self._compute_whole(inbox, wave)
        return self._compute_some(inbox, wave)

    def payload(self, emits: IntArray) -> Tensors:
        """The rows of the last wave, for other blocks."""
        if self._home.server:
            return self._boards[int(emits[0])]
        return self._pool.take(self._emitted, emits)

    def board(self, serial: int) -> Tensors:
        """A payload of the server."""
        return self._boards[serial]

    def release(self, serials: IntArray) -> None:
        """Forget payloads that nobody absorbs any more; those of other blocks play no part."""
        self._pool.release_own(serials)

    def hand_over(self, wanted: Sum) -> Tensors:
        """Partial sums, or rows, of payloads in the pool."""
        if wanted.weights is None:
            return self._pool.take(wanted.names, wanted.sources)
        if len(wanted.indptr) == 2:
            return self._pool.sum_of(wanted.names, wanted.sources, wanted.weights)
        mixing = self._pool.mixing(wanted.indptr, wanted.sources, wanted.weights)
        rows = {name: self._pool.rows[name] for name in wanted.names}
        return {name: mixing.of(pool.dtype).product(pool, None, None) for name, pool in rows.items()}

    def measure(
        self,
        incoming: Incoming,
        parcels: Sequence[Tensors] = (),
        *,
        part: Act | None = None,
        validation: bool = False,
    ) -> Measurement:
        """Judge everybody's present variables on the test samples (where there are none, on the next best),
        and on the validation samples too where that is asked for.
        """
        judging = self._part_of(part)
        inbox = self._absorb(incoming, parcels, consume=False)
        return self._judged(judging, inbox, incoming.rows, validation)

    def judge(self, judging: Act, common: Tensors) -> Measurement:
        """Judge everybody by what is made of variables that all share."""
        self._part_of(judging)
        inbox = Inbox(
            type(judging).__name__, {name: value.expand(self.k, -1) for name, value in common.items()}
        )
        return self._judged(judging, inbox, np.arange(self.k, dtype=np.int64), validation=False)

    def _judged(self, judging: Act, inbox: Inbox, rows: IntArray, validation: bool) -> Measurement:
        if not judging.tunes:
            return self._measured(judging, inbox, rows, validation)
        most = max(1, CHUNK_BYTES // (self._sizes.inner * self._dtype.itemsize))
        pieces = [slice(start, min(start + most, len(rows))) for start in range(0, len(rows), most)]
        return together([self._measured(judging, inbox.of(at), rows[at], validation) for at in pieces])

    def _measured(self, judging: Act, inbox: Inbox, rows: IntArray, validation: bool) -> Measurement:
        """Of the clients at some rows, in order."""
        at = At(self._home, rows, np.zeros(len(rows), dtype=np.int64), np.full(len(rows), JUDGING))
        judged = judging.judge(at, inbox, self._memory_of(judging, rows))
        require_kind(judging, "judge", judged, Judged)
        for one in (judged, *judged.also.values()):
            values = {"inner": one.inner, "outer": one.outer}
            require_rows(judging, "is judged by", values, len(rows), self._lengths)
        found = measured(
            self._derivatives,
            self.clients[rows],
            self._data,
            rows,
            judged,
            self._chunk,
            validation,
            None if self._home.buffers is None else self._home.buffers[self._index(rows)],
            at.moved_buffers,
        )
        if (wrong := found.not_finite()) is not None:
            found = replace(found, cause=judging.explain(inbox, wrong.place) or "")
        return found

    def finish(self, incoming: Incoming, steps: IntArray, parcels: Sequence[Tensors] = ()) -> None:
        """Close the part: absorb what has arrived, compute once more where the part wants it, and store the
        outcome for the next. `steps` says how many steps each client has made.
        """
        self._part_of(None)
        part = self._part
        assert part is not None, "a part among peers is begun first"
        inbox = self._absorb(incoming, parcels, consume=False)
        everyone = np.arange(self.k, dtype=np.int64)
        if part.closing:
            for places, rows in self._chunks(everyone):
                made = self._step(part, inbox, places, rows, steps, {})
                self._note(made, places, rows, {}, self.k)
        found = part.finish(self._at(everyone), inbox, self._memory)
        require_kind(part, "finish", found, dict)
        require_rows(part, "leaves", found, self.k, self._lengths)
        for key, value in found.items():
            self._require_finite(part, key, value, inbox, everyone, steps)
        self.store = self.store | found

    # --- going on later ------------------------------------------------------------------------------

    def state(self) -> State:
        """All that steps to come depend on, copied: what is made anew from the scenario is not part of it."""
        held = {name: value for name, value in self._residue.items() if value is not None}
        boards = {
            f"{serial}/{name}": value for serial, own in self._boards.items() for name, value in own.items()
        }
        parts = {
            "store": State(copied(self.store)),
            "residue": State(copied(held)),
            "memory": State(copied(self._memory)),
            "boards": State(copied(boards)),
            "pool": self._pool.state(),
        }
        facts = {"first_step": self._first_step, "chunk": self._chunk}
        return joined(parts, facts | {"exchanged": list(self._residue), "kept": sorted(self._kept)})

    def restore(self, state: State, part: Part | None) -> None:
        """Be as `state` was taken, in the middle of that part (among peers)."""

        def mine(prefix: str) -> Tensors:
            tensors = state.under(prefix).tensors
            return {name: value.to(self._device, copy=True) for name, value in tensors.items()}

        facts = state.facts
        self.store, self._memory = mine("store"), mine("memory")
        self._home.buffers = self.store.get("buffers")
        self._borrowed, self._kept = set(), set(facts["kept"])
        self._residue = dict.fromkeys(facts["exchanged"]) | mine("residue")
        self._boards = {}
        for name, value in mine("boards").items():
            serial, _, variable = name.partition("/")
            self._boards.setdefault(int(serial), {})[variable] = value
        self._part, self._first_step = part, int(facts["first_step"])
        self._carries, self._exact = ({}, ()) if part is None else (part.carries(self._sizes), part.exact)
        self._spare = {name: [] for name in self._residue}
        self._chunk = int(facts["chunk"])
        if self._chunk < 1:
            raise ValueError(f"{self._chunk} clients are to step at once")
        self._pool = Pool(self.k, self._dtype, self._device)
        self._pool.restore(state.under("pool"))

    # --- absorbing -----------------------------------------------------------------------------------

    def _absorb(self, incoming: Incoming, parcels: Sequence[Tensors], *, consume: bool) -> Inbox:
        totals: Tensors = {}
        versions: dict[str, int] = {}
        for channel in incoming.channels:
            mixing = self._mixing(channel.home)
            for name in channel.names:
                common = self._common(channel, name, incoming.rows, parcels)
                if common is not None:
                    totals[name], versions[name] = common
                    continue
                start = self._start(name, incoming.rows, consume=consume)
                own = self._own_sum(name, mixing, start)
                arrived = with_arrivals(name, own, channel.away, parcels, len(incoming.rows), self._device)
                # Where nothing has come and nothing was there, it is zero.
                totals[name] = self._zeros(incoming.rows, name) if arrived is None else arrived
        if len(incoming.empty):
            self._start_again(totals, incoming)
        each = self._single_messages(incoming, parcels) if self._current.each else None
        whose, clients = type(self._current).__name__, self._sizes.clients
        if not self._home.server:
            return Inbox(whose, totals, each, versions, None, clients)
        return Inbox(whose, totals, each, versions, senders_of(incoming), clients, weight_of(incoming))

    def _mixing(self, home: Sums | MatrixSums | Common | None) -> Mixing | None:
        if isinstance(home, MatrixSums):
            return self._pool.of_matrix(home.matrix)
        if isinstance(home, Sums) and len(home.sources):
            return self._pool.mixing(home.indptr, home.sources, home.weights)
        return None

    def _common(
        self, channel: Taken, name: str, rows: IntArray, parcels: Sequence[Tensors]
    ) -> tuple[Tensor, int] | None:
        """What all were sent alike (each its own row, where it is addressed), and which payload it is."""
        if isinstance(channel.home, Common):
            payload, version = self._boards[channel.home.source], channel.home.source
        elif channel.away and isinstance(channel.away[0], CommonFrom):
            payload, version = parcels[channel.away[0].parcel], channel.away[0].version
        else:
            return None
        value = payload[name].to(self._device)
        if name + _WHOSE in payload:
            whose = payload[name + _WHOSE][torch.from_numpy(self.clients[rows])]
            return value.index_select(0, whose.to(self._device)), version
        return value.expand(len(rows), -1), version

    def _start(self, name: str, rows: IntArray, *, consume: bool) -> Tensor | None:
        residue = self._residue.get(name)
        if residue is None:
            return None
        if len(rows) == self.k:
            return residue if consume else residue.clone()
        return residue.index_select(0, self._index(rows))

    def _own_sum(self, name: str, mixing: Mixing | None, start: Tensor | None) -> Tensor | None:
        if mixing is None:
            return start
        pool = self._pool.rows[name]
        mixing = mixing.of(pool.dtype)
        dense = mixing.slots is None and start is None
        out = self._buffer(name, mixing.rows, pool.shape[1]) if dense else None
        return mixing.product(pool, start, out)

    def _single_messages(self, incoming: Incoming, parcels: Sequence[Tensors]) -> Callable[[str], Messages]:
        def each(name: str) -> Messages:
            nothing = self._zeros(incoming.rows[:0], name)
            return single_messages(name, incoming, parcels, self._pool, nothing)

        return each

    def _zeros(self, rows: IntArray, name: str) -> Tensor:
        length = self._current.carries(self._sizes)[name]
        return torch.zeros(len(rows), length, dtype=self._precision(name), device=self._device)

    def _buffer(self, name: str, rows: int, length: int) -> Tensor:
        if rows == self.k and self._spare.get(name):
            return self._spare[name].pop()
        return torch.empty(rows, length, dtype=self._precision(name), device=self._device)

    def _precision(self, name: str) -> torch.dtype:
        """Of what the open part exchanges: the run's, or doubles."""
        return torch.float64 if name in self._exact else self._dtype

    # --- coming and going ----------------------------------------------------------------------------

    def _forget(self, rows: IntArray) -> Start | None:
        """These nodes crashed and are back. With a server they remember nothing of earlier rounds. Among
        peers they hold nothing, and all else is as the run began: returns how the part starts.
        """
        at = self._index(rows)
        if self._home.buffers is not None:
            self._home.buffers[at] = self._first_buffers()[: len(rows)]
        if self._current is not self._part:
            for name in self._kept:
                self.store[name].index_fill_(0, at, 0.0)
            return None
        assert self._part is not None
        for held in self._residue.values():
            if held is not None:
                held.index_fill_(0, at, 0.0)
        for name, first in (("inner", self._home.start), ("outer", self._first_outer)):
            self.store[name] = self.store[name].index_copy(0, at, first.index_select(0, at))
        everyone = np.arange(self.k, dtype=np.int64)
        start = self._part.start(At(self._home, everyone, np.zeros(self.k, dtype=np.int64)), self.store)
        for key, value in start.memory.items():
            self._own_memory(key)
            self._memory[key].index_copy_(0, at, value.index_select(0, at))
        return start

    def _start_again(self, totals: Tensors, incoming: Incoming) -> None:
        """Who has nothing stands where everybody began."""
        start = self._forget(incoming.empty)
        assert start is not None, "clients of a server stand on what it sends"
        at = self._index(incoming.empty)
        places = self._index(np.searchsorted(incoming.rows, incoming.empty))
        for name, value in start.absorbed.items():
            totals[name] = totals[name].index_copy(0, places, value[at].to(totals[name]))

    def _hand_over(self, inbox: Inbox, wave: BlockWave) -> Reports:
        """Who leaves computes nothing: all it has is its payload."""
        rows = wave.incoming.rows
        self._emitted = tuple(inbox)
        self._pool.put(inbox, wave.emits, self.clients[rows])
        for residue in self._residue.values():
            if residue is not None:
                residue[self._index(rows)] = 0.0
        if self._tap is not None:
            held = {name: value.clone() for name, value in inbox.items()}
            self._tap(Observation(self.clients[rows], wave.steps, held, Step(held), self._current))
        return {}

    # --- computing and emitting ----------------------------------------------------------------------

    def _compute_whole(self, inbox: Inbox, wave: BlockWave) -> Reports:
        """Every client of the block makes a step among peers: results are written where they will stay."""
        part = self._current
        room = {key: self._buffer(key, self.k, y.shape[1]) for key, y in inbox.items()}
        payload: Tensors = {}
        residue: dict[str, Tensor | None] = dict.fromkeys(inbox)
        without: dict[str, list[slice | Tensor]] = {key: [] for key in inbox}
        reports: Reports = {}
        for places, rows in self._chunks(wave.incoming.rows):
            made = self._step(part, inbox, places, rows, wave.steps, room, wave.elapsed)
            for key in inbox:
                home = () if residue[key] is room[key] else (room[key],)
                payload[key] = self._keep(made.payload[key], places, payload.get(key), (inbox[key], *home))
                if key in made.residue:
                    home = () if payload[key] is room[key] else (room[key],)
                    residue[key] = self._keep(made.residue[key], places, residue[key], home, like=inbox[key])
                else:
                    without[key].append(places)
            self._note(made, places, rows, reports, len(wave.emits))
        for key, kept in residue.items():
            if kept is not None:
                for places in without[key]:
                    kept[places] = 0.0
        self._emitted = tuple(payload)
        if not self._pool.alive:  # nothing older is wanted: the payload itself becomes the pool
            old = self._pool.adopt(payload, wave.emits, self.clients)
            in_use = [*payload.values(), *(r for r in residue.values() if r is not None)]
            for key in inbox:
                candidates = [inbox[key], room[key]] + (
                    [old[key]] if key in old and len(old[key]) == self.k else []
                )
                free = [t for t in candidates if not any(t.data_ptr() == used.data_ptr() for used in in_use)]
                self._spare[key] = free[:2]
        else:
            self._pool.put(payload, wave.emits, self.clients)
        self._residue = residue
        return reports

    def _compute_some(self, inbox: Inbox, wave: BlockWave) -> Reports:
        """Some nodes of the block make a step: their rows are copied to where they belong."""
        part = self._current
        payload: Tensors = {}
        reports: Reports = {}
        # Clients of a server read nothing of the pool, so theirs may go there chunk by chunk.
        at_once = part is not self._part and bool(self._pool.alive)
        for places, rows in self._chunks(wave.incoming.rows):
            made = self._step(part, inbox, places, rows, wave.steps, {}, wave.elapsed)
            at = self._index(rows)
            self._emitted = tuple(made.payload)
            if at_once:
                here = places if isinstance(places, slice) else places.cpu().numpy()
                self._pool.put(made.payload, wave.emits[here], self.clients[rows])
            for key, value in () if at_once else made.payload.items():
                if len(rows) == len(wave.emits) and isinstance(places, slice):
                    payload[key] = value
                else:
                    if key not in payload:
                        payload[key] = value.new_empty(len(wave.emits), value.shape[1])
                    payload[key][places] = value
            for key in self._residue if part is self._part else ():
                old = self._residue[key]
                if key in made.residue:
                    if old is None:
                        new = made.residue[key]
                        old = self._residue[key] = new.new_zeros(self.k, new.shape[1])
                    old.index_copy_(0, at, made.residue[key])
                elif old is not None:
                    old.index_fill_(0, at, 0.0)
            self._note(made, places, rows, reports, len(wave.emits))
        nodes = self.clients[wave.incoming.rows]
        if part is self._part:
            self._pool.put(payload, wave.emits, nodes)
        elif not at_once:  # where nothing older is wanted, the answers of a round stay where they are
            self._pool.adopt(payload, wave.emits, nodes)
        return reports

    def _compute_server(self, inbox: Inbox, wave: BlockWave) -> Reports:
        """The server's step: what changes is stored, and what of it is sent becomes a payload."""
        rows = wave.incoming.rows
        made = self._step(self._current, inbox, slice(0, 1), rows, wave.steps, {})
        for serial in wave.released.tolist():
            self._boards.pop(serial, None)
        self.store = self.store | made.memory
        whose = {name + _WHOSE: rows for name, rows in made.addressed.items()}
        self._boards[int(wave.emits[0])] = made.payload | whose
        return {name: value.double().cpu().numpy() for name, value in made.report.items()}

    def _step(
        self,
        part: Act,
        inbox: Inbox,
        places: slice | Tensor,
        rows: IntArray,
        steps: IntArray,
        room: Tensors,
        elapsed: FloatArray | None = None,
    ) -> Step:
        if len(rows) != len(steps):  # else the whole wave in one chunk, in order or all of equal size
            here = places if isinstance(places, slice) else places.cpu().numpy()
            steps, elapsed = steps[here], None if elapsed is None else elapsed[here]
            inbox = inbox.of(places)
            room = {key: value[places] for key, value in room.items()} if isinstance(places, slice) else {}
        memory = self._memory_of(part, rows)
        seen = {key: value.clone() for key, value in inbox.items()} if self._tap is not None else {}
        within = steps - self._first_step if part is self._part else steps
        if part is self._part:
            numbers = (self._first_step if part.draws_from is None else part.draws_from) + part.samples_of(
                within
            )
        else:  # who works twice in a round looks at other samples
            numbers = steps + self._turn * _ROUNDS
        at = At(self._home, rows, within, numbers, part.batch, room, elapsed)
        if self._strict:
            inbox = inbox.with_values({key: _copy(value) for key, value in inbox.items()})
            memory = Declared(type(part).__name__, {key: value.clone() for key, value in memory.items()})
            at.room = {key: value.clone() for key, value in at.room.items()}
        handed = [(key, value, value._version) for key, value in memory.items()]
        sent = [(key, value, value._version) for key, value in inbox.items()] if part.asks else []
        samples = [value._version for value in self._samples]
        made = part.step(at, inbox, memory)
        require_kind(part, "step", made, Step)
        require_untouched(part, memory, handed, () if self._home.server else sent)
        require_same_samples(part, self._samples, samples)
        self._check_step(part, made, memory, inbox, rows, steps)
        if at.moved_buffers is not None:
            assert self._home.buffers is not None
            self._require_finite(part, "buffers", at.moved_buffers, inbox, rows, steps)
            self._remember(self._home.buffers, rows, at.moved_buffers)
        if handed and not self._home.server:
            made = _on_its_own(made, memory)
        if self._strict:
            made = _spoil(made, (*inbox.values(), *memory.values(), *at.room.values()))
        if self._tap is not None:
            self._tap(Observation(self.clients[rows], steps, seen, made, part))
        return made

    def _memory_of(self, part: Act, rows: IntArray) -> Tensors:
        """What these nodes keep, guarded: it is not to be changed in place."""
        whose = type(part).__name__
        if part is self._part:
            kept = self._memory
        elif self._home.server:
            kept = self.store
        else:
            kept = self._remembered(part)
        at: slice | Tensor = slice(None)
        if len(rows) < self.k:
            together = int(rows[-1] - rows[0]) == len(rows) - 1
            at = slice(int(rows[0]), int(rows[-1]) + 1) if together else self._index(rows)
        return Declared(whose, {key: value[at] for key, value in kept.items()})

    def _remembered(self, part: Act) -> Tensors:
        """What the clients keep between rounds; zero before the first."""
        kept: Tensors = {}
        for name, length in part.remembered(self._sizes).items():
            if name not in self.store:
                self.store[name] = torch.zeros(self.k, length, dtype=self._dtype, device=self._device)
                self._kept.add(name)
            kept[name] = self.store[name]
        return kept

    def _keep(
        self,
        chunk: Tensor,
        places: slice | Tensor,
        target: Tensor | None,
        homes: Sequence[Tensor],
        like: Tensor | None = None,
    ) -> Tensor:
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
            fresh = chunk.new_empty(len(size), chunk.shape[1])
            if target is not None:
                fresh.copy_(target)
            target = fresh
        target[places] = chunk
        return target

    def _note(self, made: Step, places: slice | Tensor, rows: IntArray, reports: Reports, count: int) -> None:
        memory = self._memory if self._current is self._part else self.store
        for key, value in made.memory.items():
            self._own_memory(key)
            self._remember(memory[key], rows, value)
        here = places if isinstance(places, slice) else places.cpu().numpy()
        for key, value in made.report.items():
            reports.setdefault(key, np.full(count, np.nan))[here] = value.detach().cpu().numpy()

    def _own_memory(self, key: str) -> None:
        """What is written to in place must be nobody else's."""
        if key in self._borrowed:
            self._memory[key] = self._memory[key].clone()
            self._borrowed.remove(key)

    def _remember(self, memory: Tensor, rows: IntArray, value: Tensor) -> None:
        if int(rows[-1] - rows[0]) != len(rows) - 1:
            memory[self._index(rows)] = value
        else:
            memory[int(rows[0]) : int(rows[-1]) + 1].copy_(value)

    # --- small things --------------------------------------------------------------------------------

    def _part_of(self, round: Act | None) -> Act:
        """The part at work: the round given, or else the part that is open."""
        part = self._part if round is None else round
        assert part is not None, "a part among peers is begun first"
        self._current = part
        if round is not None:
            self._part, self._exact = None, ()
            if not self._home.server:
                self._carries = round.carries(self._sizes)
                row = sum(self._carries.values()) * self._dtype.itemsize
                self._chunk = max(1, CHUNK_BYTES // max(1, row))
        return part

    def _at(self, rows: IntArray) -> At:
        return At(self._home, rows, np.zeros(len(rows), dtype=np.int64))

    def _chunks(self, rows: IntArray) -> Iterator[tuple[slice | Tensor, IntArray]]:
        """(places within the wave, rows of the block) that can be computed together: not too many at once,
        and equally many samples where all of them are used.
        """
        most = self._chunk
        alike = self._current is self._part and self._current.batch is None
        sizes = self._data.train.sizes[rows] if alike else None
        if sizes is None or (sizes == sizes[0]).all():
            for start in range(0, len(rows), most):
                places = slice(start, min(start + most, len(rows)))
                yield places, rows[places]
            return
        for size in np.unique(sizes):
            equal = np.flatnonzero(sizes == size)
            for start in range(0, len(equal), most):
                chosen = equal[start : start + most]
                yield torch.from_numpy(chosen).to(self._device), rows[chosen]

    def _initial(self, init: Init, layout: Layout, stream: str) -> Tensor:
        """Everybody starts from the same values, drawn from the run's seed."""
        generator = torch.Generator().manual_seed(self._streams.seed_for(stream))
        row = layout.flatten(init(generator)).detach().to(self._device, self._dtype)
        return row.expand(self.k, layout.d).clone()

    def _first_buffers(self) -> Tensor:
        """Those of a network that nothing was trained on, a row for every client."""
        row = self._derivatives.problem.local_buffers
        assert row is not None
        return row.to(self._device, self._dtype).repeat(self.k, 1)

    def _index(self, rows: IntArray) -> Tensor:
        return torch.from_numpy(rows).to(self._device)

    # --- checks --------------------------------------------------------------------------------------

    def _check_step(
        self, part: Act, made: Step, memory: Tensors, inbox: Inbox, rows: IntArray, steps: IntArray
    ) -> None:
        """What a step returns is what its part declares, and all of it is finite."""
        if not self._home.server:
            require_declared(part, self._carries, made.payload, "sends", len(rows))
            require_precision(part, made.payload, "sends", self._precision)
            if made.residue:
                require_declared(part, self._carries, made.residue, "keeps", len(rows), some=True)
                require_precision(part, made.residue, "keeps", self._precision)
            require_remembered(part, memory, made.memory, len(rows))
            require_numbers(part, made.report, len(rows))
        self._check_finite(part, made, inbox, rows, steps)

    def _check_finite(self, part: Act, made: Step, inbox: Inbox, rows: IntArray, steps: IntArray) -> None:
        """What a step reports, and whatever it made anew, must be finite: so whoever made it is named, in the
        very step, before anybody absorbs it.
        """
        if part is self._part:  # a round may have nothing to report of some clients
            for quantity, values in made.report.items():
                self._require_finite(part, quantity, values, inbox, rows, steps)
        for key, value in made.residue.items():
            self._require_finite(part, key, value, inbox, rows, steps)
        for key, value in made.payload.items():
            if value is not inbox.get(key):
                self._require_finite(part, key, value, inbox, rows, steps)

    def _require_finite(
        self, part: Act, quantity: str, values: Tensor, inbox: Inbox, rows: IntArray, steps: IntArray
    ) -> None:
        if math.isfinite(values.sum().item()):  # one number says that all are; only otherwise look closer
            return
        for row, own in enumerate(values):
            wrong = own[~torch.isfinite(own)]
            if wrong.numel():  # the sum of large numbers may overflow where they do not
                at = min(row, len(rows) - 1)
                client = int(self.clients[rows[at]])
                value = float(wrong.flatten()[0])
                cause = part.explain(inbox, at) or ""
                raise DivergenceError(
                    client, int(steps[at]), quantity, value, server=self._home.server, cause=cause
                )


def _storage(value: Tensor) -> int:
    """Where a tensor's numbers lie: the same of all views of it."""
    return value.untyped_storage().data_ptr()


def _on_its_own(made: Step, memory: Tensors) -> Step:
    """What a step sends and remembers, apart from the memory it was handed, which is about to change."""
    lent = {_storage(value) for value in memory.values()}

    def apart(values: Tensors) -> Tensors:
        return {key: value.clone() if _storage(value) in lent else value for key, value in values.items()}

    return replace(made, payload=apart(made.payload), memory=apart(made.memory))


def _spoil(made: Step, lent: Iterable[Tensor]) -> Step:
    """What a step made, on its own; and nothing that it was lent is of any use after this."""
    apart = Step(*({key: value.clone() for key, value in values.items()} for values in vars(made).values()))
    for value in lent:
        if value.is_floating_point():
            (value[:1] if value.stride(0) == 0 else value).fill_(torch.nan)
    return apart


def _copy(value: Tensor) -> Tensor:
    """A copy; of what all share, one that all share."""
    return value[:1].clone().expand_as(value) if value.stride(0) == 0 else value.clone()
