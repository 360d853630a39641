"""A Ray cluster of several nodes on this machine, for tests that kill some of them.

Ray's own test utility keeps the nodes, in a process of its own (this file, run as a program), because the
tests' process has a Ray already. They talk in lines of JSON; when the pipe closes, the cluster ends, so no
process outlives the tests, however these end. Everything the cluster starts carries the name of its directory
in its environment: by that `Machines` finds what is left.

    with machines(3) as cluster:
        subprocess.run([…, cluster.address])    # a driver: run(…, backend="ray", address=…)
        cluster.actors()                        # who lives where
        cluster.kill(1)                         # pull the plug of the second node
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
STORE = 80 * 2**20  # bytes of each node's object store; Ray takes no less than 75 MiB
NOTICING = {"RAY_health_check_period_ms": "500"}  # a dead node is noticed after 3 s instead of 14
LARGEST_SESSION = 50 * 2**20  # what a cluster may write: logs


@dataclass(frozen=True)
class Machine:
    """A node of the cluster, by Ray's name for it; `pid` is its raylet, whose children its workers are."""

    node: str
    pid: int


@dataclass(frozen=True)
class Actor:
    """An actor of ours that lives or is about to."""

    id: str
    state: str  # ALIVE, PENDING_CREATION, …
    node: str
    pid: int


@dataclass
class Machines:
    """The cluster, seen from a test."""

    process: subprocess.Popen[str]
    directory: Path
    store: Path
    address: str = ""
    gcs: int = 0
    all: list[Machine] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """For drivers, so that they are found too if they are left."""
        return {**os.environ, "RAY_TMPDIR": str(self.directory)}

    def ask(self, question: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the cluster's process ended"
        return json.loads(line)

    def add(self) -> Machine:
        """A machine that comes later, or comes back."""
        self.all.append(Machine(**self.ask("add")))
        return self.all[-1]

    def kill(self, number: int) -> Machine:
        """As when its plug is pulled: all of it is gone at once (left to themselves, workers outlive their
        raylet by a moment, in which a short run may end)."""
        raylet = psutil.Process(self.all[number].pid)
        every = [raylet, *raylet.children(recursive=True)]
        for process in every:
            process.kill()
        assert until_empty(lambda: [process for process in every if alive(process)], 10.0) == []
        return self.all[number]

    def number(self, node: str) -> int:
        """Which machine that is: the start of Ray's round is not the same each time."""
        return [machine.node for machine in self.all].index(node)

    def kill_gcs(self) -> None:
        """Of the head, the process that knows who is where."""
        os.kill(self.gcs, signal.SIGKILL)

    def actors(self) -> list[Actor]:
        """Those of asyncfed that are not dead, whichever driver they belong to."""
        return [Actor(**actor) for actor in self.ask("actors")]

    def left_over(self, seconds: float = 10.0) -> list[Actor]:
        """Actors that are still there after a while; those that were killed take a moment to be gone."""
        return until_empty(self.actors, seconds)

    def processes(self) -> list[psutil.Process]:
        """All that the cluster, its workers and its drivers consist of."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RAY_TMPDIR") == str(self.directory):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def stop(self) -> None:
        """End it, and see that nothing is left: no process, nothing in shared memory, no heap of logs."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()
            left = until_empty(self.processes, 10.0)
            said = [f"{process.pid} {' '.join(process.cmdline())[:80]}" for process in left]
            for process in left:
                process.kill()
            written = sum(file.lstat().st_size for file in self.directory.rglob("*") if file.is_file())
            shared = [file.name for file in self.store.iterdir()]
            shutil.rmtree(self.store)
            shutil.rmtree(self.directory)
        assert said == []
        assert shared == []
        assert written < LARGEST_SESSION


@contextmanager
def machines(count: int = 3, cpus: float = 1) -> Iterator[Machines]:
    """A cluster of so many nodes with so many CPUs each. The first is the head."""
    directory = Path(tempfile.mkdtemp(prefix="af", dir="/tmp"))  # short: it is part of the names of sockets
    store = Path(tempfile.mkdtemp(prefix="af", dir="/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.clusters", str(count), str(cpus), str(store)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, **NOTICING, "RAY_TMPDIR": str(directory)},
    )  # fmt: skip
    cluster = Machines(process, directory, store)
    try:
        begun = cluster.answer()
        cluster.address, cluster.gcs = begun["address"], begun["gcs"]
        cluster.all = [Machine(**machine) for machine in begun["machines"]]
        yield cluster
    finally:
        cluster.stop()


def until_empty(look: Any, seconds: float) -> Any:
    """What `look` finds, once it finds nothing or the time is over."""
    end = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def alive(process: psutil.Process) -> bool:
    """A process that ended and that nobody has waited for is not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def keep(count: int, cpus: float, store: str) -> None:
    """The program: start the nodes, answer questions, and end them when the pipe closes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()

    def add(**more: Any) -> dict[str, Any]:
        node = cluster.add_node(
            num_cpus=cpus, object_store_memory=STORE, plasma_directory=store, wait=False, **more
        )
        return {"node": node.node_id, "pid": node.all_processes["raylet"][0].process.pid}

    def actors() -> list[dict[str, Any]]:
        found = cluster.global_state.actor_table(None)
        return [
            {
                "id": actor["ActorID"],
                "state": actor["State"],
                "node": actor["Address"]["NodeID"],
                "pid": actor["Pid"],
            }
            for actor in found.values()
            if actor["ActorClassName"] == "Node" and actor["State"] != "DEAD"
        ]

    say = sys.stdout
    sys.stdout = sys.stderr  # what Ray prints is no answer
    try:
        begun = [add(include_dashboard=False), *(add() for _ in range(count - 1))]
        cluster.wait_for_nodes()
        gcs = cluster.head_node.all_processes["gcs_server"][0].process.pid
        print(json.dumps({"address": cluster.address, "gcs": gcs, "machines": begun}), file=say, flush=True)
        for question in sys.stdin:
            print(json.dumps({"add": add, "actors": actors}[json.loads(question)]()), file=say, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    keep(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
