"""The commands and their options."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from asyncfed.cli.failures import guarded

EXIT_CODES = (
    "Exit codes: 0 fine; 1 a bug in asyncfed; 2 bad input, nothing was run; 3 the run failed, what was "
    "recorded stays readable; "
    "4 a run or trace that cannot be read; 130 interrupted (143 by SIGTERM, 129 by SIGHUP), the partial run "
    "stays readable and can be resumed. "
    "ASYNCFED_DEBUG=1 (or --debug) shows where an error came from."
)

app = typer.Typer(
    name="asyncfed",
    help="Simulate federated and decentralized learning on networks that misbehave.",
    epilog=EXIT_CODES,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show → shows ?, and does not fail
    app()


def _version(wanted: bool) -> None:
    if wanted:
        from asyncfed import __version__

        typer.echo(f"asyncfed {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    if debug:
        os.environ["ASYNCFED_DEBUG"] = "1"


@app.command("list")
@guarded
def list_scenarios() -> None:
    """Show the scenarios and studies that come along, a line each."""
    from asyncfed.cli.scenarios import known_scenarios, known_studies
    from asyncfed.cli.tables import print_pairs, stdout

    console = stdout()
    print_pairs(console, known_scenarios())
    studies = known_studies()
    if studies:
        console.print("\nStudies, of several runs each:")
        print_pairs(console, studies)
    console.print(
        "\nRun one with `asyncfed run NAME`, or a file of your own with `asyncfed run my_scenario.py`: "
        "it needs a function scenario() that returns a Scenario, or a value SCENARIO, "
        "or a function study() that returns a Study.",
        soft_wrap=True,
    )


@app.command(epilog=EXIT_CODES)
@guarded
def new(
    path: Annotated[Path, typer.Argument(metavar="FILE.py", help="What it is to be called.")],
) -> None:
    """Write a commented scenario of your own to start from; it runs as it is."""
    from asyncfed.cli.starting import write_starting_file

    write_starting_file(path)
    typer.echo(f"wrote {path}; run it with: asyncfed run {shlex.quote(str(path))}")


@app.command(epilog=EXIT_CODES)
@guarded
def run(
    scenario: Annotated[
        str,
        typer.Argument(metavar="NAME|FILE.py", help="A scenario or study from `asyncfed list`, or a file."),
    ],
    backend: Annotated[
        str, typer.Option(help="local: all clients in this process; ray: in Ray actors.", metavar="local|ray")
    ] = "local",
    clients_per_actor: Annotated[
        str,
        typer.Option(
            help="How many clients share a Ray actor; auto is one each where that fits.", metavar="K|auto"
        ),
    ] = "auto",
    address: Annotated[
        str | None, typer.Option(help="An existing Ray cluster (auto: the one this machine belongs to).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run, or `seed` of the study.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="Change a parameter of the scenario (clients=50) or a part of it (protocol.lr=0.1, "
            "timing.latency='exponential(0.2)', problem.model=mlp:64, topology.seed=3, "
            "weights='Metropolis()', protocol='FedAvg(3, LocalSteps(0.1))'); of a study, a parameter. "
            "Repeatable.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="Of a study, run only this part. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run directory; by default a new one under runs/ (or $ASYNCFED_RUNS). "
            "A study that was begun there goes on."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    save_final: Annotated[
        bool, typer.Option("--save-final", help="Also keep the final variables of all clients.")
    ] = False,
    checkpoint_every: Annotated[
        str, typer.Option(help="Write down what `resume` needs every 60s, 5m, 1h, so many steps, or never.")
    ] = "60s",
    max_recoveries: Annotated[
        int, typer.Option(min=0, help="How often lost Ray actors are replaced and the run goes on by itself.")
    ] = 10,
    pictures: Annotated[bool, typer.Option("--pictures", help="Also draw the result.")] = False,
    report: Annotated[
        bool,
        typer.Option("--report", help="Also write one HTML file of it, shown if there is a display."),
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH=V1,V2,…",
            help="Run all combinations of these values of a setting, by the names of --set. Repeatable.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Run each with so many seeds, from --seed (or 0) on.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many runs at a time: of a sweep (one per core unless told), or parts of a study (one).",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="Of a sweep: what its table is sorted by; accuracy or loss unless told."),
    ] = None,
) -> None:
    """Run a scenario, the parts of a study, or a sweep over settings, and print the result."""
    from asyncfed.cli.scenarios import load_work
    from asyncfed.scenario import Scenario

    packing = _packing(clients_per_actor)
    if sweep or seeds is not None:
        from asyncfed.cli.sweeping import execute_sweep

        execute_sweep(
            scenario,
            settings or (),
            seed,
            sweep or (),
            seeds,
            workers=workers,
            metric=metric,
            backend=backend,
            clients_per_actor=packing,
            address=address,
            out=out,
            device=device,
            save_final=save_final,
            checkpoint_every=_interval(checkpoint_every),
            max_recoveries=max_recoveries,
            pictures=pictures,
            report=report,
        )
        return
    from asyncfed.errors import ScenarioError

    if metric is not None:
        raise ScenarioError("--metric is for sweeps; give --sweep or --seeds, too")
    work = load_work(scenario, settings or (), seed)
    if isinstance(work, Scenario):
        from asyncfed.cli.session import execute

        if workers is not None:
            raise ScenarioError(
                f"--workers is for sweeps and studies, and {scenario} is a single scenario; give --sweep or "
                "--seeds, too"
            )
        if only:
            raise ScenarioError(f"--only chooses parts of a study, and {scenario} is a single scenario")
        execute(
            work,
            backend=backend,
            clients_per_actor=packing,
            address=address,
            out=out,
            device=device,
            save_final=save_final,
            checkpoint_every=_interval(checkpoint_every),
            max_recoveries=max_recoveries,
            pictures=pictures,
            report=report,
        )
    else:
        from asyncfed.cli.studies import execute_study

        changed = [word for setting in settings or () for word in ("--set", setting)]
        execute_study(
            work,
            again=[scenario, *changed, *([] if seed is None else ["--seed", str(seed)])],
            backend=backend,
            clients_per_actor=packing,
            address=address,
            out=out,
            device=device,
            save_final=save_final,
            checkpoint_every=_interval(checkpoint_every),
            max_recoveries=max_recoveries,
            only=only,
            workers=workers or 1,
            pictures=pictures,
            report=report,
        )


@app.command(epilog=EXIT_CODES)
@guarded
def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run that did not end.")],
    scenario: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.py",
            help="The scenario, where the run does not say all of it: problems made of one's own functions.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="With --scenario: as for `run`.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="With --scenario: as for `run`.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="As for `run`, where it is another one now.", metavar="local|ray")
    ] = None,
    clients_per_actor: Annotated[
        str | None, typer.Option(help="As for `run`, where it is to be another one now.", metavar="K|auto")
    ] = None,
    address: Annotated[str | None, typer.Option(help="The Ray cluster, where it is another one now.")] = None,
    checkpoint_every: Annotated[
        str | None, typer.Option(help="As for `run`, where it is to be another one now.")
    ] = None,
    max_recoveries: Annotated[
        int | None, typer.Option(min=0, help="As for `run`, where it is to be another one now.")
    ] = None,
    pictures: Annotated[bool, typer.Option("--pictures", help="Also draw the result.")] = False,
) -> None:
    """Go on with a run that was interrupted, killed or failed, to the same end as if it never had been."""
    from asyncfed.cli.scenarios import load_scenario
    from asyncfed.cli.session import go_on
    from asyncfed.errors import ScenarioError

    if (path / "study.json").exists():
        from asyncfed.cli.studies import refuse_to_resume

        refuse_to_resume(path)
    if scenario is None and (settings or seed is not None):
        raise ScenarioError("--set and --seed are for a scenario that is given; the run has its own")
    go_on(
        path,
        None if scenario is None else load_scenario(scenario, settings or (), seed),
        backend=backend,
        clients_per_actor=None if clients_per_actor is None else _packing(clients_per_actor),
        address=address,
        checkpoint_every=None if checkpoint_every is None else _interval(checkpoint_every),
        max_recoveries=max_recoveries,
        pictures=pictures,
    )


def _interval(text: str) -> str | int | None:
    """Of checkpoints, as `run` takes it."""
    if text == "never":
        return None
    return int(text) if text.isdecimal() else text


def _packing(text: str) -> int | Literal["auto"]:
    """Clients per actor, as `run` takes it."""
    from asyncfed.errors import ScenarioError

    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ScenarioError(f"--clients-per-actor is {text!r}; it must be 'auto' or a whole number") from None


@app.command(epilog=EXIT_CODES)
@guarded
def show(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run or a study.")],
) -> None:
    """Say what was run, how it ended, and its metrics, or a study's parts and summary."""
    from asyncfed.cli.tables import print_metrics, print_pairs, stdout
    from asyncfed.description import describe
    from asyncfed.result import load

    if (path / "study.json").exists():
        from asyncfed.cli.studies import show_study

        show_study(path)
        return
    result = load(path)
    console = stdout()
    print_pairs(console, describe(result))
    print_metrics(console, result.metrics)


