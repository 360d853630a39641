"""Weights & Biases: a run in a project, offline unless told otherwise (`wandb sync` sends it later)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from asyncfed.callbacks import Callback, EvaluationReport, RunStart
from asyncfed.trackers.plain import library, numbers, parameters

if TYPE_CHECKING:
    from asyncfed.result import Result


class WandB(Callback):
    """Log to Weights & Biases; the points are numbered by evaluation, and `step` is among the metrics.

    Parameters
    ----------
    project
        Its name.
    mode
        "offline" writes files, and needs no account; "online" sends at once.
    directory
        Where its files go; by default into the run directory.
    per_client
        Whether to log the metrics of every client too.
    """

    def __init__(
        self,
        project: str = "asyncfed",
        mode: Literal["offline", "online"] = "offline",
        directory: str | os.PathLike[str] | None = None,
        per_client: bool = False,
    ) -> None:
        self._project, self._mode, self._per_client = project, mode, per_client
        self._directory = None if directory is None else os.fspath(directory)
        self._run: Any = None

    def on_start(self, start: RunStart) -> None:
        wandb = library("wandb", "wandb")
        self._run = wandb.init(
            project=self._project,
            name=start.path.name,
            mode=self._mode,
            dir=str(start.path) if self._directory is None else self._directory,
            config=parameters(start.data),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def on_evaluation(self, report: EvaluationReport) -> None:
        self._run.log(numbers(report, self._per_client), step=report.number)

    def on_end(self, result: Result) -> None:
        self._close(0)

    def on_error(self, error: BaseException) -> None:
        self._close(1)

    def _close(self, code: int) -> None:
        if self._run is not None:
            self._run.finish(exit_code=code)
            self._run = None
