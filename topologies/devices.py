"""Kinds of devices: how fast nodes compute, and what they send and receive at all of their links together."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import networkx as nx
import numpy as np

from asyncfed.checks import Capacity, PathLike, UnitFloat, Words, checked
from asyncfed.errors import TopologyError, UnknownNameError
from asyncfed.network.distributions import PositiveTime
from asyncfed.reading import open_regular
from asyncfed.rng import Streams
from topologies._marks import canonical

_MARKS = ("compute", "uplink", "downlink")


@checked(error=TopologyError)
@dataclass(frozen=True)
class Device:
    """A kind of device.

    Parameters
    ----------
    compute
        How many times longer than the timing says a step takes.
    uplink, downlink
        Bytes per unit of virtual time, shared by all links out of a node and into it; infinite without a
        limit.
    """

    compute: PositiveTime = 1.0
    uplink: Capacity = math.inf
    downlink: Capacity = math.inf


Kinds = Annotated[
    Mapping[str, Device] | PathLike, Words("a mapping from name to Device(…), or the path of a CSV file")
]
Shares = Annotated[
    Mapping[str, UnitFloat] | Sequence[str] | None,
    Words("a mapping from device to share in [0, 1], the devices of all clients in order, or None"),
]


@checked(error=TopologyError)
def with_devices(
    graph: nx.Graph,
    devices: Kinds,
    shares: Shares = None,
    seed: int = 0,
) -> nx.Graph:
    """A copy of the graph whose clients are devices: it sets `device`, `compute`, `uplink` and `downlink`.

    A server is none of them and stays as it is. The copy has no recipe; nodes keep their names.

    Parameters
    ----------
    graph : nx.Graph or nx.DiGraph
        Any network, a user's own included.
    devices : mapping or path
        Kinds by name; or a CSV file with the header ``device,compute,uplink,downlink`` and, where it says how
        many there are of each, ``share``. An empty cell is a device's default.
    shares : mapping or names, optional
        Either a share of each kind, together 1: as many clients have it as that is of n, rounded by largest
        remainders (the earlier kind first where these are equal), and which they are is drawn. Or the kind of
        every client, in order. Without it the file's shares, or all kinds alike.
    seed : int
        Seed for which clients are which.
    """
    network = canonical(graph)
    kinds, in_file = (devices, None) if isinstance(devices, Mapping) else _read(Path(devices))
    if not kinds:
        raise TopologyError("no devices are given; name at least one, such as {'phone': Device(compute=4)}")
    clients = [node for node in network if node != network.graph.get("server")]
    if shares is None:
        shares = in_file or dict.fromkeys(kinds, 1 / len(kinds))
    if isinstance(shares, Mapping):
        chosen = _drawn(_counts(shares, kinds, len(clients)), seed)
    else:
        chosen = _named(shares, kinds, len(clients))
    for node, name in zip(clients, chosen, strict=True):
        marks = network.nodes[node]
        marks["device"] = name
        for mark in _MARKS:
            value = getattr(kinds[name], mark)
            marks.pop(mark, None)
            if value < math.inf:
                marks[mark] = value
    return network


def _named(names: Sequence[str], kinds: Mapping[str, Device], clients: int) -> list[str]:
    if len(names) != clients:
        raise TopologyError(
            f"shares is {names!r}; it must be a mapping from device to share, or the devices of all "
            f"{clients} clients in order"
        )
    for name in names:
        if name not in kinds:
            raise UnknownNameError("device", str(name), kinds)
    return list(names)


def _counts(shares: Mapping[str, float], kinds: Mapping[str, Device], clients: int) -> dict[str, int]:
    """How many clients have each kind, by largest remainders."""
    for name in shares:
        if name not in kinds:
            raise UnknownNameError("device", name, kinds)
    if not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-9):
        raise TopologyError(f"the shares {dict(shares)} add up to {sum(shares.values()):g}; they must to 1")
    names = [name for name in kinds if name in shares]
    wanted = np.array([float(shares[name]) * clients for name in names])
    counts = np.floor(wanted + 1e-9).astype(np.int64)
    by_remainder = np.argsort(-np.round(wanted - counts, 9), kind="stable")
    counts[by_remainder[: clients - int(counts.sum())]] += 1
    return dict(zip(names, counts.tolist(), strict=True))


def _drawn(counts: Mapping[str, int], seed: int) -> list[str]:
    """The kind of every client: who comes first in a drawn order has the first kind."""
    kinds = [name for name, count in counts.items() for _ in range(count)]
    order = np.argsort(Streams(seed).uniforms("topology devices", 0, 0, len(kinds)), kind="stable")
    chosen = [""] * len(kinds)
    for place, name in zip(order.tolist(), kinds, strict=True):
        chosen[place] = name
    return chosen


def _read(path: Path) -> tuple[dict[str, Device], dict[str, float] | None]:
    """Kinds, and their shares where the file has them."""
    try:
        with open_regular(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as stream:
            rows = csv.DictReader(stream)
            header, lines = list(rows.fieldnames or ()), list(rows)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TopologyError(f"cannot read the devices in {path}: {error}; give a CSV file") from error
    if not {"device"} <= set(header) <= {"device", *_MARKS, "share"}:
        raise TopologyError(
            f"the header of {path} is {','.join(header)!r}; it must be device,compute,uplink,downlink and, "
            "where wanted, share"
        )
    kinds: dict[str, Device] = {}
    shares: dict[str, float] = {}
    for number, line in enumerate(lines, start=2):
        name = (line["device"] or "").strip()
        if not name or name in kinds or None in line:
            raise TopologyError(
                f"line {number} of {path} names the device {name!r}; every line must name another, with a "
                "value for each column"
            )
        try:
            values = {
                key: float(text) for key, text in line.items() if key != "device" and (text or "").strip()
            }
            if "share" in header:
                shares[name] = values.pop("share", 0.0)
            kinds[name] = Device(**values)
        except (ValueError, TopologyError) as error:
            raise TopologyError(f"line {number} of {path}: {error}") from None
    return kinds, shares or None
