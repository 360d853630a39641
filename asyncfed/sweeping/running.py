"""`sweep`: a study of all combinations of some settings, run side by side.

A sweep is a study on disk, with all that studies have: study.json, a directory per run, a summary. Beside it,
sweep.json says which settings each run has.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from asyncfed.checks import NonNegativeInt, PathLike, PositiveInt, Words, checked
from asyncfed.comparison import Comparison
from asyncfed.errors import ScenarioError
from asyncfed.options import CheckpointEvery, PerActor
from asyncfed.registry import to_data
from asyncfed.result import Result
from asyncfed.runtime.directory import RunDirectory
from asyncfed.scenario import Scenario
from asyncfed.settings import apply_settings
from asyncfed.study import Study, StudyResult, Summary, SummaryTable, load_study, run_study
from asyncfed.sweeping.grid import checked_settings, combinations
from asyncfed.watching import Watched

FORMAT, VERSION = "asyncfed-sweep", 1

Swept = Annotated[
    Mapping[str, Any], Words("a mapping of settings to lists of values, such as {'protocol.lr': [0.1, 0.3]}")
]


@checked
def sweep(
    scenario: Scenario | Callable[..., Any],
    settings: Swept,
    *,
    out: PathLike | None = None,
    workers: PositiveInt | None = None,
    metric: str | None = None,
    backend: Literal["local", "ray"] = "local",
    clients_per_actor: PerActor = "auto",
    device: str = "auto",
    address: str | None = None,
    save_final: bool = False,
    checkpoint_every: CheckpointEvery = "60s",
    max_recoveries: NonNegativeInt = 10,
    pictures: bool = False,
    progress: Watched = None,
) -> StudyResult:
    """Run a scenario with all combinations of some settings, and make one table of what came of it.

    `backend`, `clients_per_actor`, `device`, `address`, `save_final`, `checkpoint_every` and `max_recoveries`
    are those of `run`, for every run.

    Parameters
    ----------
    scenario
        What to run; or a function that is called with a mapping of settings and returns a scenario.
    settings
        Setting → values, by the names of `--set`: `{"protocol.lr": [0.1, 0.3], "seed": range(5)}`. Runs are
        in the order of the product, the last setting fastest.
    out
        The sweep's directory; by default a new numbered one under `runs/` (or $ASYNCFED_RUNS). Where it holds
        this sweep already, complete runs are kept and interrupted ones go on; further values may be added.
    workers
        How many runs go side by side, each in a process of its own with its share of the threads; by default
        one per core (on Ray: 1).
    metric
        By which the table is sorted; accuracy or loss unless told.
    pictures
        Also draw the curves.
    progress
        As for `run_study`.

    Raises
    ------
    RunError
        No run came to its end. One that fails while others do not raises nothing; `StudyResult.parts` of what
        is returned tells of it.
    """
    grid = checked_settings(settings)
    runs = combinations(grid)
    make = partial(apply_settings, scenario) if isinstance(scenario, Scenario) else scenario
    first = _made(make, next(iter(runs.values())))
    study = Study(
        name=f"{first.name}-sweep",
        parts={name: partial(_made, make, chosen) for name, chosen in runs.items()},
        summarise=lambda results: _summary(results, grid, metric, pictures),
        note=f"a sweep over {', '.join(grid)}",
    )
    many = min(len(runs), workers or (_cores() if backend == "local" else 1))
    with _noted(study, out, {"settings": to_data(grid), "runs": to_data(runs)}) as path:
        return run_study(
            study, out=path, workers=many, keep_going=True, pictures=pictures, backend=backend,
            clients_per_actor=clients_per_actor, device=device, address=address, save_final=save_final,
            checkpoint_every=checkpoint_every, max_recoveries=max_recoveries, progress=progress,
        )  # fmt: skip


@contextlib.contextmanager
def _noted(study: Study, out: PathLike | None, about: dict[str, Any]) -> Iterator[Path]:
    """The sweep's directory, with its sweep.json; where nothing was begun in it, it is as it was before."""
    stood = out is not None and Path(out).exists()
    begun = out is not None and (Path(out) / "study.json").exists()
    directory = RunDirectory(Path(out)) if out is not None and begun else RunDirectory.create(out, study.name)
    path = directory.path
    if not begun or load_study(path).name == study.name:  # or it is refused
        directory.write("sweep.json", {"format": FORMAT, "version": VERSION, **about})
    try:
        yield path
    finally:
        if not (path / "study.json").exists():
            directory.remove("sweep.json")
            if not stood:
                with contextlib.suppress(OSError):  # where something stands in it, it stays
                    path.rmdir()


def _made(make: Callable[..., Any], chosen: Mapping[str, Any]) -> Scenario:
    made = make(chosen)
    if not isinstance(made, Scenario):
        raise ScenarioError(f"the function of a sweep returned {made!r:.200}; it must return a Scenario")
    return made


def _summary(
    results: Mapping[str, Result], grid: Mapping[str, Any], metric: str | None, pictures: bool
) -> Summary:
    compared = Comparison(results, {})
    chosen = compared.checked_metric(metric)
    title = f"{chosen.replace('_', ' ')} by {', '.join(path for path in grid if path != 'seed') or 'seed'}"
    drawn = {"curves": lambda path: compared.picture(path, chosen)} if pictures else {}
    return Summary(tables=[SummaryTable(title, compared.table(chosen, sort=True))], pictures=drawn)


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
