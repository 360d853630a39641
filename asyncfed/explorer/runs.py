"""The runs that an explorer shows, and what it tells a page of each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncfed.description import describe
from asyncfed.errors import AsyncfedError, ScenarioError, TraceError
from asyncfed.explorer import graph, layout, windows
from asyncfed.explorer.absences import absences, presence
from asyncfed.explorer.index import EVER, ChunkCache, Columns, TraceIndex, Window
from asyncfed.explorer.packed import packed
from asyncfed.network.uptimes import Uptimes
from asyncfed.result import Result, load
from asyncfed.runtime.lock import at_work
from asyncfed.study import load_study

MOST_EDGES = 250_000  # in one answer
MOST_RUNS = 24
MOST_NODES = 100_000  # of a run that is explored
_MOST_CELLS = 2_000_000  # of metrics, or clients, in one answer
_MOST_MOVES = 20_000
_MOST_NAME = 80  # characters
_MOST_COUNTED = 10_000  # clients whose class counts are told
_DAMAGED = (AttributeError, LookupError, TypeError, ValueError, OverflowError)


class ExploredRun:
    """A run directory, its index, and answers of both."""

    def __init__(self, path: Path, name: str, cache: ChunkCache) -> None:
        self.path, self.name = path, name
        self.error = ""
        trace = load(path).trace
        if trace.node_count > MOST_NODES:
            raise TraceError(
                f"{path} has {trace.node_count:,} nodes, too many to be drawn (at most {MOST_NODES:,}); "
                "`asyncfed trace` answers about it"
            )
        self.index = TraceIndex(trace.directory, trace.node_count, trace.server, cache)
        self._reading = threading.Lock()

    @property
    def result(self) -> Result:
        return load(self.path)

    def follow(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Take up what was recorded since; what cannot be read is kept as the `error`."""
        with self._reading:
            try:
                self.index.follow(enough)
                self.error = ""
            except (AsyncfedError, OSError) as error:
                self.error = str(error)
            except Exception as error:  # who follows goes on, and the page says it
                self.error = f"unexpected {type(error).__name__}: {error}"

    def state(self) -> dict[str, Any]:
        """What changes while a run goes."""
        messages, steps = self.index.count()
        first, last = self.index.span()
        error = self.error
        try:
            status = self.result.status
        except AsyncfedError as unreadable:
            status, error = "unreadable", str(unreadable)
        if status == "running" and not at_work(self.path):
            status = "killed"
        return {
            "name": self.name,
            "status": status,
            "error": error,
            "nodes": self.index.nodes,
            "server": self.index.server,
            "messages": messages,
            "steps": steps,
            "from": min(first, 0.0),
            "to": last,
            "taken": self.index.taken,
            "found": self.index.found,
            "changes": self.index.changes,
        }

    def about(self) -> dict[str, Any]:
        """What was run, for people, and the names of the nodes."""
        names, topology = self.result.names, self.result.scenario_data.get("topology", {})
        readable = _or_none(lambda: graph.declared(topology)) is not None
        note = (
            f"{self.path / 'scenario.json'} does not describe a network as runs do; names, places and "
            "declared probabilities are left out"
        )
        return {
            "pairs": list(describe(self.result).items()),
            "names": [names[node][:_MOST_NAME] for node in range(len(names))] if names.given else None,
            "notes": [] if readable else [note],
        }

    def metrics(self) -> dict[str, Any]:
        """Evaluations in columns, and the final ones of every client, who is a number."""
        clients = self.result.clients
        if "client" in clients and self.result.names.given:
            clients = clients.assign(client=clients["client"].cat.codes)
        return {"metrics": _columns_of(self.result.metrics), "clients": _columns_of(clients)}

    def marks(self) -> dict[str, Any]:
        """What lies along the time: phases, moves of the server, and absences of clients."""
        moves, clients = self.index.moves_now(), self.index.nodes - (self.index.server is not None)
        away = [] if self._presence is None else absences(self._presence, clients, self.index.span()[1])
        return {
            "absences": [list(absence) for absence in away],
            "phases": [list(phase) for phase in self.index.phases_now()],
            "moves": np.unique(moves).tolist() if len(moves) <= _MOST_MOVES else [],
            "move_count": len(moves),
        }

    def graph(self, most: int = MOST_EDGES) -> bytes:
        """The graph's own positions, and the probability that each direction was declared with."""
        topology = self.result.scenario_data.get("topology", {})
        where = _or_none(lambda: graph.places(topology))
        promises = _or_none(lambda: graph.declared(topology)) or {}
        pairs = np.array(list(promises), np.int32).reshape(-1, 2)[:most]
        columns: Columns = {
            "sender": pairs[:, 0],
            "receiver": pairs[:, 1],
            "probability": np.array(list(promises.values())[:most], np.float64),
        }
        if where is not None and len(where) == self.index.nodes and np.isfinite(where).all():
            columns |= {"x": where[:, 0], "y": where[:, 1]}
        return packed(columns)

    def spring(self) -> bytes:
        """A layout for what was sent so far."""
        sender, receiver = np.divmod(self.index.edge_sums().groups, self.index.nodes)
        where = layout.spring(self.index.nodes, sender, receiver)
        return packed({"x": where[:, 0].copy(), "y": where[:, 1].copy()})

    def edges(self, window: Window = EVER, most: int = MOST_EDGES) -> bytes:
        """`Trace.edges` of a window; of very many, those that carried most."""
        columns = self.index.edges(window)
        count = len(columns["sender"])
        if count > most:
            kept = np.sort(np.argsort(-columns["attempts"], kind="stable")[:most])
            columns = {name: values[kept] for name, values in columns.items()}
        return packed(_small(columns), edges=count)

    def nodes(self, window: Window = EVER) -> bytes:
        """`Trace.nodes` of a window."""
        return packed(_small(self.index.node_table(window)))

    def window(self, window: Window, low: int, high: int, bins: int) -> bytes:
        """Messages and steps to draw."""
        columns, facts = windows.window(self.index, window, low, high, bins)
        return packed(columns, **facts)

    def edge(self, sender: int, receiver: int, window: Window, at: float) -> bytes:
        """The messages of an edge."""
        columns, facts = windows.edge(self.index, sender, receiver, window, at)
        return packed(columns, **facts)

    def classes(self) -> bytes:
        """Training samples of each class, a row per client; no columns where that is not known."""
        counts = self._class_counts
        if counts is None:
            return packed({}, classes=0)
        return packed({"counts": counts.reshape(-1)}, classes=counts.shape[1])

    @cached_property
    def _presence(self) -> Uptimes | None:
        clients = self.index.nodes - (self.index.server is not None)
        found: Uptimes | None = _or_none(lambda: presence(self.result.scenario_data, clients))
        return found

    @cached_property
    def _class_counts(self) -> npt.NDArray[np.int32] | None:
        return class_counts(self.result)


