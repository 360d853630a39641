"""What a result says of a run that is not said elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncfed import Scenario, load, run
from asyncfed.problems import bilevel_quadratic
from asyncfed.protocols import FedNest, LocalSteps, Neumann
from topologies import star


def test_what_every_outer_iteration_costs_comes_from_the_trace(tmp_path: Path) -> None:
    protocol = FedNest(6, LocalSteps(0.1), LocalSteps(0.1), 2, Neumann(4, 0.3, "fixed"))
    for every in (1, 2):
        result = run(
            Scenario(
                problem=bilevel_quadratic(clients=3, dimension=3, outer_dimension=2),
                topology=star(3, up=0.8),
                protocol=protocol,
                precision="float64",
                evaluate_every=every,
            ),
            out=tmp_path / f"every-{every}",
        )
        table = result.iterations
        assert table["outer_step"].tolist() == list(range(every, 7, every))
        assert table["rounds"].tolist() == [every * (2 * 2 + 4 + 3)] * (6 // every)
        assert table["rounds"].sum() == result.trace.communication_rounds()
        totals = result.trace.totals()
        assert table["messages"].sum() == totals.sent
        assert table["bytes_down"].sum() + table["bytes_up"].sum() == totals.bytes


@pytest.mark.parametrize("rows", [0, 1, 2, 4])
def test_the_iterations_of_a_run_that_was_cut_short_are_those_that_were_evaluated(
    rows: int, tmp_path: Path
) -> None:
    protocol = FedNest(5, LocalSteps(0.1), LocalSteps(0.1), 2, Neumann(4, 0.3, "fixed"))
    scenario = Scenario(
        problem=bilevel_quadratic(clients=3, dimension=3, outer_dimension=2),
        topology=star(3, up=0.8),
        protocol=protocol,
        evaluate_every=1,
    )
    whole = run(scenario, out=tmp_path / "run").iterations
    assert len(whole) == 5
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:rows]) + lines[rows][:9])  # with a torn line
    partial = load(tmp_path / "run").iterations
    assert list(partial) == list(whole)
    assert partial.to_numpy().tolist() == whole.to_numpy()[: max(0, rows - 1)].tolist()
