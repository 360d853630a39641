"""TensorBoard: event files beside the run, or wherever told; look with `tensorboard --logdir runs`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncfed.callbacks import Callback, EvaluationReport, RunStart
from asyncfed.trackers.plain import library, numbers, step_of

if TYPE_CHECKING:
    from asyncfed.result import Result


class TensorBoard(Callback):
    """Log to TensorBoard.

    Parameters
    ----------
    directory
        Where the event files of each run go, in a folder called like the run; by default into the run
        directory, as `tensorboard`.
    per_client
        Whether to log the metrics of every client too.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, per_client: bool = False) -> None:
        self._directory = None if directory is None else Path(directory)
        self._per_client = per_client
        self._writer: Any = None

    def on_start(self, start: RunStart) -> None:
        writers = library("torch.utils.tensorboard", "tensorboard")
        own = start.path / "tensorboard" if self._directory is None else self._directory / start.path.name
        self._writer = writers.SummaryWriter(str(own))
        self._writer.add_text("scenario", f"```json\n{json.dumps(start.data, default=str)[:10_000]}\n```")

    def on_evaluation(self, report: EvaluationReport) -> None:
        for name, value in numbers(report, self._per_client).items():
            self._writer.add_scalar(name, value, step_of(report))
        self._writer.flush()

    def on_end(self, result: Result) -> None:
        self._close()

    def on_error(self, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
