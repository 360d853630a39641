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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import linear

from asyncfed.checks import Range, Words, checked
from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.lstm import LSTM
from asyncfed.room import require_room

MODELS = ("logistic", "mlp", "cnn", "lenet")
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "softplus": nn.Softplus,
}
Width = Annotated[int, Range(1, 10**7)]
Positions = Literal["all", "last"]
ModelName = Annotated[
    str,
    Words(
        "the name of a model: 'logistic', 'mlp:200,100' (hidden sizes), 'mlp:200,100:tanh' (another "
        "activation than ReLU), 'cnn', 'cnn:8,16,512' (widths) or 'lenet'"
    ),
]


@checked
def logistic_regression(inputs: Width, classes: Width) -> nn.Module:
    """One linear layer (`head`) that yields logits."""
    return mlp([inputs, classes])


@checked
def mlp(sizes: Sequence[Width], activation: str = "relu") -> nn.Module:
    """A network of the given sizes, inputs and outputs included: layers `hidden1`, …, `head`, and after each
    but the last the activation "relu", "tanh", "gelu" or "softplus".
    """
    if activation not in ACTIVATIONS:
        raise UnknownNameError("activation", activation, ACTIVATIONS)
    if len(sizes) < 2:
        raise ScenarioError(
            f"an mlp of sizes {list(sizes)} cannot be built; give inputs, hidden sizes and outputs"
        )
    weights = sum(fan_in * fan_out for fan_in, fan_out in pairwise(sizes))
    require_room(8.0 * weights, f"an mlp of sizes {list(sizes)}", "give smaller hidden sizes")
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    with borrowed_random_state(0):
        for number, (fan_in, fan_out) in enumerate(pairwise(sizes[:-1]), start=1):
            layers[f"hidden{number}"] = nn.Linear(fan_in, fan_out)
            layers[f"{activation}{number}"] = ACTIVATIONS[activation]()
        layers["head"] = nn.Linear(sizes[-2], sizes[-1])
    return nn.Sequential(layers)


@checked
def cnn(
    shape: tuple[int, ...] = (1, 28, 28), classes: Width = 62, widths: Sequence[Width] = (32, 64, 2048)
) -> nn.Module:
    """Two 5×5 convolutions, each followed by ReLU and 2×2 max-pooling, a hidden layer with ReLU, and a head.

    `widths` are the maps of the first and of the second convolution and the size of the hidden layer.
    """
    if len(widths) != 3:
        raise ScenarioError(
            f"a cnn of widths {list(widths)} cannot be built; give three: the maps of both convolutions and "
            "the size of the hidden layer, such as 8, 16, 512"
        )
    if len(shape) != 3 or min(shape[1:]) < _SMALLEST_CNN_IMAGE or shape[0] < 1:
        raise ScenarioError(
            f"a cnn needs images (channels, height, width) of at least "
            f"{_SMALLEST_CNN_IMAGE}×{_SMALLEST_CNN_IMAGE}, such as (1, 28, 28) or (3, 32, 32), "
            f"the samples have {shape}; use 'mlp:200'"
        )
    first, second, hidden = widths
    height, width = (((side - 4) // 2 - 4) // 2 for side in shape[1:])
    flat = second * height * width
    weights = 25 * (shape[0] + second) * first + hidden * (flat + classes)
    require_room(8.0 * weights, f"a cnn of widths {list(widths)}", "give smaller widths")
    with borrowed_random_state(0):
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(shape[0], first, 5),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(first, second, 5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                hidden1=nn.Linear(flat, hidden),
                relu3=nn.ReLU(),
                head=nn.Linear(hidden, classes),
            )
        )


_SMALLEST_CNN_IMAGE = 16  # 16 → 12 → 6 → 2 → 1


@checked
def emnist_cnn(classes: Width = 62) -> nn.Module:
    """The network of PDBO's EMNIST experiment for images 1×28×28 (2,278,334 parameters with 62 classes)."""
    return cnn((1, 28, 28), classes)


# What a LeNet reads: shape of an image, and the padding of its first layer that makes 5×5 maps at the end.
_LENET_PADDING = {(1, 28, 28): 2, (3, 32, 32): 0}


@checked
def lenet(shape: tuple[int, ...] = (1, 28, 28), classes: Width = 10) -> nn.Module:
    """The 7-layer network of LeCun et al. (1998), with ReLU and max-pooling: 6 and 16 maps, 120, 84, classes.

    For images 1×28×28 (padded to 32×32, 61,706 parameters with 10 classes) or 3×32×32 (62,006).
    """
    if shape not in _LENET_PADDING:
        raise ScenarioError(
            f"a LeNet needs images of shape {' or '.join(str(known) for known in _LENET_PADDING)}, "
            f"the samples have {shape}; use 'mlp:200'"
        )
    with borrowed_random_state(0):
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(shape[0], 6, 5, padding=_LENET_PADDING[shape]),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(6, 16, 5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                hidden1=nn.Linear(400, 120),
                relu3=nn.ReLU(),
                hidden2=nn.Linear(120, 84),
                relu4=nn.ReLU(),
                head=nn.Linear(84, classes),
            )
        )


