"""Trackers, each with its own library: what their files hold is what the run's metrics are."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from asyncfed import Callback, CallbackError, EvaluationReport, Result, Scenario, run
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP
from asyncfed.trackers import MLflow, TensorBoard, WandB
from topologies import ring

SCENARIO = Scenario(
    quadratic(clients=3), ring(3), SGP(steps=6, lr=0.1, batch=None), evaluate_every=2, name="tracked"
)


class Stops(Callback):
    def on_evaluation(self, report: EvaluationReport) -> None:
        if report.number == 1:
            raise RuntimeError("enough")


def expected(result: Result, name: str) -> list[tuple[int, float]]:
    table = result.metrics[["step", name]].dropna()
    return [(int(step), pytest.approx(value, rel=1e-6)) for step, value in table.itertuples(index=False)]


# What the libraries themselves warn of (a deprecated function of protobuf, say) is none of ours.
quietly = pytest.mark.filterwarnings("ignore")


@quietly
def test_tensorboard_holds_the_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(SCENARIO, out=tmp_path / "run", callbacks=[TensorBoard(per_client=True)])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for name in ("loss", "train_loss", "consensus", "messages", "bytes"):
        assert [(one.step, one.value) for one in events.Scalars(name)] == expected(result, name)
    last = [events.Scalars(f"client/{client}/loss")[-1].value for client in range(3)]
    assert last == pytest.approx(result.clients["loss"].tolist(), rel=1e-6)
    assert b"SGP" in events.Tensors("scenario/text_summary")[0].tensor_proto.string_val[0]


@quietly
def test_mlflow_holds_the_metrics_the_parameters_and_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more than the client
    uri = (tmp_path / "mlruns").as_uri()
    tracker = MLflow("tests", uri)
    result = run(SCENARIO, out=tmp_path / "run", callbacks=[tracker])
    with pytest.raises(CallbackError, match="Stops failed in on_evaluation"):
        run(SCENARIO, out=tmp_path / "stopped", callbacks=[tracker, Stops()])
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    runs = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    assert {name: one.info.status for name, one in runs.items()} == {"run": "FINISHED", "stopped": "FAILED"}
    assert runs["run"].data.params["protocol.lr"] == "0.1"
    assert runs["run"].data.params["topology"] == "ring, 3 clients"
    found = client.get_metric_history(runs["run"].info.run_id, "loss")
    assert [(one.step, one.value) for one in found] == expected(result, "loss")


@quietly
def test_wandb_holds_the_metrics_offline(tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    result = run(SCENARIO, out=tmp_path / "run", callbacks=[WandB()])
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    records = [wandb_internal_pb2.Record.FromString(data) for data in _logged(file.read_bytes())]
    rows = [
        _items(record.history.item) for record in records if record.WhichOneof("record_type") == "history"
    ]
    assert [row["_step"] for row in rows] == [0, 1, 2, 3]
    assert [(int(row["step"]), row["loss"]) for row in rows] == expected(result, "loss")
    (started,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (started.project, started.display_name) == ("asyncfed", "run")
    assert {item.key: item.value_json for item in started.config.update}["protocol.lr"] == '"0.1"'


def _logged(content: bytes) -> list[bytes]:
    """The entries of a file in the log format of LevelDB, after its header of seven bytes."""
    found, place, entry = [], 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768  # of this block
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        entry += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            found.append(entry)
            entry = b""
    return found


def _items(items: Any) -> dict[str, float]:
    return {item.key or "/".join(item.nested_key): float(item.value_json) for item in items}


@pytest.mark.parametrize(
    ("tracker", "module", "extra"),
    [
        (TensorBoard(), "torch.utils.tensorboard", "tensorboard"),
        (MLflow(), "mlflow.tracking", "mlflow"),
        (WandB(), "wandb", "wandb"),
    ],
)
def test_a_library_that_is_missing_is_named_with_how_to_get_it(
    tracker: Callback, module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CallbackError, match=rf"{module} cannot be imported .*'asyncfed\[{extra}\]'"):
        run(SCENARIO, out=tmp_path / "run", callbacks=[tracker])
