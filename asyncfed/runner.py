"""Run a scenario, or go on with a run that did not come to its end."""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from asyncfed.callbacks import Told
from asyncfed.checks import NonNegativeInt, PathLike, Words, checked, shown
from asyncfed.errors import AsyncfedError, ScenarioError, TraceError, UnknownNameError, UnsoundWarning
from asyncfed.execution import Execution, Progress
from asyncfed.homes import Imports, checked_imports
from asyncfed.options import CheckpointEvery, Options, PerActor
from asyncfed.protocols.part import Scene, Tensors
from asyncfed.result import Result
from asyncfed.runtime.block import Tap
from asyncfed.runtime.checkpoints import Checkpoints
from asyncfed.runtime.directory import RunDirectory
from asyncfed.runtime.fingerprint import fingerprints
from asyncfed.runtime.lock import locked
from asyncfed.scenario import AnyScenario, Scenario, check
from asyncfed.scenario_data import difference, scenario_from_data, scenario_to_data
from asyncfed.watching import Watched, watching

__all__ = ["Progress", "resumable", "resume", "run"]

_VERSIONED = ("asyncfed", "torch", "numpy", "networkx", "ray", "pyarrow")
_DECISIVE = ("python", "asyncfed", "torch", "numpy")  # versions that may change a run's numbers
_OF_DAMAGE = (
    LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError, MemoryError,
    AssertionError,
)  # fmt: skip
_FOR_GOOD = ("DivergenceError", "SeriesDivergesError", "QuorumError")  # would happen again


Initial = Annotated[
    Mapping[str, Any] | None,
    Words("a mapping of names to tensors, such as {'inner': result.final['inner']}, or None"),
]


