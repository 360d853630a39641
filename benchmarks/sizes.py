"""Ten thousand clients: time and memory grow with the edges. Each size runs in a process of its own, so that
memory can be told.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time

from benchmarks.table import Row


def sizes() -> list[Row]:
    small, large = _measured(1_000), _measured(10_000)
    ratio, gib = large["seconds"] / small["seconds"], large["gib"]
    return [
        Row("n=1,000, 100 steps", f"{small['seconds']:.1f} s, {small['gib']:.2f} GiB"),
        Row("n=10,000, 100 steps", f"{large['seconds']:.1f} s, {gib:.2f} GiB", "< 4 GiB", gib < 4),
        Row("n=10,000 / n=1,000", f"{ratio:.1f}", "≤ 15", ratio <= 15),
    ]


def _measured(clients: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sizes", str(clients)], capture_output=True, text=True, check=True
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _run(clients: int) -> None:
    from asyncfed import run
    from benchmarks.problems import sparse

    scenario = sparse(clients)
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        run(scenario, out=directory)
        seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}))


if __name__ == "__main__":
    _run(int(sys.argv[1]))
