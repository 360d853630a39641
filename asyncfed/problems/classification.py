"""Single-level classification: a shared network, cross-entropy, and heterogeneous clients.

    f_i(x) = mean over the batch of cross-entropy(model_x(sample), label) + (l2/2)‖x‖²

The factory's own seed decides which client gets which sample; initial values come from the generator that the
runtime passes in. Derivatives of a perceptron are written out for many clients at once, those of a network
with convolutions client by client (vmapped convolutions gain nothing on a CPU).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, PositiveInt
from asyncfed.data import load_dealt
from asyncfed.data.datasets import Pixels
from asyncfed.data.split import AnyPartition, Fractions
from asyncfed.models import ModelName, build_model, has_convolutions, initial_parameters
from asyncfed.problems.layout import Params
from asyncfed.problems.perceptron import PerceptronLoss, written_out
from asyncfed.problems.problem import Batch, Network, Problem, problem_factory


@problem_factory
def classification(
    dataset: str = "digits",
    clients: PositiveInt = 20,
    model: ModelName = "logistic",
    partition: AnyPartition = "dirichlet:0.4",
    seed: int = 0,
    fractions: Fractions = (0.6, 0.2, 0.2),
    limit: PositiveInt | None = None,
    l2: NonNegativeFloat = 0.0,
    part: str | None = None,
    download: bool = False,
    extra_test: NonNegativeInt = 0,
    pixels: Pixels = "normalised",
) -> Problem:
    """Classify a named dataset; see `load_dataset`, `build_model` and `parse_partition` for the names.

    `extra_test` adds that many test images to each client, in its label proportions, from those that nobody
    holds: see `load_dealt`.
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
        pixels=pixels,
    )
    shape = data.train.tensors[0].shape[1:]
    module = build_model(model, shape, classes)
    network = Network(module, lambda logits, lam, batch: cross_entropies(logits, batch[1]).mean(), l2=l2)
    loss = written_out(network.inner_loss, module, shape, l2)

    def measured(x: dict[str, Tensor], lam: Params, batch: Batch) -> dict[str, Tensor]:
        return loss_and_accuracy(network.outputs(x, batch[0]), batch[1])

    def init_inner(generator: torch.Generator) -> Params:
        return initial_parameters(module, generator)

    return Problem(
        name=f"{dataset}-{model}",
        data=data,
        **({"inner_loss": loss} if isinstance(loss, PerceptronLoss) else {"network": network}),
        init_inner=init_inner,
        metrics={
            "loss": lambda x, lam, batch: measured(x, lam, batch)["loss"],
            "accuracy": lambda x, lam, batch: measured(x, lam, batch)["accuracy"],
        },
        joint_metrics=measured,
        vectorize=not has_convolutions(module),
    )


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Of each sample; for logits (..., B, classes) and labels (B,), of each sample under each of the models.

    Written out, because torch's own falls back to a Python decomposition under vmap, which is slower and
    loads the compiler and sympy (see `Derivatives`).
    """
    wanted = labels.expand(logits.shape[:-1]).unsqueeze(-1)
    return -log_softmax(logits, -1).gather(-1, wanted).squeeze(-1)


def loss_and_accuracy(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Both of every sample."""
    return {
        "loss": cross_entropies(logits, labels),
        "accuracy": (logits.argmax(-1) == labels).to(logits.dtype),
    }
