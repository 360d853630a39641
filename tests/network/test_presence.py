"""Presence: tables, functions, draws and files become the same thing; what is no presence is refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncfed.errors import ScenarioError
from asyncfed.network import DrawnPresence, GivenPresence, PresenceFile
from asyncfed.network.names import Names
from asyncfed.network.presence import Attendance, Presence
from asyncfed.registry import from_data, to_data
from asyncfed.rng import Streams

LABELS = ("a", "b", "c", "the server")


def attend(presence: Presence, seed: int = 0) -> Attendance:
    return presence.attend(Names(LABELS).first(3), Streams(seed))


def there(presence: Presence, client: int, times: list[float]) -> list[bool]:
    on: list[bool] = attend(presence).uptimes.on(np.full(len(times), client), np.array(times)).tolist()
    return on


def test_a_table_a_function_and_a_file_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "there.csv"
    path.write_text("node,from,to\nb, 2.5 ,4\n\n2,1,\nb,0,1\n")
    table = GivenPresence({"b": [(0, 1), (2.5, 4)], 2: [(1, math.inf)]})
    function = GivenPresence.of(
        lambda c: {1: [(0, 1), (2.5, 4)], 2: [(1, math.inf)]}.get(c, [(0, math.inf)]), 3
    )
    times = [0.0, 0.5, 1.0, 2.5, 3.9, 4.0, 100.0]
    for presence in (table, function, PresenceFile(str(path))):
        assert there(presence, 0, times) == [True] * 7
        assert there(presence, 1, times) == [True, True, False, True, True, False, False]
        assert there(presence, 2, times) == [False, False, True, True, True, True, True]


def test_drawn_presence_is_of_the_clients_that_are_named() -> None:
    times = np.linspace(0, 100, 1001)
    some = attend(DrawnPresence("exponential(3)", "weibull(1, 0.5)", clients=("b",))).uptimes
    everyone = attend(DrawnPresence("exponential(3)", "weibull(1, 0.5)")).uptimes
    for client, all_there in ((0, True), (1, False), (2, True)):
        which = np.full(len(times), client)
        assert bool(some.on(which, times).all()) == all_there
        assert not everyone.on(which, times).all()
    one = np.ones(len(times), dtype=np.int64)
    assert some.on(one, times).tolist() == everyone.on(one, times).tolist()


@pytest.mark.parametrize(
    "presence",
    [
        GivenPresence({0: [(0, 1), (2, math.inf)], "b": []}, absence="crash"),
        GivenPresence({1: [(1, 2)]}, period=3.0, leaving="lost"),
        DrawnPresence("exponential(3)", "weibull(1, 0.5)", clients=(0, "b")),
        PresenceFile("there.csv"),
    ],
)
def test_a_presence_survives_being_written_down(presence: Any) -> None:
    assert from_data(json.loads(json.dumps(to_data(presence)))) == presence


def test_what_an_absence_does_is_handed_on() -> None:
    assert (attend(GivenPresence({})).crashes, attend(GivenPresence({})).hands_over) == (False, True)
    other = attend(GivenPresence({}, absence="crash", leaving="lost"))
    assert (other.crashes, other.hands_over) == (True, False)


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: GivenPresence({}, absence="nap"), "absence is 'nap'; it must be 'pause' or 'crash'"),
        (lambda: GivenPresence({}, leaving="gone"), "leaving is 'gone'; it must be 'hand over' or 'lost'"),
        (
            lambda: GivenPresence(lambda c: []),
            "GivenPresence.of(function, clients=20) makes one of a function",
        ),
        (lambda: GivenPresence([(0, 1)]), "it must be a table {client: [(from, to), …]}"),
        (lambda: GivenPresence({0: [(3, 2)]}), "the interval (3, 2) of client 0"),
        (
            lambda: GivenPresence({0: [(0, 1)]}, period=0),
            "GivenPresence: period is 0; it must be a finite number above 0 or None",
        ),
        (
            lambda: attend(GivenPresence({3: []})),
            "the presence names client 3; the clients are a, b, c (or 0 to 2)",
        ),
        (lambda: attend(GivenPresence({"the server": []})), "the presence names client 'the server'"),
        (lambda: attend(DrawnPresence(1, 1, clients=["x"])), "the presence names client 'x'"),
        (lambda: DrawnPresence(1, 1, clients="x"), "clients is 'x'; it must be a list"),
        (lambda: DrawnPresence(1, 0), "the time away, constant(0.0), must have a finite mean above 0"),
        (lambda: attend(PresenceFile("nowhere.csv")), "cannot read nowhere.csv: No such file"),
    ],
)
def test_what_is_no_presence_is_refused(made: Any, named: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(named)):
        made()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "begins with nothing; its first line must be the header node,from,to"),
        ("node,to\n", "begins with node,to; its first line must be the header node,from,to"),
        ("node,from,to\n0,1\n", "line 2 has 2 fields; it must have node,from,to"),
        ("node,from,to\n0,1,2\n7,1,2\n", "line 3 names client 7; the clients are a, b, c"),
        ("node,from,to\n0,soon,2\n", "line 2: 'soon' is no time; it must be a number"),
        ("node,from,to\n0,3,2\n", "line 2: an interval from 3 to 2 must have 0 ≤ from < to"),
        ("node,from,to\n0,1,5\n\n0,4,6\n", "line 4) overlap; make them one"),
    ],
)
def test_a_file_that_is_wrong_says_where(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "there.csv"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=re.escape(named)):
        attend(PresenceFile(str(path)))
