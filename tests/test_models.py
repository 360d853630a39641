"""Models: sizes, names, shapes, and initial values that leave torch's global generator alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.func import functional_call, grad, vmap

from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.models import (
    ACTIVATIONS,
    build_model,
    char_lstm,
    cnn,
    emnist_cnn,
    has_convolutions,
    initial_parameters,
    lenet,
    logistic_regression,
    mlp,
    outputs,
    split_layers,
    stacked_initial_parameters,
    stacked_outputs,
)


def size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_models_have_the_sizes_of_the_papers() -> None:
    assert size(emnist_cnn()) == 2_278_334
    assert size(cnn(widths=(8, 16, 512))) == 208 + 3_216 + 131_584 + 31_806  # a quarter of the widths
    assert size(cnn((3, 32, 32), 10)) == 2_432 + 51_264 + (25 * 64 + 1) * 2048 + 20_490
    assert size(mlp([784, 200, 10])) == 157_000 + 2_010
    assert size(logistic_regression(64, 10)) == 650
    assert size(char_lstm()) == 819_920
    assert size(lenet()) == 61_706  # 156 + 2,416 + 48,120 + 10,164 + 850
    assert size(lenet((3, 32, 32))) == 62_006


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("logistic", (64,)),
        ("mlp:20", (1, 28, 28)),
        ("mlp:20,10", (3, 5)),
        ("mlp:20,10:softplus", (3, 5)),
        ("cnn", (1, 28, 28)),
        ("cnn:3,4,5", (1, 28, 28)),
        ("cnn:3,4,5", (3, 32, 32)),
        ("cnn:3,4,5", (2, 16, 17)),
        ("lenet", (1, 28, 28)),
        ("lenet", (3, 32, 32)),
    ],
)
def test_models_flatten_their_input(spec: str, shape: tuple[int, ...]) -> None:
    assert build_model(spec, shape, 7)(torch.zeros(5, *shape)).shape == (5, 7)


def test_layers_carry_names() -> None:
    names = [name for name, _ in build_model("mlp:20,10", 64, 10).named_parameters()]
    assert names == [
        f"{layer}.{kind}" for layer in ("hidden1", "hidden2", "head") for kind in ("weight", "bias")
    ]
    assert [name for name, _ in logistic_regression(4, 2).named_parameters()] == ["head.weight", "head.bias"]


BY_HAND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": lambda z: z.clamp(min=0),
    "tanh": lambda z: 1 - 2 / ((2 * z).exp() + 1),
    "gelu": lambda z: z * (1 + (z / math.sqrt(2)).erf()) / 2,
    "softplus": lambda z: (1 + z.exp()).log(),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_is_an_activation_between_affine_maps(activation: str) -> None:
    module = mlp([3, 4, 5, 2], activation).double()
    p = dict(module.named_parameters())
    assert list(p) == [f"{layer}.{k}" for layer in ("hidden1", "hidden2", "head") for k in ("weight", "bias")]
    x = 4 * torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = x
    for layer in ("hidden1", "hidden2"):
        values = BY_HAND[activation](values @ p[f"{layer}.weight"].T + p[f"{layer}.bias"])
    expected = values @ p["head.weight"].T + p["head.bias"]
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(outputs(module, p, x), expected)
    named = build_model("mlp:4,5" if activation == "relu" else f"mlp:4,5:{activation}", 3, 2)
    assert str(named) == str(module)


@pytest.mark.parametrize("activation", ["tanh", "gelu", "softplus"])
def test_a_smooth_mlp_written_out_has_the_second_derivatives_of_the_module(activation: str) -> None:
    module = mlp([3, 4, 2], activation).double()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, generator=g, dtype=torch.float64)
    p = {name: torch.randn(3, *v.shape, generator=g).double() for name, v in module.named_parameters()}
    u = {name: torch.randn(v.shape, generator=g).double() for name, v in p.items()}

    def gradient(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return grad(lambda w: outputs(module, w, x).square().mean())(own)

    def product(own: dict[str, torch.Tensor], along: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return grad(
            lambda w: torch.stack([(v * along[name]).sum() for name, v in gradient(w).items()]).sum()
        )(own)

    products = vmap(product)(p, u)
    for client in range(3):
        own, along = ({name: v[client] for name, v in of.items()} for of in (p, u))

        def plain(shift: float, own: dict = own, along: dict = along) -> dict[str, torch.Tensor]:
            at = {name: (own[name] + shift * along[name]).requires_grad_() for name in own}
            loss = functional_call(module, at, (x,)).square().mean()
            return dict(zip(at, torch.autograd.grad(loss, list(at.values())), strict=True))

        ahead, behind = plain(1e-6), plain(-1e-6)
        for name, found in products.items():
            torch.testing.assert_close(
                found[client], (ahead[name] - behind[name]) / 2e-6, rtol=1e-5, atol=1e-7
            )


def test_the_cnn_of_the_paper_is_one_of_certain_widths() -> None:
    paper, named, wide = (
        emnist_cnn(10),
        build_model("cnn", (1, 28, 28), 10),
        build_model("cnn:32,64,2048", (1, 28, 28), 10),
    )
    for module in (named, wide):
        assert str(module) == str(paper)
        assert all(map(torch.equal, module.parameters(), paper.parameters()))
    narrow = dict(build_model("cnn:8,16,512", (3, 32, 32), 10).named_parameters())
    assert list(narrow) == [name for name, _ in paper.named_parameters()]
    assert [tuple(p.shape) for name, p in narrow.items() if name.endswith("weight")] == [
        (8, 3, 5, 5),
        (16, 8, 5, 5),
        (512, 400),
        (10, 512),
    ]


def test_a_lenet_is_convolutions_and_three_affine_maps() -> None:
    module = lenet().double()
    p = dict(module.named_parameters())
    assert list(p) == [
        f"{layer}.{kind}"
        for layer in ("conv1", "conv2", "hidden1", "hidden2", "head")
        for kind in ("weight", "bias")
    ]
    x = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    padded = torch.zeros(2, 1, 32, 32, dtype=torch.float64)
    padded[:, :, 2:30, 2:30] = x
    values = padded
    for layer in ("conv1", "conv2"):
        patches = values.unfold(2, 5, 1).unfold(3, 5, 1)
        values = torch.einsum("bcijkl,ockl->boij", patches, p[f"{layer}.weight"])
        values = (values + p[f"{layer}.bias"][:, None, None]).clamp(min=0)
        values = values.unfold(2, 2, 2).unfold(3, 2, 2).amax((-2, -1))
    values = values.reshape(2, 400)
    for layer in ("hidden1", "hidden2"):
        values = (values @ p[f"{layer}.weight"].T + p[f"{layer}.bias"]).clamp(min=0)
    torch.testing.assert_close(module(x), values @ p["head.weight"].T + p["head.bias"])


@pytest.mark.parametrize(
    ("spec", "shape", "last", "first_layers", "last_layers"),
    [
        ("mlp:20", (6,), 1, ["hidden1"], ["head"]),
        ("mlp:8,9,7", (6,), 2, ["hidden1", "hidden2"], ["hidden3", "head"]),
        ("logistic", (6,), 1, [], ["head"]),
        ("lenet", (1, 28, 28), 2, ["conv1", "conv2", "hidden1"], ["hidden2", "head"]),
        ("cnn", (1, 28, 28), 1, ["conv1", "conv2", "hidden1"], ["head"]),
    ],
)
def test_a_network_is_split_by_layer_and_its_halves_make_the_whole(
    spec: str, shape: tuple[int, ...], last: int, first_layers: list[str], last_layers: list[str]
) -> None:
    module = build_model(spec, shape, 4)
    body, head = split_layers(module, last)
    for half, layers in ((body, first_layers), (head, last_layers)):
        assert list(dict.fromkeys(name.split(".")[0] for name, _ in half.named_parameters())) == layers
    inputs = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    fresh = initial_parameters(module, torch.Generator().manual_seed(1))
    features = outputs(body, {name: fresh[name] for name, _ in body.named_parameters()}, inputs)
    found = outputs(head, {name: fresh[name] for name, _ in head.named_parameters()}, features)
    expected = functional_call(module, fresh, (inputs,))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(outputs(module, fresh, inputs), expected)


def test_layers_that_are_not_there_cannot_be_split_off() -> None:
    for last in (0, 3):
        with pytest.raises(ScenarioError, match=rf"the last {last} linear layers .* lie in 1\.\.2"):
            split_layers(mlp([4, 3, 2]), last)


def test_initial_parameters_come_from_the_generator_and_nowhere_else() -> None:
    before = torch.get_rng_state()
    module = build_model("mlp:50", 64, 10)
    first, again, other = (initial_parameters(module, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert list(first) == [name for name, _ in module.named_parameters()]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert not any(tensor.requires_grad for tensor in first.values())
    weight = first["hidden1.weight"]
    bound = 1 / math.sqrt(64)
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_one_generator_yields_different_values_each_time() -> None:
    generator, module = torch.Generator().manual_seed(0), logistic_regression(5, 3)
    first, second = initial_parameters(module, generator), initial_parameters(module, generator)
    assert not torch.equal(first["head.weight"], second["head.weight"])


def test_a_character_network_predicts_at_all_positions_or_at_the_last() -> None:
    everywhere, at_the_end = (char_lstm(6, hidden=4, positions=which) for which in ("all", "last"))
    assert list(everywhere.state_dict()) == list(at_the_end.state_dict())
    at_the_end.load_state_dict(everywhere.state_dict())
    characters = torch.arange(20).view(4, 5) % 6
    found = everywhere(characters)
    assert found.shape == (4, 5, 6)
    torch.testing.assert_close(at_the_end(characters), found[:, -1])
    for length in range(1, 5):  # a position knows nothing of later ones
        torch.testing.assert_close(everywhere(characters[:, :length]), found[:, :length])
    with pytest.raises(ScenarioError, match="char_lstm: positions is 'first'"):
        char_lstm(6, positions="first")  # type: ignore[arg-type]


def test_an_lstm_begins_like_torchs() -> None:
    before = torch.get_rng_state()
    first = initial_parameters(char_lstm(hidden=64), torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)
    for name in (f"lstm.{kind}_{side}_l1" for kind in ("weight", "bias") for side in ("ih", "hh")):
        assert first[name].abs().max() <= 1 / 8
        assert first[name].abs().max() > 0.95 / 8
        assert first[name].mean().item() == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (logistic_regression(6, 3), torch.linspace(-1, 1, 30).view(5, 2, 3)),
        (mlp([6, 4, 5, 3]), torch.linspace(-1, 1, 30).view(5, 2, 3)),
        (mlp([6, 4, 5, 3], "gelu"), torch.linspace(-1, 1, 30).view(5, 2, 3)),
        (emnist_cnn(7), torch.linspace(-1, 1, 2 * 784).view(2, 1, 28, 28)),
        (char_lstm(6, hidden=4), torch.arange(20).view(4, 5) % 6),
    ],
    ids=["logistic", "mlp", "gelu", "cnn", "lstm"],
)
def test_stacked_models_give_what_each_gives_alone(module: torch.nn.Module, inputs: torch.Tensor) -> None:
    parameters = stacked_initial_parameters(module, 3, torch.Generator().manual_seed(0))
    outputs = stacked_outputs(module, parameters, inputs)
    for k in range(3):
        own = {name: tensor[k] for name, tensor in parameters.items()}
        torch.testing.assert_close(outputs[k], functional_call(module, own, (inputs,)), rtol=1e-4, atol=1e-5)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


def test_convolutions_are_recognised() -> None:
    assert has_convolutions(emnist_cnn())
    assert not has_convolutions(mlp([4, 4, 2]))


def test_models_that_cannot_be_built_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown model 'logistc'; did you mean 'logistic'"):
        build_model("logistc", 4, 2)
    for shape in ((64,), (1, 15, 28), (28, 28)):
        with pytest.raises(ScenarioError, match=r"at least 16×16, such as \(1, 28, 28\) .* the samples have"):
            build_model("cnn", shape, 10)
    with pytest.raises(ScenarioError, match=r"a cnn of widths \[8, 16\] .* give three"):
        build_model("cnn:8,16", (1, 28, 28), 10)
    with pytest.raises(
        ScenarioError, match=r"cnn: widths\[1\] is 0; it must be a whole number in \[1, 10,000,000\]"
    ):
        build_model("cnn:8,0,512", (1, 28, 28), 10)
    with pytest.raises(ScenarioError, match=r"\(1, 28, 28\) or \(3, 32, 32\), .* have \(1, 32, 32\)"):
        build_model("lenet", (1, 32, 32), 10)
    for spec in (
        "mlp",
        "mlp:",
        "mlp:3:",
        "mlp:3:tanh:x",
        "logistic:3",
        "lenet:",
        "cnn:",
        "cnn:8,16,512:tanh",
    ):
        with pytest.raises(ScenarioError, match="sizes go with mlp, which needs them, and with cnn"):
            build_model(spec, (1, 28, 28), 2)
    with pytest.raises(UnknownNameError, match=r"unknown activation 'tnh'; did you mean 'tanh'.* softplus"):
        build_model("mlp:3:tnh", 4, 2)
    for spec, example in (("mlp:a,b", "mlp:200,100"), ("cnn:a,b", "cnn:8,16,512")):
        with pytest.raises(ScenarioError, match=f"'a,b' is not a list of sizes; write '{example}'"):
            build_model(spec, (1, 28, 28), 2)
    with pytest.raises(
        ScenarioError, match=r"mlp: sizes\[1\] is 0; it must be a whole number in \[1, 10,000,000\]"
    ):
        build_model("mlp:0", 4, 2)
    with pytest.raises(ScenarioError, match="char_lstm: hidden is 0; it must be a whole number"):
        char_lstm(hidden=0)
