"""Headway as users run it: `headway train` in a process of its own, for the throughput benchmark.

It reads a mix's samples from files and makes packs of them with its index, plan and feed; its meter and records are at
work, and what is not named here is at its default. Optimizer, initial weights and threads are the other sides'.
"""

import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers.utils import logging

from contenders import BETAS, CLIP, EPS, LEARNING_RATE, WEIGHT_DECAY, Shape, build_model
from headway.config.data import DataConfig
from headway.count import CostModel
from headway.data.collate import Collator
from headway.data.feed.feed import estimated_bytes
from headway.log.records import read_records
from mixes import Mix, MixFiles
from step_clock import Clock

AHEAD = 2  # packs made ahead: samples are read while steps are timed, as in a long run
WORKERS: int = DataConfig.model_fields["workers"].default
ROOM = 1.02  # of a pack that is to hold all samples there are, as the planner leaves a hundredth free


def write_weights(mix: Mix) -> None:
    """Put the weights that all sides start from into the mix's model folder."""
    logging.disable_progress_bar()
    build_model(mix, "sdpa", torch.device("cpu")).save_pretrained(_files(mix).model)


def run_headway_train(
    mix: Mix, shape: Shape, device: torch.device, *, compiled: bool = False, cached: bool = True
) -> dict[str, Any]:
    """Train in packs as long as a step of the others on average, one a step, and never less than the longest sample.

    Returns:
        What the throughput benchmark keeps of a round; FLOPs, tokens and patches are the run's own records'.
    """
    data = packs_of(mix, shape) | {"cache_encoded": "auto" if cached else "off"}
    clock, records = train(mix, data, {"steps": shape.steps}, device, compiled=compiled)
    timed = records[shape.warmup :]
    wall_s, cpu_s = clock.spent_s(shape.warmup)
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "recorded_s": sum(record["wall_s"] for record in timed),
        **{name: sum(record[name] for record in timed) for name in ("tokens", "patches", "slots")},
        "flops": sum(record["flops"]["total"] for record in timed),
    }


def place_of_encoding(record: dict[str, Any]) -> str:
    """Say where the runs of a record encode their samples; those of records without a number of workers had none."""
    workers = record.get("workers", 0)
    return f"in {workers} processes beside it, the default" if workers else "in a thread"


def packs_of(mix: Mix, shape: Shape) -> dict[str, Any]:
    """Settings of a mix's data: a pack holds as many tokens as a step of the other sides, and the longest sample."""
    lengths = [sample.tokens for sample in mix.samples]
    patches = sum(sample.patches for sample in mix.samples) / len(lengths)
    tokens_per_pack = max(*lengths, round(shape.batch * sum(lengths) / len(lengths)))
    return {
        "train": [str(_files(mix).samples)],
        "tokens_per_pack": tokens_per_pack,
        "prefetch_bytes": AHEAD * estimated_bytes(tokens_per_pack, round(shape.batch * patches)),
    }


def first_samples(mix: Mix, number: int) -> dict[str, Any]:
    """Settings of a mix's first samples alone, all in one pack."""
    files = _files(mix)
    first = files.samples.with_name("first_step.jsonl")
    lines = files.samples.read_text(encoding="utf-8").splitlines(keepends=True)
    first.write_text("".join(lines[:number]), encoding="utf-8")
    tokens = sum(sample.tokens for sample in mix.samples[:number])
    return {"train": [str(first)], "tokens_per_pack": math.ceil(ROOM * tokens)}


def first_loss(mix: Mix, batch_size: int, cost_model: CostModel) -> float:
    """Loss on the CPU of the first step of a run whose data are the samples of one, which the other sides begin with.

    Raises:
        SystemExit: the run has trained on other samples than those, or billed them other FLOPs than the benchmark does.
    """
    _, records = train(mix, first_samples(mix, batch_size), {"epochs": 1}, torch.device("cpu"))
    work = Collator()(mix.samples[:batch_size]).work(skips_unlabelled=True)
    expected = [1, work.tokens, work.patches, cost_model.count(work).total]
    record = records[0]
    actual = [len(records), record["tokens"], record["patches"], record["flops"]["total"]]
    if actual != expected:
        raise SystemExit(f"{mix.name}: steps, tokens, patches and FLOPs of the first step are {actual}, not {expected}")
    return float(record["loss"])


def train(
    mix: Mix,
    data: dict[str, Any],
    length: dict[str, int],
    device: torch.device,
    *,
    compiled: bool = False,
    sections: dict[str, Any] | None = None,
) -> tuple[Clock, list[dict[str, Any]]]:
    """Run `headway train`; returns the ends of its steps and its records of them.

    Args:
        mix: model folder with weights, and samples.
        data: settings of the section `data`.
        length: steps or epochs.
        device: where to train.
        compiled: train with `speed.compile`.
        sections: further sections of the configuration.
    """
    files = _files(mix)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {
            "model": {"path": str(files.model)},
            "data": data,
            "optim": {
                **length, "lr": LEARNING_RATE, "schedule": "constant", "betas": [*BETAS], "eps": EPS,
                "weight_decay": WEIGHT_DECAY, "clip": CLIP,
            },
            "checkpoint": {"export": "never"},
            "speed": {"compile": compiled},
            "run": {"folder": str(folder / "run"), "device": str(device), "threads": torch.get_num_threads()},
            **(sections or {}),
        }  # fmt: skip
        (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [sys.executable, str(Path(__file__).with_name("step_clock.py")), str(folder / "ends.json")]
        command += [str(device), "train", str(folder / "run.yaml")]
        env = {**os.environ, "HEADWAY_CACHE": str(files.samples.with_name("cache"))}  # the index is made once
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            raise SystemExit(f"{mix.name}: headway train failed:\n{done.stderr}")
        records = [record for record in read_records(folder / "run/metrics.jsonl") if record["kind"] == "step"]
        return Clock.read(folder / "ends.json"), records


def _files(mix: Mix) -> MixFiles:
    assert mix.files is not None  # the mix was made with a folder
    return mix.files
