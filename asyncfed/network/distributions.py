"""Durations, drawn from one uniform each.

A distribution is a frozen value with a quantile function, so that a draw is a pure function of its address in
`asyncfed.rng`. They are written and read as text, `exponential(0.2)`, which is how files and the command line
name them.

`residual` is what is left of a duration at an instant that falls into one (into a long one more likely), from
two uniforms: a part v of a duration that is drawn by its length; where it has no memory, again the duration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncfed.checks import Probability, Range, Words, fitting, shown
from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.registry import register, registered

FloatArray = npt.NDArray[np.float64]


Time = Annotated[float, Range(0, 1e60)]  # however many of them are added up, that is a number
PositiveTime = Annotated[float, Range(0, 1e60, above=True)]


@dataclass(frozen=True)
class _Text:
    """Distributions print as they are read: `lognormal(0.1, 0.5)`."""

    keyword: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.keyword}({', '.join(repr(getattr(self, f.name)) for f in fields(self))})"


@register("duration", "constant")
@dataclass(frozen=True)
class Constant(_Text):
    """Always the same."""

    value: Time
    keyword: ClassVar[str] = "constant"

    @property
    def mean(self) -> float:
        return self.value

    def quantile(self, u: FloatArray) -> FloatArray:
        return np.full(u.shape, float(self.value))

    def residual(self, u: FloatArray, v: FloatArray) -> FloatArray:
        return self.value * v


@register("duration", "exponential")
@dataclass(frozen=True)
class Exponential(_Text):
    """Memoryless, with the given mean."""

    mean: PositiveTime
    keyword: ClassVar[str] = "exponential"

    def quantile(self, u: FloatArray) -> FloatArray:
        return np.asarray(-self.mean * np.log1p(-u))

    def residual(self, u: FloatArray, v: FloatArray) -> FloatArray:
        return self.quantile(u)


@register("duration", "geometric")
@dataclass(frozen=True)
class Geometric(_Text):
    """Whole units of time, at least one, without memory: it ends with the given chance after each of them."""

    chance: Probability
    keyword: ClassVar[str] = "geometric"

    @property
    def mean(self) -> float:
        return 1 / self.chance

    def quantile(self, u: FloatArray) -> FloatArray:
        if self.chance == 1:
            return np.ones(u.shape)
        return np.asarray(np.floor(np.log1p(-u) / math.log1p(-self.chance)) + 1.0)

    def residual(self, u: FloatArray, v: FloatArray) -> FloatArray:
        return self.quantile(u)


@register("duration", "weibull")
@dataclass(frozen=True)
class Weibull(_Text):
    """With a scale, and a shape: below 1 heavy-tailed, 1 exponential, above 1 more and more regular."""

    scale: PositiveTime
    shape: Annotated[float, Range(0.05, 1e6)]
    keyword: ClassVar[str] = "weibull"

    @property
    def mean(self) -> float:
        return self.scale * math.gamma(1 + 1 / self.shape)

    def quantile(self, u: FloatArray) -> FloatArray:
        return np.asarray(self.scale * (-np.log1p(-u)) ** (1 / self.shape))

    def residual(self, u: FloatArray, v: FloatArray) -> FloatArray:
        from scipy.special import gammaincinv

        return np.asarray(self.scale * gammaincinv(1 + 1 / self.shape, u) ** (1 / self.shape) * v)


@register("duration", "uniform")
@dataclass(frozen=True)
class Uniform(_Text):
    """Anything between two bounds."""

    low: Time
    high: Time
    keyword: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ScenarioError(
                f"a uniform duration between {self.low} and {self.high} needs low ≤ high; exchange the two"
            )

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def quantile(self, u: FloatArray) -> FloatArray:
        return self.low + (self.high - self.low) * u

    def residual(self, u: FloatArray, v: FloatArray) -> FloatArray:
        return np.asarray(np.sqrt(self.low**2 + (self.high**2 - self.low**2) * u) * v)


@register("duration", "lognormal")
@dataclass(frozen=True)
class LogNormal(_Text):
    """Heavy-tailed: the given median, and the deviation of its logarithm."""

    median: PositiveTime
    sigma: Annotated[float, Range(0, 30)]
    keyword: ClassVar[str] = "lognormal"

    @property
    def mean(self) -> float:
        return self.median * math.exp(self.sigma**2 / 2)

    def quantile(self, u: FloatArray) -> FloatArray:
        from scipy.special import ndtri  # here, for it is slow to import and the actors need none of it

        return np.asarray(self.median * np.exp(self.sigma * ndtri(np.maximum(u, 2.0**-54))))

    def residual(self, u: FloatArray, v: FloatArray) -> FloatArray:
        return math.exp(self.sigma**2) * self.quantile(u) * v


@register("times")
@dataclass(frozen=True)
class Table:
    """Compute times as given: row i belongs to client i and is read step by step, and again when it ends."""

    rows: Annotated[
        tuple[tuple[PositiveTime, ...], ...], Words("a row of times, finite and above 0, for each client")
    ]

    def __post_init__(self) -> None:
        if not self.rows or not all(self.rows):
            raise ScenarioError(
                "the compute-time table has no entry for some client; give each a row of times"
            )

    @property
    def mean(self) -> float:
        return float(np.mean([v for row in self.rows for v in row]))


_WRITTEN = (
    "a number, at least 0, or one of exponential(mean), lognormal(median, sigma), weibull(scale, shape), "
    "uniform(low, high), geometric(chance), constant(value)"
)
Distribution: TypeAlias = Constant | Exponential | Geometric | Weibull | Uniform | LogNormal
Duration = Annotated[float | str | Distribution, Words(_WRITTEN)]
_BY_KEYWORD: Mapping[str, type[Distribution]] = registered("duration")


def as_distribution(value: float | str | Distribution) -> Distribution:
    """A number is a constant; text such as `exponential(0.2)`, or that of a number, is read."""
    if isinstance(value, Distribution):
        return value
    if not isinstance(value, str):
        return Constant(float(fitting(value, Annotated[Time, Words(_WRITTEN)], "a duration")))
    match = re.fullmatch(r"\s*([a-z]+)\s*\(([^()]*)\)\s*", value)
    if match is None:
        try:
            return Constant(float(value))
        except ValueError:
            raise ScenarioError(f"cannot read {shown(value)} as a duration; write {_WRITTEN}") from None
    keyword, inside = match.groups()
    if keyword not in _BY_KEYWORD:
        raise UnknownNameError("distribution", keyword, _BY_KEYWORD)
    kind = _BY_KEYWORD[keyword]
    try:
        numbers = [float(part) for part in inside.split(",")]
        return kind(*numbers)
    except (TypeError, ValueError) as error:
        if isinstance(error, ScenarioError):
            raise
        names = ", ".join(f.name for f in fields(kind))
        raise ScenarioError(f"cannot read {value!r}; write {keyword}({names})") from None
