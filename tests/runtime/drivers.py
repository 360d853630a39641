"""Drivers: processes that run scenarios on Ray when told to, and stop in the middle until told to go on.

driver = Driver(address, environment)
driver.begin("peers", out, clients_per_actor=2)    # returns when the run is in its first wave
driver.go_on()
assert driver.ended() == "complete"
driver.close()
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncfed import Progress, Scenario, VirtualTime, run
from asyncfed.problems import classification
from asyncfed.protocols import SGP, FedAvg, LocalSteps, Server
from topologies import star, stochastic_directed

ROOT = Path(__file__).parents[2]
_DIGITS = classification("digits", clients=6, model="mlp:8", seed=2)
_BUSY = VirtualTime(compute="lognormal(1.0, 0.4)", latency="exponential(0.7)", loss=0.05)
SCENARIOS = {
    "peers": Scenario(
        _DIGITS, stochastic_directed(6, seed=1), SGP(steps=12, lr=0.05, batch=16), timing=_BUSY, seed=3
    ),
    "server": Scenario(
        _DIGITS, star(6), FedAvg(4, LocalSteps(0.1, epochs=1, batch=32), Server(0.75)), timing=_BUSY, seed=3
    ),
    "long": Scenario(_DIGITS, stochastic_directed(6, seed=1), SGP(steps=100_000, lr=0.01), evaluate_every=20),
}


class Driver:
    """The process, seen from a test."""

    def __init__(self, address: str | None, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.drivers", *([address] if address else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=dict(environment),
        )  # fmt: skip

    def begin(self, scenario: str, out: Path, **options: Any) -> None:
        self._tell(scenario, str(out), options)
        assert self._hear() == "begun"

    def go_on(self) -> None:
        self._tell("go on")

    def ended(self) -> str:
        """How: "complete", or the name of the error."""
        return str(self._hear())

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        """The driver ends as programs do, and leaves its cluster."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.stdout.close()

    def _tell(self, *what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def _hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the driver ended"
        return json.loads(line)


def obey(address: str | None) -> None:
    """The program."""
    say = sys.stdout
    sys.stdout = sys.stderr

    def tell(what: str) -> None:
        print(json.dumps(what), file=say, flush=True)

    while line := sys.stdin.readline():
        name, out, options = json.loads(line)
        seen = False

        def watch(progress: Progress) -> None:
            nonlocal seen
            if not seen:
                seen = True
                tell("begun")
                sys.stdin.readline()

        try:
            run(
                SCENARIOS[name], backend="ray", address=address, out=out, save_final=True, progress=watch,
                **options,
            )  # fmt: skip
            tell("complete")
        except (Exception, KeyboardInterrupt) as error:
            tell(type(error).__name__)
            raise


if __name__ == "__main__":
    obey(sys.argv[1] if len(sys.argv) > 1 else None)