@app.command(epilog=EXIT_CODES)
@guarded
def trace(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    by: Annotated[str, typer.Option(help="One row per what.", metavar="edge|node|phase|step|round")] = "edge",
    edge: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="I J", help="Every message from I to J, by their names or numbers."),
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, help="How many rows to show; 20 unless told.")] = None,
    sort: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Largest of this column first; edges: bytes unless told."),
    ] = None,
    ascending: Annotated[bool, typer.Option("--ascending", help="Smallest first.")] = False,
    csv: Annotated[
        Path | None, typer.Option(help="Also write the table (all rows, or --top) to this file.")
    ] = None,
) -> None:
    """Ask the trace: traffic and delivery per edge, client, phase, step or round, or an edge's messages."""
    from asyncfed.cli.tables import print_frame, stdout, write_csv
    from asyncfed.cli.tracing import question
    from asyncfed.description import ending
    from asyncfed.result import load

    if (path / "study.json").exists():
        from asyncfed.cli.studies import refuse_study

        refuse_study(path)
    result = load(path)
    frame, what = question(result.trace, by, edge, sort, ascending)
    if csv is not None:
        write_csv(frame if top is None else frame.head(top), csv)
    print_frame(stdout(), frame.head(20 if top is None else top), len(frame), what, ending(result))