@checked
def run(
    scenario: AnyScenario,
    *,
    backend: Literal["local", "ray"] = "local",
    clients_per_actor: PerActor = "auto",
    device: str = "auto",
    address: str | None = None,
    out: PathLike | None = None,
    save_final: bool = False,
    checkpoint_every: CheckpointEvery = "60s",
    max_recoveries: NonNegativeInt = 10,
    progress: Watched = None,
    callbacks: Told = (),
    tap: Tap | None = None,
    initial: Initial = None,
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
    checkpoint_every
        How often to write down what `resume` needs: a time ("60s", "5m", "1h"), a number of steps of each
        client (with a server: of outer iterations), or None for never. By time it takes at most 2% of it.
    max_recoveries
        How often actors that are lost are replaced, and the run goes on from its last checkpoint by itself.
    progress
        Whether to show how far the run is: True, False, or None for where somebody looks (on a terminal, in a
        notebook). Or a function, which is called after every wave with a `Progress`.
    callbacks
        Objects of classes that derive from `Callback`, told of evaluations, phases, messages and the end;
        `asyncfed.trackers` has some for TensorBoard, MLflow and Weights & Biases. They change nothing.
    tap
        Called with every step as an `Observation` (local backend only): for debugging and teaching.
    initial
        Variables to start from instead of the problem's own, one row per client: "inner", "outer", and
        whatever the protocol carries, as in the `final` of another run.
    strict
        Hand copies to every step and spoil them afterwards (local backend only): what a method of one's own
        changes in place, or keeps without returning it, shows. Slow.
    """
    options = Options(
        backend, clients_per_actor, device, address, save_final, checkpoint_every, max_recoveries
    )
    scene, unsound = _checked(scenario)
    start = _initial(scenario, scene, initial)
    _check_local(options, tap, strict)
    listeners = callbacks
    directory = RunDirectory.create(out, scenario.name)
    with locked(directory.path) as lock, watching(progress) as tell:
        directory.write("scenario.json", scenario_to_data(scenario) | {"versions": _versions()})
        if start:
            directory.write_tensors("initial.safetensors", start)
        manifest: dict[str, Any] = {
            "scenario": scenario.name,
            "clients": scenario.clients,
            "seed": int(scenario.seed),
            "nodes": scene.network.n,
            "options": options.as_dict(),
            **({"initial": sorted(start)} if start else {}),
            **({"warnings": unsound} if unsound else {}),
        }
        directory.write_manifest(status="running", **manifest)
        execution = Execution(
            scenario, scene, options, directory, lock, manifest, start,
            progress=tell, tap=tap, strict=strict, callbacks=listeners,
        )  # fmt: skip
        return execution.play()


@checked
def resume(
    path: PathLike,
    *,
    scenario: AnyScenario | None = None,
    backend: Literal["local", "ray"] | None = None,
    clients_per_actor: PerActor | None = None,
    address: str | None = None,
    checkpoint_every: CheckpointEvery = None,
    max_recoveries: NonNegativeInt | None = None,
    progress: Watched = None,
    callbacks: Told = (),
    imports: Imports = (),
) -> Result:
    """Go on with a run that was interrupted, killed or failed, to the same bytes as if it never had been.

    It goes on from its last checkpoint, or from its beginning where there is none yet, on the backend and
    with the packing that it had. On another backend, or packed otherwise, the trace is the same, and numbers
    agree to rounding: to 1e-10 in float64.

    Parameters
    ----------
    path
        The run directory.
    scenario
        The scenario, where the directory does not say all of it: problems made of one's own functions.
    backend, clients_per_actor
        As for `run`, where they are to be others now.
    address
        The Ray cluster, where it is another one now.
    checkpoint_every, max_recoveries
        As for `run`, where they are to be others now.
    progress, callbacks
        As for `run`. Evaluations that were recorded before are not told again.
    imports
        As for `load`: modules that may be imported for methods and problems of one's own.
    """
    directory, modules = RunDirectory.open(path), checked_imports(imports)
    listeners = callbacks
    with locked(directory.path) as lock, watching(progress) as tell:
        manifest = directory.manifest()
        _require_unfinished(directory.path, manifest)
        told = directory.scenario()
        _require_versions(directory.path, told.pop("versions", {}))
        scenario = _same_scenario(directory.path, told, scenario, modules)
        changes = {
            "backend": backend, "clients_per_actor": clients_per_actor, "address": address,
            "checkpoint_every": checkpoint_every, "max_recoveries": max_recoveries,
        }  # fmt: skip
        given: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
        before = Options.from_dict(_mapping(manifest, "options", directory.path))
        options = replace(before, **given)
        checkpoint = Checkpoints(directory.path).newest()
        if checkpoint is not None:
            _require_same_code(directory.path, checkpoint.facts.get("fingerprints", {}), scenario)
        scene, _ = _checked(scenario)
        start = {}
        if "initial" in manifest:
            start = _initial(scenario, scene, _given(directory))
        placement = manifest.get("placement") if options.same_place(before) else None
        kept = ("scenario", "clients", "seed", "nodes", "initial", "warnings", "recoveries", "wall_seconds")
        again = {key: manifest[key] for key in kept if key in manifest}
        again |= {"options": options.as_dict(), "resumed": int(manifest.get("resumed", 0)) + 1}
        again |= {"placement": placement} if placement else {}
        directory.write_manifest(status="running", **again)
        execution = Execution(
            scenario, scene, options, directory, lock, again, start, placement, tell, callbacks=listeners
        )
        try:
            return execution.play(checkpoint)
        except _OF_DAMAGE as error:
            if checkpoint is None or isinstance(error, AsyncfedError):
                raise
            raise TraceError(
                f"the run in {directory.path} cannot go on from its checkpoint ({type(error).__name__}: "
                f"{error!s:.500}): that was damaged or changed, unless code of your own failed. Remove "
                f"{directory.path / 'checkpoints'} to begin anew"
            ) from error


@checked
def resumable(path: PathLike) -> bool:
    """Whether a directory holds a run that `resume` could go on with, as far as its run.json tells."""
    try:
        directory = RunDirectory.open(path)
        manifest = directory.manifest()
        _require_unfinished(directory.path, manifest)
        _mapping(manifest, "options", directory.path)
    except AsyncfedError:
        return False
    return True


# --- what may be run -------------------------------------------------------------------------------------


def _checked(scenario: Scenario) -> tuple[Scene, list[str]]:
    """What it is to run on, and what was warned of."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        scene = check(scenario)
    for warning in noted:
        warnings.warn(warning.message, stacklevel=4)  # whoever called run or resume, which are `checked`
    return scene, [str(w.message) for w in noted if issubclass(w.category, UnsoundWarning)]


def _check_local(options: Options, tap: Tap | None, strict: bool) -> None:
    for name, given in (("tap", tap is not None), ("strict", strict)):
        if given and options.backend != "local":
            raise ScenarioError(f"{name} is for runs in this process; it needs backend='local'")


# --- what may be resumed ---------------------------------------------------------------------------------


def _require_unfinished(path: Path, manifest: Mapping[str, Any]) -> None:
    status = manifest.get("status")
    if status == "complete":
        raise ScenarioError(f"the run in {path} is complete; there is nothing to go on with")
    if status == "failed" and manifest.get("kind") in _FOR_GOOD:
        raise ScenarioError(
            f"the run in {path} would fail again, for it is its numbers that fail: {manifest.get('error')}"
        )


def _require_versions(path: Path, then: Any) -> None:
    if not isinstance(then, Mapping):
        raise TraceError(f"scenario.json of {path} is damaged: its versions are no object")
    now = _versions()
    others = [name for name in _DECISIVE if then.get(name) != now[name]]
    if others:
        said = ", ".join(f"{name} {then.get(name, '?')} then and {now[name]} now" for name in others)
        raise ScenarioError(
            f"the run in {path} was made with other versions ({said}), with which its numbers may be others; "
            "go back to those, or start it anew"
        )


def _same_scenario(
    path: Path, told: Mapping[str, Any], given: Scenario | None, imports: tuple[str, ...]
) -> Scenario:
    if given is None:
        try:
            return scenario_from_data(told, imports)
        except ScenarioError as error:
            raise ScenarioError(
                f"the scenario of {path} cannot be built again from what it says: {error}. "
                "Give it: resume(path, scenario=…), or `asyncfed resume RUN --scenario FILE.py`"
            ) from error
    changed = difference(told, given)
    if changed:
        raise ScenarioError(f"the run in {path} is of another scenario: {changed}")
    return given


def _require_same_code(path: Path, then: Any, scenario: Scenario) -> None:
    if not isinstance(then, Mapping):
        raise TraceError(f"the checkpoint in {path} is damaged: it does not say which code it is of")
    now = fingerprints(scenario)
    changed = [what for what, value in now.items() if then.get(what) != value]
    if changed:
        raise ScenarioError(
            f"{' and '.join(changed)} changed since the run in {path} was interrupted, so it would not come "
            f"to the same end; go back to what it was, or start the run anew (without its checkpoints, in "
            f"{path / 'checkpoints'}, it begins from its first step)"
        )


def _given(directory: RunDirectory) -> Tensors:
    """What the run began with."""
    try:
        return directory.tensors("initial.safetensors")
    except FileNotFoundError:
        raise TraceError(
            f"{directory.path} began with given variables, and initial.safetensors is missing; start it anew"
        ) from None


def _mapping(manifest: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    found = manifest.get(key)
    if not isinstance(found, Mapping):
        raise TraceError(
            f"run.json of {path} has no {key}; it was written by a version that could not resume"
        )
    return found


# --- small things ----------------------------------------------------------------------------------------


def _initial(scenario: Scenario, scene: Scene, initial: Mapping[str, Any] | None) -> Tensors:
    """The given variables, checked: a row for every client (for the server: one row), as long as the
    problem's own where it has one; in the run's precision, or in doubles where the method says so.
    """
    rows = scenario.clients if scenario.protocol.server is None else 1
    known = {"inner", "outer", *scenario.protocol.passes_on}
    lengths = {"inner": scene.sizes.inner, "outer": scene.sizes.outer, "omega": 1}
    ordinary = torch.float64 if scenario.precision == "float64" else torch.float32
    given: Tensors = {}
    for name, what in (initial or {}).items():
        of, _, which = name.partition("/")  # what several methods find is "hypergradient/0", …
        if of not in known or (which and (of in lengths or not which.isdecimal())):
            raise UnknownNameError(
                "variable in initial", name, known, "leave out what this method does not begin with"
            )
        value = _tensor(what, name)
        expected = (rows, lengths[name]) if name in lengths else (rows, *(value.shape[1:] or (1,)))
        if tuple(value.shape) != expected:
            raise ScenarioError(
                f"initial[{name!r}] has the shape {tuple(value.shape)}; it must be {expected}: "
                "one flat row for each client (with a server: one row in all)"
            )
        precision = torch.float64 if name in scenario.protocol.exact else ordinary
        given[name] = value.detach().clone().to(precision)
    return given


def _tensor(what: Any, name: str) -> torch.Tensor:
    try:
        return torch.as_tensor(what)
    except (TypeError, ValueError, RuntimeError):
        raise ScenarioError(
            f"initial[{name!r}] is {shown(what)}; it must be a tensor, one flat row for each client"
        ) from None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = getattr(sys.modules.get(name), "__version__", "unknown")
    return found
