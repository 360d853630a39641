"""Callbacks for experiment trackers, each with its own extra: `pip install asyncfed[tensorboard]`, say.

    run(scenario, callbacks=[TensorBoard()])

Every run is one of the tracker's, opened when it starts and closed when it ends, with the scenario as its
parameters and a point for each evaluation. A tracker's library is imported when a run starts.
"""

from asyncfed.trackers.mlflow import MLflow
from asyncfed.trackers.tensorboard import TensorBoard
from asyncfed.trackers.wandb import WandB

__all__ = ["MLflow", "TensorBoard", "WandB"]
