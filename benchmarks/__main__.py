"""`make bench`: every figure in one run, as a table. `python -m benchmarks NAME …` runs some of them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from benchmarks.table import Row


def _benchmarks() -> dict[str, Callable[[], list[Row]]]:
    from benchmarks.events import event_driven, schedule_alone
    from benchmarks.hypergradients import hypergradient_rounds
    from benchmarks.local import reference_work, small_model
    from benchmarks.on_ray import many_actors, packed, traffic
    from benchmarks.servers import buffered, fedavg, fednest, tiny_rounds
    from benchmarks.sizes import sizes
    from benchmarks.tracing import trace

    return {
        "reference": reference_work,
        "small": small_model,
        "events": event_driven,
        "schedule": schedule_alone,
        "hgp": hypergradient_rounds,
        "fedavg": fedavg,
        "fednest": fednest,
        "rounds": tiny_rounds,
        "buffered": buffered,
        "trace": trace,
        "sizes": sizes,
        "packed": packed,
        "actors": many_actors,
        "traffic": traffic,
    }


def main(names: list[str]) -> int:
    benchmarks = _benchmarks()
    unknown = [name for name in names if name not in benchmarks]
    if unknown:
        print(f"unknown benchmark {unknown[0]!r}; there are {', '.join(benchmarks)}", file=sys.stderr)
        return 2
    console = Console(width=110)
    table = Table("benchmark", "measured", "target", "", title="asyncfed benchmarks")
    missed = 0
    for name in names or benchmarks:
        console.print(f"running {name} …")
        for row in benchmarks[name]():
            missed += row.met is False
            table.add_row(row.what, row.value, row.target, {True: "met", False: "MISSED", None: ""}[row.met])
        table.add_section()
    console.print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
