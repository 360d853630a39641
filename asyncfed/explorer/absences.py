"""When clients were away, drawn again from the scenario: a trace holds what they did, not where they were."""

from __future__ import annotations

from typing import Any

from asyncfed.network.timing import Timing
from asyncfed.network.uptimes import Uptimes
from asyncfed.registry import from_data
from asyncfed.rng import Streams
from asyncfed.scenario_data import graph_from_data

MOST = 20_000  # intervals that are told


def presence(data: dict[str, Any], clients: int) -> Uptimes | None:
    """When each client of a scenario, as its run directory holds it, is there; None where all always are."""
    described = data.get("timing")
    if not isinstance(described, dict) or described.get("presence") is None:
        return None
    timing: Timing = from_data(described, "a scenario")
    network = timing.network(graph_from_data(data["topology"]))
    attendance = timing.attendance(network, clients, Streams(int(data["seed"])))
    return None if attendance is None else attendance.uptimes


def absences(uptimes: Uptimes, clients: int, until: float) -> list[tuple[int, float, float]]:
    """(client, from, to) of every absence before a time, of the first clients where they are too many."""
    found: list[tuple[int, float, float]] = []
    for client in range(clients):
        time = 0.0
        while time < until and len(found) < MOST:
            back = uptimes.next_on(client, time)
            if back > time:
                found.append((client, time, min(back, until)))
            time = uptimes.next_off(client, back) if back < until else until
    return found
