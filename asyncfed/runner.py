"""Run a scenario: check it, make its directory, execute it on a backend, and record everything as it goes."""

from __future__ import annotations

import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import numpy as np
import torch

from asyncfed.errors import ScenarioError, UnknownNameError, UnsoundWarning
from asyncfed.goals import Goal
from asyncfed.plain import plain
from asyncfed.protocols.part import Scene, Tensors
from asyncfed.record import Record
from asyncfed.result import Result
from asyncfed.rng import Streams
from asyncfed.runtime.backend import Backend
from asyncfed.runtime.block import Tap
from asyncfed.runtime.directory import RunDirectory
from asyncfed.runtime.evaluation import Evaluation
from asyncfed.runtime.local import LocalBackend
from asyncfed.runtime.loop import execute
from asyncfed.runtime.stage import Stage
from asyncfed.scenario import Scenario, check
from asyncfed.scenario_data import scenario_to_data
from asyncfed.trace import Totals, TraceWriter

_VERSIONED = ("asyncfed", "torch", "numpy", "networkx", "ray", "pyarrow")


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
    strict: bool = False,
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
    strict
        Hand copies to every step and spoil them afterwards (local backend only): what a method of one's own
        changes in place, or keeps without returning it, shows. Slow.
    """
    clients_per_actor = plain(clients_per_actor)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        scene = check(scenario)
    for warning in noted:
        warnings.warn(warning.message, stacklevel=2)
    unsound = [str(warning.message) for warning in noted if issubclass(warning.category, UnsoundWarning)]
    network, peers = scene.network, scenario.protocol.server is None
    start = _initial(scenario, scene, initial)
    _check_options(backend, clients_per_actor, device, tap, strict)
    directory = RunDirectory.create(out, scenario.name)
    directory.write("scenario.json", scenario_to_data(scenario) | {"versions": _versions()})
    manifest: dict[str, Any] = {
        "scenario": scenario.name,
        "clients": scenario.clients,
        "seed": int(scenario.seed),
        "nodes": network.n,
        **({"initial": sorted(start)} if start else {}),
        **({"warnings": unsound} if unsound else {}),
    }
    directory.write_manifest(status="running", **manifest)
    writer = TraceWriter(directory.trace, nodes=network.n, server=None if peers else network.server)
    record = Record(directory, writer)
    started = time.perf_counter()
    engine: Backend | None = None
    status, error = "failed", ""
    try:
        engine = _open_backend(scenario, backend, clients_per_actor, device, address, tap, start, strict)
        stage = Stage(
            scene=scene,
            streams=Streams(scenario.seed),
            backend=engine,
            recorder=writer,
            itemsize=_dtype(scenario).itemsize,
            evaluate_every=scenario.evaluate_every,
            enough=lambda item: _enough(item, scenario.until),
        )
        manifest["placement"] = vars(engine.placement)
        directory.write_manifest(status="running", **manifest)
        loss: float | None = None
        for item in execute(scenario.protocol, stage):
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


def _enough(item: Evaluation, until: Mapping[str, Goal] | None) -> bool:
    """Whether all the metrics of `until` have come so far."""
    if not until:
        return False
    return all(goal.met(float(item.sums[name].sum() / item.counts.sum())) for name, goal in until.items())


def _dtype(scenario: Scenario) -> torch.dtype:
    return torch.float64 if scenario.precision == "float64" else torch.float32


def _close(engine: Backend | None, record: Record) -> None:
    try:
        if engine is not None:
            engine.close()
    finally:
        record.close()


def _check_options(
    backend: str, clients_per_actor: object, device: str, tap: Tap | None, strict: bool
) -> None:
    if backend not in ("local", "ray"):
        raise UnknownNameError("backend", backend, ("local", "ray"))
    if clients_per_actor != "auto" and not (isinstance(clients_per_actor, int) and clients_per_actor >= 1):
        raise ScenarioError(f"clients_per_actor is {clients_per_actor!r}; it must be 'auto' or at least 1")
    for name, given in (("tap", tap is not None), ("strict", strict)):
        if given and backend != "local":
            raise ScenarioError(f"{name} is for runs in this process; it needs backend='local'")
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
    strict: bool,
) -> Backend:
    problem, seed, dtype = scenario.problem, scenario.seed, _dtype(scenario)
    server = scenario.protocol.server is not None
    if backend == "local":
        return LocalBackend(
            problem, seed=seed, dtype=dtype, device=device, tap=tap, initial=initial, server=server,
            strict=strict,
        )  # fmt: skip
    from asyncfed.runtime.ray_backend import RayBackend

    return RayBackend(
        problem,
        seed=seed,
        dtype=dtype,
        device=device,
        clients_per_actor=clients_per_actor,
        address=address,
        initial=initial,
        server=server,
    )


def _initial(scenario: Scenario, scene: Scene, initial: Mapping[str, torch.Tensor] | None) -> Tensors:
    """The given variables, checked: a row for every client (for the server: one row), as long as the
    problem's own where it has one; in the run's precision, or in doubles where the method says so.
    """
    rows = scenario.clients if scenario.protocol.server is None else 1
    known = {"inner", "outer", *scenario.protocol.passes_on}
    lengths = {"inner": scene.sizes.inner, "outer": scene.sizes.outer, "omega": 1}
    given: Tensors = {}
    if initial is not None and not isinstance(initial, Mapping):
        raise ScenarioError(
            f"initial is a {type(initial).__name__}; it must be a mapping of names to tensors, such as "
            "{'inner': result.final['inner']}"
        )
    for name, what in (initial or {}).items():
        if str(name).partition("/")[0] not in known:  # what several methods find is "hypergradient/0", …
            raise UnknownNameError(
                "variable in initial", str(name), known, "leave out what this method does not begin with"
            )
        value = torch.as_tensor(what)
        expected = (rows, lengths[name]) if name in lengths else (rows, *(value.shape[1:] or (1,)))
        if tuple(value.shape) != expected:
            raise ScenarioError(
                f"initial[{name!r}] has the shape {tuple(value.shape)}; it must be {expected}: "
                "one flat row for each client (with a server: one row in all)"
            )
        precision = torch.float64 if name in scenario.protocol.exact else _dtype(scenario)
        given[name] = value.detach().clone().to(precision)
    return given


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
            column = "train_loss" if name == "loss" else name
            row[column if column not in item.sums else f"reported_{column}"] = float(known.mean())
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
    unrecorded = item.unrecorded
    return row | {
        "messages": totals.sent + unrecorded.arrived + unrecorded.on_the_way,
        "delivered": totals.delivered + unrecorded.arrived - unrecorded.early,
        "lost": totals.lost,
        "bytes": totals.bytes + unrecorded.bytes,
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