@app.command(epilog=EXIT_CODES)
@guarded
def view(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="Directories of runs, finished or still going, or of studies."),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes a free one.")] = 0,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Print the address, and do not open a browser.")
    ] = False,
) -> None:
    """Explore runs in the browser: network, space-time, matrix, learning, clients; several side by side.

    Served from this machine to this machine only, until Ctrl-C. No request leaves it.
    """
    from asyncfed.cli.viewing import serve

    serve(paths, port, browser=not no_open)


@app.command(epilog=EXIT_CODES)
@guarded
def report(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Directories of runs, or of a study.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
) -> None:
    """Write one HTML file for a colleague: what was run, how to run it again, tables, curves, network.

    It opens from disk without a network, and has less than 5 MB.
    """
    from asyncfed.cli.tables import stdout
    from asyncfed.report.document import report as write

    stdout().print(str(write(paths, out)), soft_wrap=True)


@app.command(epilog=EXIT_CODES)
@guarded
def compare(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Directories of runs, or of studies and sweeps.")
    ],
    metric: Annotated[
        list[str] | None,
        typer.Option(help="Compare this one; accuracy or loss unless told. Repeatable."),
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS=POINT",
            help="Where: step=100, virtual_time=20, bytes=1e6 or rounds=50; unless told, at the furthest "
            "point of each that all runs have come to. Repeatable.",
        ),
    ] = None,
    sort: Annotated[bool, typer.Option("--sort", help="The best last value first.")] = False,
    csv: Annotated[
        Path | None, typer.Option(help="Also write all metrics as plain numbers to this file.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw the (first) metric into this .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Compare runs: what differs, and metrics at equal steps, virtual time, bytes and rounds.

    Runs that differ by their seed only are one row, mean ± standard error.
    """
    from asyncfed.cli.comparing import print_comparison

    print_comparison(paths, metric or [None], at or (), sort=sort, csv=csv, picture=picture)


@app.command(epilog=EXIT_CODES)
@guarded
def export(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    to: Annotated[
        str,
        typer.Option(help="What to write.", metavar="perfetto|chrome|csv|graphml|gexf|parquet"),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file (csv: the folder); by default in export/ of the run."),
    ] = None,
) -> None:
    """Write a run for other programs: a timeline, tables, or the network with what was measured."""
    from asyncfed.cli.tables import stdout
    from asyncfed.exporting import export as write

    if (path / "study.json").exists():
        from asyncfed.cli.studies import refuse_study

        refuse_study(path)
    for file in write(path, to, out):
        stdout().print(str(file), soft_wrap=True)
