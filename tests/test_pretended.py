"""The pretended GPU refuses what CUDA refuses, allows what it allows, and finds out who mixes devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from asyncfed import Scenario, run
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP
from asyncfed.protocols.at import At
from asyncfed.protocols.part import Inbox, Step, Tensors
from tests.pretended import pretended_gpu
from topologies import fully_connected


def _both() -> tuple[Tensor, Tensor, Tensor]:
    """Numbers on the CPU and on the GPU, and a place there."""
    here = torch.arange(6.0).reshape(2, 3)
    return here, here.to("cuda"), torch.tensor([1], device="cuda")


REFUSED: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "a sum": lambda here, there, at: there + here,
    "a sum in place": lambda here, there, at: here.add_(there),
    "a product": lambda here, there, at: there @ here.T,
    "a product into": lambda here, there, at: torch.mm(there, there.T, out=torch.empty(2, 2)),
    "rows put together": lambda here, there, at: torch.cat([here, there]),
    "numbers put together": lambda here, there, at: torch.stack([there[0, 0], here[0, 0]]),
    "rows selected": lambda here, there, at: there.index_select(0, torch.tensor([1])),
    "rows copied": lambda here, there, at: there.index_copy_(0, at, here[:1]),
    "rows written": lambda here, there, at: there.__setitem__(at, here[1]),
    "rows of the CPU by a place on the GPU": lambda here, there, at: here[at],
    "a bag of rows": lambda here, there, at: torch.nn.functional.embedding_bag(
        torch.tensor([0, 1]), there, torch.tensor([0]), mode="sum"
    ),
    "a number of the CPU, written to": lambda here, there, at: torch.ones(()).add_(there[0, 0]),
    "a comparison": lambda here, there, at: torch.equal(here, there),
    "an array": lambda here, there, at: there.numpy(),
    "an array unasked": lambda here, there, at: np.asarray(there),
    "a generator": lambda here, there, at: torch.rand(2, generator=torch.Generator(), device="cuda"),
    "within vmap": lambda here, there, at: vmap(lambda row: row + torch.ones(3))(there),
    "within a gradient": lambda here, there, at: vmap(grad(lambda row: (row * torch.ones(3)).sum()))(there),
}
ALLOWED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a number": lambda here, there, at: there * 2.0 + torch.tensor(1.0),
    "rows by a place on the CPU": lambda here, there, at: there[torch.tensor([1])],
    "a copy": lambda here, there, at: there.clone().copy_(here),
    "a number written": lambda here, there, at: there.clone().index_put_((at,), torch.tensor(4.0)),
    "made like another": lambda here, there, at: here.to(there) + torch.ones_like(there) + there.new_ones(3),
    "made there": lambda here, there, at: torch.eye(3, device=there.device)[:2] + there,
    "within vmap": lambda here, there, at: vmap(lambda row: row + torch.ones(3, device=row.device))(there),
    "a gradient": lambda here, there, at: vmap(grad(lambda row: row.square().sum()))(there),
}


@pytest.mark.parametrize("mistake", REFUSED.values(), ids=REFUSED)
def test_what_a_gpu_refuses_is_refused(mistake: Callable[[Tensor, Tensor, Tensor], object]) -> None:
    with pretended_gpu(), pytest.raises((RuntimeError, TypeError), match=r"same device|found 'cpu'|to numpy"):
        mistake(*_both())


@pytest.mark.parametrize("use", ALLOWED.values(), ids=ALLOWED)
def test_what_a_gpu_allows_is_done_there(use: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    with pretended_gpu():
        found = use(*_both())
        assert found.device == torch.device("cuda", 0)
    here = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(found.cpu(), use(here, here, torch.tensor([1])))


def test_a_tensor_that_is_there_already_is_not_copied() -> None:
    with pretended_gpu():
        _, there, _ = _both()
        assert there.to("cuda") is there
        assert there.to(there.device) is there
        assert there.cpu().device.type == "cpu"
        assert there[1:].untyped_storage().data_ptr() == there.untyped_storage().data_ptr()


class Careless(SGP):
    """Keeps in mind a tensor of its own, which nobody brings to the clients' device."""

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        made = super().step(at, inbox, memory)
        return replace(made, payload=made.payload | {"z": made.payload["z"] + 0 * torch.ones(1, 3)})


def test_a_method_with_a_tensor_of_the_cpu_is_found_out(tmp_path: Path) -> None:
    problem = quadratic(clients=4, dimension=3)
    scenario = Scenario(problem, fully_connected(4), Careless(steps=2, lr=0.1))
    run(scenario, out=tmp_path / "cpu", device="cpu")
    with pretended_gpu(), pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        run(scenario, out=tmp_path / "gpu", device="cuda")


def test_a_problem_with_a_tensor_of_the_cpu_is_found_out(tmp_path: Path) -> None:
    centre = torch.ones(3, dtype=torch.float32)
    plain = quadratic(clients=4, dimension=3)
    problem = replace(plain, inner_loss=lambda x, lam, batch: (x - centre).square().sum(), recipe=None)
    scenario = Scenario(problem, fully_connected(4), SGP(steps=2, lr=0.1))
    run(scenario, out=tmp_path / "cpu", device="cpu")
    with pretended_gpu(), pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        run(scenario, out=tmp_path / "gpu", device="cuda")
