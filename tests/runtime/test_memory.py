"""Payloads that no memory is left for end a run with an error, not with a kill."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import psutil

from asyncfed.room import free_bytes

# Links that carry a hundredth of what they are offered, in a process that may map 256 MiB more.
SATURATED = """
import resource, sys
import psutil, torch
from asyncfed import RunError, Scenario, VirtualTime, run
from asyncfed.data import client_data_from_lists
from asyncfed.problems import Problem
from asyncfed.protocols import PushPull
from topologies import fully_connected

def scenario(steps, timing):
    problem = Problem(
        name="large",
        data=client_data_from_lists([(torch.ones(1, 1),) for _ in range(6)]),
        inner_loss=lambda x, lam, batch: (batch[0] * x.square()).mean(),
        init_inner=lambda generator: torch.ones(20_000),
    )
    protocol = PushPull(steps=steps, lr=1e-9, batch=None)
    return Scenario(problem=problem, topology=fully_connected(6), protocol=protocol, timing=timing)

run(scenario(3, VirtualTime()), out=sys.argv[1] + "/before")
room = psutil.Process().memory_info().vms + 2**28
resource.setrlimit(resource.RLIMIT_AS, (room, room))
try:
    run(scenario(30_000, VirtualTime("exponential(1.0)", bandwidth=1600.0)), out=sys.argv[1] + "/run")
except RunError as error:
    print(error)
"""


def test_free_memory_is_no_more_than_the_machine_has() -> None:
    assert 0 < free_bytes() < psutil.virtual_memory().total
    assert math.isfinite(free_bytes())


def test_a_run_whose_links_are_saturated_ends_with_an_error_when_memory_is_full(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SATURATED, str(tmp_path)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("memory is full of payloads that are under way: "), done.stderr
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (manifest["status"], manifest["error"]) == ("failed", done.stdout.strip())
    assert any(text.startswith("PushPull offers edge ") for text in manifest["warnings"])
