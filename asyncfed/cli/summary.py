"""What was run, for people, from what the run directory says (even where its code is gone)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncfed.cli.tables import duration

if TYPE_CHECKING:
    from asyncfed.result import Result

_ENDINGS = {
    "complete": "complete",
    "interrupted": "interrupted: a partial run, readable up to its last evaluation",
    "failed": "failed: a partial run, readable up to its last evaluation",
    "running": "running, or killed before it could say so: a partial run",
}


def describe(result: Result) -> dict[str, str]:
    """A few lines: scenario, network, method, where, how it ended."""
    manifest, data = result.manifest, result.scenario_data
    placement, versions = manifest.get("placement"), data.get("versions", {})
    pairs = {
        "run": str(result.path),
        "scenario": f"{data.get('name')}, {manifest.get('clients')} clients, seed {manifest.get('seed')}",
        "problem": _problem(data.get("problem", {})),
        "topology": _topology(data.get("topology", {})),
        "protocol": _value(data.get("protocol")),
        "timing": _value(data.get("timing")),
        "weights": _value(data.get("weights")),
        "precision": str(data.get("precision")),
        "placement": _placement(placement) if placement else "nowhere yet",
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "status": _ENDINGS.get(result.status, result.status),
    }
    if result.warnings:
        pairs["warned of"] = "\n".join(result.warnings)
    if "error" in manifest:
        pairs["error"] = str(manifest["error"])
    if "wall_seconds" in manifest:
        pairs["wall time"] = duration(manifest["wall_seconds"])
    return pairs


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


def _problem(data: dict[str, Any]) -> str:
    if "own" in data:
        return f"{data['own']} (own functions)"
    return _called(str(data.get("factory")), data.get("arguments", {}))


def _topology(data: dict[str, Any]) -> str:
    about = data.get("about", {})
    kind = "directed" if data.get("directed") else "undirected"
    return f"{about.get('name', 'own graph')} ({len(data.get('from', ())):,} {kind} edges)"


def _placement(placement: dict[str, Any]) -> str:
    if placement.get("backend") == "local":
        where = f"this process, {placement.get('device')}"
    else:
        where = (
            f"{placement.get('backend')}, {placement.get('actors')} actors of up to "
            f"{placement.get('clients_per_actor')} clients, {placement.get('device')}"
        )
    return f"{where}; {placement['note']}" if placement.get("note") else where


def _called(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={_value(value)}' for key, value in arguments.items())})"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        if "own" in value:
            return str(value["own"])
        if "type" in value:
            return _called(value["type"], {key: item for key, item in value.items() if key != "type"})
        return "{" + ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"({', '.join(map(_value, value))})"
    return str(value)
