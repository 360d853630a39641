"""Personalized classification: a shared model, and an outer variable of each client's own that adapts it.

    p(s)  = Σ_k softmax(λ.ensemble)_k · softmax(model_{x_k}(s)),    k = 1..K
    f_i   = mean over the batch of C·softmax(λ.labels)_y · (−log p(s)_y) + (l2/2)‖x‖²
    F_i   = mean over the train samples of −log p(s)_y + Σ_part (γ_part/2)‖λ_part‖²

for samples s with label y among C. An ensemble's weights (MTL) change what a client predicts; label weights
(DA) change only what it trains on. A part that a personalization leaves out is uniform: K = 1, weights 1.
A sample may have several labels, say one at each position of a sequence: then all of this is said of each,
and a loss is a mean over samples and labels.

    personalize    λ_i, which begins at 0     PDBO paper (Section 6.1, Appendix D)
    "none"         –                          SGP, Local: the baselines
    "da"           labels (C)                 PDBO-DA
    "mtl"          ensemble (K)               PDBO-MTL
    "mtl+da"       ensemble (K), labels (C)   PDBO-MTL&DA

The inner variable holds all K models, each parameter with a leading axis K, begun at K different points.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, PositiveInt, Range, checked
from asyncfed.data import ClientData, load_dealt
from asyncfed.data.split import AnyPartition, Fractions
from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.models import (
    ModelName,
    build_model,
    has_convolutions,
    initial_parameters,
    stacked_initial_parameters,
)
from asyncfed.problems.classification import cross_entropies, loss_and_accuracy
from asyncfed.problems.layout import Params
from asyncfed.problems.problem import (
    Batch,
    Mixture,
    Network,
    OuterSplit,
    Problem,
    half_square,
    problem_factory,
)

_PARTS = {"none": (), "da": ("labels",), "mtl": ("ensemble",), "mtl+da": ("ensemble", "labels")}


Components = Annotated[int, Range(1, 10_000)]
OuterL2 = NonNegativeFloat | Mapping[str, NonNegativeFloat]


@problem_factory
def personalized_classification(
    dataset: str = "digits",
    clients: PositiveInt = 20,
    model: ModelName = "logistic",
    personalize: str = "mtl+da",
    components: Components = 3,
    partition: AnyPartition = "dirichlet:0.4",
    seed: int = 0,
    fractions: Fractions = (0.6, 0.2, 0.2),
    limit: PositiveInt | None = None,
    l2: NonNegativeFloat = 0.0,
    outer_l2: OuterL2 = 0.0,
    part: str | None = None,
    download: bool = False,
    extra_test: NonNegativeInt = 0,
) -> Problem:
    """Classify a named dataset, every client in its own way; see `classification` for the other arguments.

    Parameters
    ----------
    personalize
        "none", "da", "mtl" or "mtl+da" (also written "mtl&da").
    components
        Number K of models in an ensemble; without one ("none", "da") there is a single model.
    outer_l2
        γ for every part of the outer variable, or for some of them by name: {"ensemble": 0.01}.
    """
    data, classes = load_dealt(
        dataset,
        partition,
        clients,
        seed,
        fractions,
        part=part,
        limit=limit,
        extra_test=extra_test,
        download=download,
    )
    module = build_model(model, data.train.tensors[0].shape[1:], classes)
    return personalized(
        f"{dataset}-{model}",
        data,
        module,
        classes,
        personalize=personalize,
        components=components,
        l2=l2,
        outer_l2=outer_l2,
        vectorize=not has_convolutions(module),
    )


@checked
def personalized(
    name: str,
    data: ClientData,
    module: nn.Module,
    classes: PositiveInt,
    *,
    personalize: str,
    components: Components = 3,
    l2: NonNegativeFloat = 0.0,
    outer_l2: OuterL2 = 0.0,
    outer_split: OuterSplit = "train",
    vectorize: bool = True,
) -> Problem:
    """The problem above for any data (inputs, labels) and any module that turns inputs into logits: (B, C)
    for labels (B,), or (B, …, C) for labels (B, …).

    The module's parameters are drawn anew. It may have no buffers and draw nothing (BatchNorm, dropout):
    models of an ensemble, and second derivatives, are functions of parameters alone. `from_module` takes
    such networks.
    """
    _refuse_what_is_no_function_of_parameters(module)
    kind = personalize.replace("&", "+")
    if kind not in _PARTS:
        raise UnknownNameError("personalization", personalize, _PARTS)
    parts = {part: {"ensemble": components, "labels": classes}[part] for part in _PARTS[kind]}
    rates = _outer_rates(kind, outer_l2)
    ensemble = "ensemble" in parts

    def label_losses(logits: Tensor, lam: dict[str, Tensor], labels: Tensor) -> Tensor:
        """Of every label of every sample (B, …)."""
        each = cross_entropies(logits, labels)
        return -log_mixture(-each, lam["ensemble"]) if ensemble else each

    def inner(logits: Tensor, lam: dict[str, Tensor], batch: Batch) -> Tensor:
        labels = batch[1]
        each = label_losses(logits, lam, labels)
        if "labels" in parts:
            each = label_weights(lam["labels"]).gather(0, labels.flatten()).view_as(labels) * each
        return each.mean()

    def outer(logits: Tensor, lam: dict[str, Tensor], batch: Batch) -> Tensor:
        loss = label_losses(logits, lam, batch[1]).mean()
        for part, rate in rates.items():
            loss = loss + half_square({part: lam[part]}, rate)
        return loss

    network = Network(module, inner, outer, copies=components if ensemble else None, l2=l2)

    def penalty(x: dict[str, Tensor]) -> Tensor:
        return half_square(x, l2)

    def mixture_losses(x: dict[str, Tensor], batch: Batch) -> Tensor:
        inputs, labels = batch
        return _per_sample(cross_entropies(network.outputs(x, inputs), labels), axes=2)

    def measured(x: dict[str, Tensor], lam: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        inputs, labels = batch
        output = network.outputs(x, inputs)
        if ensemble:  # log-probabilities are logits too
            output = log_mixture(log_softmax(output, -1), lam["ensemble"])
        found = loss_and_accuracy(output, labels)
        return {name: _per_sample(values) for name, values in found.items()}

    def init_inner(generator: torch.Generator) -> Params:
        if ensemble:
            return stacked_initial_parameters(module, components, generator)
        return initial_parameters(module, generator)

    def init_outer(generator: torch.Generator) -> Params:
        return {part: torch.zeros(size) for part, size in parts.items()}

    return Problem(
        name=f"{name}-{kind}",
        data=data,
        network=network,
        init_inner=init_inner,
        init_outer=init_outer,
        outer_split=outer_split,
        metrics={
            "loss": lambda x, lam, batch: measured(x, lam, batch)["loss"],
            "accuracy": lambda x, lam, batch: measured(x, lam, batch)["accuracy"],
        },
        joint_metrics=measured,
        mixture=Mixture(components, mixture_losses, penalty if l2 else None) if kind == "mtl" else None,
        vectorize=vectorize,
    )


def _refuse_what_is_no_function_of_parameters(module: nn.Module) -> None:
    noted = [name for name, _ in module.named_buffers()]
    drawing = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.training and layer.p
    ]
    if noted or drawing:
        what = f"buffers ({noted[0]})" if noted else f"dropout ({drawing[0]})"
        raise ScenarioError(
            f"{type(module).__name__} has {what}, and a personalized problem is of parameters alone; use "
            "from_module(module, data, buffers='local'), with outer='…' for a part of each client's own, or "
            "a network without BatchNorm and dropout"
        )


def _per_sample(values: Tensor, axes: int = 1) -> Tensor:
    """The mean over the labels of a sample, of values with so many axes before those of labels."""
    return values.flatten(axes).mean(-1) if values.ndim > axes else values


def label_weights(lam: Tensor) -> Tensor:
    """C·softmax(λ) for λ in R^C: weights that are 1 where λ = 0, and C together."""
    return len(lam) * torch.softmax(lam, -1)


def log_mixture(log_probabilities: Tensor, lam: Tensor) -> Tensor:
    """log Σ_k softmax(λ)_k exp(log_probabilities_k), for log-probabilities (K, …) and λ in R^K."""
    weights = log_softmax(lam, -1).reshape(-1, *(1,) * (log_probabilities.ndim - 1))
    return torch.logsumexp(weights + log_probabilities, 0)


def _outer_rates(kind: str, outer_l2: float | Mapping[str, float]) -> dict[str, float]:
    """The positive rates γ by part."""
    known = _PARTS[kind]
    rates = outer_l2 if isinstance(outer_l2, Mapping) else dict.fromkeys(known, outer_l2)
    for part in rates:
        if part not in known:
            raise UnknownNameError(f"part of the outer variable of {kind!r} in outer_l2", part, known)
    return {part: rate for part, rate in rates.items() if rate}
