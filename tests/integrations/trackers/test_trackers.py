"""ExperimentLogger with the trackers themselves, all of which can do without a server."""

import csv
import json
import struct
import time
import zipfile

import pytest

from ipufit.callbacks import ExperimentLogger
from tests.faulty import batches, compiled, fit
from tests.told import Means


def trained(tracker):
    """What a tracker must have of two epochs of four updates: value and step by name."""
    means = Means()
    callbacks = [means, ExperimentLogger(tracker, every_updates=2)]
    options = {"epochs": 2, "device_iterations": 2, "validation_data": batches(1)}
    found = fit(compiled(), batches(4), callbacks=callbacks, **options).history
    return {
        "batch_loss": [*zip(means.values, (2, 4, 6, 8))],
        "loss": [*zip(found["loss"], (4, 8))],
        "val_loss": [*zip(found["val_loss"], (4, 8))],
        "learning_rate": [(0.05, 4), (0.05, 8)],
    }


def of_mlflow(client, run_id):
    names = client.get_run(run_id).data.metrics
    return {
        name: [(metric.value, metric.step) for metric in client.get_metric_history(run_id, name)]
        for name in names
        if name != "epoch"
    }


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """The module, which writes into a folder of the test's."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    module = pytest.importorskip("mlflow")
    module.set_tracking_uri((tmp_path / "mlruns").as_uri())
    return module


def test_the_module_of_mlflow(mlflow):
    """Within a run that the user has begun."""
    with mlflow.start_run() as run:
        expected = trained(mlflow)
    client = mlflow.MlflowClient()
    assert of_mlflow(client, run.info.run_id) == expected
    found = client.get_run(run.info.run_id)
    assert found.data.params.items() >= {"optimizer": "SGD", "epochs": "2"}.items()
    assert found.info.status == "FINISHED"


def test_a_logger_of_lightning_to_mlflow(mlflow, tmp_path):
    """Which is told how it ended."""
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.MLFlowLogger(tracking_uri=(tmp_path / "mlruns").as_uri())
    expected = trained(logger)
    client = mlflow.MlflowClient()
    assert of_mlflow(client, logger.run_id) == expected
    found = client.get_run(logger.run_id)
    assert found.data.params["optimizer"] == "SGD"
    assert found.info.status == "FINISHED"


def test_a_tracker_of_accelerate(mlflow, tmp_path):
    """One that writes to MLflow."""
    tracking = pytest.importorskip("accelerate.tracking")
    tracker = tracking.MLflowTracker("test", logging_dir=str(tmp_path / "mlruns"))
    tracker.start()
    expected = trained(tracker)
    run_id = mlflow.active_run().info.run_id
    tracker.finish()
    client = mlflow.MlflowClient()
    assert of_mlflow(client, run_id) == expected
    assert client.get_run(run_id).data.params["optimizer"] == "SGD"


def test_a_logger_of_lightning_to_a_table(tmp_path):
    """Its file has everything, with nothing closed."""
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.CSVLogger(tmp_path, name="", version="")
    expected = trained(logger)
    with open(tmp_path / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    found = {
        name: [(float(row[name]), int(row["step"])) for row in rows if row[name]]
        for name in rows[0]
        if name not in ("step", "epoch")
    }
    assert found == expected
    assert "optimizer: SGD" in (tmp_path / "hparams.yaml").read_text(encoding="utf-8")


def test_a_run_of_wandb(tmp_path):
    """Without a network: what it wrote to be sent later."""
    wandb = pytest.importorskip("wandb")
    run = wandb.init(project="test", dir=tmp_path, mode="offline")
    try:
        expected = trained(run)
        settings = dict(run.config)
    finally:
        run.finish()
    assert settings["optimizer"] == "SGD"
    found = {}
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    end = time.monotonic() + 30
    while not (records := [*records_of_wandb(path)]) or not records[-1].HasField("exit"):
        assert time.monotonic() < end, "the process that writes the file has not come to its end"
        time.sleep(0.1)
    for record in records:
        if record.WhichOneof("record_type") == "history":
            values = {item.key or ".".join(item.nested_key): item for item in record.history.item}
            for name, item in values.items():
                found.setdefault(name, []).append(
                    (json.loads(item.value_json), record.history.step.num)
                )
    assert {name: found[name] for name in expected} == expected


def records_of_wandb(path):
    """Of its file, which is a log of LevelDB's: blocks of 32 KiB, of pieces with a header each."""
    from wandb.proto import wandb_internal_pb2

    data, start, whole = path.read_bytes(), 7, b""
    while start + 7 <= len(data):
        left = 32768 - start % 32768
        if left < 7:
            start += left
            continue
        size, kind = struct.unpack_from("<HB", data, start + 4)
        whole += data[start + 7 : start + 7 + size]
        start += 7 + size
        if kind in (1, 4):  # the only piece, or the last
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


# Of Comet's own.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_an_experiment_of_comet(tmp_path):
    """Without a network: the archive that it wrote to be sent later."""
    comet = pytest.importorskip("comet_ml")
    experiment = comet.OfflineExperiment(offline_directory=str(tmp_path), disabled=False)
    try:
        expected = trained(experiment)
    finally:
        experiment.end()
    (path,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        lines = archive.read("messages.json").decode().splitlines()
    messages = [json.loads(line)["payload"] for line in lines]
    metrics = [message["metric"] for message in messages if message.get("metric")]
    found = {}
    for metric in metrics:
        found.setdefault(metric["metricName"], []).append((metric["metricValue"], metric["step"]))
    assert {name: found[name] for name in expected} == expected
