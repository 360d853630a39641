"""FedAvg with momenta that stay at the clients, and FedAvg+, against loops over the same minibatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncfed import ScenarioError
from asyncfed.protocols import FedAvg, FedAvgPlus, FedProx, LocalSteps, Server, StepDecay
from asyncfed.protocols.at import JUDGING
from tests.protocols.served import serve
from tests.protocols.test_fedprox import SETS, proximal_steps
from tests.protocols.test_local_steps import SEED, SIZES, data, problem

LOCAL = LocalSteps(0.3, epochs=1, batch=4)
SGDM: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.2, "server": Server(SETS, weighted=True)}


def test_with_momentum_it_is_fedprox_without_its_term(tmp_path: Path) -> None:
    """Whose rounds are compared with its box in test_fedprox."""
    results = [
        serve(problem(), protocol, tmp_path / type(protocol).__name__, seed=SEED)
        for protocol in (FedAvg(5, LOCAL, **SGDM), FedProx(5, LOCAL, mu=0.0, **SGDM))
    ]
    for name, value in results[0].final.items():
        assert torch.equal(value, results[1].final[name]), name
    assert "clients/m" in results[0].final


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_everybody_is_judged_after_an_epoch_of_its_own(momentum: float, tmp_path: Path) -> None:
    """From a momentum of zero, whatever m it trains with; training and traffic are those of FedAvg."""
    settings = SGDM | {"momentum": momentum}
    plain = serve(problem(), FedAvg(5, LOCAL, **settings), tmp_path / "plain", seed=SEED)
    result = serve(problem(), FedAvgPlus(5, LOCAL, **settings), tmp_path / "tuned", seed=SEED)
    for name, value in plain.final.items():
        assert torch.equal(value, result.final[name]), name
    assert plain.trace.to_arrow().equals(result.trace.to_arrow())
    assert result.clients["loss_tuned_0"].tolist() == plain.clients["loss"].tolist()
    y = result.final["inner"][0].numpy()
    for i, row in enumerate(result.clients.to_dict("records")):
        steps = -(-SIZES[i] // 4)
        own, _ = proximal_steps(y, np.zeros(3), i, JUDGING, steps, 0.3, 0.0, 0.2, momentum)
        a, t = data()[i]
        assert row["loss"] == pytest.approx(np.logaddexp(0, a @ own - t).mean() + 0.05 * own @ own, abs=1e-12)


def test_how_to_tune_must_be_said_where_the_learning_rate_changes(tmp_path: Path) -> None:
    changing = LocalSteps(StepDecay(0.1, at=(3,)), epochs=1)
    with pytest.raises(ScenarioError, match=r"say how clients tune, as in tuning=LocalSteps"):
        serve(problem(), FedAvgPlus(1, changing), tmp_path / "unsaid")
    serve(problem(), FedAvgPlus(1, changing, tuning=LOCAL), tmp_path / "said")
    with pytest.raises(ScenarioError, match=r"tuning is 3; it must be LocalSteps\(…\) or None"):
        FedAvgPlus(1, LOCAL, tuning=3)  # type: ignore[arg-type]
    with pytest.raises(ScenarioError, match=r"momentum is 1; it must be a number in \[0, 1\)"):
        FedAvg(1, LOCAL, momentum=1)
