"""The smallest of everything: one client, two, one sample, more asked for than there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncfed import Scenario, run
from tests.laws.changed import with_method, with_samples
from tests.laws.examples import Case, cases
from tests.laws.runs import every_case


def _runs(case: Case, scenario: Scenario, out: Path) -> None:
    result = run(scenario, out=out)
    assert result.complete, case.name
    for name, value in result.final.items():
        assert bool(value.isfinite().all()), f"{case.name} ends with {name} = {value}"


@every_case
@pytest.mark.parametrize("clients", [1, 2])
def test_few_clients_are_enough(case: Case, clients: int, tmp_path: Path) -> None:
    _runs(case, case.example.scenario(case.kind, clients), tmp_path / "run")


@pytest.mark.parametrize("batch", [1000, None])
@pytest.mark.parametrize(
    "case", [case for case in cases() if case.kind == "lockstep"], ids=lambda case: case.name
)
def test_one_sample_is_enough_and_a_batch_may_ask_for_more(
    case: Case, batch: int | None, tmp_path: Path
) -> None:
    """A client has one sample, the others what they have; every minibatch is larger, or is all of them."""

    def asked(name: str, value: Any) -> Any:
        return batch if name == "batch" else value

    one = with_samples(case.scenario, 1, lambda samples: tuple(tensor[:1] for tensor in samples))
    assert one.problem.data.train.sizes[1] == 1
    _runs(case, with_method(one, asked), tmp_path / "run")
