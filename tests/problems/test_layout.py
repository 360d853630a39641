"""Layouts: flat rows and named tensors are the same numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfed.problems import Layout, Params

shapes = st.dictionaries(
    st.text("abc.", min_size=1, max_size=4), st.lists(st.integers(1, 4), max_size=3).map(tuple), max_size=4
)


@settings(deadline=None, max_examples=60)
@given(shapes=shapes, clients=st.integers(1, 4))
def test_flatten_and_views_are_inverse(shapes: dict[str, tuple[int, ...]], clients: int) -> None:
    generator = torch.Generator().manual_seed(0)
    stacked = {name: torch.randn(clients, *shape, generator=generator) for name, shape in shapes.items()}
    layout = Layout.of({name: tensor[0] for name, tensor in stacked.items()})
    flat = layout.flatten_stacked(stacked, out=torch.empty(clients, layout.d))
    assert flat.shape == (clients, sum(tensor[0].numel() for tensor in stacked.values()))
    for name, tensor in layout.views(flat).items():
        assert torch.equal(tensor, stacked[name])
    for i in range(clients):
        own = layout.views_one(flat[i])
        assert torch.equal(layout.flatten(own), flat[i])
        assert all(torch.equal(own[name], stacked[name][i]) for name in stacked)


def test_views_share_memory_with_the_rows() -> None:
    layout = Layout.of({"a": torch.zeros(2, 3), "b": torch.zeros(())})
    flat = torch.zeros(4, layout.d)
    views = layout.views(flat)
    assert isinstance(views, dict)
    views["a"][1, 0, 2] = 5.0
    views["b"][3] = 7.0
    assert flat[1, 2] == 5
    assert flat[3, 6] == 7
    assert flat.sum() == 12


def test_a_single_tensor_needs_no_name() -> None:
    layout = Layout.of(torch.zeros(2, 2))
    flat = torch.arange(8.0).view(2, 4)
    stacked: Params = layout.views(flat)
    assert isinstance(stacked, torch.Tensor)
    assert stacked.shape == (2, 2, 2)
    assert torch.equal(layout.flatten_stacked(stacked), flat)
    assert torch.equal(layout.flatten(layout.views_one(flat[1])), flat[1])
    assert layout.d == 4


def test_no_parameters_is_a_layout_too() -> None:
    layout = Layout.of({})
    assert layout.d == 0
    assert layout.views(torch.empty(3, 0)) == {}
    assert layout.flatten({}).shape == (0,)
    assert layout.flatten_stacked({}, out=torch.empty(3, 0)).shape == (3, 0)
    with pytest.raises(ValueError, match="does not tell how many clients"):
        layout.flatten_stacked({})


def test_order_is_the_layouts_not_the_dicts() -> None:
    layout = Layout.of({"a": torch.zeros(1), "b": torch.zeros(1)})
    assert layout.flatten({"b": torch.tensor([2.0]), "a": torch.tensor([1.0])}).tolist() == [1, 2]
