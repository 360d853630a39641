"""What annotations say is what is taken, and what is said of the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest
import torch

from asyncfed.checks import (
    MOST,
    Capacity,
    PathLike,
    PositiveFloat,
    PositiveInt,
    Probability,
    Range,
    Words,
    checked,
    described,
    fits,
    fitting,
    shown,
)
from asyncfed.errors import DataError, ScenarioError
from asyncfed.registry import _NAMES, _THINGS, register

if TYPE_CHECKING:
    from nowhere import Unknown


@pytest.mark.parametrize(
    ("hint", "value", "taken"),
    [
        (int, np.int64(3), 3),
        (float, 2, 2.0),
        (float, np.float32(0.5), 0.5),
        (float, Fraction(1, 2), 0.5),
        (float | None, None, None),
        (bool, np.bool_(True), True),
        (PositiveInt | Probability, 1, 1),
        (PositiveInt | Probability, 0.5, 0.5),
        (Sequence[float], [1, np.float64(2)], (1.0, 2.0)),
        (tuple[float, float], np.array([1.0, 2.0]), (1.0, 2.0)),
        (Sequence[Sequence[int]], torch.tensor([[1, 2]]), ((1, 2),)),
        (Mapping[str, float], {"a": 1}, {"a": 1.0}),
        (Capacity, math.inf, math.inf),
        (Literal["a", 1], 1, 1),
        (PathLike, Path("x"), Path("x")),
    ],
)
def test_what_fits_comes_out_as_pythons_own(hint: Any, value: Any, taken: Any) -> None:
    found = fitting(value, hint, "it")
    assert found == taken
    assert type(found) is type(taken)


@pytest.mark.parametrize(
    ("hint", "value", "told"),
    [
        (PositiveInt, "3", "it is '3'; it must be a whole number, at least 1"),
        (PositiveInt, True, "it is True; it must be a whole number, at least 1"),
        (PositiveInt, 3.0, "it is 3.0; it must be a whole number, at least 1"),
        (PositiveInt, 2**40, "that is too large: it must be at most 2,147,483,647"),
        (int, 10**400, "it is a number of 1329 bits; that is too large"),
        (PositiveFloat, math.nan, "it is nan; it must be a finite number above 0"),
        (PositiveFloat | None, math.inf, "it is inf; it must be a finite number above 0 or None"),
        (Annotated[int, Range(1, 10**6)], 0, "it is 0; it must be a whole number in [1, 1,000,000]"),
        (Annotated[float, Range(0, 1, below=True)], 1, "it is 1; it must be a number in [0, 1)"),
        (Literal["local", "ray"], "rey", "it is 'rey'; did you mean 'ray'? It must be 'local' or 'ray'"),
        (Literal[1, 2], True, "it is True; it must be 1 or 2"),
        (
            Annotated[int | None, Words("a number, or nothing")],
            "x",
            "it is 'x'; it must be a number, or noth",
        ),
        (tuple[float, float], [1, "a"], "it[1] is 'a'; it must be a number"),
        (tuple[float, float], [1], "it is [1]; it must be 2 values, each a number"),
        (Mapping[str, PositiveInt], {"a": {"b": 1}}, "it['a'] is {'b': 1}; it must be a whole number"),
        (float | Sequence[Sequence[int]], [[1], [2, None]], "it[1][1] is None; it must be a whole number"),
        (
            Sequence[torch.Tensor],
            torch.zeros(2, 3),
            "it is a Tensor of shape (2, 3); it must be a list, each",
        ),
        (Callable[[int], int], int, "it is <class 'int'>; it must be a function"),
        (str, "x" * 10_000, "that is too long: it must be text of at most 4,096 characters"),
    ],
)
def test_what_does_not_fit_is_told_with_what_would(hint: Any, value: Any, told: str) -> None:
    assert not fits(value, hint)
    with pytest.raises(ScenarioError) as refused:
        fitting(value, hint, "it")
    assert told in str(refused.value)
    assert len(str(refused.value)) < 400


def test_functions_and_classes_look_at_what_they_are_given() -> None:
    @checked(error=DataError)
    def deal(clients: PositiveInt, how: Literal["even", "uneven"] = "even", *rest: int, **more: int) -> Any:
        return clients, how

    assert deal(np.int64(3), how="uneven") == (3, "uneven")
    with pytest.raises(DataError, match="deal: clients is 0; it must be a whole number, at least 1"):
        deal(0)
    with pytest.raises(TypeError, match="missing a required argument: 'clients'"):
        deal()

    @checked
    class Plain:
        def __init__(self, size: PositiveInt) -> None:
            self.size = size

    assert Plain(np.int32(2)).size == 2
    with pytest.raises(ScenarioError, match="Plain: size is 'a'"):
        Plain("a")  # type: ignore[arg-type]


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What a test registers is forgotten again."""
    yield
    _NAMES.pop(_THINGS["option"].pop("checked_example"))  # type: ignore[arg-type]


def test_whatever_is_registered_is_checked_but_for_names_of_the_type_checker(forgotten: None) -> None:
    @register("option", "checked_example")
    @dataclass(frozen=True)
    class Example:
        size: PositiveInt
        either: Unknown | None = None
        several: Mapping[str, Unknown.Inner] | None = None

    assert Example(np.int64(2), either="anything").size == 2
    with pytest.raises(ScenarioError, match="Example: several is 3; it must be a mapping from text or None"):
        Example(2, several=3)
    with pytest.raises(ScenarioError, match=r"Example: size is 0\.5"):
        Example(0.5)  # type: ignore[arg-type]


def test_words_for_annotations_and_values() -> None:
    assert described(PositiveInt | None) == "a whole number, at least 1, or None"
    assert described(Annotated[int, Range(0, MOST)]) == "a whole number, at least 0"
    assert shown(np.zeros((3, 4))) == "a ndarray of shape (3, 4)"
    assert shown(np.float64(0.5)) == "0.5"
    assert len(shown("x" * 10**6)) < 210
    nested: Any = []
    for _ in range(10_000):
        nested = [nested]
    assert shown(nested) == "a list that cannot be written down"
