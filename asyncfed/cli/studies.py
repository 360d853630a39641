"""Studies on the command line: run with somebody watching, and shown again."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, cast

from asyncfed.cli.browser import write_report
from asyncfed.cli.tables import print_columns, print_pairs, stderr, stdout
from asyncfed.errors import ScenarioError, TraceError
from asyncfed.options import Options
from asyncfed.printable import duration
from asyncfed.runtime.directory import RunDirectory
from asyncfed.study import Study, StudyResult, load_study, run_study
from asyncfed.study.summary import answer, text_columns
from asyncfed.study.watching import StudyWatcher

if TYPE_CHECKING:
    from rich.console import Console

    from asyncfed.result import Result

_STUDY_ENDINGS = {
    "partial": "partial: some parts were not asked for",
    "interrupted": "interrupted: what is complete is kept",
    "failed": "failed: what is complete is kept",
    "running": "running, or killed before it could say so",
}


def execute_study(
    study: Study,
    *,
    again: Sequence[str],
    backend: str,
    clients_per_actor: int | Literal["auto"],
    address: str | None,
    out: Path | None,
    device: str,
    save_final: bool,
    checkpoint_every: str | int | None,
    max_recoveries: int,
    only: Sequence[str] | None,
    workers: int,
    pictures: bool,
    report: bool,
) -> None:
    """Run, print the summary and where everything is.

    `again` are the words after `asyncfed run` with which the same study can be gone on with.
    """
    # Refuses what cannot be, before anything is said or made.
    Options(
        cast("Literal['local', 'ray']", backend), clients_per_actor, device, address, save_final,
        checkpoint_every, max_recoveries,
    )  # fmt: skip
    stood = out is not None and out.exists()
    path = RunDirectory.create(out, study.name).path
    messages = stderr()
    messages.print(f"running the study {study.name}: {len(study.parts)} parts, into {path}", soft_wrap=True)
    with to_go_on_with(messages, path, again, "parts", stood=stood), StudyWatcher(messages) as watching:
        result = run_study(
            study,
            backend=cast("Literal['local', 'ray']", backend),  # `run` refuses others, and names them
            clients_per_actor=clients_per_actor,
            device=device,
            address=address,
            out=path,
            save_final=save_final,
            checkpoint_every=checkpoint_every,
            max_recoveries=max_recoveries,
            only=only,
            workers=workers,
            pictures=pictures,
            progress=watching,
        )
    console = stdout()
    print_summary(console, result)
    where = {"wall time": duration(seconds_of(result)), "study": str(path)}
    if result.status != "complete":
        where["status"] = _STUDY_ENDINGS[result.status]
    where["parts"] = f"asyncfed show {shlex.quote(str(path))}"
    where["pictures"] = "  ".join(map(str, result.pictures)) or (
        "none in this summary"
        if pictures
        else "none; run it with --pictures into the same --out to draw some"
    )
    console.print()
    print_pairs(console, where)
    if report:
        write_report(result)


@contextlib.contextmanager
def to_go_on_with(
    messages: Console, path: Path, again: Sequence[str], what: str, *, stood: bool
) -> Iterator[None]:
    """Where it ends early: say what is kept and how to go on, or leave nothing where nothing stood before."""
    try:
        yield
    except BaseException as error:
        refused = isinstance(error, (ScenarioError, TraceError))
        if (path / "study.json").exists() and not refused:
            command = shlex.join(["asyncfed", "run", *again, "--out", str(path)])
            messages.print(f"complete {what} are kept in {path}; go on with: {command}", soft_wrap=True)
        elif not stood:
            with contextlib.suppress(OSError):  # where something stands in it, it stays
                path.rmdir()
        raise


def show_study(path: Path) -> None:
    """How the parts stand, and the summary."""
    result = load_study(path)
    manifest = result.manifest
    console = stdout()
    pairs = {"study": str(path), "name": result.name}
    if manifest["note"]:
        pairs["note"] = manifest["note"]
    pairs["status"] = _STUDY_ENDINGS.get(result.status, result.status)
    if "error" in manifest:
        pairs["error"] = manifest["error"]
    pairs["wall time"] = duration(seconds_of(result))
    print_pairs(console, pairs)
    times = {part: duration(_wall_seconds(run)) for part, run in result.results.items()}
    columns = [
        ("part", list(result.parts), False),
        ("status", [state["status"] for state in result.parts.values()], False),
        ("wall time", [times.get(part, "") for part in result.parts], True),
    ]
    print_columns(console, columns)
    print_summary(console, result)
    if result.pictures:
        console.print()
        print_pairs(console, {"pictures": "  ".join(map(str, result.pictures))})


def refuse_study(path: Path) -> NoReturn:
    """For commands that need a single run."""
    parts = load_study(path).parts
    example = shlex.quote(str(path / next(iter(parts), "PART")))
    raise TraceError(f"{path} is a study of {len(parts)} runs; give one of them, such as {example}")


def refuse_to_resume(path: Path) -> NoReturn:
    """A study's parts are made by its file, which a directory does not name."""
    study = load_study(path)
    raise ScenarioError(
        f"{path} is a study; go on with it by the command that began it, which ended in "
        f"`asyncfed run {study.name} … --out {shlex.quote(str(path))}`: complete parts are kept, and the one "
        "that was interrupted goes on from its last checkpoint"
    )


def print_summary(console: Console, result: StudyResult) -> None:
    """Tables, findings, and what is missing and why."""
    summary = result.summary
    for table in summary.tables:
        console.print(table.title, soft_wrap=True, style="bold")
        print_columns(console, text_columns(table.frame))
        for note in table.notes:
            console.print(note, soft_wrap=True)
        if table.notes:
            console.print()
    for text, holds in summary.findings:
        console.print(f"{answer(holds)}  {text}", soft_wrap=True)
    if not result.summarised:
        console.print("no summary yet")
    elif len(result.summarised) < len(result.parts):
        console.print(f"(a summary of {len(result.summarised)} of {len(result.parts)} parts)")
    errors = {part: state for part, state in result.parts.items() if "error" in state}
    print_pairs(console, {part: f"{state['status']}: {state['error']}" for part, state in errors.items()})


def seconds_of(result: StudyResult) -> float:
    """Of all complete parts."""
    return sum(map(_wall_seconds, result.results.values()))


def _wall_seconds(run: Result) -> float:
    return float(run.manifest.get("wall_seconds", 0.0))
