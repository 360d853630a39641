"""Run a study: check every part, run one after the other, summarise what is complete.

Every part is built and checked before the first one runs, so that a mistake in the last is told at once; it
is built again when its turn comes, and let go afterwards. A part that diverges says something too: the study
goes on without it, and tells.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncfed.callbacks import Told
from asyncfed.checks import NonNegativeInt, PathLike, checked
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

    Raises
    ------
    RunError
        No part came to its end, or complete parts could not be summarised. A part that diverges while others
        do not raises nothing; `StudyResult.parts` tells of it.
    """
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
            for part in chosen:
                if is_done(parts[part]):
                    tell(part, "kept", error=parts[part].get("error", ""))
                    continue
                ledger.mark(part, "running")
                tell(part, "running")
                options = Options(
                    backend, clients_per_actor, device, address, save_final or study.save_final,
                    checkpoint_every, max_recoveries,
                )  # fmt: skip
                try:
                    _run_part(study.scenario(part), directory.path, part, options, watched(part), listeners)
                except DivergenceError as error:
                    ledger.mark(part, "failed", error)
                    tell(part, "failed", error=str(error))
                else:
                    ledger.mark(part, "complete")
                    tell(part, "complete")
            summary = _summarise(study, directory, parts, pictures)
        except BaseException as error:
            ledger.close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error)
            if isinstance(error, ScenarioError) and not begun:
                _leave_nothing(study, directory.path, existed)
            raise
        ledger.close("complete" if all(map(is_done, parts.values())) else "partial")
    return StudyResult(directory.path, summary)


def _run_part(
    scenario: Scenario,
    study: Path,
    part: str,
    options: Options,
    progress: Callable[[Progress], None],
    callbacks: Told,
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
    try:
        summary = study.summarise(Results(path, complete))
        if not isinstance(summary, Summary):
            raise TypeError(f"summarise() returned {summary!r}, and not a Summary")
    except Exception as error:
        missing = [part for part in parts if part not in complete]
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
    directory.write("summary.json", to_data(summary) | {"pictures": drawn, "of": complete, "failed": failed})
    return summary


def _unsummarised(what: str, error: Exception, path: Path) -> RunError:
    return RunError(
        f"the parts were run, but {what}: {_words(error)}; "
        f"mend that and run the study into {path} again: no complete part is run twice"
    )


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, AsyncfedError) else f"{type(error).__name__}: {error}"