class LastStep(nn.Module):
    """Sequences (B, length, …) to what stands at their end (B, …)."""

    def forward(self, sequences: Tensor) -> Tensor:
        return sequences[:, -1]


@checked
def char_lstm(
    vocabulary: Width = 80,
    embedding: Width = 8,
    hidden: Width = 256,
    layers: Width = 2,
    positions: Positions = "all",
) -> nn.Module:
    """The network of PDBO's Shakespeare experiment: characters (B, length) to logits of what follows each (B,
    length, vocabulary), or (`positions="last"`) the last of them (B, vocabulary).

    819,920 parameters as in the paper: an `embedding`, an `lstm` and a `head` on its outputs.
    """
    require_room(
        8.0 * (vocabulary * (embedding + hidden) + 8.0 * layers * hidden**2),
        f"a network of {layers} layers of {hidden:,} with an embedding of {embedding:,}",
        "give fewer or smaller layers",
    )
    with borrowed_random_state(0):
        parts: OrderedDict[str, nn.Module] = OrderedDict(
            embedding=nn.Embedding(vocabulary, embedding), lstm=LSTM(embedding, hidden, layers)
        )
        if positions == "last":
            parts["last"] = LastStep()
        parts["head"] = nn.Linear(hidden, vocabulary)
        return nn.Sequential(parts)


@checked
def build_model(spec: ModelName, inputs: Width | Sequence[Width], classes: Width) -> nn.Module:
    """The model that a short text names: "logistic", "mlp:200", "mlp:200,100" (hidden sizes),
    "mlp:80,60:tanh" (an activation other than ReLU: "tanh", "gelu" or "softplus"), "cnn" (the one of PDBO's
    EMNIST experiment), "cnn:8,16,512" (other widths, see `cnn`) or "lenet".

    `inputs` is the shape of one sample, or the number of its features.
    """
    kind, *values = spec.split(":")
    shape = (inputs,) if isinstance(inputs, int) else tuple(inputs)
    if kind not in MODELS:
        raise UnknownNameError("model", kind, MODELS)
    fewest, most = {"mlp": (1, 2), "cnn": (0, 1)}.get(kind, (0, 0))
    if not fewest <= len(values) <= most or not all(values):
        raise ScenarioError(
            f"model {spec!r}: sizes go with mlp, which needs them, and with cnn, which may have them, and an "
            "activation with mlp alone; write 'logistic', 'mlp:200,100', 'mlp:200,100:tanh', 'cnn', "
            "'cnn:8,16,512' or 'lenet'"
        )
    if kind == "lenet":
        return lenet(shape, classes)
    try:
        widths = [int(size) for size in values[0].split(",")] if values else []
    except ValueError as error:
        example = "mlp:200,100" if kind == "mlp" else "cnn:8,16,512"
        raise ScenarioError(
            f"model {spec!r}: {values[0]!r} is not a list of sizes; write {example!r}"
        ) from error
    if kind == "cnn":
        return cnn(shape, classes, widths) if widths else cnn(shape, classes)
    return mlp([math.prod(shape), *widths, classes], *values[1:])


