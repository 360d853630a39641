"""A client's model, as a run leaves it, is what the client was judged by (or what it tuned before)."""

from __future__ import annotations

import pytest
import torch

from asyncfed.problems import Derivatives
from asyncfed.problems.whole import evaluate
from tests.laws.examples import Case
from tests.laws.runs import Runs, every_case


@every_case
def test_a_clients_model_is_the_one_that_it_was_judged_by(case: Case, told: Runs) -> None:
    result, problem = told(case).result, case.scenario.problem
    own = [result.method.model_of(client, result.final) for client in range(problem.clients)]
    x, lam = (torch.stack(rows) for rows in zip(*own, strict=True))
    found = evaluate(Derivatives.of(problem), x.double(), lam.double(), problem.data.test)
    for name, (sums, counts) in found.items():
        before_tuning = f"{name}_tuned_0"
        column = before_tuning if before_tuning in result.clients else name
        judged = result.clients.sort_values("client")[column].tolist()
        assert (sums / counts).tolist() == pytest.approx(judged, abs=1e-12), name
