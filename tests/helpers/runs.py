"""Training runs of tiny models: their data, configurations and ledgers, and what they and trackers wrote down."""

import hashlib
import json
import os
import pickle
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.log.records import read_records
from helpers.processes import run_processes


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Losses repeat bit for bit on one thread only."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A folder with data/ and model/."""
    from headway.synthetic.digits import write_digits, write_reader

    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder / "data", num_one_digit=400, num_train=80, num_eval=12, renderings=1)
    write_reader(folder / "model")
    path = folder / "model" / "config.json"
    config = json.loads(path.read_text())
    rope = {**config["text_config"]["rope_parameters"], "mrope_section": [2, 1, 1]}
    small = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 1, "rope_parameters": rope}
    config["text_config"].update(small)
    config["vision_config"].update({"hidden_size": 32, "intermediate_size": 48, "depth": 1, "out_hidden_size": 32})
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def mixture(digits, tmp_path_factory):
    """The folder of the digits' model with eight experts in place of each MLP, two of them for each token."""
    folder = tmp_path_factory.mktemp("mixture") / "model"
    shutil.copytree(digits / "model", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"]}
    config["text_config"] |= {"model_type": "qwen3_vl_moe_text", "num_experts": 8, "num_experts_per_tok": 2}
    config["text_config"] |= {"moe_intermediate_size": 16, "num_hidden_layers": 2}
    config["vision_config"] |= {"model_type": "qwen3_vl_moe_vision"}
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture
def raw(digits, tmp_path):
    """A configuration as plain types, free to change."""
    return {
        "model": {"path": str(digits / "model"), "random_init": True},
        "data": {
            "train": [{"path": str(digits / "data/train.jsonl")}],
            "tokens_per_pack": 160,
            "workers": 0,
            "prefetch_bytes": 0,
        },
        "optim": {"steps": 6, "lr": 2e-3, "warmup_steps": 2},
        "run": {"folder": str(tmp_path / "run"), "device": "cpu", "threads": 1},
    }


@pytest.fixture
def config(raw):
    """The same, checked."""
    from headway.config import parse_config

    return parse_config(raw)


@pytest.fixture
def config_file(raw, tmp_path):
    """Write the configuration, with changes, to a file."""

    def write(**sections):
        for name, changes in sections.items():
            raw.setdefault(name, {}).update(changes)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(raw))
        return path

    return write


IS_LONG = os.environ.get("HEADWAY_TEST_PROFILE") == "long"  # as `make test-long` sets it
PACKS_PER_STEP, STEPS = 4, 20 if IS_LONG else 5


def write_model(folder, family, **changes):
    """A model folder without weights: configuration, tokenizer and, where it sees, processor.

    Args:
        folder: created where needed.
        family: as in `helpers.models`.
        changes: to the configuration's attributes.
    """
    from headway.models import load_processor
    from headway.synthetic.processor import write_processor
    from helpers.models import PATCH, VISION_FAMILIES, tiny_config, vision_tokens

    processor = load_processor(write_processor(folder, ["Which picture is it? It is the one."], PATCH))
    tokenizer = processor.tokenizer
    config = tiny_config(family, len(tokenizer), vision_tokens(tokenizer))
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    if family not in VISION_FAMILIES:
        for file in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
            (folder / file).unlink(missing_ok=True)
        tokenizer.init_kwargs.pop("processor_class", None)
        tokenizer.save_pretrained(folder)
    return folder


def write_data(folder):
    """The sources that vision models and text models train on, as the configuration's `data.train`."""
    from helpers.data import write_sources

    folder.mkdir(parents=True, exist_ok=True)
    paths = write_sources(folder)
    shares = {"pictures": 3.0, "films": 1.0, "text": 2.0}
    seen = [{"path": str(paths[name]), "name": name, "weight": share} for name, share in shares.items()]
    return {"vision": [{"mix": seen}], "text": [{"path": str(paths["text"]), "name": "text"}]}