def initial_parameters(module: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Fresh parameters for `module` as torch's layers initialise themselves, drawn from `generator`."""
    fresh = copy.deepcopy(module)
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with borrowed_random_state(seed):
        for layer in fresh.modules():
            reset = getattr(layer, "reset_parameters", None)
            if callable(reset):
                reset()
    return {name: parameter.detach() for name, parameter in fresh.named_parameters()}


def stacked_initial_parameters(
    module: nn.Module, count: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Fresh parameters for `count` models like `module`, each drawn anew, stacked along a leading axis."""
    each = [initial_parameters(module, generator) for _ in range(count)]
    return {name: torch.stack([parameters[name] for parameters in each]) for name in each[0]}


def stacked_outputs(module: nn.Module, parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """The outputs (K, B, …), for the same inputs (B, …), of K models like `module` with stacked parameters.

    The first layers of K perceptrons are one wide layer, as they all read the same inputs: that takes half
    the time of vmap over K (100 clients, 784-32-62, B = 64, K = 3: 55 ms a gradient and 125 ms a
    Hessian-vector product, against 100 and 220).
    """
    if not _is_perceptron(module):
        outputs: Tensor = vmap(lambda own: functional_call(module, own, (inputs,)))(dict(parameters))
        return outputs
    values, stacked = inputs, False
    for name, layer in module.named_children():
        if not isinstance(layer, nn.Linear):
            values = layer(values)
            continue
        weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
        if stacked:
            values = values @ weight.mT + bias.unsqueeze(1)
        else:
            wide = linear(values, weight.flatten(0, 1), bias.flatten())
            values, stacked = wide.view(-1, *bias.shape).transpose(0, 1), True
    return values


def split_layers(module: nn.Module, last: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Everything before the `last` linear layers, and these with what stands between them; names stay."""
    layers = list(module.named_children()) if isinstance(module, nn.Sequential) else []
    linear_layers = [place for place, (_, layer) in enumerate(layers) if isinstance(layer, nn.Linear)]
    if not 1 <= last <= len(linear_layers):
        raise ScenarioError(
            f"the last {last} linear layers cannot be split off: "
            f"there are {len(linear_layers)} in a row of layers, so it must lie in 1..{len(linear_layers)}"
        )
    start = linear_layers[-last]
    return nn.Sequential(OrderedDict(layers[:start])), nn.Sequential(OrderedDict(layers[start:]))


def outputs(module: nn.Module, parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """What `module` makes of `inputs` with other parameters.

    A perceptron is written out, which is cheaper under vmap than torch's functional_call (10 clients, B = 10,
    a head 200-10: 0.76 ms a gradient against 0.91).
    """
    if not _is_perceptron(module):
        found: Tensor = functional_call(module, dict(parameters), (inputs,))
        return found
    values = inputs
    for name, layer in module.named_children():
        if isinstance(layer, nn.Linear):
            values = values @ parameters[f"{name}.weight"].mT + parameters[f"{name}.bias"]
        else:
            values = layer(values)
    return values


def _is_perceptron(module: nn.Module) -> bool:
    plain = (nn.Flatten, nn.Linear, *ACTIVATIONS.values())
    return isinstance(module, nn.Sequential) and all(
        isinstance(layer, plain) and getattr(layer, "bias", True) is not None for layer in module
    )


def has_convolutions(module: nn.Module) -> bool:
    """Whether to run clients one by one: vmapped convolutions gain nothing on a CPU."""
    return any(isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for layer in module.modules())


@contextmanager
def borrowed_random_state(seed: int) -> Iterator[None]:
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
