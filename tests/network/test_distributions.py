"""Durations: quantiles against scipy, text there and back, refusals."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.network.distributions import (
    Constant,
    Distribution,
    Exponential,
    Geometric,
    LogNormal,
    Table,
    Uniform,
    Weibull,
    as_distribution,
)
from asyncfed.rng import Streams

U = np.concatenate([np.linspace(0.0005, 0.9995, 1000), [2.0**-53, 1 - 2.0**-53]])
RANDOM = [
    (Exponential(0.7), stats.expon(scale=0.7)),
    (Uniform(0.2, 1.7), stats.uniform(0.2, 1.5)),
    (Weibull(0.7, 0.6), stats.weibull_min(c=0.6, scale=0.7)),
    (LogNormal(0.4, 0.9), stats.lognorm(s=0.9, scale=0.4)),
]


@pytest.mark.parametrize(("ours", "scipys"), RANDOM)
def test_quantiles_and_means_are_scipys(ours: Distribution, scipys: Any) -> None:
    assert ours.quantile(U) == pytest.approx(scipys.ppf(U), rel=1e-10)
    assert ours.mean == pytest.approx(scipys.mean(), rel=1e-12)


@pytest.mark.parametrize(("ours", "scipys"), RANDOM)
def test_draws_follow_the_distribution(ours: Distribution, scipys: Any) -> None:
    drawn = ours.quantile(Streams(4).uniforms("compute", 0, 0, 20_000))
    assert stats.kstest(drawn, scipys.cdf).pvalue > 6e-5
    assert drawn.mean() == pytest.approx(ours.mean, abs=4 * scipys.std() / np.sqrt(len(drawn)))


def test_geometric_durations_are_whole_and_scipys() -> None:
    u = Streams(4).uniforms("compute", 0, 0, 20_000)  # none of them just where it steps
    assert Geometric(0.3).quantile(u).tolist() == stats.geom(0.3).ppf(u).tolist()
    assert Geometric(0.3).mean == pytest.approx(stats.geom(0.3).mean())
    assert Geometric(1.0).quantile(U).tolist() == [1.0] * len(U)


def test_a_constant_is_always_the_same() -> None:
    assert Constant(2.5).quantile(U).tolist() == [2.5] * len(U)
    assert Constant(2.5).mean == 2.5


@pytest.mark.parametrize("ours", [Constant(1.5), *(ours for ours, _ in RANDOM)])
def test_the_ends_of_the_unit_interval_give_finite_durations(ours: Distribution) -> None:
    ends = ours.quantile(np.array([0.0, 1 - 2.0**-53]))
    assert np.isfinite(ends).all()
    assert (ends >= 0).all()


def test_without_deviation_a_lognormal_is_its_median() -> None:
    assert LogNormal(3.0, 0.0).quantile(U) == pytest.approx(np.full(len(U), 3.0), rel=1e-15)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Constant(0.1), "constant(0.1)"),
        (Exponential(1 / 3), "exponential(0.3333333333333333)"),
        (Uniform(0.0, 1e-9), "uniform(0.0, 1e-09)"),
        (LogNormal(0.1, 0.5), "lognormal(0.1, 0.5)"),
        (Weibull(2.0, 0.5), "weibull(2.0, 0.5)"),
        (Geometric(0.25), "geometric(0.25)"),
    ],
)
def test_text_there_and_back(value: Distribution, text: str) -> None:
    assert str(value) == text
    assert as_distribution(text) == value
    assert as_distribution(value) is value


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (2, Constant(2.0)),
        (0.5, Constant(0.5)),
        (np.float32(0.5), Constant(0.5)),
        (np.int64(3), Constant(3.0)),
        ("0.25", Constant(0.25)),
        (" uniform( 1 ,2 ) ", Uniform(1.0, 2.0)),
    ],
)
def test_numbers_and_loose_text_are_read(value: Any, meant: Distribution) -> None:
    assert as_distribution(value) == meant


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("fast", "cannot read 'fast' as a duration; write a number, at least 0, or one of"),
        (None, "a duration is None; it must be a number, at least 0, or one of"),
        ([1.0], "a duration is [1.0]; it must be a number, at least 0, or one of"),
        (True, "a duration is True; it must be a number, at least 0, or one of"),
        ("exponential(a)", "cannot read 'exponential(a)'; write exponential(mean)"),
        ("exponential()", "cannot read 'exponential()'; write exponential(mean)"),
        ("uniform(1)", "cannot read 'uniform(1)'; write uniform(low, high)"),
        ("lognormal(1, 2, 3)", "cannot read 'lognormal(1, 2, 3)'; write lognormal(median, sigma)"),
        ("-1", "cannot read '-1' as a duration; write a number, at least 0, or one of"),
        ("nan", "cannot read 'nan' as a duration; write a number, at least 0, or one of"),
        (float("inf"), "a duration is inf; it must be a number, at least 0, or one of"),
        ("exponential(0)", "Exponential: mean is 0.0; it must be a finite number above 0"),
        ("exponential(inf)", "Exponential: mean is inf; it must be a finite number above 0"),
        ("uniform(2, 1)", "a uniform duration between 2.0 and 1.0 needs low ≤ high; exchange the two"),
        ("uniform(-1, 1)", "Uniform: low is -1.0; it must be a finite number, at least 0"),
        ("weibull(1, 0)", "Weibull: shape is 0.0; it must be a number in [0.05, 1e+06]"),
        ("geometric(0)", "Geometric: chance is 0.0; it must be a number in (0, 1]"),
        ("lognormal(0, 1)", "LogNormal: median is 0.0; it must be a finite number above 0"),
        ("lognormal(1, -1)", "LogNormal: sigma is -1.0; it must be a number in [0, 30]"),
        ("lognormal(1, 100)", "LogNormal: sigma is 100.0; it must be a number in [0, 30]"),
    ],
)
def test_what_is_no_duration_is_refused(value: Any, named: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(named)):
        as_distribution(value)


def test_an_unknown_distribution_gets_a_suggestion() -> None:
    with pytest.raises(
        UnknownNameError, match="unknown distribution 'exponental'; did you mean 'exponential'"
    ):
        as_distribution("exponental(1)")


def test_a_table_keeps_what_it_was_given() -> None:
    lists: Any = [[1, 2.5], np.array([3.0])]
    table = Table(lists)
    assert table.rows == ((1.0, 2.5), (3.0,))
    assert table.mean == pytest.approx(6.5 / 3)
    assert table == Table(((1.0, 2.5), (3.0,)))


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ((), "the compute-time table has no entry for some client; give each a row of times"),
        (((1.0,), ()), "the compute-time table has no entry for some client; give each a row of times"),
        (((1.0,), (2.0, 0.0)), "Table: rows[1][1] is 0.0; it must be a finite number above 0"),
        (((float("nan"),),), "Table: rows[0][0] is nan; it must be a finite number above 0"),
    ],
)
def test_a_table_without_positive_times_is_refused(rows: Any, named: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(named)):
        Table(rows)
