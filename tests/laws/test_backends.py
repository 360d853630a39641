"""Local, packed into two actors, and one actor for each client: the same trace, the same values.

Every method runs packed. One actor each is slow, so of every feature that decides what travels the first
method that declares it runs so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncfed import Result, run
from asyncfed.network.buffer import Buffered
from asyncfed.protocols.rounds import Round
from asyncfed.rng import Streams
from asyncfed.scenario import check
from tests.laws.examples import Case, cases, methods

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def _small() -> list[Case]:
    """With few clients, for each costs a process; in virtual time first, for then blocks wait for others."""
    few = [replace(case, clients=3) for case in cases()]
    return sorted(few, key=lambda case: case.kind, reverse=True)


def _packed() -> list[Case]:
    """Of every method the first case."""
    first: dict[str, Case] = {}
    for case in _small():
        first.setdefault(case.method, case)
    return [first[method] for method in methods() if method in first]


def features(case: Case) -> Iterator[str]:
    """What a method declares that decides what travels between blocks, and when."""
    scenario = case.scenario
    method, scene = scenario.protocol, check(scenario)
    where = "peers" if method.server is None else "a server"
    if isinstance(method.server, Buffered):
        where = "a server that does not wait"
    yield f"{where} in {case.kind}"
    for iteration in method.iterations(Streams(scenario.seed)):
        for part in iteration:
            if part.each:
                yield f"single messages at {where}"
            if part.remembered(scene.sizes):
                yield "a memory of clients"
            if isinstance(part, Round):
                if type(part).addressed is not Round.addressed:
                    yield "rows addressed to clients"
            elif part.closing:
                yield "a closing step"
            elif part.sends and not part.estimates and len(part.mixing(scene, None)) > 1:
                yield f"two mixings in {case.kind}"


def _one_each() -> list[Case]:
    """Of every feature the first case that declares it."""
    first: dict[str, Case] = {}
    for case in _small():
        for feature in features(case):
            first.setdefault(feature, case)
    return list({case.name: case for case in first.values()}.values())


def _agree(case: Case, here: Result, there: Result) -> None:
    assert there.manifest["placement"]["backend"] == "ray"
    mine, theirs = here.trace.to_arrow(), there.trace.to_arrow()
    assert mine.equals(theirs), f"{case.name}: other messages"
    assert here.trace.steps().equals(there.trace.steps()), f"{case.name}: other steps"
    assert here.final.keys() == there.final.keys(), f"{case.name}: other variables"
    for name, value in here.final.items():
        other = there.final[name]
        assert value.shape == other.shape, f"{case.name}: {name}"
        large = float(value.abs().max()) if value.numel() else 0.0
        assert large < 1e3, f"{case.name} is no example: {name} grows to {large}, where 1e-10 means nothing"
        assert torch.allclose(value, other, rtol=0, atol=1e-10), f"{case.name}: another {name}"
    for table in ("metrics", "clients"):
        ours, others = getattr(here, table), getattr(there, table)
        assert list(ours.columns) == list(others.columns), f"{case.name}: {table}"
        for column in ours:
            if ours[column].dtype.kind in "if":
                same = np.allclose(ours[column], others[column], rtol=1e-9, atol=1e-9, equal_nan=True)
                assert same, f"{case.name}: {column} of {table}"
            else:
                assert ours[column].tolist() == others[column].tolist(), f"{case.name}: {column} of {table}"


@pytest.mark.parametrize("case", _packed(), ids=lambda case: case.name)
def test_packed_into_two_actors_a_method_does_the_same(case: Case, tmp_path: Path) -> None:
    here = run(case.scenario, out=tmp_path / "local")
    there = run(case.scenario, out=tmp_path / "ray", backend="ray", clients_per_actor=2)
    assert there.manifest["placement"]["actors"] == 2
    _agree(case, here, there)


@pytest.mark.parametrize("case", _one_each(), ids=lambda case: case.name)
def test_with_an_actor_for_each_client_a_method_does_the_same(case: Case, tmp_path: Path) -> None:
    here = run(case.scenario, out=tmp_path / "local")
    there = run(case.scenario, out=tmp_path / "ray", backend="ray", clients_per_actor=1)
    assert there.manifest["placement"]["actors"] == case.clients
    _agree(case, here, there)
