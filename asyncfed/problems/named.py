"""A final model by the names of its parts: what a torch module loads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from asyncfed.errors import ScenarioError
from asyncfed.problems.layout import Layout, Params
from asyncfed.problems.problem import Problem


def model_by_name(problem: Problem, final: Mapping[str, Tensor], client: int | None) -> dict[str, Tensor]:
    """A client's, or (None) the server's, from the final variables of a run."""
    inner, clients = final["inner"], problem.clients
    if client is None and len(inner) > 1:
        raise ScenarioError(
            f"each of the {clients} clients has a model of its own; say whose is wanted: model(0)"
        )
    if client is not None and (isinstance(client, bool) or client not in range(clients)):
        raise ScenarioError(f"there is no client {client!r}; they are 0 to {clients - 1}")
    seed = torch.Generator().manual_seed(0)
    found = {
        name: _own(problem, name, Layout.of(init(seed)), final[name], client)
        for name, init in (("inner", problem.init_inner), ("outer", problem.init_outer))
    }
    if problem.state_dict is not None:
        noted = final.get("clients/buffers", final.get("buffers"))
        return problem.state_dict(
            found["inner"], found["outer"], None if noted is None or client is None else noted[client]
        )
    named: dict[str, Tensor] = {}
    for name, values in found.items():
        named |= values if isinstance(values, dict) else {name: values}
    return {name: value.clone() for name, value in named.items()}


def _own(problem: Problem, name: str, layout: Layout, rows: Tensor, client: int | None) -> Params:
    if rows.shape[1] != layout.d:
        raise ScenarioError(
            f"the run has {rows.shape[1]:,} numbers in an {name} variable, and problem {problem.name!r} has "
            f"{layout.d:,}; give the problem that was run"
        )
    return layout.views_one(rows[0 if len(rows) == 1 or client is None else client])
