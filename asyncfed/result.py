"""What a run leaves behind, in memory or opened again from disk."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfed.errors import ScenarioError
from asyncfed.runtime.directory import RunDirectory
from asyncfed.trace import Trace

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from asyncfed.scenario import Scenario


class Result:
    """Metrics and trace of a run.

    `metrics` has a row per evaluation, `clients` a row per client, `trace` answers questions about every
    edge; `status` is complete, interrupted, failed, or running.
    """

    def __init__(self, directory: RunDirectory, final: dict[str, torch.Tensor] | None = None) -> None:
        self._directory = directory
        self._final = final

    @property
    def path(self) -> Path:
        return self._directory.path

    @property
    def manifest(self) -> dict[str, Any]:
        return self._directory.manifest()

    @property
    def status(self) -> str:
        return str(self.manifest["status"])

    @property
    def complete(self) -> bool:
        return self.status == "complete"

    @property
    def warnings(self) -> list[str]:
        """Why the network gave the method no right to its answer, said before the run; mostly nothing."""
        return list(self.manifest.get("warnings", []))

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per evaluation: step, virtual_time, train_loss, the problem's metrics over all test
        samples, their 10th percentile over clients where it makes sense, consensus, messages and bytes so
        far.
        """
        return self._table("metrics.jsonl")

    @property
    def best(self) -> dict[str, Any]:
        """Of a protocol that steps an outer variable: the evaluation of the best validation accuracy (or else
        the smallest validation loss), the earliest of equals; its test figures are the ones to report.
        """
        metrics = self.metrics
        if "outer_step" in metrics:  # where an inner problem was solved, not on the way there
            metrics = metrics.groupby("outer_step", as_index=False).last()
        if "validation_accuracy" in metrics:
            return dict(metrics.iloc[int(metrics["validation_accuracy"].argmax())])
        if "validation_loss" in metrics:
            return dict(metrics.iloc[int(metrics["validation_loss"].argmin())])
        raise ScenarioError(
            f"{self.path} has no validation figures to choose by: its protocol has no outer steps, or its "
            "problem no validation samples; take the last row of `metrics`"
        )

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row per client: steps and final metrics; empty for a run that did not end."""
        return self._table("clients.jsonl")

    @cached_property
    def trace(self) -> Trace:
        return Trace(self._directory.trace, nodes=int(self.manifest.get("nodes", self.manifest["clients"])))

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """Of a method with a server, what its outer iterations cost, from the trace: a row per iteration (or
        per stretch between two evaluations), with communication rounds, messages and bytes. Of a run that did
        not end, those that were evaluated.
        """
        rounds, evaluated = self.trace.rounds(), self._directory.rows("metrics.jsonl")[1:]
        ends = np.array([row["step"] for row in evaluated], dtype=np.int64)  # rounds made by each evaluation
        rounds = rounds[rounds["round"] < ends.max(initial=0)]  # the others are of an iteration cut short
        place = ends.searchsorted(rounds["round"].to_numpy(), side="right")
        summed = [
            "asked",
            "answered",
            "arrived",
            "used_late",
            "late",
            "lost",
            "messages",
            "bytes_down",
            "bytes_up",
        ]
        table: pd.DataFrame = rounds[summed].groupby(place).sum()
        table.insert(0, "rounds", (rounds["answered"] > 0).groupby(place).sum())
        table.insert(0, "outer_step", [evaluated[at]["outer_step"] for at in table.index])
        return table.reset_index(drop=True)

    @cached_property
    def scenario(self) -> Scenario:
        """The scenario, built again from what the run directory says."""
        from asyncfed.scenario_data import scenario_from_data

        data = self._directory.scenario()
        data.pop("versions", None)
        return scenario_from_data(data)

    @property
    def scenario_data(self) -> dict[str, Any]:
        """The scenario as the run directory holds it."""
        return self._directory.scenario()

    @property
    def final(self) -> dict[str, torch.Tensor]:
        """The final variables of all clients, stacked: "inner" (the models, one flat row each), "outer", and
        the protocol's own.
        """
        if self._final is None:
            saved = self.path / "final.safetensors"
            if not saved.exists():
                raise ScenarioError(
                    f"{self.path} holds no final variables; "
                    "run with save_final=True (--save-final) to keep them"
                )
            from safetensors.torch import load_file

            self._final = load_file(saved)
        return self._final

    def __repr__(self) -> str:
        return f"<Result {self.path} ({self.status})>"

    def _table(self, name: str) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(self._directory.rows(name))


def load(path: str | os.PathLike[str]) -> Result:
    """Open a run again, whole or partial."""
    return Result(RunDirectory.open(path))
