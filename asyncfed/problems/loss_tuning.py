"""Loss tuning: a loss function learnt so that a model trained with it does well on rare classes, too.

For a network with logits o_c(y) and a label k among C classes, the VS-loss (Kini et al. 2021) is

    Δ_c = 2·sigmoid(x.multiplicative_c),   ι_c = x.additive_c
    f_i(y, x) = mean over train of ω_k · (−log softmax(Δ ⊙ o + ι)_k) + (l2/2)‖y‖²
    F_i(y)    = mean over validation of w_k · (−log softmax(o)_k)

and tuning it by bilevel optimization is Li et al. (2021, AutoBalance); FedNest (Section 4.2) does so with
many clients. The outer variable x, which all clients share, begins at 0, where f_i is plain cross-entropy. Δ
is kept positive and bounded by the authors' sigmoid, but twice it, so that Δ = 1 at the start and not ½ (a
factor common to all classes is only another scale of the logits).

w_k = 1/(C · frequency of k) among the validation samples of all clients together, whoever holds them: with
equally many each, the mean of the F_i is the loss averaged over classes. x acts on F_i through y alone. The
data are a long-tailed subset (`long_tail`), and samples carry such a weight in every split, so that the mean
of "balanced_accuracy" over all test samples is the mean over classes of each one's accuracy.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncfed.checks import NonNegativeFloat, PositiveInt, Probability
from asyncfed.data import ClientData, load_with_test, long_tail
from asyncfed.data.split import AnyPartition, Fractions
from asyncfed.models import ModelName, build_model, has_convolutions, initial_parameters, outputs
from asyncfed.problems.classification import cross_entropies, loss_and_accuracy
from asyncfed.problems.held_out import balanced, deal
from asyncfed.problems.layout import Params
from asyncfed.problems.problem import Batch, Problem, half_square, problem_factory


@problem_factory
def loss_tuning(
    dataset: str = "mnist",
    clients: PositiveInt = 100,
    model: ModelName = "mlp:200,100",
    partition: AnyPartition = "iid",
    seed: int = 0,
    fractions: Fractions | None = None,
    largest: PositiveInt = 6000,
    ratio: Probability = 0.01,
    train_weights: Literal["equal", "balanced"] = "equal",
    l2: NonNegativeFloat = 0.0,
    separate_test: bool | None = None,
    download: bool = False,
) -> Problem:
    """Tune a loss on a long-tailed dataset; see `hyper_representation` for the other arguments.

    Parameters
    ----------
    fractions
        By default (0.8, 0.2, 0) with a separate test set and (0.64, 0.16, 0.2) without.
    largest, ratio
        Class c keeps largest · ratio^(c/(C−1)) samples; see `long_tail`.
    train_weights
        ω: "equal" for 1, "balanced" for 1/(C · frequency) among everybody's training samples.
    """
    whole, test = load_with_test(dataset, download=download, separate_test=separate_test)
    samples = long_tail(whole, largest, ratio, seed)
    classes = samples.classes
    dealt = deal(samples, test, partition, clients, seed, fractions, validation=0.2)
    data = ClientData(*(balanced(split, classes) for split in (dealt.train, dealt.validation, dealt.test)))
    module = build_model(model, samples.x.shape[1:], classes)

    def inner_loss(y: dict[str, Tensor], x: dict[str, Tensor], batch: Batch) -> Tensor:
        images, weights, labels = batch
        delta, iota = 2 * torch.sigmoid(x["multiplicative"]), x["additive"]
        each = cross_entropies(delta * outputs(module, y, images) + iota, labels)
        loss = (weights * each).mean() if train_weights == "balanced" else each.mean()
        return loss + half_square(y, l2) if l2 else loss

    def sample_loss(y: dict[str, Tensor], x: dict[str, Tensor], batch: Batch) -> Tensor:
        images, _, labels = batch
        return cross_entropies(outputs(module, y, images), labels)

    def correct(y: dict[str, Tensor], x: dict[str, Tensor], batch: Batch) -> Tensor:
        images, _, labels = batch
        output = outputs(module, y, images)
        return (output.argmax(-1) == labels).to(output.dtype)

    def joint_metrics(y: dict[str, Tensor], x: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        images, weights, labels = batch
        found = loss_and_accuracy(outputs(module, y, images), labels)
        return found | {"balanced_accuracy": weights * found["accuracy"]}

    def init_inner(generator: torch.Generator) -> Params:
        return initial_parameters(module, generator)

    def init_outer(generator: torch.Generator) -> Params:
        return {"multiplicative": torch.zeros(classes), "additive": torch.zeros(classes)}

    return Problem(
        name=f"{dataset}-{model}-loss-tuning",
        data=data,
        inner_loss=inner_loss,
        outer_loss=lambda y, x, batch: (batch[1] * sample_loss(y, x, batch)).mean(),
        init_inner=init_inner,
        init_outer=init_outer,
        outer_split="validation",
        metrics={
            "loss": sample_loss,
            "accuracy": correct,
            "balanced_accuracy": lambda y, x, batch: batch[1] * correct(y, x, batch),
        },
        joint_metrics=joint_metrics,
        vectorize=not has_convolutions(module),
    )
