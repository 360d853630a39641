"""What a run leaves behind, in memory or opened again from disk."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfed.checks import PathLike, checked, shown
from asyncfed.errors import AsyncfedError, ScenarioError, TraceError
from asyncfed.homes import Imports, checked_imports
from asyncfed.markup import panel
from asyncfed.network.names import Names, stored_names
from asyncfed.reading import is_number, is_whole
from asyncfed.runtime.directory import RunDirectory
from asyncfed.trace import Trace

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.figure import Figure

    from asyncfed.problems import Problem
    from asyncfed.protocols.part import Method
    from asyncfed.scenario import Scenario

_MOST_COLUMNS = 1000
_MOST_CELLS = 1 << 26


class Result:
    """Metrics and trace of a run.

    `metrics` has a row per evaluation, `clients` a row per client, `trace` answers questions about every
    edge; `status` is complete, interrupted, failed, or running.
    """

    def __init__(
        self,
        directory: RunDirectory,
        final: dict[str, torch.Tensor] | None = None,
        made_of: Scenario | None = None,
        imports: tuple[str, ...] = (),
    ) -> None:
        self._directory = directory
        self._final = final
        self._made_of = made_of
        self._imports = imports

    @property
    def path(self) -> Path:
        return self._directory.path

    @property
    def manifest(self) -> dict[str, Any]:
        return self._directory.manifest()

    @property
    def status(self) -> str:
        return str(self.manifest.get("status", "unknown"))

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
        far, and (where the method says what it computes) gradients and hessian_products of minibatches.
        """
        return _frame(self._evaluations())

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
        """One row per client: steps, gradients and hessian_products where they are known, and final metrics;
        empty for a run that did not end.
        """
        rows, names = self._rows("clients.jsonl"), self.names
        frame = _frame(rows)
        if names.given and rows:
            if not all(is_whole(row.get("client"), 0, len(names) - 1) for row in rows):
                raise TraceError(
                    f"{self.path / 'clients.jsonl'} is damaged: it does not say whose rows it has"
                )
            frame["client"] = names.column(frame["client"].to_numpy())
        return frame

    @cached_property
    def names(self) -> Names:
        """What clients (and a server, which comes last) are called: by the graph of scenario.json, or by
        their numbers where it has no names, or none that could be read.
        """
        try:
            topology = self._directory.scenario().get("topology")
        except TraceError:  # what the trace holds can be read without
            topology = None
        nodes = self.manifest.get("nodes", self.manifest.get("clients", 0))
        return stored_names(topology, nodes)

    @cached_property
    def trace(self) -> Trace:
        """Every message and step. Where a run was stopped, as far as it was recorded; of a complete run, all
        that run.json counts, or an error that says what is missing.
        """
        manifest = self.manifest
        nodes = manifest.get("nodes", manifest.get("clients"))
        if nodes is None:
            raise TraceError(
                f"{self.path / 'run.json'} does not say how many nodes there are; it was changed"
            )
        trace = Trace(
            self._directory.trace, nodes, self.names
        )  # empty, where a kill came before its first row
        counted = manifest.get("totals", {})
        if manifest.get("status") == "complete" and "sent" in counted:
            trace.check_complete(counted["sent"] + counted.get("link_down", 0), manifest.get("steps"))
        return trace

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """Of a method with a server, what its outer iterations cost, from the trace: a row per iteration (or
        per stretch between two evaluations), with communication rounds, messages and bytes. Of a run that did
        not end, those that were evaluated.
        """
        rounds, evaluated = self.trace.rounds(), self._evaluations()[1:]
        if any("outer_step" not in row for row in evaluated):
            raise ScenarioError(f"{self.path} has no outer iterations: its method has one level")
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
        """The scenario, built again from what the run directory says. Methods and problems of one's own are
        found where they are registered, or in the modules that `load` was allowed to import.
        """
        from asyncfed.scenario_data import scenario_from_data

        data = self._directory.scenario()
        data.pop("versions", None)
        try:
            return scenario_from_data(data, self._imports)
        except AsyncfedError:
            raise
        except (
            ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
        ) as error:  # fmt: skip
            raise TraceError(
                f"{self.path / 'scenario.json'} does not make a scenario "
                f"({type(error).__name__}: {error!s:.200}); it was changed, or is of another version"
            ) from error

    @cached_property
    def method(self) -> Method:
        """The method; of a run that was loaded, built again as `scenario` is."""
        from asyncfed.scenario_data import method_from_data

        return (
            self._made_of.protocol if self._made_of else method_from_data(self.scenario_data, self._imports)
        )

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
            self._final = self._saved()
        return self._final

    def report(self, path: PathLike | None = None) -> Path:
        """Write one HTML file that says and draws all of this, by default `report.html` in its directory;
        returns its path.
        """
        from asyncfed.report.document import report

        return report(self.path, self.path / "report.html" if path is None else path)

    def plot(self) -> Figure:
        """How it learned, as a figure of matplotlib: loss and accuracy, against steps or virtual time and
        against what was sent. What the network did is in `trace.plot`.
        """
        from asyncfed.report.plots import plot

        return plot(self)

    def model(self, client: int | None = None, problem: Problem | None = None) -> dict[str, torch.Tensor]:
        """A client's final model by name, or the server's: what `load_state_dict` of the module takes. The
        client is judged by it; where that is after some tuning, it is what is tuned.

        `problem` is needed for a run that was loaded, of a problem of your own functions.
        """
        from asyncfed.problems.named import model_by_name

        if problem is None:
            problem = (self._made_of or self.scenario).problem
        final, clients = self.final, problem.clients
        if client is None:
            models = len(final["inner"])
            if models > 1:
                raise ScenarioError(
                    f"there are {models} models for {clients} clients; say whose is wanted: model(0)"
                )
            return model_by_name(problem, final["inner"][0], final["outer"][0], None)
        if isinstance(client, bool) or client not in range(clients):
            raise ScenarioError(f"there is no client {client!r}; they are 0 to {clients - 1}")
        noted = final.get("clients/buffers", final.get("buffers"))
        inner, outer = self.method.model_of(client, final)
        return model_by_name(problem, inner, outer, None if noted is None else noted[client])

    def __repr__(self) -> str:
        return f"<Result {self.path} ({self.status})>"

    def _repr_html_(self) -> str:
        from asyncfed.description import describe, last_line

        return panel("Result", describe(self) | {"last evaluation": last_line(self)})

    def _saved(self) -> dict[str, torch.Tensor]:
        try:
            tensors = self._directory.tensors("final.safetensors")
        except FileNotFoundError:
            raise ScenarioError(
                f"{self.path} holds no final variables; run with save_final=True (--save-final) to keep them"
            ) from None
        if "inner" not in tensors or tensors["inner"].dim() != 2:
            raise TraceError(
                f"{self.path / 'final.safetensors'} holds no final variables of a run: {shown(list(tensors))}"
            )
        return tensors

    def _evaluations(self) -> list[dict[str, Any]]:
        return self._rows("metrics.jsonl", "step", "messages", "bytes")

    def _rows(self, name: str, *needed: str) -> list[dict[str, Any]]:
        """The rows of a table: numbers, or nothing, but for the phase, and always the columns `needed`."""
        rows = self._directory.rows(name)
        columns: set[str] = set()
        for number, row in enumerate(rows, start=1):
            columns.update(row)
            wrong = [key for key in needed if row.get(key) is None]
            wrong += [key for key, value in row.items() if not _fits(key, value)]
            if wrong:
                raise TraceError(
                    f"{self.path / name} is damaged: in line {number}, {shown(wrong[0])} is "
                    f"{shown(row.get(wrong[0]))}, which is no number; the trace beside it may still be whole"
                )
            if len(columns) > _MOST_COLUMNS or len(columns) * len(rows) > _MOST_CELLS:
                raise TraceError(
                    f"{self.path / name} is damaged: {len(rows):,} lines, {len(columns):,} columns or more; "
                    "the trace beside it may still be whole"
                )
        return rows


def _fits(column: str, value: Any) -> bool:
    return isinstance(value, str) if column == "phase" else value is None or is_number(value)


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows)


@checked
def load(path: PathLike, *, imports: Imports = ()) -> Result:
    """Open a run again, whole or partial.

    `imports` names the modules (or packages) that may be imported, which runs their code, to find methods and
    problems of one's own that the run's scenario names. Without it nothing is imported that a run names.
    """
    return Result(RunDirectory.open(path), imports=checked_imports(imports))
