"""The first minute: a network that misbehaves, methods that cope with it, and its edges; digits, 20 clients.

Two clients are ten times slower than the others, messages take time, and one in twenty is lost. Every link
between peers is down half of the time, each direction for itself. Four ways to learn from 20 clients, each of
which has its own mixture of the ten digits and 54 samples of it on average:

    alone      everybody for itself: nothing is sent
    waits      FedAvg: a server that asks everybody, and waits for the slowest
    goes-on    FedBuff: a server that moves on any three answers
    peers      Push-DIGing: gradients are tracked from peer to peer, with no server at all

Rates and sizes were fixed on seeds 0 to 2, and then tried on 0 to 9: see docs/results.md for all ten.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asyncfed import Result, Scenario, Study, Summary, SummaryTable, VirtualTime
from asyncfed.explorer.graph import declared
from asyncfed.problems import Problem, classification
from asyncfed.protocols import Buffered, FedAvg, FedBuff, Local, LocalSteps, PushDIGing, Server
from scenarios._server_methods import remembered
from topologies import small_world, star, stochastic_directed

ALONE, WAITS, GOES_ON, PEERS = "alone", "waits", "goes-on", "peers"
GOAL = 0.85
SLOW: dict[int | str, float] = {0: 10.0, 1: 10.0}
LOST = 0.05


def study(
    clients: int = 20,
    horizon: float = 240.0,
    rounds: int = 8,
    moves: int = 200,
    model: str = "mlp:32",
    seed: int = 0,
) -> Study:
    """`rounds` of the server that waits, `moves` of the one that does not; the others go on to `horizon`."""
    steps = int(1.6 * horizon) + 60  # nobody comes to the end of them
    local = LocalSteps(0.3, steps=5, batch=32)
    links = stochastic_directed(small_world(clients, 6, 0.3, seed=seed), probability=(0.3, 0.7), seed=seed)
    methods: dict[str, tuple[Any, Any, int]] = {
        ALONE: (Local(steps, 0.3, batch=32), links, 10),
        WAITS: (FedAvg(rounds, local, Server(weighted=True, attempts=10)), star(clients), 1),
        GOES_ON: (FedBuff(moves, local, server=Buffered(size=3)), star(clients), 5),
        PEERS: (PushDIGing(steps, 0.5, batch=32, omega0=1.0), links, 10),
    }

    @remembered
    def problem() -> Problem:
        return classification("digits", clients=clients, model=model, partition="dirichlet:1.0", seed=seed)

    def scenario(name: str) -> Scenario:
        protocol, topology, every = methods[name]
        timing = VirtualTime(
            "exponential(1.0)", factors=SLOW, latency="exponential(0.2)", loss=LOST,
            horizon=horizon if protocol.server is None else None,
        )  # fmt: skip
        return Scenario(
            problem=problem(),
            topology=topology,
            protocol=protocol,
            timing=timing,
            seed=seed,
            evaluate_every=every,
        )

    def summary(results: Mapping[str, Result]) -> Summary:
        return summarise(results, horizon)

    return Study("quickstart", {name: partial(scenario, name) for name in methods}, summary)


def summarise(results: Mapping[str, Result], horizon: float) -> Summary:
    import pandas as pd

    told = {name: _told(result, horizon) for name, result in results.items()}
    ways = SummaryTable(
        "Four ways to learn from 20 clients",
        pd.DataFrame([_line(name, results[name], one, horizon) for name, one in told.items()]),
        (
            f"accuracy in %, at time {horizon:g}, over all test samples; a step takes 1 on average, 10 of "
            "clients 0 and 1",
            f"to {100 * GOAL:g}%: the time of the first evaluation that is there",
        ),
    )
    tables = [ways]
    if PEERS in results:
        tables.append(SummaryTable("Edges of the peers", _edges(results[PEERS]), _EDGES))
    return Summary(tables, _findings(results, told), {"accuracy": lambda path: _draw(results, path)})


def _told(result: Result, horizon: float) -> dict[str, float]:
    metrics = result.metrics
    there = metrics[metrics["accuracy"] >= GOAL]
    at = metrics[metrics["virtual_time"] <= horizon]
    return {
        "accuracy": float(at["accuracy"].iloc[-1]),
        "goal": float(there["virtual_time"].iloc[0]) if len(there) else float("inf"),
        "ended": float(metrics["virtual_time"].iloc[-1]),
        "bytes": float(at["bytes"].iloc[-1]),
    }


_WAYS = {
    ALONE: "Local", WAITS: "FedAvg, a server that waits", GOES_ON: "FedBuff, a server that does not",
    PEERS: "Push-DIGing, no server",
}  # fmt: skip


def _line(name: str, result: Result, told: Mapping[str, float], horizon: float) -> dict[str, Any]:
    totals = result.manifest["totals"]
    tried = totals["sent"] + totals["link_down"]
    goal = f"{told['goal']:.0f}" if np.isfinite(told["goal"]) else f"not by {told['ended']:.0f}"
    return {
        "method": _WAYS[name],
        "accuracy": f"{100 * told['accuracy']:.1f}",
        f"to {100 * GOAL:g}%": goal,
        "MB sent": f"{told['bytes'] / 1e6:.0f}",
        "delivered": f"{100 * totals['delivered'] / tried:.0f}%" if tried else "–",
    }


_EDGES = (
    "declared: the chance that a link is up and a message not lost; measured: the share that arrived",
    "the five furthest apart, in standard errors",
)


def _edges(result: Result) -> Any:
    return _compared(result).head(5).round({"declared": 2, "measured": 2, "s.e. apart": 1})


def _compared(result: Result) -> Any:
    """Declared against measured, of every edge; those furthest apart first."""
    import pandas as pd

    edges = result.trace.edges()
    ends = [edges[end].to_numpy(int) for end in ("sender", "receiver")]
    chance = declared(result.scenario_data["topology"])
    expected = np.array([chance[edge] for edge in zip(*ends, strict=True)]) * (1 - LOST)
    arrived, tried, under_way = (
        edges[name].to_numpy(float) for name in ("delivered", "attempts", "in_flight")
    )
    tried = tried - under_way
    measured = arrived / tried
    errors = (measured - expected) / np.sqrt(expected * (1 - expected) / tried)
    table = pd.DataFrame(
        {
            "from": ends[0], "to": ends[1], "messages": tried.astype(int), "declared": expected,
            "measured": measured, "s.e. apart": errors,
        }
    )  # fmt: skip
    return table.iloc[np.argsort(-np.abs(errors), kind="stable")].reset_index(drop=True)


def _findings(
    results: Mapping[str, Result], told: Mapping[str, Mapping[str, float]]
) -> list[tuple[str, bool | None]]:
    found: list[tuple[str, bool | None]] = []
    if {WAITS, GOES_ON} <= set(told):
        slow, fast = told[WAITS], told[GOES_ON]
        least = min(slow["goal"], slow["ended"])
        more = "" if np.isfinite(slow["goal"]) else "more than "
        found.append(
            (
                f"A server that does not wait is at {100 * GOAL:g}% {more}{least / fast['goal']:.1f} times "
                "sooner than one that waits",
                least > 2 * fast["goal"],
            )
        )
    if {ALONE, PEERS} <= set(told):
        gain = 100 * (told[PEERS]["accuracy"] - told[ALONE]["accuracy"])
        found.append(
            (
                f"Peers gain {gain:+.1f} points over being alone, on links that are down half of the time",
                gain > 3,
            )
        )
    if PEERS in results:
        edges = _compared(results[PEERS])
        within = int((edges["s.e. apart"].abs() <= 2).sum())
        found.append(
            (
                f"{within} of {len(edges)} edges delivered what they declare, to 2 standard errors (95% do)",
                within >= 0.88 * len(edges),
            )
        )
    return found


def _draw(results: Mapping[str, Result], path: Path) -> None:
    from asyncfed.report import draw_curves

    curves = {
        _WAYS[name]: (result.metrics["virtual_time"].to_numpy(), 100 * result.metrics["accuracy"].to_numpy())
        for name, result in results.items()
    }
    draw_curves(
        path, curves, xlabel="virtual time", ylabel="accuracy, %", title="Four ways to learn from 20 clients"
    )
