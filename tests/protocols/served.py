"""What tests of server-based methods share: runs whose variables can be seen after every iteration, and the
derivatives of a bilevel quadratic written out by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncfed import Result, Scenario, run
from asyncfed.problems import Problem
from topologies import star

Array = npt.NDArray[np.float64]


def serve(
    problem: Problem,
    protocol: Any,
    out: Path,
    *,
    start: Mapping[str, Any] | None = None,
    every: int = 1,
    **changes: Any,
) -> Result:
    """A run in float64; `start` holds x and y to begin from."""
    names = {"x": "outer", "y": "inner"}
    initial = {names[name]: torch.as_tensor(value)[None] for name, value in (start or {}).items()}
    scenario = Scenario(
        problem=problem,
        topology=star(problem.clients),
        protocol=protocol,
        precision="float64",
        evaluate_every=every,
        **changes,
    )
    return run(scenario, out=out, initial=initial or None)


def watched(problem: Problem) -> Problem:
    """The problem with all numbers of both its variables (single tensors) as metrics."""

    def number(which: int, place: int) -> Callable[..., torch.Tensor]:
        return lambda y, x, batch: (y, x)[which][place].expand(len(batch[0]))

    g = torch.Generator()
    lengths = [len(init(g)) for init in (problem.init_inner, problem.init_outer)]
    metrics = {
        f"{name}{place}": number(which, place)
        for which, name in enumerate("yx")
        for place in range(lengths[which])
    }
    return replace(problem, metrics=metrics)


def iterates(result: Result, name: str) -> Array:
    """Of a watched problem: "x" or "y" after 0, 1, … iterations, one row each."""
    columns = [column for column in result.metrics if column[0] == name and column[1:].isdigit()]
    return np.asarray(result.metrics[columns].to_numpy(dtype=float))


def asked(result: Result) -> list[list[int]]:
    """The clients asked in every round, from the trace."""
    requests = result.trace.to_pandas()
    requests = requests[requests.sender == result.trace.server]
    return [sorted(group.receiver.tolist()) for _, group in requests.groupby("step")]


@dataclass(frozen=True)
class Quadratics:
    """A `bilevel_quadratic` without noise, by hand: x is the outer variable λ of that problem, y its x.

    Indices run over clients `S` first (by default all), and what is returned has a leading axis for them.
    """

    A: Array
    b: Array
    R: Array
    t: Array
    s: Array
    curved: bool
    pull: float = 0.1
    bend: float = 0.1

    @classmethod
    def of(cls, problem: Problem) -> Quadratics:
        assert problem.recipe is not None
        tensors = (tensor.numpy() for tensor in problem.data.train.tensors)
        return cls(*tensors, curved=bool(problem.recipe.arguments["curved"]))

    @property
    def n(self) -> int:
        return len(self.A)

    def _rates(self, x: Array, y: Array) -> Array:
        return np.exp(x[np.arange(len(y)) % len(x)])

    def g_y(self, i: int, x: Array, y: Array) -> Array:
        """∇_y g_i"""
        q = self.A[i] @ (y - self.b[i]) + self.R[i] @ x
        return q + self.bend * (self._rates(x, y) * y + y / np.sqrt(1 + y * y)) if self.curved else q

    def g_yy(self, i: int, x: Array, y: Array) -> Array:
        """∇²_y g_i"""
        if not self.curved:
            return self.A[i]
        return self.A[i] + self.bend * np.diag(self._rates(x, y) + (1 + y * y) ** -1.5)

    def g_xy(self, i: int, x: Array, y: Array) -> Array:
        """∇²_xy g_i, a row for every number of x"""
        if not self.curved:
            return self.R[i].T
        which = np.arange(len(x))[:, None] == np.arange(len(y)) % len(x)
        return self.R[i].T + self.bend * which * self._rates(x, y) * y

    def f_y(self, i: int, x: Array, y: Array) -> Array:
        """∇_y f_i"""
        return y - self.t[i]

    def f_x(self, i: int, x: Array, y: Array) -> Array:
        """∇_x f_i"""
        return self.pull * (x - self.s[i])

    def mean(
        self, derivative: Callable[[int, Array, Array], Array], x: Array, y: Array, S: Any = None
    ) -> Array:
        """Over clients."""
        clients = range(self.n) if S is None else S
        return np.asarray(np.mean([derivative(i, x, y) for i in clients], axis=0))


def fed_inn(
    o: Quadratics,
    x: Array,
    y: Array,
    beta: Sequence[float],
    tau: Sequence[int],
    S: Sequence[int] | None = None,
) -> Array:
    """004 Alg. 4, line by line."""
    S = range(o.n) if S is None else S
    q = np.mean([o.g_y(i, x, y) for i in S], axis=0)
    ends = []
    for i in S:
        y_i = y
        for _ in range(tau[i]):
            y_i = y_i - beta[i] * (o.g_y(i, x, y_i) - o.g_y(i, x, y) + q)
        ends.append(y_i)
    return np.asarray(np.mean(ends, axis=0))


def fed_out_steps(
    o: Quadratics,
    x: Array,
    y: Array,
    h: Array,
    alpha: Sequence[float],
    tau: Sequence[int],
    S: Sequence[int] | None = None,
) -> Array:
    """004 Alg. 2, lines 9–15."""
    S = range(o.n) if S is None else S
    ends = []
    for i in S:
        x_i = x
        for _ in range(tau[i]):
            x_i = x_i - alpha[i] * (o.f_x(i, x_i, y) - o.f_x(i, x, y) + h)
        ends.append(x_i)
    return np.asarray(np.mean(ends, axis=0))
