"""Sweeps on the command line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

from asyncfed.cli.scenarios import load_maker
from asyncfed.cli.studies import print_summary, seconds_of, to_go_on_with
from asyncfed.cli.tables import print_pairs, stderr, stdout
from asyncfed.errors import RunError, ScenarioError
from asyncfed.printable import duration
from asyncfed.runtime.directory import RunDirectory
from asyncfed.study.watching import StudyWatcher
from asyncfed.sweeping import sweep
from asyncfed.sweeping.grid import parse_sweeps


def execute_sweep(
    name: str,
    settings: Sequence[str],
    seed: int | None,
    sweeps: Sequence[str],
    seeds: int | None,
    *,
    backend: str,
    out: Path | None,
    report: bool,
    **options: Any,
) -> None:
    """Run, print the table and where everything is; runs that failed are told at the end, as an error."""
    grid = parse_sweeps(sweeps)
    if seeds is not None:
        if "seed" in grid:
            raise ScenarioError("--seeds and --sweep seed=… both say which seeds; give one of them")
        grid["seed"] = list(range(seed or 0, (seed or 0) + seeds))
    make = load_maker(name, settings, seed)
    stood = out is not None and out.exists()
    begun = out is not None and (out / "study.json").exists()
    path = out if out is not None and begun else RunDirectory.create(out, f"{Path(name).stem}-sweep").path
    messages = stderr()
    messages.print(f"sweeping {name} over {', '.join(grid)}, into {path}", soft_wrap=True)
    again = [name, *(word for text in settings for word in ("--set", text))]
    again += [word for text in sweeps for word in ("--sweep", text)]
    again += [] if seed is None else ["--seed", str(seed)]
    again += [] if seeds is None else ["--seeds", str(seeds)]
    with to_go_on_with(messages, path, again, "runs", stood=stood), StudyWatcher(messages) as watching:
        result = sweep(
            make,
            grid,
            out=path,
            backend=cast("Literal['local', 'ray']", backend),  # `sweep` refuses others, and names them
            progress=watching,
            **options,
        )
    console = stdout()
    print_summary(console, result)
    quoted = shlex.quote(str(result.path))
    where = {"wall time of all runs": duration(seconds_of(result)), "sweep": str(result.path)}
    if report:
        where["report"] = str(result.report())
    print_pairs(console, where | {"more": f"asyncfed compare {quoted}"})
    failed = [part for part, state in result.parts.items() if "error" in state]
    if failed:
        raise RunError(
            f"{len(failed)} of {len(result.parts)} runs failed ({', '.join(failed[:5])}"
            f"{', …' if len(failed) > 5 else ''}); the others are complete"
        )
