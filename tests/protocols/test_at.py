"""What a step can look at: its minibatches, of every kind, from one sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncfed.data import client_data_from_lists
from asyncfed.problems import Derivatives, Problem
from asyncfed.protocols.at import At, Home
from asyncfed.rng import Streams

SIZES = (5, 3, 5)


def home(clients: list[int]) -> Home:
    """Sample number j of client i is 100 i + j."""
    samples = [(100.0 * i + torch.arange(float(size)),) for i, size in enumerate(SIZES)]
    problem = Problem(
        name="numbers",
        data=client_data_from_lists([samples[i] for i in clients]),
        inner_loss=lambda x, lam, batch: (x * batch[0]).mean(),
        init_inner=lambda g: torch.zeros(1),
    )
    numbers = np.array(clients)
    start = torch.zeros(len(clients), 1)
    return Home(Derivatives.of(problem), problem.data, numbers, len(SIZES), start, Streams(7))


def at(step: int, clients: list[int] | None = None) -> At:
    clients = list(range(len(SIZES))) if clients is None else clients
    return At(home(clients), np.arange(len(clients)), np.full(len(clients), step))


def by_client(groups: object, clients: list[int]) -> dict[int, list[float]]:
    return {
        clients[place]: row.tolist()
        for places, (batch,) in groups  # type: ignore[attr-defined]
        for place, row in zip(places.tolist(), batch, strict=True)
    }


def test_an_epoch_is_every_sample_once_and_the_next_has_another_order() -> None:
    everybody = list(range(len(SIZES)))
    steps = [by_client(at(step).by_epoch(2), everybody) for step in range(12)]
    for client, size in enumerate(SIZES):
        per_epoch = -(-size // 2)
        epochs = [
            [number for step in steps[first : first + per_epoch] for number in step[client]]
            for first in range(0, 12 - per_epoch + 1, per_epoch)
        ]
        assert all(sorted(epoch) == [100.0 * client + j for j in range(size)] for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1


def test_different_samples_are_different_and_all_where_there_are_no_more() -> None:
    drawn = by_client(at(3).different(4, "mine"), [0, 1, 2])
    assert {client: len(set(numbers)) for client, numbers in drawn.items()} == {0: 4, 1: 3, 2: 4}
    assert sorted(drawn[1]) == [100.0, 101.0, 102.0]


@pytest.mark.parametrize("client", range(len(SIZES)))
def test_a_client_alone_draws_what_it_draws_among_others(client: int) -> None:
    everybody = list(range(len(SIZES)))
    for kind in (lambda here: here.by_epoch(2), lambda here: here.different(2, "mine")):
        assert by_client(kind(at(4, [client])), [client])[client] == by_client(kind(at(4)), everybody)[client]
    alone, among = at(4, [client]).minibatch(6, "other"), at(4).minibatch(6, "other")
    assert alone[0][0].tolist() == among[0][client].tolist()


def test_draws_for_different_purposes_and_steps_differ() -> None:
    draws = [
        here.tolist() for (here,) in (at(1).minibatch(40), at(1).minibatch(40, "other"), at(2).minibatch(40))
    ]
    assert all(draws[i] != draws[j] for i in range(3) for j in range(i))
