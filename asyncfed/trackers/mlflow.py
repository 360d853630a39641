"""MLflow: a run in an experiment, with the scenario as parameters and a point for each evaluation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from asyncfed.callbacks import Callback, EvaluationReport, RunStart
from asyncfed.trackers.plain import library, numbers, parameters, step_of

if TYPE_CHECKING:
    from asyncfed.result import Result


class MLflow(Callback):
    """Log to MLflow, through a client of our own: a run that is active in the process is left alone.

    Parameters
    ----------
    experiment
        Its name; it is made where there is none.
    tracking_uri
        Where to, as MLflow has it; by default where MLflow would. ("sqlite:///mlflow.db" needs the whole of
        MLflow, "http://…" its client only, which is what the extra installs.)
    per_client
        Whether to log the metrics of every client too.
    """

    def __init__(
        self, experiment: str = "asyncfed", tracking_uri: str | None = None, per_client: bool = False
    ) -> None:
        self._experiment, self._uri, self._per_client = experiment, tracking_uri, per_client
        self._client: Any = None
        self._run = ""

    def on_start(self, start: RunStart) -> None:
        self._client = library("mlflow.tracking", "mlflow").MlflowClient(tracking_uri=self._uri)
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        )
        self._run = self._client.create_run(experiment, run_name=start.path.name).info.run_id
        entities = library("mlflow.entities", "mlflow")
        params = [entities.Param(name, value) for name, value in parameters(start.data).items()]
        for place in range(0, len(params), 100):  # as many as one call may have
            self._client.log_batch(self._run, params=params[place : place + 100])
        self._client.set_tag(self._run, "asyncfed.path", str(start.path))

    def on_evaluation(self, report: EvaluationReport) -> None:
        entities, now = library("mlflow.entities", "mlflow"), int(time.time() * 1000)
        metrics = [
            entities.Metric(name, value, now, step_of(report))
            for name, value in numbers(report, self._per_client).items()
        ]
        for place in range(0, len(metrics), 1000):
            self._client.log_batch(self._run, metrics=metrics[place : place + 1000])

    def on_end(self, result: Result) -> None:
        self._close("FINISHED")

    def on_error(self, error: BaseException) -> None:
        self._close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")

    def _close(self, status: str) -> None:
        if self._run:
            self._client.set_terminated(self._run, status)
            self._run = ""
