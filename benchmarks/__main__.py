"""`make bench`: every figure in one run, as a table. `python -m benchmarks NAME …` runs some of them.

Those that kill are long, and run by name only: `python -m benchmarks kills`, `actor_kills`,
`node_kills`, `memory_kills`, or `kills:20` for so many.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from benchmarks.table import Row


def _benchmarks() -> dict[str, Callable[[], list[Row]]]:
    from benchmarks.convolutions import convolutions
    from benchmarks.durability import checkpoints
    from benchmarks.events import event_driven, schedule_alone
    from benchmarks.explorer import explorer
    from benchmarks.hypergradients import hypergradient_rounds
    from benchmarks.local import reference_work, small_model
    from benchmarks.meta import meta
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
        "meta": meta,
        "convolutions": convolutions,
        "rounds": tiny_rounds,
        "buffered": buffered,
        "trace": trace,
        "explorer": explorer,
        "sizes": sizes,
        "packed": packed,
        "actors": many_actors,
        "checkpoints": checkpoints,
        "traffic": traffic,
    }


def _long() -> dict[str, Callable[..., list[Row]]]:
    from benchmarks.durability import actor_kills, kills, memory_kills, node_kills

    return {
        "kills": kills,
        "actor_kills": actor_kills,
        "node_kills": node_kills,
        "memory_kills": memory_kills,
    }


def _counted(name: str) -> tuple[str, list[int]]:
    """ "kills:20" is twenty of them."""
    what, _, count = name.partition(":")
    return what, [int(count)] if count.isdecimal() else []


def main(names: list[str]) -> int:
    benchmarks: dict[str, Callable[..., list[Row]]] = dict(_benchmarks())
    usual = list(benchmarks)
    benchmarks |= _long()
    wanted = [_counted(name) for name in names or usual]
    names = [name for name, _ in wanted]
    unknown = [name for name in names if name not in benchmarks]
    if unknown:
        print(f"unknown benchmark {unknown[0]!r}; there are {', '.join(benchmarks)}", file=sys.stderr)
        return 2
    console = Console(width=110)
    table = Table("benchmark", "measured", "target", "", title="asyncfed benchmarks")
    missed = 0
    for name, count in wanted:
        console.print(f"running {name} …")
        for row in benchmarks[name](*count):
            missed += row.met is False
            table.add_row(row.what, row.value, row.target, {True: "met", False: "MISSED", None: ""}[row.met])
        table.add_section()
    console.print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
