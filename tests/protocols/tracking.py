"""What the tests of gradient tracking share: quadratics in plain NumPy, what every step absorbed and sent,
and where the tracker is at an instant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asyncfed import Result, Scenario, run
from asyncfed.problems import Problem, average_minimiser
from asyncfed.runtime.block import Observation

Array = npt.NDArray[np.float64]
Key = tuple[int, int]  # client, step


@dataclass
class Quadratics:
    """∇f_i(x_i) = A_i (x_i − b_i), of all clients at once or of one."""

    A: Array
    b: Array

    @classmethod
    def of(cls, problem: Problem) -> Quadratics:
        clients = [problem.data.train.of(i) for i in range(problem.clients)]
        return cls(np.stack([A[0].numpy() for A, _ in clients]), np.stack([b[0].numpy() for _, b in clients]))

    def gradients(self, x: Array) -> Array:
        return np.einsum("ijk,ik->ij", self.A, x - self.b)

    def gradient(self, client: int, x: Array) -> Array:
        return np.asarray(self.A[client] @ (x - self.b[client]))


@dataclass
class Seen:
    """A tap: what every step absorbed, sent and remembers."""

    absorbed: dict[Key, dict[str, Array]] = field(default_factory=dict)
    sent: dict[Key, dict[str, Array]] = field(default_factory=dict)
    remembered: dict[Key, dict[str, Array]] = field(default_factory=dict)

    def __call__(self, seen: Observation) -> None:
        for row, key in enumerate(zip(seen.clients.tolist(), seen.steps.tolist(), strict=True)):
            for store, tensors in (
                (self.absorbed, seen.absorbed),
                (self.sent, seen.made.payload),
                (self.remembered, seen.made.memory),
            ):
                store[key] = {name: value[row].clone().numpy() for name, value in tensors.items()}

    def stacked(self, name: str, step: int, clients: int) -> Array:
        return np.stack([self.absorbed[client, step][name] for client in range(clients)])


def run_seen(scenario: Scenario, out: Path) -> tuple[Result, Seen]:
    seen = Seen()
    return run(scenario, out=out, tap=seen), seen


def shares(result: Result, step: int, n: int) -> Array:
    """Column-stochastic C[receiver, sender] of a lockstep step, as the trace has it."""
    messages = result.trace.to_pandas()
    here = messages[(messages.step == step) & (messages.status == "delivered")]
    C = np.zeros((n, n))
    C[here.receiver, here.sender] = here.weight
    C[np.diag_indices(n)] = 1 - C.sum(0)
    return C


def gap(x: Array, problem: Problem) -> float:
    """How far the worst client is from the minimiser of the mean."""
    return float(np.linalg.norm(x - average_minimiser(problem).numpy(), axis=1).max())


def tracked_at(result: Result, seen: Seen, instant: float) -> tuple[Array, Array, dict[int, int]]:
    """Σ y at an instant in virtual time, by the trace: all of it, what is on its way, and the last step of
    each client.

    A step absorbs when it starts, so those that have started by then are the past. Of a client's last payload
    the client has what the past has not absorbed; of the payloads before, what is left is on its way, too.
    """
    times, messages = result.trace.steps(), result.trace.to_pandas()
    started = times[times.started_at <= instant]
    last = {int(client): int(step) for client, step in started.groupby("client").step.max().items()}
    sent = messages[messages.status.isin(["delivered", "in_flight"])]
    past = sent[[row.step <= last[row.sender] for row in sent.itertuples()]]
    whole = sum(seen.sent[key]["y"] for key in last.items())
    flying = np.zeros_like(whole)
    for row in past.itertuples():
        y = row.weight * seen.sent[row.sender, row.step]["y"]
        absorbed = row.status == "delivered" and row.absorbed_step <= last[row.receiver]
        if row.step == last[row.sender]:
            whole = whole - y if absorbed else whole
        elif not absorbed:
            whole = whole + y
        if not absorbed and row.sent_at <= instant:
            flying = flying + y
    return whole, flying, last
