"""The Ray backend against the local one, in steady state: packed into two actors, and one client in each of a
hundred; and what goes over Ray in a step, by packing.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

from asyncfed import Progress, Scenario, run
from asyncfed.protocols import FedAvg, LocalSteps
from benchmarks.problems import reference, reference_problem
from benchmarks.table import Row
from topologies import star, stochastic_directed


def packed() -> list[Row]:
    local, _, _ = _steady(reference(steps=40), skip=8)
    ray, _, _ = _steady(reference(steps=40), skip=8, backend="ray", clients_per_actor=50)
    again, _, _ = _steady(reference(steps=40), skip=8)
    local = (local + again) / 2
    return [
        Row("MLP, n=100: local", f"{local * 1e3:.0f} ms/step"),
        Row("MLP, n=100: Ray, 2 actors", f"{ray * 1e3:.0f} ms/step"),
        Row("Ray packed in 2 / local", f"{ray / local:.2f}", "≤ 1.4", ray / local <= 1.4),
    ]


def many_actors() -> list[Row]:
    local, _, _ = _steady(reference(steps=20), skip=5)
    ray, startup, memory = _steady(reference(steps=24), skip=8, backend="ray", clients_per_actor=1)
    return [
        Row("100 actors: first step after", f"{startup:.0f} s"),
        Row("100 actors: memory in all, at most", f"{memory:.1f} GiB", "≤ 20 GiB", memory <= 20),
        Row("100 actors: step", f"{ray * 1e3:.0f} ms"),
        Row("100 actors / local", f"{ray / local:.1f}", "≤ 15", ray / local <= 15),
    ]


def traffic() -> list[Row]:
    """Of 20 clients with 159,010 parameters (0.64 MB a payload), among peers and with a server."""
    problem, steps, rows = reference_problem(20), 6, []
    peers = reference(
        steps, problem=problem, topology=stochastic_directed(20, probability=(0.4, 0.8), seed=1)
    )
    served = reference(steps, problem=problem, topology=star(20), protocol=FedAvg(steps, LocalSteps(0.05)))
    for name, scenario in (("peers", peers), ("server", served)):
        for clients in (1, 10, 20):
            with tempfile.TemporaryDirectory() as directory, _counted() as counts:
                run(scenario, backend="ray", clients_per_actor=clients, out=directory)
            exchanges = steps - (name == "peers")  # in their first step peers have nothing to read
            value = (
                f"{counts.calls / steps:.0f} calls, {counts.put / exchanges / 1e6:.1f} MB put, "
                f"{counts.read / exchanges / 1e6:.1f} MB read"
            )
            rows.append(Row(f"{name}, 20 clients, {clients} per actor: a step", value))
    return rows


@dataclass
class _Counts:
    calls: int = 0
    put: int = 0  # bytes that actors put into object stores
    read: int = 0  # bytes that actors take as arguments
    sizes: dict[Any, int] = field(default_factory=dict)


@contextmanager
def _counted() -> Iterator[_Counts]:
    """Count the calls of steps, and the objects that go in and out of them."""
    import ray
    from ray.actor import ActorMethod
    from ray.experimental import get_object_locations

    counts, plain = _Counts(), ActorMethod._remote

    def size(reference: Any) -> int:
        if reference not in counts.sizes:
            ray.wait([reference], fetch_local=False)
            counts.sizes[reference] = get_object_locations([reference])[reference]["object_size"] or 0
            counts.put += counts.sizes[reference]
        return counts.sizes[reference]

    def counting(method: Any, args: Any = None, *rest: Any, **options: Any) -> Any:
        made = plain(method, args, *rest, **options)
        if method._method_name in ("run", "hand_over"):
            counts.calls += 1
            counts.read += sum(size(arg) for arg in args or () if isinstance(arg, ray.ObjectRef))
        return made

    ActorMethod._remote = counting
    try:
        yield counts
    finally:
        ActorMethod._remote = plain


def _steady(scenario: Scenario, *, skip: int, **options: object) -> tuple[float, float, float]:
    """(seconds per step once it is going, seconds until the first step, most memory used, in GiB)."""
    at: list[float] = []
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory, _Memory() as memory:

        def note(progress: Progress) -> None:
            at.append(time.perf_counter())

        run(scenario, out=directory, progress=note, **options)  # type: ignore[arg-type]
    # On Ray the driver is a few waves ahead of the actors, always the same few, so its pace is theirs.
    paces = [later - earlier for earlier, later in zip(at[skip:], at[skip + 1 :], strict=False)]
    return statistics.median(paces), at[0] - started, memory.most


class _Memory:
    """Watches how much of the machine's memory is in use beyond what was at the start."""

    def __enter__(self) -> _Memory:
        self._before = psutil.virtual_memory().available
        self._least = self._before
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.5):
            self._least = min(self._least, psutil.virtual_memory().available)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def most(self) -> float:
        return float(self._before - self._least) / 2**30
