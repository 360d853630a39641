"""An event-driven run, everything random, against the same gradients and weighted sums with nothing around
them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import networkx as nx
import numpy as np
import torch

from asyncfed import Scenario, VirtualTime
from asyncfed.network.waves import Conversation, Wave
from asyncfed.network.weights import Uniform
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.whole import evaluate
from asyncfed.rng import Streams
from asyncfed.runtime.local import LocalBackend
from asyncfed.runtime.loop import execute
from asyncfed.scenario import check
from asyncfed.trace import TraceWriter
from benchmarks.measure import local_stage
from benchmarks.problems import LR, reference
from benchmarks.table import Row
from topologies import stochastic_directed

STEPS = 20


def event_driven(rounds: int = 3) -> list[Row]:
    timing = VirtualTime(
        compute="exponential(1.0)",
        latency="exponential(0.5)",
        bandwidth=2e6,
        loss=0.02,
        factors=dict.fromkeys(range(0, 100, 10), 3.0),
    )
    scenario = reference(steps=STEPS, timing=timing)
    client_steps = STEPS * scenario.clients
    full, bare = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            stage, backend, writer = local_stage(scenario, Path(directory))
            started = time.perf_counter()
            for _ in execute(scenario.protocol, stage):
                pass
            writer.close()
            full.append(time.perf_counter() - started - _evaluations(backend, scenario))
        bare.append(_bare(scenario))
    over = (statistics.median(full) - statistics.median(bare)) / client_steps * 1e3
    return [
        Row(
            "event-driven MLP, n=100: mathematics",
            f"{statistics.median(bare) / client_steps * 1e3:.2f} ms per client step",
        ),
        Row(
            "event-driven MLP, n=100: run",
            f"{statistics.median(full) / client_steps * 1e3:.2f} ms per client step",
        ),
        Row("overhead beyond the mathematics", f"{over:.2f} ms per client step", "≤ 0.5 ms", over <= 0.5),
    ]


def _evaluations(backend: LocalBackend, scenario: Scenario) -> float:
    """The first and the last evaluation of a run are not steps: their time, measured on the final models."""
    final = backend.final()
    started = time.perf_counter()
    for _ in range(2):
        shards = scenario.problem.data.test
        if scenario.problem.metrics:
            evaluate(Derivatives.of(scenario.problem), final["inner"], final["outer"], shards)
        x = final["inner"].double()
        (x - x.mean(0)).square().sum()
    return time.perf_counter() - started


class _Nobody:
    def messages(self, **row: object) -> None:
        return None

    def steps(self, **row: object) -> None:
        return None


def _bare(scenario: Scenario) -> float:
    """The waves, known beforehand, with rows in a fixed pool: absorb by weighted sums, gradients, and nothing
    else.
    """
    scene = check(scenario)
    problem = scenario.problem
    derivatives = Derivatives.of(problem)
    talk = Conversation("sgp", "push", STEPS, 4 * derivatives.inner.d + 8)
    mixing = scenario.protocol.mixing(scene, None)
    schedule = scene.timing.among_peers(scene.network, mixing, Streams(0), talk, _Nobody(), 10**9)
    waves = [item for item in schedule if isinstance(item, Wave)]
    plans = _plans(waves)
    n, d = scenario.clients, derivatives.inner.d
    rows = 1 + max(int(emits.max()) for _, _, emits in plans)
    pool, pool_omega = torch.zeros(rows, d), torch.zeros(rows, 1)
    start = derivatives.inner.flatten(problem.init_inner(torch.Generator().manual_seed(0)))
    residue, residue_omega = start.expand(n, d).clone(), torch.ones(n, 1)
    shards = problem.data.to(torch.float32).train
    nothing = torch.empty(n, 0)
    started = time.perf_counter()
    for wave, slots, emits in plans:
        clients, channel = torch.from_numpy(wave.absorption.nodes), wave.absorption.channels[0]
        z, omega = residue[clients], residue_omega[clients]
        if len(slots):
            offsets = torch.from_numpy(channel.indptr)
            weights = torch.from_numpy(channel.weights).float()
            for into, store in ((z, pool), (omega, pool_omega)):
                into += torch.nn.functional.embedding_bag(
                    slots, store, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
                )
        index = (
            torch.rand(len(clients), 64) * torch.from_numpy(shards.sizes[wave.absorption.nodes])[:, None]
        ).long()
        descent, _ = derivatives.inner_gradient(
            z / omega, nothing[clients], shards.gather(clients, index), scale=-LR
        )
        pool[emits], pool_omega[emits] = z, omega
        residue[clients], residue_omega[clients] = descent, torch.zeros_like(omega)
    return time.perf_counter() - started


def _plans(waves: list[Wave]) -> list[tuple[Wave, torch.Tensor, torch.Tensor]]:
    """Rows of a pool for every payload, given back when it is released."""
    slot: dict[int, int] = {}
    free: list[int] = []
    used = 0
    plans = []
    for wave in waves:
        slots = torch.from_numpy(
            np.array([slot[s] for s in wave.absorption.channels[0].sources.tolist()], dtype=np.int64)
        )
        free.extend(slot.pop(s) for s in wave.released.tolist())
        emits = []
        for serial in wave.emits.tolist():
            if not free:
                free.append(used)
                used += 1
            slot[serial] = free.pop()
            emits.append(slot[serial])
        plans.append((wave, slots, torch.tensor(emits)))
    return plans


def schedule_alone(clients: int = 1000, degree: int = 10, steps: int = 60) -> list[Row]:
    """Who steps when and absorbs what on a sparse graph, with the trace and without; no mathematics."""
    graph = stochastic_directed(nx.random_regular_graph(degree, clients, seed=1), probability=0.6, seed=1)
    rows = []
    for what, more in (("", {}), (", 10% loss, running sums", {"loss": 0.1})):
        timing = VirtualTime("exponential(1.0)", latency="exponential(0.2)", **more)
        network = timing.network(graph)
        mixing = ((("z",), Uniform().prepare(network)),)
        talk = Conversation("steps", "push", steps, 31_400, conserves=True, recovers=True)
        for writes in (False, True):
            best = 0.0
            for seed in range(3):
                with tempfile.TemporaryDirectory() as directory:
                    writer = TraceWriter(Path(directory), clients) if writes else None
                    schedule = timing.among_peers(
                        network, mixing, Streams(seed), talk, writer or _Nobody(), 10.0**9
                    )
                    started = time.perf_counter()
                    count = sum(len(item.steps) for item in schedule if isinstance(item, Wave))
                    if writer is not None:
                        writer.close()
                    best = max(best, count / (time.perf_counter() - started))
            rows.append(
                Row(
                    f"schedule{' and trace' if writes else ' alone'}, n={clients}, degree {degree}{what}",
                    f"{best:,.0f} client steps per second",
                    "" if writes else "≥ 20,000",
                    None if writes else best >= 20_000,
                )
            )
    return rows
