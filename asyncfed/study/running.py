"""Run a study: check every part, run one after the other, summarise what is complete.

Every part is built and checked before the first one runs, so that a mistake in the last is told at once; it
is built again when its turn comes, and let go afterwards. A part that diverges says something too: the study
goes on without it, and tells. Parts may run side by side, in processes of their own (`processes`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncfed.callbacks import Told
from asyncfed.checks import NonNegativeInt, PathLike, PositiveInt, checked
from asyncfed.errors import (
    AsyncfedError,
    DivergenceError,
    RecoveredWarning,
    RunError,
    ScenarioError,
    TraceError,
    UnknownNameError,
)
from asyncfed.options import CheckpointEvery, Options, PerActor
from asyncfed.runner import Progress, resume, run
from asyncfed.runtime.directory import RunDirectory
from asyncfed.runtime.stopping import stopping
from asyncfed.scenario import Scenario, check
from asyncfed.study.definition import Study
from asyncfed.study.directory import (
    WAITING,
    Ledger,
    Results,
    State,
    StudyResult,
    alone,
    discard,
    interrupted,
    is_complete,
    is_done,
    recorded_parts,
    standing,
)
from asyncfed.study.processes import in_processes
from asyncfed.study.summary import Summary, draw, to_data, write_summary
from asyncfed.study.watching import StudyWatcher
from asyncfed.watching import Watched, errors_console, watching


@dataclass(frozen=True)
class StudyProgress:
    """Where a study is, for whoever watches.

    Every part is "checking" first; then it is "kept" as it stands from an earlier run, or "running" (`run`
    says how far, and is None at its start) until it is "complete" or "failed".
    """

    part: str
    number: int  # of `total`, from 1
    total: int
    status: Literal["checking", "kept", "running", "complete", "failed"]
    run: Progress | None = None
    error: str = ""
    alone: bool = True  # False where others run beside it, which do not tell how far they are


@checked
def run_study(
    study: Study,
    *,
    backend: Literal["local", "ray"] = "local",
    clients_per_actor: PerActor = "auto",
    device: str = "auto",
    address: str | None = None,
    out: PathLike | None = None,
    save_final: bool = False,
    checkpoint_every: CheckpointEvery = "60s",
    max_recoveries: NonNegativeInt = 10,
    only: Sequence[str] | None = None,
    pictures: bool = True,
    progress: Watched = None,
    callbacks: Told = (),
    workers: PositiveInt = 1,
    keep_going: bool = False,
) -> StudyResult:
    """Run the parts of a study, one after the other, and summarise those that are complete.

    `backend`, `clients_per_actor`, `device`, `address`, `save_final`, `checkpoint_every` and `max_recoveries`
    are those of `run`, for every part.

    Parameters
    ----------
    out
        The study's directory; by default a new numbered one under `runs/` (or $ASYNCFED_RUNS). Where it holds
        this study already, the parts that are complete or diverged are kept, one that was interrupted goes
        on from its last checkpoint, and the others run afresh.
    only
        Run only these parts; one that diverged is tried again. The summary is of all that are complete.
    pictures
        Also draw the pictures of the summary.
    progress
        Whether to show how far the study is, as for `run`; or a function, which is called with a
        `StudyProgress` whenever something happens.
    callbacks
        As for `run`, for every part that runs; `on_start` says which it is.
    workers
        How many parts run side by side, each in a process of its own with its share of the threads (local
        backend only, and without callbacks); 1 is in this process.
    keep_going
        Whether the others go on when a part fails otherwise than by diverging.

    Raises
    ------
    RunError
        No part came to its end, or complete parts could not be summarised. A part that diverges while others
        do not raises nothing (nor, with `keep_going`, one that fails); `StudyResult.parts` tells of it.
    """
    if workers > 1 and (backend != "local" or callbacks):
        raise ScenarioError(
            f"workers is {workers}, for parts in processes of their own; that needs backend='local', and no "
            "callbacks, which could not be told from there"
        )
    chosen = _chosen(study, only)
    listeners = callbacks

    def tell(part: str, status: Any, **more: Any) -> None:
        if told is not None:
            told(StudyProgress(part, chosen.index(part) + 1, len(chosen), status, **more))

    def watched(part: str) -> Callable[[Progress], None]:
        return lambda now: tell(part, "running", run=now)

    path = None if out is None else Path(out)
    existed = path is not None and path.exists()
    begun = path is not None and (path / "study.json").exists()
    with contextlib.ExitStack() as stack:
        shown = watching(progress, lambda: StudyWatcher(errors_console()))
        told = stack.enter_context(shown)
        if path is not None and begun:
            stack.enter_context(alone(path))
            directory = RunDirectory(path)
            parts = _checked(study, chosen, path, tell)
        else:
            parts = _checked(study, chosen, path, tell)
            directory = RunDirectory.create(out, study.name)
            stack.enter_context(alone(directory.path))
        if only:
            parts |= {part: WAITING for part in chosen if not is_complete(parts[part])}
        ledger = Ledger(directory, study, parts)
        if backend == "ray":
            from asyncfed.runtime.ray_actors import actors_kept

            stack.enter_context(actors_kept())
        try:
            options = Options(
                backend, clients_per_actor, device, address, save_final or study.save_final,
                checkpoint_every, max_recoveries,
            )  # fmt: skip
            todo = []
            for part in chosen:
                if is_done(parts[part]):
                    tell(part, "kept", error=parts[part].get("error", ""))
                else:
                    todo.append(part)

            def begin(part: str) -> Scenario:
                ledger.mark(part, "running")
                tell(part, "running", alone=workers == 1)
                return study.scenario(part)

            if workers == 1:
                played = _one_by_one(todo, begin, directory.path, options, watched, listeners)
            else:
                stack.enter_context(stopping())
                played = in_processes(todo, begin, directory.path, options, workers)
            tolerated = Exception if keep_going else DivergenceError
            with contextlib.closing(played):
                for part, error in played:
                    if error is None:
                        ledger.mark(part, "complete")
                        tell(part, "complete", alone=workers == 1)
                    elif isinstance(error, tolerated):
                        ledger.mark(part, "failed", error)
                        tell(part, "failed", error=_words(error), alone=workers == 1)
                    else:
                        raise error
            summary = _summarise(study, directory, parts, pictures)
        except BaseException as error:
            ledger.close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error)
            if isinstance(error, ScenarioError) and not begun:
                _leave_nothing(study, directory.path, existed)
            raise
        failed = any("error" in state and not is_done(state) for state in parts.values())
        ledger.close("complete" if all(map(is_done, parts.values())) else "failed" if failed else "partial")
    return StudyResult(directory.path, summary)


def _one_by_one(
    parts: Sequence[str],
    scenario: Callable[[str], Scenario],
    study: Path,
    options: Options,
    watched: Callable[[str], Callable[[Progress], None]],
    callbacks: Told,
) -> Generator[tuple[str, BaseException | None]]:
    """Run parts; yields each as it ends, with its error where it failed."""
    for part in parts:
        made = scenario(part)
        try:
            run_part(made, study, part, options, watched(part), callbacks)
        except Exception as error:
            yield part, error
        else:
            yield part, None


def run_part(
    scenario: Scenario,
    study: Path,
    part: str,
    options: Options,
    progress: Callable[[Progress], None] | Literal[False] = False,
    callbacks: Told = (),
) -> None:
    """Go on with what stands there, where that comes to the same end; or run it afresh."""
    out = study / part
    if interrupted(out, options):
        try:
            resume(
                out, scenario=scenario, address=options.address, max_recoveries=options.max_recoveries,
                progress=progress, callbacks=callbacks,
            )  # fmt: skip
            return
        except (ScenarioError, TraceError) as error:  # other versions, changed code, a damaged checkpoint
            warnings.warn(RecoveredWarning(f"{out} is run afresh: {error}"), stacklevel=3)
    discard(study, part)
    run(scenario, out=out, progress=progress, callbacks=callbacks, **options.as_dict())


def _chosen(study: Study, only: Sequence[str] | None) -> list[str]:
    for part in only or ():
        if part not in study.parts:
            raise UnknownNameError(f"part of the study {study.name}:", part, study.parts)
    return [part for part in study.parts if not only or part in only]


def _checked(
    study: Study, chosen: Sequence[str], path: Path | None, tell: Callable[[str, str], None]
) -> dict[str, State]:
    """How every part stands; refuses what cannot be run, or not in this directory."""
    recorded = {} if path is None else recorded_parts(study, path)
    parts: dict[str, State] = {}
    for part in study.parts:
        stands = path is not None and (path / part).exists()
        parts[part] = WAITING
        if part in chosen:
            tell(part, "checking")
        if part in chosen or stands:
            scenario = study.scenario(part)
            check(scenario)
            if path is not None and stands:
                parts[part] = standing(path / part, recorded.get(part), scenario)
    return parts


def _leave_nothing(study: Study, path: Path, existed: bool) -> None:
    """What `run` refused before its first step (an unknown backend, say) leaves no directory."""
    if not any((path / part).exists() for part in study.parts):
        (path / "study.json").unlink()
        if not existed:
            with contextlib.suppress(OSError):
                path.rmdir()


def _summarise(study: Study, directory: RunDirectory, parts: dict[str, State], pictures: bool) -> Summary:
    """The summary of what is complete, made and written."""
    path = directory.path
    complete = [part for part, state in parts.items() if is_complete(state)]
    failed = {part: state["error"] for part, state in parts.items() if "error" in state}
    if not complete:
        reasons = "; ".join(f"{part}: {error}" for part, error in failed.items())
        raise RunError(f"no part came to its end: {reasons}")
    told = [part for part, state in parts.items() if is_done(state)] if study.with_diverged else complete
    try:
        summary = study.summarise(Results(path, told))
        if not isinstance(summary, Summary):
            raise TypeError(f"summarise() returned {summary!r}, and not a Summary")
    except Exception as error:
        missing = [part for part in parts if part not in told]
        if not missing:
            raise _unsummarised("they could not be summarised", error, path) from error
        summary = Summary(findings=[(f"no summary without {', '.join(missing)}: {_words(error)}", None)])
    write_summary(summary, "\n".join(filter(None, (study.name, study.note))), failed, path)
    drawn = sorted(summary.pictures) if pictures else []
    if drawn:
        try:
            draw(summary.pictures, path / "pictures")
        except Exception as error:
            raise _unsummarised("a picture could not be drawn", error, path) from error
    drawn = [f"{name}.png" for name in drawn]
    directory.write("summary.json", to_data(summary) | {"pictures": drawn, "of": told, "failed": failed})
    return summary


def _unsummarised(what: str, error: Exception, path: Path) -> RunError:
    return RunError(
        f"the parts were run, but {what}: {_words(error)}; "
        f"mend that and run the study into {path} again: no complete part is run twice"
    )


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, AsyncfedError) else f"{type(error).__name__}: {error}"
