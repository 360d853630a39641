"""The local backend: all clients in one block in this process, and the server, if any, in another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from asyncfed.network.waves import Absorption, Snapshot, Wave
from asyncfed.problems.problem import Problem
from asyncfed.problems.threads import WORTH_SHARING
from asyncfed.protocols.part import Act, Part, Tensors
from asyncfed.runtime.backend import Placement
from asyncfed.runtime.block import Block, FloatArray, Measurement, Reports, Tap
from asyncfed.runtime.exchange import BlockWave, Exchange, Incoming, Need, Object, Taken, Task


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
    """Everybody at home."""

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
    ) -> None:
        chosen = choose_device(device, torch.cuda.is_available())
        n = problem.clients
        given = initial or {}
        self._clients = Block(
            problem, np.arange(n, dtype=np.int64), seed=seed, dtype=dtype, device=chosen, tap=tap,
            initial={} if server else given, strict=strict,
        )  # fmt: skip
        self._blocks = [self._clients]
        self._exchange: Exchange | None = None
        if server:
            self._blocks.append(
                Block(
                    without_data(problem),
                    np.array([n]),
                    seed=seed,
                    dtype=dtype,
                    device=chosen,
                    tap=tap,
                    n=n,
                    initial=given,
                    server=True,
                    strict=strict,
                )
            )
            self._exchange = Exchange(((0, n), (n, n + 1)))
        self._objects: dict[int, Tensors] = {}
        self._problem = problem
        self._threads = torch.get_num_threads()
        self._reports: dict[str, list[FloatArray]] = {}
        self._standing: Reports = {}  # what the server reported last
        self.placement = Placement("local", 0, n, chosen)

    def begin(self, part: Part, first_step: int) -> None:
        largest = int(self._problem.data.train.sizes.max())
        batch = largest if part.batch is None else part.batch
        parameters = self._clients.store["inner"].shape[1]
        torch.set_num_threads(worthwhile_threads(self._problem.clients, batch, parameters, self._threads))
        self._clients.begin(part, first_step)

    @torch.no_grad()
    def run(self, wave: Wave, round: Act | None = None) -> None:
        if self._exchange is None:
            alone = BlockWave(_incoming(wave.absorption), wave.steps, wave.emits, wave.released)
            self._note(self._clients.run(alone, part=round))
            return
        tasks = self._exchange.tasks(wave, single=round is not None and bool(round.each))
        parcels = [self._parcels(task.needs) for task in tasks]  # before anybody steps, and forgets
        for task, own in zip(tasks, parcels, strict=True):
            report = self._blocks[task.place].run(task.wave, own, round)
            if self._blocks[task.place] is self._clients:
                self._note(report)
            else:
                self._standing |= report
        for number in self._exchange.forget(wave.released):
            del self._objects[number]
        for task in tasks:
            emitted = self._exchange.emitted(task)
            if emitted is not None:
                self._objects[emitted] = self._blocks[task.place].payload(task.wave.emits)

    def reports(self) -> Reports:
        collected = {name: np.concatenate(pieces) for name, pieces in self._reports.items()}
        self._reports = {}
        return collected | self._standing

    def measure(
        self, snapshot: Snapshot, *, judging: Act | None = None, validation: bool = False
    ) -> list[Measurement]:
        task = self._task(snapshot)
        return [
            self._clients.measure(
                task.wave.incoming, self._parcels(task.needs), part=judging, validation=validation
            )
        ]

    def finish(self, snapshot: Snapshot) -> None:
        self._clients.finish(self._task(snapshot).wave.incoming, snapshot.steps)

    def final(self) -> Tensors:
        return final_of(self._blocks[-1].store, self._clients.store if self._exchange else {})

    def close(self) -> None:
        torch.set_num_threads(self._threads)

    def _task(self, snapshot: Snapshot) -> Task:
        if self._exchange is not None:
            return self._exchange.everything(snapshot.absorption, 0)
        nothing = np.zeros(0, dtype=np.int64)
        return Task(0, BlockWave(_incoming(snapshot.absorption), nothing, nothing, nothing))

    def _parcels(self, needs: list[Need]) -> list[Tensors]:
        return [
            self._objects[need.number]
            if isinstance(need, Object)
            else self._blocks[need.owner].hand_over(need)
            for need in needs
        ]

    def _note(self, report: Reports) -> None:
        for name, values in report.items():
            self._reports.setdefault(name, []).append(values)


def _incoming(absorption: Absorption) -> Incoming:
    """Of a block that is everybody."""
    return Incoming(absorption.nodes, tuple(Taken(channel.names, channel) for channel in absorption.channels))


def final_of(decides: Tensors, remembered: Tensors) -> Tensors:
    """What the deciding nodes have, each tensor of its own memory, and what the clients remember."""
    own = {name: value.clone() for name, value in decides.items()}
    mine = {name: value for name, value in remembered.items() if name not in ("inner", "outer")}
    return own | {f"clients/{name}": value.clone() for name, value in mine.items()}
