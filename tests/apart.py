"""What the Ray backend does with its actors, one after the other and without Ray: the same nodes, plans and
parcels. So what an actor does can be looked at in this process, on a device that is only pretended.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from asyncfed import Scenario
from asyncfed.network.waves import Snapshot, Wave
from asyncfed.protocols.part import Act, Part, Tensors
from asyncfed.rng import Streams
from asyncfed.runtime.backend import Placement
from asyncfed.runtime.block import Reports
from asyncfed.runtime.exchange import Exchange, Need, Object
from asyncfed.runtime.judging import Measurement
from asyncfed.runtime.local import final_of, without_data
from asyncfed.runtime.loop import Evaluation, Stage, execute
from asyncfed.runtime.ray_actors import Arrays, Node
from asyncfed.runtime.ray_backend import _stacked
from asyncfed.scenario import check

Ranges = tuple[tuple[int, int], ...]


def _settled(*arguments: Any, **named: Any) -> Node:
    node = Node()
    node.settle(*arguments, **named)
    return node


class Nobody:
    """A recorder that writes nothing down."""

    def messages(self, **columns: Any) -> None:
        return None

    def steps(self, **columns: Any) -> None:
        return None


class Apart:
    """Clients `ranges` in a node each, on a device; the server in another, on the CPU."""

    def __init__(self, scenario: Scenario, ranges: Ranges, device: str) -> None:
        problem, n = scenario.problem, scenario.clients
        self.placement = Placement("apart", len(ranges), max(b - a for a, b in ranges), device)
        self._server = scenario.protocol.server is not None
        self._exchange = Exchange((*ranges, (n, n + 1)) if self._server else ranges)
        self._clients = len(ranges)
        dtype = torch.float64 if scenario.precision == "float64" else torch.float32
        common = {"n": n, "initial": {}, "seed": scenario.seed, "dtype": dtype, "threads": 1}
        self._made: list[Callable[[], Node]] = []
        for first, last in ranges:
            some = np.arange(first, last, dtype=np.int64)
            mine = replace(problem, data=problem.data.select(some))
            self._made.append(partial(_settled, mine, some, device=device, server=False, **common))
        if self._server:
            node, empty = np.array([n], dtype=np.int64), without_data(problem)
            self._made.append(partial(_settled, empty, node, device="cpu", server=True, **common))
        self.nodes = self._new_nodes()
        self.replaced = 0
        self._objects: dict[int, Any] = {}
        self._reports: list[Reports] = []
        self._standing: Reports = {}
        self._open: Part | None = None

    def _new_nodes(self) -> list[Any]:
        attended = signal.getsignal(signal.SIGINT)
        nodes = [make() for make in self._made]
        signal.signal(signal.SIGINT, attended)  # an actor leaves it to the driver, which is here
        return nodes

    def replace_nodes(self) -> None:
        """Others take the place of all nodes, with what a checkpoint holds of these."""
        states = [node.state() for node in self.nodes]
        self.nodes = self._new_nodes()
        for place, (node, (arrays, facts)) in enumerate(zip(self.nodes, states, strict=True)):
            node.restore(_stored(arrays), facts, self._open if place < self._clients else None)
        self.replaced += 1

    def begin(self, part: Part, first_step: int) -> None:
        self._exchange.reset()
        self._objects, self._open = {}, part
        for node in self.nodes[: self._clients]:
            node.begin(part, first_step)

    def run(self, wave: Wave, round: Act | None = None) -> None:
        tasks = self._exchange.tasks(wave, single=self._single(round))
        parcels = [self._parcels(task.needs) for task in tasks]
        payloads = []
        for task, own in zip(tasks, parcels, strict=True):
            payload, report = self.nodes[task.place].run(task.wave, round, *own)
            payloads.append(_stored(payload))
            if task.place < self._clients:
                self._reports.append(report)
            else:
                self._standing |= report
        for number in self._exchange.forget(wave.released):
            del self._objects[number]
        for task, payload in zip(tasks, payloads, strict=True):
            emitted = self._exchange.emitted(task)
            if emitted is not None:
                self._objects[emitted] = payload

    def reports(self) -> Reports:
        names = dict.fromkeys(name for report in self._reports for name in report)
        found = {name: np.concatenate([r[name] for r in self._reports if name in r]) for name in names}
        self._reports = []
        return found | self._standing

    def measure(
        self, snapshot: Snapshot, *, judging: Act | None = None, validation: bool = False
    ) -> list[Measurement]:
        found = []
        for place in range(self._clients):
            task = self._exchange.everything(snapshot.absorption, place, single=self._single(judging))
            parcels = self._parcels(task.needs)
            found.append(self.nodes[place].measure(task, judging, validation, *parcels))
        return found

    def finish(self, snapshot: Snapshot) -> None:
        tasks = [
            self._exchange.everything(snapshot.absorption, place, single=self._single(None))
            for place in range(self._clients)
        ]
        parcels = [self._parcels(task.needs) for task in tasks]
        for task, own in zip(tasks, parcels, strict=True):
            steps = snapshot.steps[slice(*self._exchange.ranges[task.place])]
            self.nodes[task.place].finish(task, steps, *own)

    def final(self) -> Tensors:
        parts = [node.final() for node in self.nodes[: self._clients]]
        names = dict.fromkeys(name for part in parts for name in part)
        clients = {name: torch.from_numpy(_stacked(parts, name)) for name in names}
        if not self._server:
            return clients
        board = self.nodes[-1].final()
        return final_of({name: torch.tensor(value) for name, value in board.items()}, clients)

    def close(self, *, well: bool = False) -> None:
        self.nodes = []

    def _single(self, round: Act | None) -> bool:
        act = self._open if round is None else round
        return act is not None and bool(act.each)

    def _parcels(self, needs: list[Need]) -> list[Any]:
        return [
            self._objects[need.number]
            if isinstance(need, Object)
            else _stored(self.nodes[need.owner].hand_over(need))
            for need in needs
        ]


def _stored(arrays: Arrays | None) -> Arrays | None:
    """As Ray's object store holds them: copies that nobody may write to."""
    if arrays is None:
        return None
    stored = {name: value.copy() for name, value in arrays.items()}
    for value in stored.values():
        value.flags.writeable = False
    return stored


def played(
    scenario: Scenario, backend: Any, at_rest: Callable[[], None] | None = None
) -> tuple[list[Evaluation], Tensors]:
    """A scenario to its end on a backend: what was judged, and the variables that it ended with. `at_rest` is
    called wherever a checkpoint could be taken.
    """
    stage = Stage(
        scene=check(scenario),
        streams=Streams(scenario.seed),
        backend=backend,
        recorder=Nobody(),
        itemsize=8 if scenario.precision == "float64" else 4,
        evaluate_every=scenario.evaluate_every,
        enough=lambda item: False,
    )
    judged = []
    for item in execute(scenario.protocol, stage):
        if isinstance(item, Evaluation):
            judged.append(item)
        elif item.rests and at_rest is not None:
            at_rest()
    return judged, backend.final()
