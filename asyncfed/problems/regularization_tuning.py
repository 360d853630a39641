"""Regularization tuning: how strongly to shrink what, learnt from validation samples.

    f_i(y, x) = mean over train of cross-entropy(model_y(image), label) + ½ Σ_j exp(x_j) y_j²
    F_i(y)    = mean over validation of cross-entropy(model_y(image), label)

The outer variable x, which all clients share, acts on F_i through y alone. Per class there is one exponent
for each row of the last layer (`head`: a class's weights and its bias), so that for a "logistic" model every
f_i is strongly convex; per parameter each number of the model has its own.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from asyncfed.checks import NonNegativeFloat, PositiveFloat, PositiveInt
from asyncfed.data import load_with_test
from asyncfed.data.split import AnyPartition, Fractions
from asyncfed.models import ModelName, build_model, has_convolutions, initial_parameters, outputs
from asyncfed.problems.classification import cross_entropies
from asyncfed.problems.held_out import deal
from asyncfed.problems.layout import Params
from asyncfed.problems.problem import Batch, Problem, half_square, problem_factory


@problem_factory
def regularization_tuning(
    dataset: str = "digits",
    clients: PositiveInt = 20,
    model: ModelName = "logistic",
    per: Literal["class", "parameter"] = "class",
    partition: AnyPartition = "iid",
    seed: int = 0,
    fractions: Fractions | None = None,
    rate: PositiveFloat = 0.01,
    l2: NonNegativeFloat = 0.0,
    limit: PositiveInt | None = None,
    separate_test: bool | None = None,
    download: bool = False,
) -> Problem:
    """Tune weight decay; see `hyper_representation` for the other arguments.

    Parameters
    ----------
    per
        "class" (x.class, one exponent per class) or "parameter" (x looks like y).
    rate
        What every exp(x_j) is at the start.
    l2
        A fixed (l2/2)‖y‖² besides, for the layers before the last where `per` is "class".
    """
    samples, test = load_with_test(
        dataset, download=download, separate_test=separate_test, limit=limit, seed=seed
    )
    # What the functions below hold goes with them to actors, so they hold no samples.
    classes = samples.classes
    module = build_model(model, samples.x.shape[1:], classes)

    def penalty(y: dict[str, Tensor], x: dict[str, Tensor]) -> Tensor:
        if per == "class":
            rows = y["head.weight"].square().sum(1) + y["head.bias"].square()
            return 0.5 * (x["class"].exp() * rows).sum()
        return 0.5 * torch.stack([(x[name].exp() * y[name].square()).sum() for name in y]).sum()

    def inner_loss(y: dict[str, Tensor], x: dict[str, Tensor], batch: Batch) -> Tensor:
        loss = sample_loss(y, x, batch).mean() + penalty(y, x)
        return loss + half_square(y, l2) if l2 else loss

    def sample_loss(y: dict[str, Tensor], x: dict[str, Tensor], batch: Batch) -> Tensor:
        images, labels = batch
        return cross_entropies(outputs(module, y, images), labels)

    def correct(y: dict[str, Tensor], x: dict[str, Tensor], batch: Batch) -> Tensor:
        images, labels = batch
        output = outputs(module, y, images)
        return (output.argmax(-1) == labels).to(output.dtype)

    def init_inner(generator: torch.Generator) -> Params:
        return initial_parameters(module, generator)

    def init_outer(generator: torch.Generator) -> Params:
        if per == "class":
            return {"class": torch.full((classes,), math.log(rate))}
        return {
            name: torch.full(parameter.shape, math.log(rate)) for name, parameter in module.named_parameters()
        }

    return Problem(
        name=f"{dataset}-{model}-decay-per-{per}",
        data=deal(samples, test, partition, clients, seed, fractions, validation=0.5),
        inner_loss=inner_loss,
        outer_loss=lambda y, x, batch: sample_loss(y, x, batch).mean(),
        init_inner=init_inner,
        init_outer=init_outer,
        outer_split="validation",
        metrics={"loss": sample_loss, "accuracy": correct},
        vectorize=not has_convolutions(module),
    )
