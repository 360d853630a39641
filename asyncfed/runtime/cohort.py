"""A cohort: clients of one process that work for a server, and the server's board.

What a cohort does in a round is one call: the clients asked compute their answers, in chunks whose
temporaries the allocator can reuse, and the weighted sum of these leaves the cohort, ready to be added to
those of other cohorts. Who is asked, whose answer arrives and what it weighs was decided by the network
before. Answers that arrive too late for their own round are kept until the round that uses them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.data import ClientShards
from asyncfed.errors import DivergenceError
from asyncfed.problems.derivatives import Derivatives, samples_at_once
from asyncfed.problems.layout import Layout
from asyncfed.problems.problem import Init, Problem
from asyncfed.protocols.rounds import LEVELS, Round, Tensors, Workplace
from asyncfed.rng import Streams
from asyncfed.runtime.block import CHUNK_BYTES, Measurement

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Task:
    """What a cohort does in a round. Clients by their numbers in the run."""

    round: Round
    number: int
    clients: IntArray  # whose answers count now, and by how much
    weights: FloatArray
    held: IntArray  # whose answers are kept
    older: tuple[tuple[int, int, float], ...]  # (round, client, weight) of kept answers that count now
    forgotten: tuple[tuple[int, int], ...]  # kept answers that never will
    x_version: int  # which x on the board this is: what is encoded with it is kept while it lasts

    def part(self, start: int, stop: int) -> Task | None:
        """What of it concerns clients start..stop−1; None where nothing does."""
        mine = (self.clients >= start) & (self.clients < stop)
        held = self.held[(self.held >= start) & (self.held < stop)]
        older = tuple(entry for entry in self.older if start <= entry[1] < stop)
        forgotten = tuple(entry for entry in self.forgotten if start <= entry[1] < stop)
        if not (mine.any() or len(held) or older or forgotten):
            return None
        return Task(
            self.round,
            self.number,
            self.clients[mine],
            self.weights[mine],
            held,
            older,
            forgotten,
            self.x_version,
        )


class Cohort:
    """The clients `clients` of a problem that holds the data of exactly these, numbered without gaps."""

    def __init__(
        self, problem: Problem, clients: IntArray, *, seed: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self._first = int(clients[0])
        self._clients = clients
        self._data = problem.data.to(dtype, device)
        self._derivatives = Derivatives.of(problem)
        self._staged = self._derivatives.staged()
        self._outer = self._data.validation if problem.outer_split == "validation" else self._data.train
        self._streams = Streams(seed)
        self._dtype = dtype
        self._kept: dict[tuple[int, int], Tensors] = {}
        self._encoded: dict[bytes, ClientShards] = {}
        self._encoded_with = -1

    @torch.no_grad()
    def answer(self, task: Task, board: Tensors) -> tuple[Tensors, dict[str, FloatArray]]:
        """Compute what is asked; returns Σ weight · answer over this cohort and the round's report."""
        total: Tensors = {}
        reports: dict[str, list[FloatArray]] = {}
        computed = np.concatenate([task.clients, task.held])
        weights = np.concatenate([task.weights, np.zeros(len(task.held))])
        order = np.argsort(computed)
        computed, weights = computed[order], weights[order]
        most = self._chunk(task.round)
        for start in range(0, len(computed), most):
            clients, share = computed[start : start + most], weights[start : start + most]
            answer = task.round.local(self._workplace(task, clients), board)
            self._add(total, answer.values, share)
            self._require_finite(total, answer.values, clients, task.number)
            for name, value in answer.report.items():
                reports.setdefault(name, []).append(value.double().cpu().numpy())
            for place in np.flatnonzero(np.isin(clients, task.held)).tolist():
                kept = {name: rows[place : place + 1].clone() for name, rows in answer.values.items()}
                self._kept[task.number, int(clients[place])] = kept
        for number, client, weight in task.older:
            self._add(total, self._kept.pop((number, client)), np.array([weight]))
        for entry in task.forgotten:
            self._kept.pop(entry, None)
        return total, {name: np.concatenate(pieces) for name, pieces in reports.items()}

    def measure(self, board: Tensors) -> Measurement:
        """Judge the server's variables on every client's test samples (where there are none, on the next
        best).
        """
        data = self._data
        shards = next((s for s in (data.test, data.validation) if s.total), data.train)
        sums = self._derivatives.evaluate_common(board["y"], board["x"], shards)
        return Measurement(
            self._clients,
            {name: values.double().cpu().numpy() for name, values in sums.items()},
            shards.sizes,
            np.zeros(0),
            0.0,
            {},
            data.validation.sizes,
        )

    def _workplace(self, task: Task, clients: IntArray) -> Workplace:
        rows = clients - self._first
        return Workplace(
            self._derivatives,
            self._staged,
            self._data.train,
            self._outer,
            rows,
            clients,
            self._streams,
            task.number,
            lambda x: self._encode(x, task.x_version, rows),
        )

    def _encode(self, x: Tensor, version: int, rows: IntArray) -> ClientShards:
        """The clients' training samples after the first stage; made once for each x."""
        if version != self._encoded_with:
            self._encoded, self._encoded_with = {}, version
        key = rows.tobytes()
        if key not in self._encoded:
            stages = self._derivatives.problem.stages
            assert stages is not None
            train = self._data.train if len(rows) == self._data.clients else self._data.train.select(rows)
            outer = self._derivatives.outer.views_one(x)
            most = samples_at_once(train)
            pieces = [
                stages.encode(outer, tuple(t[start : start + most] for t in train.tensors))
                for start in range(0, train.total, most)
            ]
            tensors = pieces[0] if len(pieces) == 1 else tuple(map(torch.cat, zip(*pieces, strict=True)))
            self._encoded[key] = ClientShards(tensors, train.sizes)
        return self._encoded[key]

    def _chunk(self, round: Round) -> int:
        row = sum(self._length(name) for name in round.answers) * self._dtype.itemsize
        return max(1, CHUNK_BYTES // max(1, row))

    def _length(self, name: str) -> int:
        return (self._derivatives.inner if LEVELS[name] == "inner" else self._derivatives.outer).d

    def _add(self, total: Tensors, values: Tensors, weights: FloatArray) -> None:
        for name, rows in values.items():
            share = torch.from_numpy(weights).to(rows)
            total[name] = torch.mv(rows.T, share) if name not in total else total[name].addmv_(rows.T, share)

    def _require_finite(self, total: Tensors, values: Tensors, clients: IntArray, number: int) -> None:
        for name in values:
            if math.isfinite(total[name].sum().item()):
                continue
            for client, row in zip(clients.tolist(), values[name], strict=True):
                wrong = row[~torch.isfinite(row)]
                if wrong.numel():
                    raise DivergenceError(client, number, name, float(wrong[0]))


class Board:
    """The server's variables."""

    def __init__(
        self,
        problem: Problem,
        *,
        seed: int,
        dtype: torch.dtype,
        device: str = "cpu",
        initial: Tensors | None = None,
    ) -> None:
        layouts = Derivatives.of(problem)
        streams = Streams(seed)

        def start(init: Init, layout: Layout, stream: str) -> Tensor:
            generator = torch.Generator().manual_seed(streams.seed_for(stream))
            return layout.flatten(init(generator)).detach().to(device, dtype)

        self.values: Tensors = {
            "y": start(problem.init_inner, layouts.inner, "initial inner"),
            "x": start(problem.init_outer, layouts.outer, "initial outer"),
        }
        for name, short in (("inner", "y"), ("outer", "x")):
            if initial and name in initial:
                self.values[short] = initial[name][0].to(device, dtype)
        self._start = self.values["y"]

    def reset_inner(self) -> Tensors:
        """The inner variable back at where the run began."""
        self.values["y"] = self._start
        return {"y": self._start}

    def fold(self, round: Round, parts: Sequence[Mapping[str, Tensor]]) -> Tensors:
        """Add up what the cohorts sent and put what the round makes of it on the board; returns that."""
        mean: Tensors = {}
        for part in parts:
            for name, value in part.items():
                mean[name] = value.clone() if name not in mean else mean[name].add_(value)
        changed = round.fold(self.values, mean)
        self.values |= changed
        return changed

    def final(self) -> Tensors:
        """As a result shows it: one row, of its own memory (p may be the same tensor as the sum)."""
        names = {"y": "inner", "x": "outer"}
        return {names.get(name, name): value[None].clone() for name, value in self.values.items()}
