"""What trackers have written, read back by their own means, and settings that keep them to a folder."""

import json
import struct


def leave_settings_out(monkeypatch, folder):
    """Start from none of the user's settings; W&B keeps its files in a folder."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("WANDB_DIR", str(folder))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events


def read_wandb(folder):
    """Read the records of the one offline run below a folder.

    Source: the file is a LevelDB log (github.com/google/leveldb/blob/main/doc/log_format.md) with a 7-byte header:
    blocks of 32 KiB, fragments of checksum (4 bytes), length (2), type (1: full, first, middle, last) and data.
    """
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its own process writes the file, and has done so when it is gone
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, records, parts, at = path.read_bytes(), [], b"", 7
    while at + 7 <= len(data):
        left_in_block = 32768 - at % 32768
        if left_in_block < 7:
            at += left_in_block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


def wandb_history(folder):
    """[{key: value}] of the rows that were logged."""
    return [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in read_wandb(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def read_mlflow(uri, experiment):
    """The one run of an experiment: its {metric: [(step, value), ...]}, tags and status."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    series = {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    return series, run.data.tags, run.info.status
