"""A look at a problem's own functions and data before anything runs: a loss must be one number, a metric one
number per sample, and every number of a sample finite. vmap would complain in words of its own, or not at
all; and a run on what is not a number ends with what is none.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncfed.data import ClientShards
from asyncfed.errors import DataError, ScenarioError
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
        found = getattr(problem, name)(inner, outer, _samples(problem, over))
        if not isinstance(found, Tensor) or found.ndim:
            raise ScenarioError(
                f"{name} of problem {problem.name!r} returns {_form(found)}; it must be a tensor that is one "
                "number, the mean over the samples of its batch (.mean())"
            )
    over = next((shards for shards in (data.test, data.validation) if shards.total), data.train)
    batch = _samples(problem, over)
    for name, values in problem.measured(inner, outer, batch).items():
        if not isinstance(values, Tensor) or values.shape != (len(batch[0]),):
            raise ScenarioError(
                f"metric {name!r} of problem {problem.name!r} returns {_form(values)} for {len(batch[0])} "
                "samples; it must be a tensor with one number for each sample"
            )
    if (mixture := problem.mixture) is not None:
        found = mixture.losses(inner, batch)
        if not isinstance(found, Tensor) or found.shape != (mixture.count, len(batch[0])):
            raise ScenarioError(
                f"the losses of the mixture of problem {problem.name!r} are {_form(found)} for "
                f"{mixture.count} models and {len(batch[0])} samples; they must be a tensor of shape "
                f"({mixture.count}, {len(batch[0])})"
            )


def check_data(problem: Problem) -> None:
    """Refuse samples that are not finite, by split, client and place."""
    data = problem.data
    for split, shards in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        for number, tensor in enumerate(shards.tensors):
            # One number says that all are finite; only otherwise, or where the sum overflows, look closer.
            if not tensor.is_floating_point() or math.isfinite(tensor.sum().item()):
                continue
            wrong = torch.nonzero(~torch.isfinite(tensor.reshape(len(tensor), -1)))
            if not len(wrong):
                continue
            row, place = wrong[0].tolist()
            client = int(np.searchsorted(shards.offsets, row, side="right")) - 1  # the last that begins there
            rows = len(np.unique(wrong[:, 0].cpu().numpy()))
            raise DataError(
                f"the {split} samples of client {client} of problem {problem.name!r} are not all finite: "
                f"tensor {number} of its sample {row - int(shards.offsets[client])} holds "
                f"{tensor[row].reshape(-1)[place].item()} ({rows} such samples in all); leave them out, or "
                "fill in numbers"
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


def _samples(problem: Problem, shards: ClientShards) -> Batch:
    """The first two samples of one client, or its only one, and what stands beside them."""
    client = int(shards.sizes.argmax())
    samples = tuple(t[:2].float() if t.is_floating_point() else t[:2] for t in shards.of(client))
    return samples + tuple(row[0] for row in problem.beside(torch.zeros(1)))


def _form(value: object) -> str:
    return (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )
