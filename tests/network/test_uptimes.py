"""When things are on: against a naive reference, in any order, and with the laws they are drawn from."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from asyncfed.errors import ScenarioError
from asyncfed.network.distributions import (
    Constant,
    Distribution,
    Exponential,
    Geometric,
    LogNormal,
    Uniform,
    Weibull,
    as_distribution,
)
from asyncfed.network.uptimes import AlternatingTimes, Always, GivenTimes, Uptimes
from asyncfed.rng import Streams

LAWS: list[Distribution] = [
    Constant(2.0), Exponential(1.5), Geometric(0.3), Uniform(0.5, 2.0), Weibull(1.0, 0.7),
    LogNormal(1.0, 0.8),
]  # fmt: skip


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[int, list[tuple[float, float]]], float | None]:
    """Intervals of some of four things, with whole bounds: so that asked times fall on them, too."""
    period = draw(st.sampled_from([None, 12.0, 13.5]))
    table = {}
    for thing in draw(st.sets(st.integers(0, 3))):
        bounds = sorted(draw(st.sets(st.integers(0, 12), max_size=8)))
        pairs = list(zip(bounds[::2], bounds[1::2], strict=False))
        if period is None and pairs and draw(st.booleans()):
            pairs[-1] = (pairs[-1][0], math.inf)
        table[thing] = [(float(a), float(b)) for a, b in pairs]
    return table, period


def on(table: dict[int, list[tuple[float, float]]], period: float | None, thing: int, time: float) -> bool:
    if thing not in table:
        return True
    phase = time if period is None else time % period
    return any(a <= phase < b for a, b in table[thing])


GRID = [k / 2 for k in range(81)]  # halves are exact, so that the reference's modulo is


@settings(deadline=None)
@given(tables(), st.permutations(range(4)))
def test_given_times_are_those_of_a_naive_reading(
    made: tuple[dict[int, list[tuple[float, float]]], float | None], order: list[int]
) -> None:
    table, period = made
    times = GivenTimes(4, table, period)
    for thing in order:
        asked = times.on(np.full(len(GRID), thing), np.array(GRID))
        assert asked.tolist() == [on(table, period, thing, t) for t in GRID]
        for t in GRID[:60:2]:
            later = [u for u in GRID if u >= t]
            begins = [u for u in later if on(table, period, thing, u)]
            ends = [u for u in later if not on(table, period, thing, u)]
            if begins or not table.get(thing):
                assert times.next_on(thing, t) == (begins[0] if begins else math.inf)
            if on(table, period, thing, t):
                assert times.next_off(thing, t) == (ends[0] if ends else math.inf)


def test_a_period_that_has_no_exact_form_does_not_miss_its_own_bounds() -> None:
    times = GivenTimes(1, {0: [(0.03, 0.07)]}, 0.1)
    t = 0.0
    for cycle in range(2_000):
        begin = times.next_on(0, t)
        assert begin == cycle * 0.1 + 0.03
        end = times.next_off(0, begin)
        assert end == cycle * 0.1 + 0.07
        around = np.array([np.nextafter(begin, 0), begin, np.nextafter(end, 0), end])
        assert times.on(np.zeros(4, dtype=np.int64), around).tolist() == [False, True, True, False]
        t = end


def test_a_whole_period_never_ends_and_one_that_crosses_its_end_goes_on() -> None:
    times = GivenTimes(3, {0: [(0, 5)], 1: [(0, 1), (4, 5)]}, {0: 5.0, 1: 5.0})
    assert times.next_off(0, 3.0) == math.inf
    assert times.next_off(1, 4.5) == 6.0
    assert times.next_on(1, 1.0) == 4.0
    assert times.next_off(2, 7.0) == math.inf


def test_always_is_always() -> None:
    times: Uptimes = Always()
    assert times.on(np.arange(3), 5.0).tolist() == [True] * 3
    assert (times.next_on(1, 2.0), times.next_off(1, 2.0)) == (2.0, math.inf)


@pytest.mark.parametrize(
    ("intervals", "period", "named"),
    [
        ([(2, 1)], None, "the interval (2, 1) of thing 0 must have 0 ≤ from < to"),
        ([(-1, 1)], None, "the interval (-1, 1) of thing 0"),
        ([(0, 2), (1, 3)], None, "the intervals (0, 2) and (1, 3) of thing 0 overlap; make them one"),
        ([(0, 2)], 1.0, "the interval (0, 2) of thing 0 does not lie within its period of 1"),
        ([3], None, "an interval of thing 0 is 3; it must be a pair (from, to)"),
        ("ever", None, "the intervals of thing 0 are 'ever'; give a list of pairs (from, to)"),
        ([(0, 1)], -1.0, "the period of thing 0 is -1.0; it must be above 0 and finite"),
    ],
)
def test_intervals_that_are_none_are_refused(intervals: Any, period: float | None, named: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(named)):
        GivenTimes(1, {0: intervals}, period)


# ---- drawn ones


def alternating(on: Any, off: Any, count: int, seed: int = 3) -> AlternatingTimes:
    laws = [(as_distribution(on), as_distribution(off))]
    return AlternatingTimes(Streams(seed), "presence", laws, np.zeros(count, dtype=np.int64))


def naive(
    on: Distribution, off: Distribution, thing: int, until: float, seed: int = 3
) -> list[tuple[float, bool]]:
    """Ends of sojourns and what they were, drawn one by one."""
    streams = Streams(seed)

    def u(row: int, lane: int = 0) -> np.ndarray[Any, Any]:
        return streams.uniforms("presence", row, thing, thing + 1, lane)

    state = bool(u(0, 1)[0] < on.mean / (on.mean + off.mean))
    end = float((on if state else off).residual(u(0), u(0, 2))[0])
    found = [(end, state)]
    while end <= until:
        state = not state
        end = end + float((on if state else off).quantile(u(len(found)))[0])
        found.append((end, state))
    return found


@settings(deadline=None)
@given(
    st.sampled_from(LAWS),
    st.sampled_from(LAWS),
    st.lists(st.tuples(st.integers(0, 4), st.floats(0, 40)), min_size=1),
)
def test_drawn_times_are_those_of_a_naive_drawing_in_any_order(
    on: Distribution, off: Distribution, asked: list[tuple[int, float]]
) -> None:
    times = alternating(on, off, 5)
    reference = {thing: naive(on, off, thing, 200.0) for thing in range(5)}

    def state(thing: int, time: float) -> bool:
        return next(was for end, was in reference[thing] if end > time)

    together = alternating(on, off, 5).on(np.array([i for i, _ in asked]), np.array([t for _, t in asked]))
    for (thing, time), at_once in zip(asked, together, strict=True):
        now = bool(times.on(np.array([thing]), time)[0])
        assert now == at_once == state(thing, time)
        ends = [end for end, _ in reference[thing] if end > time]
        change = next(end for end in ends if state(thing, end) != now)
        if now:
            assert times.next_on(thing, time) == time
            assert times.next_off(thing, time) == change
        else:
            assert times.next_on(thing, time) == change


def test_one_that_comes_and_goes_changes_nothing_about_the_others() -> None:
    laws = [(as_distribution("exponential(3)"), as_distribution("weibull(1, 0.5)"))]
    grid = np.linspace(0, 50, 101)
    few = AlternatingTimes(Streams(1), "presence", laws, np.array([0, -1, 0]))
    more = AlternatingTimes(Streams(1), "presence", laws, np.array([0, 0, 0]))
    for thing in (0, 2):
        which = np.full(len(grid), thing)
        assert few.on(which, grid).tolist() == more.on(which, grid).tolist()
    assert few.on(np.ones(len(grid), dtype=np.int64), grid).all()
    assert not more.on(np.ones(len(grid), dtype=np.int64), grid).all()
    assert few.next_off(1, 0.0) == math.inf


@pytest.mark.parametrize("law", [law for law in LAWS if not isinstance(law, Geometric)], ids=str)
def test_the_process_is_stationary_from_the_beginning(law: Distribution) -> None:
    """On with the same probability at time 0 and later; 4 standard errors of 20,000 independent things are
    4·√(p(1-p)/20,000) ≤ 0.0141.
    """
    off = Exponential(1.0)
    count = 20_000
    times = alternating(law, off, count)
    p = law.mean / (law.mean + off.mean)
    for t in (0.0, 0.7, 5.0):
        share = times.on(np.arange(count), t).mean()
        assert share == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / count))


@pytest.mark.parametrize("law", [law for law in LAWS if not isinstance(law, Geometric)], ids=str)
def test_what_is_left_of_a_duration_has_the_equilibrium_law(law: Distribution) -> None:
    """F(x) = ∫₀ˣ P(duration > s) ds / mean, by quadrature of the quantile function's inverse."""
    streams = Streams(9)
    drawn = law.residual(streams.uniforms("a", 0, 0, 5_000), streams.uniforms("b", 0, 0, 5_000))
    survival: Any = {
        Constant: lambda: lambda s: 1.0 * (s < law.mean),
        Exponential: lambda: stats.expon(scale=law.mean).sf,
        Uniform: lambda: stats.uniform(0.5, 1.5).sf,
        Weibull: lambda: stats.weibull_min(c=0.7, scale=1.0).sf,
        LogNormal: lambda: stats.lognorm(s=0.8, scale=1.0).sf,
    }[type(law)]()
    grid = np.linspace(0, float(drawn.max()), 4001)
    cdf = integrate.cumulative_trapezoid(survival(grid), grid, initial=0) / law.mean
    assert stats.kstest(drawn, lambda x: np.interp(x, grid, cdf)).pvalue > 6e-5


def test_geometric_sojourns_are_a_two_state_markov_chain() -> None:
    """Of 400 chains over 500 whole units, each change from on to off is a Bernoulli(0.2) draw and back
    Bernoulli(0.5), independent of what was before: 4 standard errors of the counted shares.
    """
    chances = {True: 0.2, False: 0.5}
    times = alternating(Geometric(0.2), Geometric(0.5), 400)
    units = np.arange(1.0, 502.0)
    states = np.array([times.on(np.full(len(units), thing), units) for thing in range(400)])
    before, now, after = states[:, :-2], states[:, 1:-1], states[:, 2:]
    for state, chance in chances.items():
        for history in (True, False):
            some = (now == state) & (before == history)
            se = math.sqrt(chance * (1 - chance) / some.sum())
            assert (after[some] != state).mean() == pytest.approx(chance, abs=4 * se)
    assert states[:, 0].mean() == pytest.approx(5 / 7, abs=4 * math.sqrt(5 / 7 * 2 / 7 / 400))


def test_times_without_a_length_are_refused() -> None:
    with pytest.raises(
        ScenarioError, match=re.escape("the time off, constant(0.0), must have a finite mean above 0")
    ):
        alternating(1.0, 0.0, 3)
