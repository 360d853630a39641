"""A look at a problem's own functions before anything runs: a loss must be one number, a metric one number
per sample. vmap would complain in words of its own, or not at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncfed.data import ClientShards
from asyncfed.errors import ScenarioError
from asyncfed.problems.layout import Layout, Params
from asyncfed.problems.problem import Batch, Init, Problem


@torch.no_grad()
def check_functions(problem: Problem) -> None:
    """Call every function once, with initial values and a sample or two."""
    data = problem.data
    inner, outer = _begun(problem, "init_inner"), _begun(problem, "init_outer")
    outer_data = (
        data.validation if problem.outer_split == "validation" and data.validation.total else data.train
    )
    for name, over in (("inner_loss", data.train), ("outer_loss", outer_data)):
        found = getattr(problem, name)(inner, outer, _samples(over))
        if not isinstance(found, Tensor) or found.ndim:
            raise ScenarioError(
                f"{name} of problem {problem.name!r} returns {_form(found)}; it must be a tensor that is one "
                "number, the mean over the samples of its batch (.mean())"
            )
    batch = _samples(next((shards for shards in (data.test, data.validation) if shards.total), data.train))
    for name, values in problem.measured(inner, outer, batch).items():
        if not isinstance(values, Tensor) or values.shape != (len(batch[0]),):
            raise ScenarioError(
                f"metric {name!r} of problem {problem.name!r} returns {_form(values)} for {len(batch[0])} "
                "samples; it must be a tensor with one number for each sample"
            )


def _begun(problem: Problem, which: str) -> Params:
    """Initial values, as single or as double as the samples will be."""
    init: Init = getattr(problem, which)
    values: Any = init(torch.Generator().manual_seed(0))
    tensors = values.values() if isinstance(values, dict) else (values,)
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ScenarioError(
            f"{which} of problem {problem.name!r} returns a {type(values).__name__}; it must be a tensor, "
            "or a dict of tensors by name"
        )
    layout = Layout.of(values)
    return layout.views_one(layout.flatten(values).float())


def _samples(shards: ClientShards) -> Batch:
    """The first two samples of one client, or its only one."""
    client = int(shards.sizes.argmax())
    return tuple(t[:2].float() if t.is_floating_point() else t[:2] for t in shards.of(client))


def _form(value: object) -> str:
    return (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )
