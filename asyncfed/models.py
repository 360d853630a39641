"""Small networks, as torch modules that flatten their input as they need to.

Layers carry names (`hidden1`, `conv2`, `head`), because protocols and problems that split a network into an
inner and an outer part choose by layer. Nobody here touches torch's global random state: torch's own
initialisers draw from it, so they run with that state borrowed, seeded from the generator that was given, and
put back.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from asyncfed.errors import ScenarioError, UnknownNameError

MODELS = ("logistic", "mlp", "cnn")


def logistic_regression(inputs: int, classes: int) -> nn.Module:
    """One linear layer (`head`) that yields logits."""
    return mlp([inputs, classes])


def mlp(sizes: Sequence[int]) -> nn.Module:
    """A ReLU network of the given sizes, inputs and outputs included: layers `hidden1`, …, `head`."""
    if len(sizes) < 2 or min(sizes) < 1:
        raise ScenarioError(
            f"an mlp of sizes {list(sizes)} cannot be built; "
            "give inputs, hidden sizes and outputs, all positive"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    with _borrowed_random_state(0):
        for number, (fan_in, fan_out) in enumerate(pairwise(sizes[:-1]), start=1):
            layers[f"hidden{number}"] = nn.Linear(fan_in, fan_out)
            layers[f"relu{number}"] = nn.ReLU()
        layers["head"] = nn.Linear(sizes[-2], sizes[-1])
    return nn.Sequential(layers)


def emnist_cnn(classes: int = 62) -> nn.Module:
    """The network of PDBO's EMNIST experiment for images 1×28×28 (2,278,334 parameters with 62 classes)."""
    with _borrowed_random_state(0):
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(1, 32, 5),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(32, 64, 5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                hidden1=nn.Linear(1024, 2048),
                relu3=nn.ReLU(),
                head=nn.Linear(2048, classes),
            )
        )


def build_model(spec: str, inputs: int | Sequence[int], classes: int) -> nn.Module:
    """The model that a short text names: "logistic", "mlp:200", "mlp:200,100" (hidden sizes) or "cnn".

    `inputs` is the shape of one sample, or the number of its features.
    """
    kind, _, value = spec.partition(":")
    shape = (inputs,) if isinstance(inputs, int) else tuple(inputs)
    if kind not in MODELS:
        raise UnknownNameError("model", kind, MODELS)
    if (kind == "mlp") != bool(value):
        raise ScenarioError(
            f"model {spec!r}: hidden sizes go with mlp and only there; "
            "write 'logistic', 'cnn' or 'mlp:200,100'"
        )
    if kind == "cnn":
        if shape != (1, 28, 28):
            raise ScenarioError(
                f"model 'cnn' needs images of shape (1, 28, 28), the samples have {shape}; use 'mlp:200'"
            )
        return emnist_cnn(classes)
    try:
        hidden = [int(size) for size in value.split(",")] if value else []
    except ValueError as error:
        raise ScenarioError(
            f"model {spec!r}: {value!r} is not a list of hidden sizes; write 'mlp:200,100'"
        ) from error
    return mlp([math.prod(shape), *hidden, classes])


def initial_parameters(module: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Fresh parameters for `module` as torch's layers initialise themselves, drawn from `generator`."""
    fresh = copy.deepcopy(module)
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with _borrowed_random_state(seed):
        for layer in fresh.modules():
            reset = getattr(layer, "reset_parameters", None)
            if callable(reset):
                reset()
    return {name: parameter.detach() for name, parameter in fresh.named_parameters()}


def has_convolutions(module: nn.Module) -> bool:
    """Whether to run clients one by one: vmapped convolutions gain nothing on a CPU."""
    return any(isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for layer in module.modules())


@contextmanager
def _borrowed_random_state(seed: int) -> Iterator[None]:
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
