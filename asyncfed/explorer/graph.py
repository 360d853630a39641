"""The graph of a run as its scenario.json has it, by the numbers of the trace: a server stands last."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from asyncfed.network.names import in_order

Floats = npt.NDArray[np.float64]


def places(topology: dict[str, Any]) -> Floats | None:
    """(nodes, 2): where every node is on the plane, by the numbers of the trace; None where that is not
    known.
    """
    pos = topology.get("of_nodes", {}).get("pos", [])
    if not pos or any(place is None or len(place) != 2 for place in pos):
        return None
    labels, number = _numbers(topology)
    where = np.empty((len(labels), 2))
    where[[number[label] for label in labels]] = pos
    return where


def declared(topology: dict[str, Any]) -> dict[tuple[int, int], float]:
    """The probability of every direction by the numbers of the trace, from the scenario as the run directory
    holds it.
    """
    labels, number = _numbers(topology)
    probability = topology["marks"].get("probability", [None] * len(topology["from"]))
    changing = [topology["marks"].get(mark, [None] * len(probability)) for mark in ("schedule", "bursts")]
    found: dict[tuple[int, int], float] = {}
    for start, end, value, *over_time in zip(
        topology["from"], topology["to"], probability, *changing, strict=True
    ):
        if isinstance(value, (int, float)) and over_time == [None, None]:
            sender, receiver = number[labels[start]], number[labels[end]]
            found[sender, receiver] = float(value)
            if not topology["directed"]:
                found[receiver, sender] = float(value)
    return found


def _numbers(topology: dict[str, Any]) -> tuple[list[Any], dict[Any, int]]:
    """The nodes as the graph lists them, and the number of each in the trace."""
    nodes, server = topology["nodes"], topology["about"].get("server")
    labels = list(range(nodes)) if isinstance(nodes, int) else nodes
    return labels, {label: place for place, label in enumerate(in_order(labels, server))}
