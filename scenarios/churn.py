"""Clients that come and go: accuracy and lost mass against churn, with a server and without.

Digits, logistic, 20 clients, Dirichlet(0.4). A client is there for T units of time in the mean and away for
T/4 (exponential both), T = 100, 30 or 10, or it is always there; an absence is a pause or a crash. A step
takes a unit of time in the mean (exponential), a message 0.1 (exponential), and 1% of messages get lost.

    SGP, plain          (4b), batch 32, rate 0.1, on links that come and go one way (small world of degree 8,
                        up 0.4 to 0.8); what is lost is lost
    SGP, running sums   the same; what is lost on a link comes with the next message
    FedAvg              rounds with everybody who is there, 5 local steps of batch 32 at rate 0.1; what
                        is lost is asked for again
    FedBuff             moves of 5 answers, the same local steps

All have `horizon` units of time. Servers know no horizon: they make more rounds than fit in (a work takes
five units in the mean, a round of FedAvg as long as its slowest) and are judged by the last look before it.

*Lost mass* is 1 − (what clients hold + what is under way or waits for a carrier) / n, of push-sum weights, at
the end. It is counted along the trace alone: ω of a step is what its client kept of the step before and the
weights of what it absorbed times the ω of their senders' steps; who is away at some time between two steps
and crashed kept nothing, and who is away in the beginning of a run with crashes has nothing.

Protocol, fixed before the study was run (after one seed of the ends of the grid, for its cost): one rate for
all, nothing is tuned; three seeds; a finding holds if it does by more than two standard errors of the
difference of means, and is open otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from asyncfed import Result, Scenario, Study, Summary, SummaryTable, VirtualTime
from asyncfed.network import DrawnPresence, Names
from asyncfed.protocols import SGP, Buffered, FedAvg, FedBuff, LocalSteps, Server
from asyncfed.rng import Streams
from scenarios.stragglers import digits, network
from topologies import star

PLAIN, SUMS, FEDAVG, FEDBUFF = "SGP, plain", "SGP, running sums", "FedAvg", "FedBuff"
METHODS = (PLAIN, SUMS, FEDAVG, FEDBUFF)
STAYS = (100.0, 30.0, 10.0)
Absence = Literal["pause", "crash"]
ABSENCES: tuple[Absence, ...] = ("pause", "crash")
LOCAL_STEPS, AT_ONCE = 5, 5
Key = tuple[str, float, str]  # method, time there, absence


def study(seeds: int = 3, clients: int = 20, horizon: float = 100.0, loss: float = 0.01) -> Study:
    def part(key: Key, seed: int) -> Callable[[], Scenario]:
        return lambda: scenario(*key, clients=clients, horizon=horizon, loss=loss, seed=seed)

    parts = {_file(key, seed): part(key, seed) for key in keys() for seed in range(seeds)}
    return Study("churn", parts, lambda results: summarise(results, horizon))


def keys() -> list[Key]:
    """Who is always there neither pauses nor crashes."""
    grid: list[tuple[float, str]] = [(math.inf, "pause")]
    grid += [(there, absence) for absence in ABSENCES for there in STAYS]
    return [(method, *one) for method in METHODS for one in grid]


def scenario(
    method: str, there: float, absence: Any, *, clients: int, horizon: float, loss: float, seed: int
) -> Scenario:
    peers = method in (PLAIN, SUMS)
    presence = None
    if math.isfinite(there):
        presence = DrawnPresence(f"exponential({there:g})", f"exponential({there / 4:g})", absence=absence)
    timing = VirtualTime(
        "exponential(1.0)",
        latency="exponential(0.1)",
        loss=loss,
        horizon=horizon if peers else None,
        running_sums=method == SUMS if peers else None,
        presence=presence,
    )
    return Scenario(
        name="churn",
        problem=digits(clients),
        topology=network(clients) if peers else star(clients),
        protocol=_protocol(method, clients, horizon),
        timing=timing,
        evaluate_every={FEDAVG: 1, FEDBUFF: 4}.get(method, horizon / 10),
        seed=seed,
    )


def _protocol(method: str, clients: int, horizon: float) -> Any:
    local = LocalSteps(0.1, steps=LOCAL_STEPS, batch=32)
    if method in (PLAIN, SUMS):
        return SGP(int(2 * horizon) + 50, 0.1, batch=32)
    if method == FEDAVG:
        return FedAvg(max(2, round(horizon / 6)), local, Server(attempts=1000))
    moves = round(1.1 * horizon * clients / LOCAL_STEPS / AT_ONCE)
    return FedBuff(max(2, moves), local, server=Buffered(min(AT_ONCE, clients), attempts=1000))


# --- mass ----------------------------------------------------------------------------------------------


def lost_mass(result: Result) -> float:
    """The share of all push-sum weight that nobody holds at the end, and that nothing brings."""
    messages: Any = result.trace.to_pandas()
    steps: Any = result.trace.steps()
    scenario, timing = result.scenario, result.scenario.timing
    assert isinstance(timing, VirtualTime)
    assert timing.horizon is not None
    n, end = scenario.clients, timing.horizon
    sent = messages[messages["status"] != "link_down"]
    presence = timing.presence
    attendance = None if presence is None else presence.attend(Names(range(n)), Streams(scenario.seed))
    crashes = attendance is not None and attendance.crashes
    uptimes = attendance.uptimes if attendance is not None and crashes else None

    def crashed(client: int, since: float, until: float) -> bool:
        if uptimes is None:
            return False
        there = bool(uptimes.on(np.array([client]), since)[0])
        return not there or uptimes.next_off(client, since) <= until

    given = sent.groupby(["sender", "step"])["weight"].sum().to_dict()
    brought: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
    taken = sent[sent["status"].isin(["delivered", "carried"])]
    for row in taken.itertuples():
        entry = row.sender, row.step, row.weight
        brought.setdefault((row.receiver, row.absorbed_step), []).append(entry)
    omega: dict[tuple[int, int], float] = {}
    own = {client: (float(not crashed(client, 0.0, 0.0)), 0.0) for client in range(n)}  # held, and since when
    for row in steps.sort_values(["started_at", "client"]).itertuples():
        key, (held, since) = (row.client, row.step), own[row.client]
        if crashed(row.client, since, row.started_at):
            held = 0.0
        omega[key] = held + sum(weight * omega[sender, step] for sender, step, weight in brought.get(key, ()))
        own[row.client] = omega[key] * (1.0 - given.get(key, 0.0)), row.ended_at
    there = sum(0.0 if crashed(client, since, end) else held for client, (held, since) in own.items())
    for row in sent.itertuples():
        under_way = row.status == "in_flight" or (
            row.status in ("delivered", "carried") and (row.receiver, row.absorbed_step) not in omega
        )
        waits = row.status == "lost" and timing.running_sums and not crashed(row.sender, row.sent_at, end)
        if under_way or (waits and _is_last(row, taken)):
            there += row.weight * omega[row.sender, row.step]
    return 1.0 - there / n


def _is_last(row: Any, taken: Any) -> bool:
    """Whether nothing got through on its link after it."""
    later = taken[(taken["sender"] == row.sender) & (taken["receiver"] == row.receiver)]
    return not (later["step"] > row.step).any()


# --- what comes of it ----------------------------------------------------------------------------------


def accuracy_at(result: Result, horizon: float) -> float:
    """At the last look by then."""
    frame = result.metrics
    return float(frame["accuracy"][frame["virtual_time"] <= horizon].iloc[-1])


def summarise(results: Mapping[str, Result], horizon: float) -> Summary:
    import pandas as pd

    accuracy: dict[Key, list[float]] = {}
    mass: dict[Key, list[float]] = {}
    ended: dict[Key, float] = {}
    for name, result in results.items():
        key = _key(name)
        accuracy.setdefault(key, []).append(accuracy_at(result, horizon))
        ended[key] = min(ended.get(key, math.inf), float(result.metrics["virtual_time"].iloc[-1]))
        if key[0] in (PLAIN, SUMS):
            mass.setdefault(key, []).append(lost_mass(result))
    lines = [
        {
            "method": method,
            "mean time there": "always" if there == math.inf else f"{there:g}",
            "absence": "–" if there == math.inf else absence,
            "accuracy": f"{np.mean(values):.3f} ± {_error(values):.3f}",
            "lost mass": _percent(mass.get((method, there, absence))),
            "until": f"{min(ended[method, there, absence], horizon):.0f}",
        }
        for (method, there, absence), values in accuracy.items()
    ]
    table = SummaryTable(
        "Clients that come and go",
        pd.DataFrame(lines),
        (
            f"at time {horizon:g}, mean over seeds ± standard error; away for a quarter of the time there",
            "lost mass: of all push-sum weight, what nobody holds and nothing brings; mean, and the largest",
            "until: the time of the last look, of the seed that ended first",
        ),
    )
    pictures = {f"accuracy-{absence}": _picture(accuracy, absence, "accuracy") for absence in ABSENCES} | {
        f"lost-mass-{absence}": _picture(mass, absence, "lost mass") for absence in ABSENCES
    }
    return Summary([table], _findings(accuracy, mass), pictures)


def _picture(found: Mapping[Key, list[float]], absence: str, what: str) -> Callable[[Any], object]:
    curves: dict[str, Any] = {}
    for method in METHODS:
        some = {there: values for (who, there, how), values in found.items() if who == method
                and (how == absence or there == math.inf)}  # fmt: skip
        if some:
            ordered = [(0.8 / there, some[there]) for there in sorted(some, reverse=True)]
            rates = np.array([rate for rate, _ in ordered])
            stacked = [np.array(values) for _, values in ordered]
            middle, low, high = ([f(values) for values in stacked] for f in (np.mean, np.min, np.max))
            curves[method] = (rates, np.array(middle), np.array(low), np.array(high))

    def draw(path: Any) -> object:
        from asyncfed.report import draw_curves

        return draw_curves(
            path,
            curves,
            xlabel="absences of a client per unit of time",
            ylabel=what,
            title=f"An absence is a {absence}; bands from lowest to highest seed",
        )

    return draw


def _findings(
    accuracy: Mapping[Key, list[float]], mass: Mapping[Key, list[float]]
) -> list[tuple[str, bool | None]]:
    found: list[tuple[str, bool | None]] = []
    always = math.inf
    pauses = [values for (method, _, absence), values in mass.items() if (method, absence) == (SUMS, "pause")]
    if pauses:
        most = max(max(map(abs, values)) for values in pauses)
        found.append((f"pauses cost running sums no mass (at most {most:.1e} of it)", most < 1e-6))
    for method in METHODS:
        for absence in ABSENCES:
            worst, base = accuracy.get((method, STAYS[-1], absence)), accuracy.get((method, always, "pause"))
            if worst and base:
                text = (
                    f"{method}, clients that {absence} after {STAYS[-1]:g} units: less accurate than without"
                )
                found.append(_less(text, worst, base))
    for there in STAYS:
        for one, other in ((PLAIN, SUMS), (SUMS, FEDBUFF), (FEDAVG, FEDBUFF)):
            pair = [accuracy.get((method, there, "crash")) for method in (one, other)]
            if pair[0] and pair[1]:
                text = f"with crashes, {there:g} units there: {one} is below {other}"
                found.append(_less(text, pair[0], pair[1]))
    return found


def _less(text: str, one: list[float], other: list[float]) -> tuple[str, bool | None]:
    """Whether the mean of one is below that of the other; None where noise hides it."""
    margin = 2 * math.hypot(_error(one), _error(other))
    gap = float(np.mean(other) - np.mean(one))
    holds = None if abs(gap) <= margin else gap > 0
    return f"{text}: {np.mean(one):.3f} against {np.mean(other):.3f}, margin {margin:.3f}", holds


def _error(values: list[float]) -> float:
    """Standard error of the mean."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _percent(values: list[float] | None) -> str:
    if values is None:
        return "–"
    mean, most = (round(float(value), 6) + 0.0 for value in (np.mean(values), max(values)))  # no -0
    return f"{mean:.1%}, at most {most:.1%}"


def _file(key: Key, seed: int) -> str:
    method, there, absence = key
    return f"{method.replace(', ', '+').replace(' ', '-')}/{there:g}-{absence}/seed-{seed}"


def _key(part: str) -> Key:
    name, churn, _ = part.split("/")
    there, absence = churn.split("-")
    method = next(one for one in METHODS if one.replace(", ", "+").replace(" ", "-") == name)
    return method, float(there), absence
