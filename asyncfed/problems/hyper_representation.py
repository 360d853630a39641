"""Hyper-representation: a shared network whose head learns from one half of the data, its body from another.

    features = body_x(image)
    f_i(y, x) = mean over train of cross-entropy(head_y(features), label) + (l2/2)‖y‖²
    F_i(y, x) = mean over validation of cross-entropy(head_y(features), label)

The network is cut between layers: its last `inner_layers` linear layers, with the activations between them,
are the inner variable y, and everything before is the outer variable x, which all clients share. The problem
of FedNest (Section 4.1) and AggITD (Section 5), there with MNIST and a perceptron 784-200-10: 157,000 outer
and 2,010 inner numbers, 100 clients with 300 + 300 samples. AggITD's LeNet has two inner layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncfed.checks import NonNegativeFloat, PositiveInt
from asyncfed.data import load_with_test
from asyncfed.data.split import AnyPartition, Fractions
from asyncfed.errors import ScenarioError
from asyncfed.models import (
    ModelName,
    build_model,
    has_convolutions,
    initial_parameters,
    outputs,
    split_layers,
)
from asyncfed.problems.classification import cross_entropies, loss_and_accuracy
from asyncfed.problems.encoding import encoder
from asyncfed.problems.held_out import deal, with_own_as_test
from asyncfed.problems.layout import Params
from asyncfed.problems.problem import Batch, Problem, Stages, half_square, problem_factory


@problem_factory
def hyper_representation(
    dataset: str = "mnist",
    clients: PositiveInt = 100,
    model: ModelName = "mlp:200",
    partition: AnyPartition = "iid",
    seed: int = 0,
    fractions: Fractions | None = None,
    inner_layers: PositiveInt = 1,
    l2: NonNegativeFloat = 0.0,
    limit: PositiveInt | None = None,
    separate_test: bool | None = None,
    download: bool = False,
    judged_on_own: PositiveInt | None = None,
) -> Problem:
    """Learn a representation; see `classification` for what names mean.

    Parameters
    ----------
    partition
        "iid", or "shards:2" for the papers' heterogeneous clients.
    fractions
        Of a client's samples, for training (inner loss), validation (outer loss) and testing. By default
        (0.5, 0.5, 0) with a separate test set and (0.4, 0.4, 0.2) without.
    inner_layers
        How many of the last linear layers are the inner variable.
    separate_test
        Test on the dataset's own test part, dealt out evenly; by default where it has one (digits has none).
    limit
        Use that many of the clients' samples; the separate test set stays whole.
    judged_on_own
        Judge on that many of each client's own samples for training and validation, drawn once, instead of
        test samples: `accuracy` is then training accuracy, as some figures show it.
    """
    samples, test = load_with_test(
        dataset, download=download, separate_test=separate_test, limit=limit, seed=seed
    )
    module = build_model(model, samples.x.shape[1:], samples.classes)
    body, head = split_layers(module, inner_layers)
    if not any(True for _ in body.parameters()):
        raise ScenarioError(
            f"inner_layers is {inner_layers}, which is all of model {model!r}; "
            "use fewer, or a deeper model such as 'mlp:200', so that something is left to be represented"
        )

    features = encoder(body)

    def encode(x: dict[str, Tensor], batch: Batch) -> Batch:
        images, labels = batch
        return features(x, images), labels

    def head_loss(y: dict[str, Tensor], encoded: Batch) -> Tensor:
        encoded_images, labels = encoded
        loss = cross_entropies(outputs(head, y, encoded_images), labels).mean()
        return loss + half_square(y, l2) if l2 else loss

    def logits(y: dict[str, Tensor], x: dict[str, Tensor], batch: Batch) -> Tensor:
        return outputs(head, y, encode(x, batch)[0])

    def sample_loss(y: dict[str, Tensor], x: dict[str, Tensor], batch: Batch) -> Tensor:
        return cross_entropies(logits(y, x, batch), batch[1])

    def correct(y: dict[str, Tensor], x: dict[str, Tensor], batch: Batch) -> Tensor:
        output = logits(y, x, batch)
        return (output.argmax(-1) == batch[1]).to(output.dtype)

    def init_inner(generator: torch.Generator) -> Params:
        return initial_parameters(head, generator)

    def init_outer(generator: torch.Generator) -> Params:
        return initial_parameters(body, generator)

    data = deal(samples, test, partition, clients, seed, fractions, validation=0.5)
    return Problem(
        name=f"{dataset}-{model}-representation",
        data=data if judged_on_own is None else with_own_as_test(data, judged_on_own, seed),
        stages=Stages(encode, head_loss, vectorize=not has_convolutions(head)),
        outer_loss=lambda y, x, batch: sample_loss(y, x, batch).mean(),
        init_inner=init_inner,
        init_outer=init_outer,
        outer_split="validation",
        metrics={"loss": sample_loss, "accuracy": correct},
        joint_metrics=lambda y, x, batch: loss_and_accuracy(logits(y, x, batch), batch[1]),
        vectorize=not has_convolutions(module),
    )
