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
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.registry import register, registered

FloatArray = npt.NDArray[np.float64]


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ScenarioError(text)


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

    value: float
    keyword: ClassVar[str] = "constant"

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.value) and self.value >= 0,
            f"a constant duration of {self.value} must be finite and at least 0",
        )

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

    mean: float
    keyword: ClassVar[str] = "exponential"

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.mean) and self.mean > 0,
            f"an exponential mean of {self.mean} must be finite and above 0",
        )

    def quantile(self, u: FloatArray) -> FloatArray:
        return np.asarray(-self.mean * np.log1p(-u))

    def residual(self, u: FloatArray, v: FloatArray) -> FloatArray:
        return self.quantile(u)


@register("duration", "geometric")
@dataclass(frozen=True)
class Geometric(_Text):
    """Whole units of time, at least one, without memory: it ends with the given chance after each of them."""

    chance: float
    keyword: ClassVar[str] = "geometric"

    def __post_init__(self) -> None:
        _require(0 < self.chance <= 1, f"a geometric chance of {self.chance} must lie in (0, 1]")

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

    scale: float
    shape: float
    keyword: ClassVar[str] = "weibull"

    def __post_init__(self) -> None:
        _require(
            0 < self.scale < math.inf and 0.05 <= self.shape < math.inf,
            f"a Weibull with scale {self.scale} and shape {self.shape} needs a finite scale above 0 and a "
            "finite shape of at least 0.05",
        )

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

    low: float
    high: float
    keyword: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        _require(
            0 <= self.low <= self.high < math.inf,
            f"a uniform duration between {self.low} and {self.high} needs 0 ≤ low ≤ high < ∞",
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

    median: float
    sigma: float
    keyword: ClassVar[str] = "lognormal"

    def __post_init__(self) -> None:
        _require(
            0 < self.median < math.inf and 0 <= self.sigma <= 30,
            f"a log-normal with median {self.median} and sigma {self.sigma} needs a finite median above 0 "
            "and sigma in [0, 30]",
        )

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

    rows: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(tuple(float(v) for v in row) for row in self.rows))
        _require(len(self.rows) > 0, "the compute-time table is empty; give one row per client")
        for client, row in enumerate(self.rows):
            _require(len(row) > 0, f"the compute-time table has no entry for client {client}")
            _require(
                all(0 < v < math.inf for v in row),
                f"the compute times of client {client}, {row}, must be above 0",
            )

    @property
    def mean(self) -> float:
        return float(np.mean([v for row in self.rows for v in row]))


Distribution: TypeAlias = Constant | Exponential | Geometric | Weibull | Uniform | LogNormal
_BY_KEYWORD: Mapping[str, type[Distribution]] = registered("duration")


def as_distribution(value: float | str | Distribution) -> Distribution:
    """A number is a constant; text such as `exponential(0.2)` is read."""
    if isinstance(value, Distribution):
        return value
    match = re.fullmatch(r"\s*([a-z]+)\s*\(([^()]*)\)\s*", str(value))
    if match is None:
        try:
            number = float("no number" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            raise ScenarioError(
                f"cannot read {value!r} as a duration; write a number or one of exponential(mean), "
                "lognormal(median, sigma), weibull(scale, shape), uniform(low, high), geometric(chance), "
                "constant(value)"
            ) from None
        return Constant(number)
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
