"""Which asynchronous gradient push is stable among stragglers: five candidates on `stragglers`, 20 seeds.

What was fixed before these 20 seeds were run (after a look at five, with other paces):

- The *lockstep-safe* rate is the largest of 0.1, 0.2, 0.4 and 0.8 at which SGP, as it comes (4b), in lockstep
  on the same network and for as many steps as the horizon has units of time, never has a test loss more than
  10% above its lowest so far, in any of five seeds.
- Everybody runs at three times that rate. A *spike* is a test loss above twice the lowest so far, at any of
  100 looks. `per` is the clients' mean step time, ω₀ is 1 for a debt of gradients, and 1/2 for one of time:
  then a model moves at most twice as far as in lockstep.
- Lockstep waits for the slowest: a round takes at least the straggler's mean step, and that is what it is
  charged.

`tracking, debt` joined when the others had been seen. In lockstep the order (4a), which the candidates have,
bears four times the rate of (4b); at three times *that* (`--set lr=2.4`) none of them is free of spikes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from asyncfed import Lockstep, Result, Scenario, Study, Summary, SummaryTable
from asyncfed.protocols import SGP
from scenarios.stragglers import METHODS, digits, network, scenario

SAFE, TIMES = 0.2, 3.0
GRID, GRID_SEEDS = (0.1, 0.2, 0.4, 0.8), 5
SAFE_RISE, SPIKE = 1.1, 2.0
REACHED = 0.85  # accuracy
_CHOSEN = ("by time, debt", "by time, time owed", "tracking, debt")


def study(
    seeds: int = 20,
    clients: int = 20,
    horizon: float = 200.0,
    slowdown: float = 10.0,
    loss: float = 0.005,
    lr: float = TIMES * SAFE,
) -> Study:
    def paced(method: str, seed: int) -> Callable[[], Scenario]:
        return lambda: scenario(clients, horizon, lr, slowdown, loss, method, seed)

    def lockstep(order: Literal["4a", "4b"], rate: float, seed: int) -> Callable[[], Scenario]:
        return lambda: in_lockstep(clients, horizon, order, rate, loss, seed)

    parts = {
        f"lockstep {rate:g}/seed-{s}": lockstep("4b", rate, s)
        for rate in GRID
        for s in range(min(seeds, GRID_SEEDS))
    }
    parts |= {f"lockstep {lr:g}/seed-{s}": lockstep("4b", lr, s) for s in range(seeds)}
    parts |= {f"lockstep 4a {lr:g}/seed-{s}": lockstep("4a", lr, s) for s in range(seeds)}
    parts |= {f"{method}/seed-{s}": paced(method, s) for method in METHODS for s in range(seeds)}

    def summary(results: Mapping[str, Result]) -> Summary:
        return summarise(results, slowdown)

    return Study("stragglers_compared", {_file(name): part for name, part in parts.items()}, summary)


def in_lockstep(
    clients: int, horizon: float, order: Literal["4a", "4b"], lr: float, loss: float, seed: int
) -> Scenario:
    return Scenario(
        problem=digits(clients),
        topology=network(clients),
        protocol=SGP(int(horizon), lr, order, batch=32),
        timing=Lockstep(loss=loss),
        evaluate_every=max(1, round(horizon / 100)),
        seed=seed,
    )


def rise(result: Result) -> float:
    """The largest ratio of a test loss to the lowest before it."""
    loss = result.metrics["loss"].to_numpy()
    return float((loss / np.minimum.accumulate(loss)).max())


def summarise(results: Mapping[str, Result], slowdown: float) -> Summary:
    import pandas as pd

    by_method: dict[str, list[Result]] = {}
    for name, result in results.items():
        by_method.setdefault(_method(name), []).append(result)
    lines, rises = [], {}
    curves: dict[str, Any] = {}
    for method, runs in by_method.items():
        charged = slowdown if method.startswith("lockstep") else 1.0
        frames = [result.metrics for result in runs]
        rises[method] = np.array([rise(result) for result in runs])
        times = [frame["virtual_time"][frame["accuracy"] >= REACHED].min() * charged for frame in frames]
        lines.append(
            {
                "method": method,
                "runs": len(runs),
                "test loss": _mean([frame["loss"].iloc[-1] for frame in frames]),
                "accuracy": _mean([frame["accuracy"].iloc[-1] for frame in frames]),
                "largest rise": f"{np.median(rises[method]):.2f}, at most {rises[method].max():.2f}",
                "with spikes": int((rises[method] > SPIKE).sum()),
                "consensus": _mean([frame["consensus"].iloc[-1] for frame in frames]),
                f"time to {REACHED:.0%}": _mean(times),
            }
        )
        if charged == 1.0:
            losses = np.stack([frame["loss"].to_numpy() for frame in frames])
            time = frames[0]["virtual_time"].to_numpy()
            curves[method] = (time, np.median(losses, 0), losses.min(0), losses.max(0))
    table = SummaryTable(
        "Asynchronous gradient push among stragglers",
        pd.DataFrame(lines),
        (
            "at the end, mean over seeds ± standard error; rise: the largest ratio of a test loss to the "
            f"lowest before it, median and largest over seeds; spike: a rise above {SPIKE:g}",
            "lockstep: SGP (4b where not said); a round is charged the straggler's mean step, "
            f"{slowdown:g} units of time",
        ),
    )

    def draw(path: Any) -> object:
        from asyncfed.report import draw_curves

        return draw_curves(
            path,
            curves,
            xlabel="virtual time",
            ylabel="test loss",
            title="Test loss, median over seeds; bands from lowest to highest",
            logy=True,
        )

    return Summary([table], _findings(rises, by_method, slowdown), {"loss": draw})


def _findings(
    rises: Mapping[str, npt.NDArray[np.float64]], by_method: Mapping[str, list[Result]], slowdown: float
) -> list[tuple[str, bool | None]]:
    largest = {lr: rises[f"lockstep {lr:g}"].max() for lr in GRID if f"lockstep {lr:g}" in rises}
    safe = [lr for lr, most in largest.items() if most <= SAFE_RISE]
    listed = ", ".join(f"{lr:g}: {most:.2f}" for lr, most in largest.items())
    findings: list[tuple[str, bool | None]] = [
        (
            f"{SAFE:g} is the lockstep-safe rate (largest rise at each rate: {listed})",
            max(safe, default=0.0) == SAFE,
        )
    ]
    for method in METHODS:
        if method in rises:
            spikes, most = int((rises[method] > SPIKE).sum()), rises[method].max()
            seen = f"{spikes} with one, largest rise {most:.2f}"
            findings.append((f"{method}: no spike in {len(rises[method])} seeds ({seen})", spikes == 0))
    base = by_method.get(f"lockstep {SAFE:g}", [])
    for method in _CHOSEN:
        runs = by_method.get(method, [])
        if base and runs:
            ours, theirs = _at_equal_time(runs, 1.0), _at_equal_time(base, slowdown)
            margin = 2 * math.hypot(_error(ours), _error(theirs))
            text = (
                f"{method}: lower loss at the horizon than lockstep at its safe rate in that time "
                f"({np.mean(ours):.3f} against {np.mean(theirs):.3f}, margin {margin:.3f})"
            )
            findings.append((text, bool(np.mean(ours) + margin < np.mean(theirs))))
    return findings


def _at_equal_time(runs: list[Result], charged: float) -> list[float]:
    """Test losses at the horizon of the paced runs, where a unit of a run's own time costs `charged`."""
    found = []
    for result in runs:
        frame = result.metrics
        own = frame["virtual_time"].to_numpy()
        found.append(float(frame["loss"].to_numpy()[own <= own[-1] / charged][-1]))
    return found


def _mean(values: list[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "–"
    missing = f" ({len(values) - len(known)} never)" if len(known) < len(values) else ""
    return f"{np.mean(known):.3g} ± {_error(known):.2g}{missing}"


def _error(values: list[float]) -> float:
    """Standard error of the mean."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _file(name: str) -> str:
    return name.replace(", ", "+").replace(" ", "-")


def _method(part: str) -> str:
    known = {_file(name): name for name in METHODS}
    name = part.split("/")[0]
    return known.get(name, name.replace("-", " "))