def configuration(model, data, run, *, processes=1, overrides=None):
    """A configuration as plain types: four packs a step, shared out among the processes that have packs of their own.

    Args:
        model: its folder.
        data: `data.train`.
        run: the run's folder.
        processes: how many train together.
        overrides: sections and what is changed in them.
    """
    changes = overrides or {}
    data_ranks = processes // changes.get("parallel", {}).get("sequence", 1)
    packing = {
        "tokens_per_pack": 256,
        "overlong": "split",
        "strategy": "best_fit",
    }  # "balanced" minds the number of ranks
    raw = {
        "model": {"path": str(model), "random_init": True},
        "data": {"train": data, "workers": 0, "prefetch_bytes": 0} | packing,
        "optim": {"steps": STEPS, "lr": 2e-3, "warmup_steps": 2, "accumulation": PACKS_PER_STEP // data_ranks},
        "run": {"folder": str(run), "device": "cpu", "threads": 1},
    }
    for section, values in changes.items():
        raw[section] = raw.get(section, {}) | values
    return raw


# A trace takes longer than a run of a few steps. That traces are right is held where tracing is tested; a run uses what
# it is given. Within a process, and between it and those that it starts, models of one class, configuration, parameters
# and modules share a ledger.
LEDGER_FOLDER = "HEADWAY_TEST_LEDGERS"  # the environment variable that names the folder of the ledgers


def ledger_of(model: Any) -> Any:
    """What `trace` says of a model of transformers, read from the folder if it was traced before."""
    from headway.tracing import trace

    config = {key: value for key, value in model.config.to_dict().items() if key not in ("_name_or_path", "dtype")}
    parameters = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    modules = [(name, type(module).__name__) for name, module in model.named_modules()]
    facts = repr((type(model).__name__, config, parameters, modules))
    path = Path(os.environ[LEDGER_FOLDER]) / hashlib.sha256(facts.encode()).hexdigest()
    if not path.exists():
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_bytes(pickle.dumps(trace(model)))
        unfinished.replace(path)
    return pickle.loads(path.read_bytes())


def install_ledgers() -> None:
    """Have the runs of this process, and of those that it starts, take their ledgers from the folder."""
    from headway.optim import groups
    from headway.train import build

    build.trace = groups.trace = ledger_of  # type: ignore[attr-defined]


@pytest.fixture(autouse=True, scope="session")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Trace each model once, however many runs train it: import this into a conftest.py."""
    os.environ[LEDGER_FOLDER] = str(tmp_path_factory.mktemp("ledgers"))
    install_ledgers()


def read_metrics(path):
    """Read the records of a metrics.jsonl, in their order."""
    return list(read_records(Path(path)))


def recorded(folder):
    """The last step that a run has recorded, 0 before its first."""
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open(encoding="utf-8") as file:
        return sum('"kind": "step"' in line for line in file if line.endswith("\n"))


def trained(folder):
    """What the data and the weights decide in each step's record."""
    names = ("step", "loss", "grad_norm", "tokens", "slots", "flops", "samples", "sources", "samples_digest")
    records = read_metrics(Path(folder) / "metrics.jsonl")
    return [{name: record.get(name) for name in names} for record in records if record["kind"] == "step"]


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


def scaled_down(recipe: Path, folder: Path, *settings: str, processes: int = 1) -> Any:
    """Train a recipe scaled down for three steps; its summary."""
    # without workers: each process of the run would start a server of processes that imports all of it once more
    always = ("optim.steps=3", "optim.warmup_steps=0", "speed.compile=false", "data.workers=0")
    options = [part for setting in (*always, *settings) for part in ("--set", setting)]
    command = [sys.executable, "-m", "headway", "train", str(recipe), "--scale-down", "--json", *options]
    done = run_processes([*command, "--set", f"run.folder={folder}"], processes)
    return json.loads(done[0].stdout.splitlines()[-1])
