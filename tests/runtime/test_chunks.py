"""A wave computed in many chunks is the wave computed at once, whatever a part returns for each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncfed import Lockstep, Scenario, VirtualTime, run
from asyncfed.data import client_data_from_lists
from asyncfed.network.expectations import Expectations
from asyncfed.network.weights import Mixing, PullShares
from asyncfed.problems import Problem
from asyncfed.protocols import HGP, SGP, VRHGP, EstimateHypergradient
from asyncfed.protocols.at import At
from asyncfed.protocols.part import Inbox, Scene, Step, Tensors
from asyncfed.runtime import block
from topologies import stochastic_directed

N, D = 6, 40  # more than 32 inner variables, so that products are taken round by round


def regression(sizes: list[int]) -> Problem:
    generator = torch.Generator().manual_seed(0)
    rows = [
        (torch.randn(size, D, generator=generator), torch.randn(size, generator=generator)) for size in sizes
    ]

    def losses(x: torch.Tensor, lam: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return (batch[0] @ x - batch[1]).square()

    return Problem(
        name="regression",
        data=client_data_from_lists(rows),
        inner_loss=lambda x, lam, batch: losses(x, lam, batch).mean() + lam.exp().sum() * x.square().sum(),
        outer_loss=lambda x, lam, batch: losses(x, lam, batch).mean(),
        init_inner=lambda g: torch.zeros(D),
        init_outer=lambda g: torch.zeros(2),
        metrics={"loss": losses},
    )


@pytest.mark.parametrize(
    ("timing", "sampling"),
    [
        (Lockstep(), "alternating"),
        (Lockstep(), "joint"),
        (VirtualTime("uniform(0.7, 1.3)", latency=0.2), "joint"),
    ],
)
@pytest.mark.parametrize("order", ["4a", "4b"])
@pytest.mark.parametrize("sizes", [[5] * N, [3, 3, 5, 5, 7, 2]], ids=["equal", "unequal"])
@pytest.mark.parametrize("kind", [HGP, VRHGP])
def test_chunks_change_nothing(
    kind: type[HGP] | type[VRHGP],
    sizes: list[int],
    order: str,
    timing: Lockstep | VirtualTime,
    sampling: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = kind(rounds=6, sampling=sampling, lr=0.02, expectations="exact", record=True)  # type: ignore[arg-type]
    scenario = Scenario(
        problem=regression(sizes),
        topology=stochastic_directed(N, seed=1),
        protocol=EstimateHypergradient(SGP(steps=4, lr=0.02, order=order, batch=None), method),  # type: ignore[arg-type]
        timing=timing,
        precision="float64",
    )
    at_once = run(scenario, out=tmp_path / "once").final
    monkeypatch.setattr(block, "CHUNK_BYTES", 2 * 8 * D)
    in_pieces = run(scenario, out=tmp_path / "pieces").final
    for name in ("inner", "hypergradient", "history"):
        torch.testing.assert_close(in_pieces[name], at_once[name], rtol=0, atol=1e-12)


class Mixed(SGP):
    """A part whose chunks answer differently: some with a residue, some without, some in place, some not."""

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        kind = int(inbox["z"][0, 0].abs() * 1e6) % 3
        made = super().step(at, inbox, memory)
        if kind == 0:
            return made
        payload = {key: value.clone() for key, value in made.payload.items()}
        if kind == 1:
            return replace(made, payload=payload)
        payload["z"] = payload["z"] + made.residue["z"]
        return replace(made, payload=payload, residue={})


def test_chunks_that_answer_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On silent links (everybody keeps all of it) a residue and a payload are the same thing, so that the
    mixture must be plain SGP alone.
    """
    from asyncfed.protocols import Local

    class MixedAlone(Mixed):
        sends = False

        def check(self, scene: Scene) -> None:
            return None

    monkeypatch.setattr(block, "CHUNK_BYTES", 8 * D)
    finals = []
    for kind in (Local, MixedAlone):
        scenario = Scenario(
            problem=regression([5] * N),
            topology=stochastic_directed(N, seed=1),
            protocol=kind(steps=12, lr=0.02, batch=3),
            precision="float64",
        )
        finals.append(run(scenario, out=tmp_path / kind.__name__).final["inner"])
    torch.testing.assert_close(finals[0], finals[1], rtol=0, atol=1e-12)
    assert np.isfinite(finals[0].numpy()).all()


class OneByOne(SGP):
    """Puts its sums together from single messages; some of its chunks have more to report than others."""

    each = ("z", "omega")

    def mixing(self, scene: Scene, learned: Expectations | None) -> Mixing:
        return (("z",), scene.weights.prepare(scene.network)), (("omega",), PullShares(scene.network))

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        for name in self.each:
            single = inbox.each(name)
            weighed = torch.from_numpy(single.weights)[:, None] * single.values
            total = torch.zeros_like(inbox[name]).index_add_(0, torch.from_numpy(single.rows), weighed)
            if (at.steps > 0).all():  # order 4a keeps no residue: the sum is all there is
                torch.testing.assert_close(total, inbox[name], rtol=0, atol=1e-12)
        made = super().step(at, inbox, memory)
        return replace(made, report={"first": made.report["loss"]} if 0 in at.clients else {})


@pytest.mark.parametrize("timing", [Lockstep(), VirtualTime("uniform(0.7, 1.3)", latency=0.4)])
def test_single_messages_of_a_chunk_are_those_to_its_clients(
    timing: Lockstep | VirtualTime, tmp_path: Path
) -> None:
    scenario = Scenario(
        problem=regression([3, 3, 5, 5, 7, 2]),
        topology=stochastic_directed(N, seed=1),
        protocol=OneByOne(steps=6, lr=0.001, order="4a", batch=None),
        timing=timing,
        precision="float64",
    )
    found = run(scenario, out=tmp_path / "r")
    assert 0 < found.metrics["first"].iloc[-1] < 100, "what was not reported is not made up"
