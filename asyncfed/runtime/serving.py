"""The loop of a server-based run: outer iterations, their rounds, and what the server must send for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from asyncfed.network.links import Network
from asyncfed.network.server_timeline import Ask, ServerTimeline
from asyncfed.network.timing import Timing
from asyncfed.network.waves import Recorder
from asyncfed.protocols.rounds import LEVELS, Level, Round, ServerProtocol
from asyncfed.rng import Streams
from asyncfed.runtime.cohort import Task
from asyncfed.runtime.engine import Evaluation, Tick, gathered
from asyncfed.runtime.served import ServedBackend

IntArray = npt.NDArray[np.int64]


class Knowledge:
    """Which version of every variable on the board each client is known to have, since it has answered.

    A request carries the rest of what its round reads.
    """

    def __init__(self, clients: int, lengths: dict[str, int], itemsize: int) -> None:
        self._clients, self._itemsize = clients, itemsize
        self._lengths = lengths  # of the inner and the outer variable
        self._version: dict[str, int] = {}
        self._known: dict[str, IntArray] = {}

    def size(self, name: str) -> int:
        return self._lengths[LEVELS[name]] * self._itemsize

    def request_bytes(self, round: Round, clients: IntArray) -> IntArray:
        total = np.zeros(len(clients), dtype=np.int64)
        for name in round.reads:
            known = self._known.setdefault(name, np.full(self._clients, -1, dtype=np.int64))[clients]
            total += self.size(name) * (known != self.version(name))
        return total

    def version(self, name: str) -> int:
        return self._version.get(name, 0)

    def versions(self, round: Round) -> dict[str, int]:
        """Of what the round reads."""
        return {name: self.version(name) for name in round.reads}

    def answered(self, round: Round, clients: IntArray) -> None:
        for name, version in self.versions(round).items():
            self._known[name][clients] = version

    def answered_late(self, versions: dict[str, int], client: int) -> None:
        """To a request of an earlier round, when these were the versions."""
        for name, version in versions.items():
            self._known[name][client] = max(self._known[name][client], version)

    def changed(self, *names: str) -> None:
        for name in names:
            self._version[name] = self.version(name) + 1


def serve(
    protocol: ServerProtocol,
    network: Network,
    timing: Timing,
    streams: Streams,
    backend: ServedBackend,
    recorder: Recorder,
    *,
    sizes: dict[Level, IntArray],
    lengths: dict[str, int],
    itemsize: int,
    evaluate_every: int,
    enough: Callable[[Evaluation], bool],
) -> Iterator[Tick | Evaluation]:
    """Run all iterations, or until an evaluation is good enough; the last evaluation is the final one.

    `sizes` are the clients' samples of the inner and of the outer loss, `lengths` those of the variables.
    """
    n = len(sizes["inner"])
    timeline = timing.server_timeline(network, streams, recorder, protocol.server)
    knowledge = Knowledge(n, lengths, itemsize)
    importance = sizes["inner"].astype(float) if protocol.server.weighted else np.ones(n)
    carried: dict[int, dict[str, int]] = {}  # by the rounds from which answers were held: what they had read
    turns = 0
    last = protocol.outer_steps
    iteration = 0
    while True:
        rounds = protocol.rounds(iteration, streams) if iteration < last else ()
        limit = protocol.max_rounds
        over = not rounds or (limit is not None and timeline.round + len(rounds) > limit)
        if over or iteration % evaluate_every == 0:
            evaluation = _evaluation(backend, timeline, iteration, final=over)
            if not over and enough(evaluation):
                over, evaluation = True, replace(evaluation, final=True)
            yield evaluation
        if over:
            timeline.finish()
            return
        planned = last if limit is None else min(last, iteration + (limit - timeline.round) // len(rounds))
        if protocol.start == "fresh" and iteration:
            backend.reset_inner()
            knowledge.changed("y")
        cohorts: dict[int, IntArray] = {}
        for round in rounds:
            if round.cohort not in cohorts:
                cohorts[round.cohort] = protocol.server.draw(streams, iteration, round.cohort, n, turns)
                turns += 1
            asked = cohorts[round.cohort]
            exchange = timeline.exchange(
                Ask(
                    round.phase,
                    round.kind,
                    asked,
                    knowledge.request_bytes(round, asked),
                    sum(knowledge.size(name) for name in round.answers),
                    round.work({level: of[asked] for level, of in sizes.items()}, asked),
                    importance[asked],
                    series=f"{type(round).__name__} {round.kind}",  # not all that is called p may be mixed
                )
            )
            knowledge.answered(round, exchange.clients)
            if len(exchange.held):
                carried[exchange.round] = knowledge.versions(round)
            for number, client in (*(entry[:2] for entry in exchange.older), *exchange.forgotten):
                knowledge.answered_late(carried[number], client)
            backend.run(
                Task(
                    round,
                    exchange.round,
                    exchange.clients,
                    exchange.weights,
                    exchange.held,
                    exchange.older,
                    exchange.forgotten,
                    knowledge.version("x"),
                )
            )
            knowledge.changed(*round.writes)
            yield Tick(round.phase, n * iteration, n * planned, timeline.now)
        iteration += 1


def _evaluation(
    backend: ServedBackend, timeline: ServerTimeline, iteration: int, *, final: bool
) -> Evaluation:
    reports: dict[str, list[npt.NDArray[np.float64]]] = {}
    for report in backend.reports():  # first, for what went wrong in a round is told by whose it was
        for name, values in report.items():
            reports.setdefault(name, []).append(values)
    return Evaluation(
        phase="server",
        time=timeline.now,
        steps=timeline.worked.copy(),
        rounds=timeline.round,
        reports={name: np.concatenate(values) for name, values in reports.items()},
        **gathered(backend.measure()),
        consensus=None,
        final=final,
        outer_step=iteration,
        waiting=0,
        on_the_way=0,
        message_bytes=0,
    )