def class_counts(result: Result) -> npt.NDArray[np.int32] | None:
    """[client, class], where the problem has classes and can be built again on this machine."""
    problem = result.scenario_data.get("problem", {})
    classified = isinstance(problem, dict) and str(problem.get("factory", "")).endswith("classification")
    if not classified or int(result.manifest["clients"]) > _MOST_COUNTED:
        return None
    from asyncfed.data import class_counts as counted

    try:
        train = result.scenario.problem.data.train
        counts = counted(train, int(train.tensors[-1].max()) + 1).to_numpy()
    except (ScenarioError, TraceError, RuntimeError, *_DAMAGED):  # its data is not on this machine
        return None
    return counts.astype(np.int32)


def opened(paths: Sequence[Path]) -> list[ExploredRun]:
    """The runs in some directories; a study is its parts that were begun."""
    found: list[tuple[Path, str]] = []
    for path in paths:
        if (path / "study.json").exists():
            study = load_study(path)
            begun = [part for part in study.parts if (path / part / "run.json").exists()]
            if not begun:
                raise TraceError(f"no part of the study in {path} was begun; run it first")
            found += [(path / part, part) for part in begun]
        else:
            found.append((path, path.resolve().name))
    if len(found) > MOST_RUNS:
        raise ScenarioError(
            f"{len(found)} runs are too many to look at together, at most {MOST_RUNS}; give some of them"
        )
    cache = ChunkCache()
    return [ExploredRun(path, name, cache) for path, name in found]


def _or_none(made: Callable[[], Any]) -> Any:
    """What a scenario.json says of its network; nothing where it is not as ours are."""
    try:
        return made()
    except (AsyncfedError, *_DAMAGED):
        return None


def _columns_of(frame: Any) -> dict[str, list[Any]]:
    step = -(-frame.size // _MOST_CELLS) or 1
    thinned = frame.iloc[::step]
    return {str(name): thinned[name].tolist() for name in thinned}


def _small(columns: Columns) -> Columns:
    """Counts in 4 bytes where they fit."""
    most = np.iinfo(np.int32).max
    return {
        name: values.astype(np.int32)
        if values.dtype.kind == "i" and values.max(initial=0) <= most
        else values
        for name, values in columns.items()
    }
