"""A final model by the names of its parts: what a torch module loads."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncfed.errors import ScenarioError
from asyncfed.problems.layout import Layout
from asyncfed.problems.problem import Problem


def model_by_name(
    problem: Problem, inner: Tensor, outer: Tensor, buffers: Tensor | None
) -> dict[str, Tensor]:
    """Of flat variables, and of the buffers of the client whose model it is, where it has some of its own."""
    seed = torch.Generator().manual_seed(0)
    found = {}
    for name, init, row in (("inner", problem.init_inner, inner), ("outer", problem.init_outer, outer)):
        layout = Layout.of(init(seed))
        if len(row) != layout.d:
            raise ScenarioError(
                f"the run has {len(row):,} numbers in an {name} variable, and problem {problem.name!r} has "
                f"{layout.d:,}; give the problem that was run"
            )
        found[name] = layout.views_one(row)
    if problem.state_dict is not None:
        return problem.state_dict(found["inner"], found["outer"], buffers)
    named: dict[str, Tensor] = {}
    for name, values in found.items():
        named |= values if isinstance(values, dict) else {name: values}
    return {name: value.clone() for name, value in named.items()}
