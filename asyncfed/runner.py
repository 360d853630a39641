"""Run a scenario: check it, make its directory, execute it on a backend, and record everything as it goes."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import numpy as np
import torch

from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.goals import Goal
from asyncfed.network.links import Network
from asyncfed.plain import plain
from asyncfed.problems.derivatives import Derivatives
from asyncfed.protocols.phase import ProtocolLike, Tensors
from asyncfed.record import Record
from asyncfed.result import Result
from asyncfed.rng import Streams
from asyncfed.runtime.backend import Backend
from asyncfed.runtime.block import Tap
from asyncfed.runtime.directory import RunDirectory
from asyncfed.runtime.engine import Evaluation, Tick, execute
from asyncfed.runtime.local import LocalBackend
from asyncfed.runtime.served import LocalServed, ServedBackend
from asyncfed.runtime.serving import serve
from asyncfed.scenario import Scenario, check, scenario_to_data
from asyncfed.trace import Totals, TraceWriter

_VERSIONED = ("asyncfed", "torch", "numpy", "networkx", "ray", "pyarrow")
_CARRIED = {
    "omega", "z", "hypergradient", "history", "adam_mean", "adam_square", "adam_steps", "outer_z",
    "outer_omega", "U", "trajectory", "h", "p", "q", "sum",
}  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """How far a run is, for whoever watches."""

    phase: str
    steps_done: int  # of all clients together
    steps_planned: int
    clients: int
    loss: float | None
    totals: Totals
    elapsed: float
    virtual_time: float
    horizon: float | None = None
    note: str = ""

    @property
    def fraction(self) -> float:
        """How much is done, between 0 and 1: by steps, or by the horizon where that comes first."""
        by_steps = self.steps_done / max(1, self.steps_planned)
        by_time = 0.0 if self.horizon is None else self.virtual_time / self.horizon
        return min(1.0, max(by_steps, by_time))


def run(
    scenario: Scenario,
    *,
    backend: Literal["local", "ray"] = "local",
    clients_per_actor: int | Literal["auto"] = "auto",
    device: str = "auto",
    address: str | None = None,
    out: str | os.PathLike[str] | None = None,
    save_final: bool = False,
    progress: Callable[[Progress], None] | None = None,
    tap: Tap | None = None,
    initial: Mapping[str, torch.Tensor] | None = None,
) -> Result:
    """Run a scenario and return its result.

    Parameters
    ----------
    backend
        "local": all clients in this process. "ray": clients in Ray actors, one each unless that would
        not fit into memory.
    clients_per_actor
        How many clients share a Ray actor; "auto" is one each where that fits.
    device
        "auto" (a GPU where there is one), "cpu", "cuda", …
    address
        An existing Ray cluster, "auto" for the one this machine belongs to; without it Ray is started on this
        machine.
    out
        The run directory; by default a new numbered one under `runs/` (or $ASYNCFED_RUNS).
    save_final
        Also keep the final variables of all clients on disk.
    progress
        Called after every wave with a `Progress`.
    tap
        Called with every step as an `Observation` (local backend only): for debugging and teaching.
    initial
        Variables to start from instead of the problem's own, one row per client: "inner", "outer", and
        whatever the protocol carries, as in the `final` of another run.
    """
    clients_per_actor = plain(clients_per_actor)
    network = check(scenario)
    derivatives = Derivatives.of(scenario.problem)
    peers = isinstance(scenario.protocol, ProtocolLike)
    start = _initial(scenario.clients if peers else 1, derivatives, initial, _carried(scenario.protocol))
    _check_options(backend, clients_per_actor, device, tap, peers)
    directory = RunDirectory.create(out, scenario.name)
    directory.write("scenario.json", scenario_to_data(scenario) | {"versions": _versions()})
    manifest: dict[str, Any] = {
        "scenario": scenario.name,
        "clients": scenario.clients,
        "seed": int(scenario.seed),
        "nodes": network.n,
        **({"initial": sorted(start)} if start else {}),
    }
    directory.write_manifest(status="running", **manifest)
    writer = TraceWriter(directory.trace, nodes=network.n, server=None if peers else network.server)
    record = Record(directory, writer)
    started = time.perf_counter()
    engine: Backend | ServedBackend | None = None
    status, error = "failed", ""
    try:
        engine = _open_backend(scenario, backend, clients_per_actor, device, address, tap, start)
        items = _items(scenario, network, derivatives, engine, writer)
        manifest["placement"] = vars(engine.placement)
        directory.write_manifest(status="running", **manifest)
        loss: float | None = None
        for item in items:
            record.keep_up()
            if isinstance(item, Evaluation):
                row = _metrics(item, writer.totals)
                record.metrics(row)
                loss = row["train_loss"] if row["train_loss"] is not None else loss
                if item.final:
                    directory.append("clients.jsonl", *_clients(item))
            elif progress is not None:
                progress(
                    Progress(
                        phase=item.phase,
                        steps_done=item.steps_done,
                        steps_planned=item.steps_planned,
                        clients=scenario.clients,
                        loss=loss,
                        totals=writer.totals,
                        elapsed=time.perf_counter() - started,
                        virtual_time=item.time,
                        horizon=getattr(scenario.timing, "horizon", None),
                        note=engine.placement.note,
                    )
                )
        final = engine.final()
        if save_final:
            from safetensors.torch import save_file

            save_file(
                {name: tensor.contiguous() for name, tensor in final.items()},
                directory.path / "final.safetensors",
            )
        status = "complete"
    except KeyboardInterrupt:
        status, error = "interrupted", "stopped by the user"
        raise
    except BaseException as problem:
        error = str(problem)
        raise
    finally:
        try:
            _close(engine, record)
        except (
            BaseException
        ) as problem:  # a full disk, say: the run is not complete then, whatever it computed
            status, error = "failed", error or str(problem)
            raise
        finally:
            manifest |= {
                "wall_seconds": round(time.perf_counter() - started, 3),
                "totals": writer.totals._asdict(),
            }
            directory.write_manifest(status=status, **manifest, **({"error": error} if error else {}))
    return Result(directory, final)


def _items(
    scenario: Scenario,
    network: Network,
    derivatives: Derivatives,
    engine: Backend | ServedBackend,
    writer: TraceWriter,
) -> Iterator[Tick | Evaluation]:
    """The run itself, as it goes."""
    protocol, streams = scenario.protocol, Streams(scenario.seed)
    if isinstance(protocol, ProtocolLike):
        assert not isinstance(engine, ServedBackend)
        return execute(
            protocol,
            network,
            scenario.timing,
            scenario.weights,
            streams,
            engine,
            writer,
            scenario.evaluate_every,
        )
    assert isinstance(engine, ServedBackend)
    data = scenario.problem.data
    outer = data.validation if scenario.problem.outer_split == "validation" else data.train
    every = scenario.evaluate_every or max(1, protocol.outer_steps // 20)
    return serve(
        protocol,
        network,
        scenario.timing,
        streams,
        engine,
        writer,
        sizes={"inner": data.train.sizes, "outer": outer.sizes},
        lengths={"inner": derivatives.inner.d, "outer": derivatives.outer.d},
        itemsize=_dtype(scenario).itemsize,
        evaluate_every=int(every),
        enough=lambda item: _enough(item, scenario.until),
    )


def _enough(item: Evaluation, until: Mapping[str, Goal] | None) -> bool:
    """Whether all the metrics of `until` have come so far."""
    if not until:
        return False
    return all(goal.met(float(item.sums[name].sum() / item.counts.sum())) for name, goal in until.items())


def _dtype(scenario: Scenario) -> torch.dtype:
    return torch.float64 if scenario.precision == "float64" else torch.float32


def _close(engine: Backend | ServedBackend | None, record: Record) -> None:
    try:
        if engine is not None:
            engine.close()
    finally:
        record.close()


def _check_options(
    backend: str, clients_per_actor: object, device: str, tap: Tap | None, peers: bool
) -> None:
    if backend not in ("local", "ray"):
        raise UnknownNameError("backend", backend, ("local", "ray"))
    if clients_per_actor != "auto" and not (isinstance(clients_per_actor, int) and clients_per_actor >= 1):
        raise ScenarioError(f"clients_per_actor is {clients_per_actor!r}; it must be 'auto' or at least 1")
    if tap is not None and (backend != "local" or not peers):
        raise ScenarioError(
            "a tap sees every step of peers in this process, so it needs backend='local' and a method "
            "without a server"
        )
    if device != "auto":
        try:
            kind = torch.device(device).type
        except RuntimeError:
            raise ScenarioError(
                f"device is {device!r}; it must be 'auto', 'cpu', 'cuda' or 'cuda:N'"
            ) from None
        if kind == "cuda" and backend == "local" and not torch.cuda.is_available():
            raise ScenarioError(
                "device is 'cuda', but this machine has no usable GPU; use device='cpu' or 'auto'"
            )


def _open_backend(
    scenario: Scenario,
    backend: str,
    clients_per_actor: int | Literal["auto"],
    device: str,
    address: str | None,
    tap: Tap | None,
    initial: Tensors,
) -> Backend | ServedBackend:
    problem, seed, dtype = scenario.problem, scenario.seed, _dtype(scenario)
    peers = isinstance(scenario.protocol, ProtocolLike)
    if backend == "local" and peers:
        return LocalBackend(problem, seed=seed, dtype=dtype, device=device, tap=tap, initial=initial)
    if backend == "local":
        return LocalServed(problem, seed=seed, dtype=dtype, device=device, initial=initial)
    from asyncfed.runtime.ray_backend import RayBackend
    from asyncfed.runtime.ray_served import RayServed

    return (RayBackend if peers else RayServed)(
        problem,
        seed=seed,
        dtype=dtype,
        device=device,
        clients_per_actor=clients_per_actor,
        address=address,
        initial=initial,
    )


def _carried(protocol: object) -> set[str]:
    """What a protocol carries from phase to phase: what its parts say (`carries`), else all there is."""
    parts = (protocol, *protocol.phases()) if isinstance(protocol, ProtocolLike) else (protocol,)
    declared = [set(part.carries) for part in parts if hasattr(part, "carries")]
    return {"inner", "outer"}.union(*(declared or [_CARRIED]))


def _initial(
    clients: int, derivatives: Derivatives, initial: Mapping[str, torch.Tensor] | None, known: set[str]
) -> Tensors:
    """The given variables, checked: a row for every client, as long as the problem's own where it has one."""
    lengths = {"inner": derivatives.inner.d, "outer": derivatives.outer.d, "omega": 1}
    rows: Tensors = {}
    for name, given in (initial or {}).items():
        if str(name).partition("/")[0] not in known:  # what several methods find is "hypergradient/0", …
            raise UnknownNameError("variable in initial", str(name), known)
        value = torch.as_tensor(given)
        expected = (clients, lengths[name]) if name in lengths else (clients, *(value.shape[1:] or (1,)))
        if tuple(value.shape) != expected:
            raise ScenarioError(
                f"initial[{name!r}] has the shape {tuple(value.shape)}; it must be {expected}: "
                "one flat row for each client (with a server: one row in all)"
            )
        rows[name] = value.detach().clone()
    return rows


