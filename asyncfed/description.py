"""What was run, for people, from what the run directory says (even where its code is gone)."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from asyncfed.errors import TraceError
from asyncfed.printable import duration
from asyncfed.runner import resumable
from asyncfed.runtime.lock import at_work

if TYPE_CHECKING:
    from asyncfed.result import Result

MOST_SHOWN = 4000  # characters of any one line

_ENDINGS = {
    "complete": "complete",
    "interrupted": "interrupted: a partial run, readable up to its last evaluation",
    "failed": "failed: a partial run, readable up to its last evaluation",
    "running": "running: a partial run, readable up to its last evaluation",
}
_KILLED = "killed before it could say so: a partial run, readable up to its last evaluation"


def describe(result: Result) -> dict[str, str]:
    """A few lines: scenario, network, method, where, how it ended."""
    manifest, data = result.manifest, result.scenario_data
    working = at_work(result.path)
    killed = result.status == "running" and not working
    placement, versions = manifest.get("placement"), _mapping(data.get("versions"))
    pairs = {
        "run": str(result.path),
        "scenario": f"{data.get('name')}, {manifest.get('clients')} clients, seed {manifest.get('seed')}",
        "problem": _problem(_mapping(data.get("problem"))),
        "topology": _topology(_mapping(data.get("topology"))),
        "protocol": value_text(data.get("protocol")),
        "timing": value_text(data.get("timing")),
        "weights": value_text(data.get("weights")),
        "precision": value_text(data.get("precision")),
        "placement": _placement(placement) if placement else "nowhere yet",
        "versions": ", ".join(f"{name} {value_text(number)}" for name, number in versions.items()),
        "status": _KILLED if killed else _ENDINGS.get(result.status, result.status),
    }
    if not working and resumable(result.path):
        pairs["go on with"] = f"asyncfed resume {shlex.quote(str(result.path))}"
    if result.warnings:
        pairs["warned of"] = "\n".join(result.warnings)
    if "error" in manifest:
        pairs["error"] = manifest["error"]
    if "wall_seconds" in manifest:
        pairs["wall time"] = duration(manifest["wall_seconds"])
    try:
        pairs["trace"] = ending(result) or f"{len(result.trace):,} messages, whole"
    except TraceError as error:
        pairs["trace"] = str(error)
    return {name: _cut(text) for name, text in pairs.items()}


def ending(result: Result) -> str:
    """That the record of a run ends early, and where; nothing for one that is whole."""
    if result.complete:
        return ""
    recorded, metrics = len(result.trace), result.metrics
    counted = 0 if metrics.empty else int(metrics["messages"].iloc[-1])
    missing = f" of the {counted:,} that its metrics count" if counted > recorded else ""
    return f"the record ends early, as the run did ({result.status}): {recorded:,} messages{missing}"


def links_line(result: Result) -> str:
    """The worst and the best link, in a line."""
    edges = result.trace.edges()
    if edges.empty:
        return "no messages were sent"
    rates = edges["delivery_rate"].to_numpy()
    if rates.min() == rates.max():
        return f"{len(edges):,} edges; delivery rate {rates[0]:.3f} on each"
    worst, best = int(rates.argmin()), int(rates.argmax())

    def named(place: int) -> str:
        return f"{rates[place]:.3f} ({edges['sender'][place]}→{edges['receiver'][place]})"

    return f"{len(edges):,} edges; delivery rate {named(worst)} to {named(best)}, mean {rates.mean():.3f}"


def last_line(result: Result) -> str:
    """What the last evaluation found, in a line."""
    if result.metrics.empty:
        return "none yet"
    last = result.metrics.iloc[-1].dropna()
    said = {name: value if isinstance(value, str) else f"{value:,.5g}" for name, value in last.items()}
    return _cut(", ".join(f"{name} {value}" for name, value in said.items()))


def _problem(data: dict[str, Any]) -> str:
    if "own" in data:
        return f"{value_text(data['own'])} (own functions)"
    return _called(data.get("factory"), _mapping(data.get("arguments")))


def _topology(data: dict[str, Any]) -> str:
    kind = "directed" if data.get("directed") else "undirected"
    edges = data.get("from")
    count = len(edges) if isinstance(edges, list) else 0
    return f"{value_text(_mapping(data.get('about')).get('name', 'own graph'))} ({count:,} {kind} edges)"


def _placement(placement: dict[str, Any]) -> str:
    of = {name: value_text(value) for name, value in placement.items()}
    if of.get("backend") == "local":
        where = f"this process, {of.get('device')}"
    else:
        where = (
            f"{of.get('backend')}, {of.get('actors')} actors of up to "
            f"{of.get('clients_per_actor')} clients, {of.get('device')}"
        )
    return f"{where}; {of['note']}" if of.get("note") else where


def _called(name: object, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value_text(value)}' for key, value in arguments.items())})"


def value_text(value: Any) -> str:
    """Plain data as it would be written: `SGP(steps=3, lr=0.1)`."""
    if isinstance(value, dict):
        if "own" in value:
            return str(value["own"])
        if "type" in value:
            return _called(value["type"], {key: item for key, item in value.items() if key != "type"})
        return "{" + ", ".join(f"{key}: {value_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"({', '.join(map(value_text, value))})"
    return str(value)


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _cut(text: str) -> str:
    """What a file says may be of any length."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
