"""A run that was stopped goes on elsewhere: on another backend, or packed otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncfed import Result, Scenario, TraceError, VirtualTime, resume, run
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP, Buffered, ClusteredFL, FedBuff, LocalSteps, Scaffold, Server
from asyncfed.runtime.checkpoints import Checkpoints
from asyncfed.runtime.repacking import Ranges, repacked
from asyncfed.runtime.state import State
from tests.helpers import files_of
from tests.laws.test_resumed import Killed, Killer
from topologies import star, stochastic_directed

CLIENTS = 5
PAIRS: Ranges = ((0, 2), (2, 4), (4, 5))
LOCAL: dict[str, Any] = {"backend": "local"}


def on_ray(each: int) -> dict[str, Any]:
    return {"backend": "ray", "clients_per_actor": each}


def scenario(kind: str) -> Scenario:
    problem = quadratic(clients=CLIENTS, dimension=3, seed=1, noise=0.5, samples=5)
    timing = VirtualTime("uniform(0.5, 1.5)", factors={4: 1.5}, latency="exponential(0.8)", loss=0.1)
    local = LocalSteps(0.05, steps=2, batch=2)
    options: dict[str, Any] = {"seed": 7, "precision": "float64", "evaluate_every": 3, "timing": timing}
    if kind == "lockstep":
        del options["timing"]
    if kind in ("virtual", "lockstep"):
        return Scenario(problem, stochastic_directed(CLIENTS, seed=5), SGP(12, 0.02, batch=2), **options)
    late = Server(quorum=0.6, late="next")
    method = {
        "remembering": Scaffold(10, local, server=late),
        "addressed": ClusteredFL(10, local, eps1=1e6, eps2=1e-6, min_rounds=2, server=late),
        "buffered": FedBuff(12, local, momentum=0.5, server=Buffered(2)),
    }[kind]
    return Scenario(problem, star(CLIENTS, up=0.9), method, **options)


def stopped(kind: str, out: Path, **options: Any) -> Path:
    """A run that was killed in the middle, with payloads under way."""
    ticks = 11 if kind == "virtual" else 6
    with pytest.raises(Killed):
        run(scenario(kind), out=out, checkpoint_every=1, save_final=True, progress=Killer(ticks), **options)
    return out


def require_alike(result: Result, whole: Result) -> None:
    """The same trace, byte for byte, and the same numbers to rounding."""
    mine, theirs = files_of(result.path), files_of(whole.path)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if "trace" in name]
    assert not [name for name in mine if "trace" in name and mine[name] != theirs[name]]
    for name in ("metrics.jsonl", "clients.jsonl"):
        rows = zip(mine[name].splitlines(), theirs[name].splitlines(), strict=True)
        for own, other in ((json.loads(a), json.loads(b)) for a, b in rows):
            assert own.keys() == other.keys()
            for key, value in other.items():
                near = pytest.approx(value, rel=1e-10, abs=1e-10) if isinstance(value, float) else value
                assert own[key] == near, (name, key)
    assert result.final.keys() == whole.final.keys()
    for name, value in whole.final.items():
        torch.testing.assert_close(result.final[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [
        ("virtual", LOCAL, on_ray(2)),
        ("addressed", LOCAL, on_ray(3)),
        ("remembering", on_ray(2), on_ray(3)),
        ("buffered", on_ray(3), on_ray(2)),
    ],
    ids=lambda own: own if isinstance(own, str) else " ".join(map(str, own.values())),
)
def test_a_run_goes_on_elsewhere_to_the_same_trace_and_the_same_numbers(
    kind: str, first: dict[str, Any], then: dict[str, Any], tmp_path: Path
) -> None:
    whole = run(scenario(kind), out=tmp_path / "whole", save_final=True)
    path = stopped(kind, tmp_path / "run", **first)
    assert Checkpoints(path).newest() is not None
    result = resume(path, **then)
    require_alike(result, whole)
    assert result.manifest["options"]["clients_per_actor"] == then["clients_per_actor"]
    assert result.manifest["placement"]["clients_per_actor"] == then["clients_per_actor"]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("kind", ["virtual", "lockstep"])
def test_a_run_that_left_ray_and_was_stopped_before_its_first_checkpoint_there_still_goes_on(
    kind: str, tmp_path: Path
) -> None:
    whole = run(scenario(kind), out=tmp_path / "whole", save_final=True)
    path = stopped(kind, tmp_path / "run", **on_ray(1 if kind == "virtual" else 2))
    with pytest.raises(Killed):
        resume(path, backend="local", checkpoint_every=1000, progress=Killer(2))
    result = resume(path)
    require_alike(result, whole)
    assert result.manifest["placement"]["backend"] == result.manifest["options"]["backend"] == "local"


def backend_state(kind: str, out: Path) -> State:
    checkpoint = Checkpoints(stopped(kind, out)).newest()
    assert checkpoint is not None
    return checkpoint.under("backend")


def payloads(pool: State) -> dict[int, tuple[int, dict[str, list[float]]]]:
    """Whose each payload is, and its rows: wherever they stand."""
    numbers = (pool.array(name).tolist() for name in ("serials", "slots", "nodes"))
    rows = pool.under("rows").tensors
    return {
        serial: (node, {name: value[slot].tolist() for name, value in rows.items()})
        for serial, slot, node in zip(*numbers, strict=True)
    }


@pytest.mark.parametrize("kind", ["virtual", "remembering", "addressed", "buffered"])
def test_there_and_back_it_is_the_same_state_and_nothing_under_way_is_lost(kind: str, tmp_path: Path) -> None:
    server = kind != "virtual"
    state = backend_state(kind, tmp_path / "run")
    assert repacked(state, None, clients=CLIENTS, server=server) is state
    there = repacked(state, PAIRS, clients=CLIENTS, server=server)
    assert repacked(there, PAIRS, clients=CLIENTS, server=server) is there
    back = repacked(there, None, clients=CLIENTS, server=server)
    assert back.facts["clients"].keys() == state.facts["clients"].keys()
    moved = ("clients/pool/", "server/pool/")
    for name, value in state.tensors.items():
        assert name.startswith(moved) or torch.equal(back.tensors[name], value), name
    assert {name for name in back.tensors if not name.startswith(moved)} == {
        name for name in state.tensors if not name.startswith(moved)
    }
    own = payloads(state.under("clients").under("pool"))
    assert own
    assert payloads(back.under("clients").under("pool")) == own
    shares = [payloads(there.under(f"block {k}").under("pool")) for k in range(len(PAIRS))]
    for (start, stop), share in zip(PAIRS, shares, strict=True):
        assert {node for node, _ in share.values()} <= set(range(start, stop))
    exchange = there.under("exchange")
    owners = dict(zip(exchange.array("serials").tolist(), exchange.array("owner").tolist(), strict=True))
    assert {serial: place for place, share in enumerate(shares) for serial in share}.items() <= owners.items()


def test_blocks_that_never_had_a_variable_have_zeros_of_it() -> None:
    def block(*names: str, rows: int) -> dict[str, torch.Tensor]:
        nothing = torch.zeros(0, dtype=torch.int64)
        pool = {f"pool/{name}": nothing for name in ("serials", "slots", "nodes", "free")}
        return pool | {name: torch.ones(rows, 2, dtype=torch.float64) for name in ("store/inner", *names)}

    facts = {"first_step": 3, "exchanged": ["z"], "pool": {"size": 0}}
    blocks = [block(rows=2), block("store/c", "residue/z", rows=1)]
    exchange = {name: torch.zeros(0, dtype=torch.int64) for name in ("serials", "object", "row", "owner")}
    tensors = {f"block {k}/{name}": value for k, own in enumerate(blocks) for name, value in own.items()}
    state = State(
        tensors | {f"exchange/{name}": value for name, value in exchange.items()},
        {
            "block 0": facts | {"chunk": 1, "kept": []},
            "block 1": facts | {"chunk": 9, "kept": ["c"]},
            "exchange": {"next_object": 4},
        },
    )
    made = repacked(state, None, clients=3, server=False).under("clients")
    for name in ("store/c", "residue/z"):
        np.testing.assert_array_equal(made.array(name), [[0, 0], [0, 0], [1, 1]])
    assert made.facts == facts | {"chunk": 9, "kept": ["c"]}
    with pytest.raises(TraceError, match="of 3 clients, and the run has 4"):
        repacked(state, None, clients=4, server=False)
