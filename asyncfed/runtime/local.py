"""The local backend: all clients in one block in this process, and the server, if any, in another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from asyncfed.errors import RunError
from asyncfed.network.waves import Absorption, Common, Snapshot, Wave
from asyncfed.problems.problem import Problem
from asyncfed.problems.threads import WORTH_SHARING
from asyncfed.protocols.part import Act, Part, Tensors
from asyncfed.runtime.backend import Placement
from asyncfed.runtime.block import Block, FloatArray, Reports, Tap
from asyncfed.runtime.exchange import Away, BlockWave, CommonFrom, Incoming, RowsFrom, Sum, SumsFrom, Taken
from asyncfed.runtime.judging import Measurement
from asyncfed.runtime.repacking import repacked
from asyncfed.runtime.state import State, joined, of_arrays

_FIRST = np.zeros(1, dtype=np.int64)


def choose_device(device: str, cuda: bool) -> str:
    """ "auto" is the GPU where there is one."""
    if device == "auto":
        return "cuda" if cuda else "cpu"
    return device


def worthwhile_threads(clients: int, batch: int, parameters: int, available: int) -> int:
    """One torch thread where a step's work is so small that sharing it costs more than it saves (and leaves
    the other cores to the trace), all of them otherwise."""
    return 1 if clients * batch * parameters < WORTH_SHARING else available


def without_data(problem: Problem) -> Problem:
    """For a server, which has none."""
    return replace(problem, data=problem.data.select(np.zeros(0, dtype=np.int64)))


class LocalBackend:
    """Everybody at home: what a server sends its clients read where it stands, and it is handed their sum."""

    def __init__(
        self,
        problem: Problem,
        *,
        seed: int,
        dtype: torch.dtype,
        device: str = "auto",
        tap: Tap | None = None,
        initial: Tensors | None = None,
        server: bool = False,
        strict: bool = False,
        threads: int | None = None,
    ) -> None:
        chosen = choose_device(device, torch.cuda.is_available())
        n = problem.clients
        given = initial or {}
        everyone = np.arange(n, dtype=np.int64)
        self._clients = Block(
            problem, everyone, seed=seed, dtype=dtype, device=chosen, tap=tap,
            initial={} if server else given, strict=strict,
        )  # fmt: skip
        self._server: Block | None = None
        if server:
            self._server = Block(
                without_data(problem), np.array([n]), seed=seed, dtype=dtype, device=chosen, tap=tap, n=n,
                initial=given, server=True, strict=strict,
            )  # fmt: skip
        self._problem = problem
        self._before = torch.get_num_threads()
        self._threads = self._before if threads is None else threads
        torch.set_num_threads(self._threads)
        self._reports: dict[str, list[FloatArray]] = {}
        self._standing: Reports = {}  # what the server reported last
        self.placement = Placement("local", 0, n, chosen, threads=self._threads)

    def begin(self, part: Part, first_step: int) -> None:
        self._share_work(part)
        self._clients.begin(part, first_step)

    def _share_work(self, part: Part) -> None:
        """Among as many threads as are worth it."""
        largest = int(self._problem.data.train.sizes.max())
        batch = largest if part.batch is None else part.batch
        parameters = self._clients.store["inner"].shape[1]
        torch.set_num_threads(worthwhile_threads(self._problem.clients, batch, parameters, self._threads))

    @torch.no_grad()
    def run(self, wave: Wave, round: Act | None = None) -> None:
        block, incoming, parcels = self._clients, *self._incoming(wave.absorption, round)
        released = wave.released
        if self._server is not None and int(wave.absorption.nodes[0]) == self._problem.clients:
            block = self._server
            self._clients.release(released)  # what it has of it is in the parcels
        made = BlockWave(
            incoming, wave.steps, wave.emits, released, elapsed=wave.elapsed, reborn=wave.reborn,
            leaving=wave.leaving, turn=wave.turn,
        )  # fmt: skip
        report = block.run(made, parcels, round)
        if block is self._server:
            self._standing |= report
            return
        for name, values in report.items():
            self._reports.setdefault(name, []).append(values)

    def reports(self) -> Reports:
        collected = {name: np.concatenate(pieces) for name, pieces in self._reports.items()}
        self._reports = {}
        return collected | self._standing

    def measure(
        self, snapshot: Snapshot, *, judging: Act | None = None, validation: bool = False
    ) -> list[Measurement]:
        incoming, parcels = self._incoming(snapshot.absorption, judging)
        return [self._clients.measure(incoming, parcels, part=judging, validation=validation)]

    def finish(self, snapshot: Snapshot) -> None:
        self._clients.finish(self._incoming(snapshot.absorption, None)[0], snapshot.steps)

    def final(self) -> Tensors:
        if self._server is None:
            return final_of(self._clients.store, {})
        return final_of(self._server.store, self._clients.store)

    def state(self) -> Callable[[], State]:
        blocks = {"clients": self._clients} if self._server is None else {
            "clients": self._clients, "server": self._server,
        }  # fmt: skip
        told = {name: np.concatenate(pieces) for name, pieces in self._reports.items()}
        parts = {name: block.state() for name, block in blocks.items()}
        parts |= {"reports": State(of_arrays(told)), "standing": State(of_arrays(self._standing))}
        whole = joined(parts)
        return lambda: whole

    def restore(self, state: State, part: Part | None) -> None:
        server = self._server is not None
        state = repacked(state, None, clients=self._problem.clients, server=server)
        self._clients.restore(state.under("clients"), part)
        if self._server is not None:
            self._server.restore(state.under("server"), None)
        if part is not None:
            self._share_work(part)
        told = state.under("reports")
        self._reports = {name: [told.array(name)] for name in told.tensors}
        standing = state.under("standing")
        self._standing = {name: standing.array(name) for name in standing.tensors}

    def recover(self) -> str:
        raise RunError("there is nobody to replace in this process")

    def close(self, *, well: bool = False) -> None:
        torch.set_num_threads(self._before)

    def _incoming(self, absorption: Absorption, act: Act | None) -> tuple[Incoming, list[Tensors]]:
        if self._server is None:
            home = tuple(Taken(channel.names, channel) for channel in absorption.channels)
            return Incoming(absorption.nodes, home, absorption.empty), []
        channels, parcels = [], []
        for channel in absorption.channels:
            away: Away
            if isinstance(channel, Common):
                parcels.append(self._server.board(channel.source))
                away = CommonFrom(len(parcels) - 1, channel.source)
            else:
                single = act is not None and bool(act.each)
                weights = None if single else channel.weights
                wanted = Sum(0, channel.names, channel.indptr, channel.sources, weights)
                parcels.append(self._clients.hand_over(wanted))
                away = SumsFrom(len(parcels) - 1, _FIRST, channel.senders, channel.weights)
                if single:
                    count = len(channel.sources)
                    away = RowsFrom(
                        len(parcels) - 1,
                        np.array([0, count]),
                        np.zeros(count, dtype=np.int64),
                        np.arange(count),
                        channel.weights,
                        channel.senders,
                    )
            channels.append(Taken(channel.names, None, (away,)))
        rows = absorption.nodes if int(absorption.nodes[0]) < self._problem.clients else _FIRST
        return Incoming(rows, tuple(channels)), parcels


def final_of(decides: Tensors, remembered: Tensors) -> Tensors:
    """What the deciding nodes have, each tensor of its own memory, and what the clients remember: on the CPU,
    wherever it was computed.
    """
    own = {name: value.to("cpu", copy=True) for name, value in decides.items()}
    mine = {name: value for name, value in remembered.items() if name not in ("inner", "outer")}
    return own | {f"clients/{name}": value.to("cpu", copy=True) for name, value in mine.items()}
