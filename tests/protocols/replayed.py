"""An oracle for methods with a server whose clients remember: what the trace says happened, done by hand.

The trace says which client set to work when, on the request of which round, and which answers the server took
in. Each client's works are done one after the other, whether or not anybody ever got the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncfed import Result

Array = npt.NDArray[np.float64]
Answers = list[tuple[int, float, Any]]  # client, weight, answer


def replay(
    result: Result,
    clients: int,
    state: Any,
    memory: Any,
    local: Callable[[int, int, Any, Any], tuple[Any, Any]],
    fold: Callable[[int, Any, Answers], Any],
) -> tuple[list[Any], list[Any]]:
    """The server's state after 0, 1, … rounds, and what each client remembers at the end.

    `local(client, round, state, memory)` returns answer and memory; `fold(round, state, answers)` the state.
    """
    steps = result.trace.steps()
    todo = [
        steps[steps.client == i].sort_values("started_at", kind="stable")[["step", "ended_at"]].to_numpy()
        for i in range(clients)
    ]
    messages = result.trace.to_pandas()
    used = messages[(messages.receiver == clients) & (messages.status == "delivered")]
    states, kept = [state], [memory] * clients
    answers: dict[tuple[int, int, float], Any] = {}
    done = [0] * clients

    def work(client: int) -> tuple[int, int, float]:
        step, ended = todo[client][done[client]]
        key = (client, int(step), float(ended))
        answers[key], kept[client] = local(client, int(step), states[int(step)], kept[client])
        done[client] += 1
        return key

    for number in range(int(used.absorbed_step.max()) + 1):
        taken: Answers = []
        for row in used[used.absorbed_step == number].sort_values("sender").itertuples():
            key = (int(row.sender), int(row.step), float(row.sent_at))
            while key not in answers:
                work(key[0])
            taken.append((key[0], float(row.weight), answers[key]))
        states.append(fold(number, states[-1], taken))
    for client in range(clients):
        while done[client] < len(todo[client]):
            work(client)
    return states, kept
