"""The rules by which clients are put into actors and actors onto devices."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfed.errors import ScenarioError
from asyncfed.runtime.packing import (
    ACTOR_BYTES,
    USABLE,
    cpus_per_actor,
    gpus_per_actor,
    pack,
    threads_per_actor,
)

GIB = 2**30


def sizes(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [stop - start for start, stop in ranges]


def test_one_client_per_actor_where_they_fit() -> None:
    packing = pack(10, "auto", memory=16 * GIB, client_bytes=10 * 2**20, cores=2)
    assert packing.ranges == tuple((i, i + 1) for i in range(10))
    assert (packing.actors, packing.clients_per_actor, packing.note) == (10, 1, "")


def test_a_hundred_clients_in_16_gib_share_one_actor_per_core_and_it_says_so() -> None:
    packing = pack(100, "auto", memory=16 * GIB, client_bytes=0, cores=2)
    assert packing.ranges == ((0, 50), (50, 100))
    assert (packing.actors, packing.clients_per_actor) == (2, 50)
    assert packing.note == (
        "100 actors would need about 19.5 GiB and 12.8 GiB are free for them, so the clients share 2 actors, "
        "one per core; clients_per_actor=1 forces one each"
    )


def test_a_hundred_clients_in_32_gib_get_an_actor_each() -> None:
    assert pack(100, "auto", memory=32 * GIB, client_bytes=0, cores=2).actors == 100


def test_the_boundary_is_80_percent_of_the_memory() -> None:
    needed = 10 * (ACTOR_BYTES + 3 * 2**20)
    assert pack(10, "auto", memory=needed / USABLE + 1, client_bytes=3 * 2**20, cores=3).actors == 10
    assert pack(10, "auto", memory=needed / USABLE - 1, client_bytes=3 * 2**20, cores=3).actors == 3


def test_the_clients_own_bytes_count() -> None:
    assert pack(10, "auto", memory=4 * GIB, client_bytes=0, cores=2).actors == 10
    assert pack(10, "auto", memory=4 * GIB, client_bytes=200 * 2**20, cores=2).actors == 2


def test_many_cores_and_little_memory_give_as_many_actors_as_fit() -> None:
    packing = pack(100, "auto", memory=4 * GIB, client_bytes=2**20, cores=64)
    assert packing.actors == 15  # 3.2 GiB without 100 MiB of clients hold 15.9 times 200 MiB
    assert "share 15 actors, as many as fit;" in packing.note
    assert max(sizes(packing.ranges)) - min(sizes(packing.ranges)) == 1


def test_with_no_memory_left_there_is_still_one_actor() -> None:
    packing = pack(5, "auto", memory=0.1 * GIB, client_bytes=GIB, cores=8)
    assert packing.ranges == ((0, 5),)
    assert "share 1 actor, as many as fit" in packing.note


@pytest.mark.parametrize(
    ("clients", "k", "expected"),
    [(10, 1, [1] * 10), (10, 4, [4, 3, 3]), (10, 5, [5, 5]), (10, 10, [10]), (10, 99, [10]), (1, 1, [1])],
)
def test_clients_per_actor_forces_it_either_way(clients: int, k: int, expected: list[int]) -> None:
    packing = pack(clients, k, memory=0.0, client_bytes=GIB, cores=1)
    assert sizes(packing.ranges) == expected
    assert packing.note == ""


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    clients=st.integers(1, 500),
    k=st.integers(1, 60) | st.just("auto"),
    memory=st.floats(0, 300 * GIB),
    client_bytes=st.floats(0, GIB),
    cores=st.integers(1, 128),
)
def test_every_client_has_one_place_and_places_are_even(
    clients: int, k: Any, memory: float, client_bytes: float, cores: int
) -> None:
    packing = pack(clients, k, memory=memory, client_bytes=client_bytes, cores=cores)
    assert [client for start, stop in packing.ranges for client in range(start, stop)] == list(range(clients))
    assert max(sizes(packing.ranges)) - min(sizes(packing.ranges)) <= 1
    assert packing.clients_per_actor == max(sizes(packing.ranges))
    if k != "auto":
        assert packing.clients_per_actor <= k
    elif packing.actors > 1:
        assert packing.actors * ACTOR_BYTES + clients * client_bytes <= USABLE * memory + 1


@pytest.mark.parametrize(
    ("device", "gpus", "actors", "share"),
    [
        ("cpu", 8, 2, 0.0),
        ("auto", 0, 100, 0.0),
        ("auto", 2, 1, 1.0),
        ("cuda", 2, 2, 1.0),
        ("auto", 2, 3, 0.5),
        ("cuda", 2, 5, 0.3333),
        ("auto", 1, 100, 0.01),
        ("cuda", 8, 100, 0.0769),
    ],
)
def test_whole_gpus_while_they_last_then_equal_fractions(
    device: str, gpus: float, actors: int, share: float
) -> None:
    assert gpus_per_actor(device, gpus, actors) == share
    if share:
        # Ray puts an actor onto one GPU; all of them find a place.
        assert int(1 / share + 1e-9) * int(gpus) >= actors


def test_a_gpu_that_is_not_there_is_an_error_only_where_it_was_asked_for() -> None:
    named = "device is 'cuda', but the Ray cluster has no GPU; use device='cpu' or 'auto'"
    with pytest.raises(ScenarioError, match=re.escape(named)):
        gpus_per_actor("cuda", 0, 4)
    assert gpus_per_actor("auto", 0.0, 4) == 0.0


@pytest.mark.parametrize(
    ("cores", "actors", "share"),
    [
        ([4], 1, 1.0),
        ([4], 4, 1.0),
        ([2], 3, 0.6666),
        ([2], 100, 0.02),
        ([1], 3, 0.3333),
        ([1, 1, 1], 4, 0.5),  # not ¾: then a place for the fourth would be in three pieces
        ([1, 1, 1], 6, 0.5),
        ([64, 2], 66, 1.0),
        ([3, 1.5], 5, 0.75),
        ([0, 0], 3, 0.0001),
    ],
)
def test_all_actors_find_a_place_on_the_cores(cores: list[float], actors: int, share: float) -> None:
    assert cpus_per_actor(cores, actors) == share
    assert sum(int(own / share + 1e-9) for own in cores) >= actors or not any(cores)


def test_on_machines_with_gpus_all_actors_find_both() -> None:
    """Four share the two GPUs of the machine with 2 cores; only a server may go to the one with 64."""
    assert cpus_per_actor([2, 64], 4, rooms=[4, 0]) == 0.5
    assert cpus_per_actor([2, 64], 4, rooms=[4, 0], others=1) == 0.5
    assert cpus_per_actor([2, 1], 4, rooms=[4, 0], others=1) == 0.5
    assert cpus_per_actor([2], 4, rooms=[4], others=1) == 0.4


@pytest.mark.parametrize(("cores", "actors", "threads"), [(8, 2, 4), (8, 3, 2), (2, 100, 1), (1, 1, 1)])
def test_threads_share_the_cores(cores: float, actors: int, threads: int) -> None:
    assert threads_per_actor(cores, actors) == threads
