"""`asyncfed run`: a run with somebody watching."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from asyncfed.cli.browser import write_report
from asyncfed.cli.tables import print_metrics, print_pairs, stderr, stdout
from asyncfed.description import links_line
from asyncfed.errors import RunError, RunExistsError, ScenarioError
from asyncfed.options import Options
from asyncfed.printable import duration
from asyncfed.runner import resumable, resume, run
from asyncfed.runtime.directory import RunDirectory
from asyncfed.scenario import Scenario
from asyncfed.watching import watcher

if TYPE_CHECKING:
    from rich.console import Console

    from asyncfed.result import Result


def execute(
    scenario: Scenario,
    *,
    backend: str,
    clients_per_actor: int | Literal["auto"],
    address: str | None,
    out: Path | None,
    device: str,
    save_final: bool,
    checkpoint_every: str | int | None,
    max_recoveries: int,
    pictures: bool,
    report: bool,
) -> None:
    """Run, print the result and where everything is; a run that stops early says where its part is."""
    if out is not None and (out / "study.json").exists():
        raise RunExistsError(f"{out} holds a study; give another directory for a single run")
    # Refuses what cannot be, before anything is said or made.
    Options(
        cast("Literal['local', 'ray']", backend), clients_per_actor, device, address, save_final,
        checkpoint_every, max_recoveries,
    )  # fmt: skip
    stood = out is not None and out.exists()
    path = RunDirectory.create(out, scenario.name).path
    messages = stderr()
    messages.print(
        f"running {scenario.name}: {scenario.clients} clients, seed {scenario.seed}, into {path}",
        soft_wrap=True,
    )
    try:
        with watcher(messages) as watching:
            result = run(
                scenario,
                backend=cast("Literal['local', 'ray']", backend),  # `run` refuses others, and names them
                clients_per_actor=clients_per_actor,
                device=device,
                address=address,
                out=path,
                save_final=save_final,
                checkpoint_every=checkpoint_every,
                max_recoveries=max_recoveries,
                progress=watching,
            )
    except BaseException as error:
        if (path / "run.json").exists():
            _say_what_is_left(messages, path)
        elif not stood and isinstance(error, (ScenarioError, KeyboardInterrupt)):
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
    _report(result, pictures)
    if report:
        write_report(result)


def go_on(
    path: Path,
    scenario: Scenario | None,
    *,
    backend: str | None,
    clients_per_actor: int | Literal["auto"] | None,
    address: str | None,
    checkpoint_every: str | int | None,
    max_recoveries: int | None,
    pictures: bool,
) -> None:
    """Resume a run, and print its result as `execute` does."""
    messages = stderr()
    messages.print(f"going on with the run in {path}", soft_wrap=True)
    try:
        with watcher(messages) as watching:
            result = resume(
                path,
                scenario=scenario,
                backend=cast("Literal['local', 'ray'] | None", backend),  # `resume` refuses others
                clients_per_actor=clients_per_actor,
                address=address,
                checkpoint_every=checkpoint_every,
                max_recoveries=max_recoveries,
                progress=watching,
            )
    except (RunError, KeyboardInterrupt):
        _say_what_is_left(messages, path)
        raise
    _report(result, pictures)


def _say_what_is_left(messages: Console, path: Path) -> None:
    quoted = shlex.quote(str(path))
    if resumable(path):
        messages.print(
            f"what was recorded is in {path}; look with: asyncfed show {quoted}\n"
            f"go on with: asyncfed resume {quoted}",
            soft_wrap=True,
        )
    else:
        messages.print(f"what was recorded is in {path}; look with: asyncfed show {quoted}", soft_wrap=True)


def _report(result: Result, pictures: bool) -> None:
    console = stdout()
    print_metrics(console, result.metrics)
    drawn: list[Path] = []
    if pictures:
        from asyncfed.report import pictures as draw

        drawn = draw(result)
    where = {
        "wall time": duration(result.manifest["wall_seconds"]),
        "links": links_line(result),
        "run": str(result.path),
        "trace": f"{result.path / 'trace'}   (asyncfed trace {result.path} --by edge --top 5)",
    }
    if drawn:
        where["pictures"] = "  ".join(map(str, drawn))
    else:
        where["pictures"] = "none; run with --pictures to draw some"
    console.print()
    print_pairs(console, where)