def _metrics(item: Evaluation, totals: Totals) -> dict[str, Any]:
    steps = float(item.steps.mean()) if np.ptp(item.steps) else int(item.steps[0])
    row: dict[str, Any] = {
        "phase": item.phase,
        "step": steps if item.rounds is None else item.rounds,
        "virtual_time": item.time,
        "train_loss": None,
    }
    for name, values in item.reports.items():
        known = values[~np.isnan(values)]
        if len(known):
            row["train_loss" if name == "loss" else name] = float(known.mean())
    counts = item.counts
    for name, sums in item.sums.items():
        row[name] = float(sums.sum() / counts.sum())
        if name == "accuracy":
            judged = counts > 0
            row["accuracy_p10"] = float(np.percentile(sums[judged] / counts[judged], 10))
    if item.outer_step is not None:
        row["outer_step"] = item.outer_step
        for name, sums in item.validation.items():
            if item.validation_counts.sum():
                row[f"validation_{name}"] = float(sums.sum() / item.validation_counts.sum())
    if item.consensus is not None:
        row["consensus"] = item.consensus
    unrecorded = item.waiting + item.on_the_way
    return row | {
        "messages": totals.sent + unrecorded,
        "delivered": totals.delivered + item.waiting,
        "lost": totals.lost,
        "bytes": totals.bytes + unrecorded * item.message_bytes,
    }


def _clients(item: Evaluation) -> list[dict[str, Any]]:
    with np.errstate(invalid="ignore"):
        means = {name: sums / item.counts for name, sums in item.sums.items()}
    return [
        {"client": int(client), "steps": int(item.steps[place]), "samples": int(item.counts[place])}
        | {name: float(values[place]) for name, values in means.items()}
        for place, client in enumerate(item.clients)
    ]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = getattr(sys.modules.get(name), "__version__", "unknown")
    return found
