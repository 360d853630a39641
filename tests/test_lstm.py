"""LSTM layers: torch's values and gradients, and the second derivatives of the equations as written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vjp, vmap
from torch.utils._pytree import tree_leaves

from asyncfed import lstm
from asyncfed.lstm import LSTM
from asyncfed.models import borrowed_random_state

Params = dict[str, Tensor]
Function = Callable[[Params, Tensor], Tensor]
INPUTS, HIDDEN, LAYERS = 3, 4, 2
with borrowed_random_state(0):
    MODULE = LSTM(INPUTS, HIDDEN, LAYERS)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameters(*networks: int, seed: int = 1) -> Params:
    """Of some networks, each drawn anew; large enough for gates to saturate here and there."""
    names = MODULE.named_parameters()
    return {
        name: 0.8 * drawn(*networks, *own.shape, seed=seed + place) for place, (name, own) in enumerate(names)
    }


def as_written(p: Params, sequences: Tensor) -> Tensor:
    """The equations one after another, for autograd to differentiate."""
    values = sequences
    for layer in range(LAYERS):
        h = c = sequences.new_zeros(len(sequences), HIDDEN)
        outputs = []
        for x in values.unbind(1):
            gates = x @ p[f"weight_ih_l{layer}"].T + p[f"bias_ih_l{layer}"]
            gates = gates + h @ p[f"weight_hh_l{layer}"].T + p[f"bias_hh_l{layer}"]
            i, f, g, o = gates.chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        values = torch.stack(outputs, 1)
    return values


def ours(p: Params, sequences: Tensor) -> Tensor:
    found: Tensor = functional_call(MODULE, p, (sequences,))
    return found


def assert_equal(ours: object, theirs: object) -> None:
    for a, b in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_it_is_torchs_lstm(layers: int) -> None:
    with borrowed_random_state(0):
        own = LSTM(3, 5, layers).double()
        torchs = torch.nn.LSTM(3, 5, layers, batch_first=True).double()
    assert list(own.state_dict()) == list(torchs.state_dict())
    torchs.load_state_dict(own.state_dict())
    sequences = drawn(4, 7, 3).requires_grad_()
    outputs = own(sequences), torchs(sequences)[0]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-14)
    gradients = [
        torch.autograd.grad(output.square().sum(), [sequences, *module.parameters()])
        for output, module in zip(outputs, (own, torchs), strict=True)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_in_single_precision_it_is_torchs_to_rounding() -> None:
    with borrowed_random_state(0):
        own, torchs = LSTM(3, 16, 2), torch.nn.LSTM(3, 16, 2, batch_first=True)
    torchs.load_state_dict(own.state_dict())
    sequences = drawn(4, 30, 3).float()
    for scale in (1e-3, 1.0, 100.0):
        found = own(scale * sequences)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torchs(scale * sequences)[0], rtol=0, atol=3e-6)


def loss_of(outputs: Tensor) -> Tensor:
    return (outputs**3 + outputs.roll(1, -1) * outputs).sin().sum()


def first_and_second(function: Function) -> Callable[[Params, Tensor, Params, Tensor], object]:
    """The gradient by parameters and sequences, and its derivative's transpose times a direction."""
    gradient = grad(lambda p, x: loss_of(function(p, x)), argnums=(0, 1))

    def both(p: Params, x: Tensor, u: Params, v: Tensor) -> object:
        found, pull = vjp(gradient, p, x)
        return found, pull((u, v))

    return both


@pytest.mark.parametrize("steps_together", [100, 3, 1])
def test_first_and_second_derivatives_of_many_networks_are_those_of_the_equations(
    steps_together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lstm, "_STRETCH_BYTES", steps_together * 5 * 6 * 4 * HIDDEN * 8)
    p, u = parameters(5), parameters(5, seed=50)
    x, v = drawn(5, 6, 7, INPUTS), drawn(5, 6, 7, INPUTS, seed=9)
    found, expected = (vmap(first_and_second(function))(p, x, u, v) for function in (ours, as_written))
    assert_equal(found, expected)


def test_an_ensemble_of_each_client_is_more_networks() -> None:
    def mixed(function: Function) -> Function:
        return lambda p, x: vmap(function, in_dims=(0, None))(p, x).prod(0)

    p, u = parameters(2, 3), parameters(2, 3, seed=50)
    x, v = drawn(2, 4, 5, INPUTS), drawn(2, 4, 5, INPUTS, seed=9)
    found, expected = (vmap(first_and_second(mixed(f)))(p, x, u, v) for f in (ours, as_written))
    assert_equal(found, expected)


def test_plain_autograd_differentiates_it_twice_too() -> None:
    p = {name: own.requires_grad_() for name, own in parameters().items()}
    x, leaves = drawn(4, 5, INPUTS), list(p.values())
    directions = [drawn(*leaf.shape, seed=place) for place, leaf in enumerate(leaves)]
    products = []
    for function in (ours, as_written):
        gradient = torch.autograd.grad(loss_of(function(p, x)), leaves, create_graph=True)
        along = sum((g * u).sum() for g, u in zip(gradient, directions, strict=True))
        products.append(torch.autograd.grad(along, leaves))
    assert_equal(*products)


def test_a_direction_may_leave_parameters_out() -> None:
    p, x = parameters(), drawn(4, 5, INPUTS)
    some = {name: own for name, own in p.items() if name.startswith("weight_hh")}

    def product(function: Function) -> object:
        gradient = grad(lambda own: loss_of(function({**p, **own}, x)))
        return vjp(gradient, some)[1]({name: torch.ones_like(own) for name, own in some.items()})

    assert_equal(product(ours), product(as_written))


def test_a_whole_jacobian_is_many_gradients_at_once() -> None:
    p, x = parameters(), drawn(2, 3, INPUTS)
    found, expected = (jacrev(lambda own: function(own, x))(p) for function in (ours, as_written))  # noqa: B023
    assert_equal(found, expected)


def test_without_gradients_nothing_is_held_but_the_outputs() -> None:
    p, x = parameters(), drawn(4, 5, INPUTS)
    weight = torch.cat((p["weight_ih_l0"], p["weight_hh_l0"]), 1)
    arguments = x.transpose(0, 1), weight, p["bias_ih_l0"]
    outputs, *held = lstm._Layer.apply(*arguments, True)  # type: ignore[no-untyped-call]
    assert len(held) == 4
    (alone,) = lstm._Layer.apply(*arguments, False)  # type: ignore[no-untyped-call]
    assert torch.equal(alone, outputs)
    with torch.no_grad():
        without = ours(p, x)
    assert torch.equal(without, ours(p, x))


def test_third_derivatives_are_refused() -> None:
    x = drawn(2, 3, INPUTS)
    weight = drawn(4 * HIDDEN, HIDDEN)

    def loss(own: Tensor) -> Tensor:
        return ours({**parameters(), "weight_hh_l0": own}, x).square().sum()

    def sharpness(own: Tensor) -> Tensor:
        return grad(lambda w: grad(loss)(w).square().sum())(own).square().sum()

    with pytest.raises(NotImplementedError, match="first and second derivatives here, and no third ones"):
        grad(sharpness)(weight)
