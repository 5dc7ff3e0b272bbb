"""Predicted step times beside measured ones: small models trained on this CPU in 24 configurations, on one thread.

    .venv/bin/python benchmarks/plan_time.py        # some eight minutes on two cores

Each configuration is predicted before it runs, from the recipe, the lengths of its samples and the rates that
`headway ceiling --model` measures: nothing is fitted to the steps. Then `headway train`'s loop takes its steps in this
process. The median processor time of their thread counts, which other processes disturb less than wall time. Packs are
made in a process of their own: a thread of this one would hold up its interpreter at every operation.

Writes benchmarks/results/plan_time_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from scipy.stats import spearmanr

from headway.cli.index import build_indices
from headway.cli.resolve import resolve_architecture, resolve_config, resolve_cost_model
from headway.config import TrainConfig, parse_config
from headway.count.activations import SavedByPrecision
from headway.data.index.length_index import length_table
from headway.data.sources import open_source
from headway.devices.ceilings import matmul_ceiling
from headway.devices.model_rates import model_rates
from headway.models.attention import attend
from headway.optim import Optimizer
from headway.predict.block_times import timed_blocks, with_blocks
from headway.predict.packs import plan_packs
from headway.predict.predictor import Predictor
from headway.predict.saved import learning_model, saved_as_trained
from headway.predict.speeds import Speeds
from headway.predict.step_time import StepForecast, shapes_of
from headway.synthetic.digits import write_digits, write_reader
from headway.train.run import train
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

WARM, STEPS = 3, 8
# width, inner width, layers of the language model; the vision tower has the same widths and its own two layers
MODELS = {"small": (128, 384, 3), "middle": (256, 768, 4), "large": (512, 1536, 4)}
# model, packing length, accumulation, recomputation, frozen parts
CONFIGURATIONS = [
    *((model, slots, 1, "none", []) for model in MODELS for slots in (256, 512, 1024)),
    *((model, 512, 2, "full", []) for model in MODELS),
    *((model, 512, 1, "none", ["vision"]) for model in MODELS),
    *((model, 1024, 1, "full", ["vision"]) for model in MODELS),
    *((model, 256, 4, "none", []) for model in MODELS),
    ("small", 2048, 1, "none", []),
    ("middle", 2048, 1, "full", []),
    ("large", 512, 1, "every:2", []),
]


def main() -> None:
    """Predict, train, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--work", type=Path, help="folder of rates and rows, so that a run that was cut goes on")
    parser.add_argument("--only", type=int, help="only so many configurations, for a try")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"what": "plan_time", "environment": environment(torch.device("cpu"))}
    record |= {"steps": STEPS, "rows": []}
    with nullcontext(options.work) if options.work else tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        os.environ["HEADWAY_CACHE"] = str(folder / "cache")
        if not (folder / "data").exists():
            write_digits(folder / "data", num_one_digit=300, num_train=3000, num_eval=4, renderings=1)
        speeds = {name: measured_speeds(folder, name) for name in MODELS}
        for number, configuration in enumerate(CONFIGURATIONS[: options.only]):
            done = folder / f"row-{number}.json"
            if not done.exists():
                row = one_row(folder, number, configuration, speeds)
                done.write_text(json.dumps(row), encoding="utf-8")
            record["rows"].append(json.loads(done.read_text(encoding="utf-8")))
            print(done.read_text(encoding="utf-8"), flush=True)
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in record["rows"]]
    order = spearmanr([row["predicted_s"] for row in record["rows"]], [row["measured_s"] for row in record["rows"]])
    record |= {"median_error": statistics.median(errors), "rank_correlation": float(order.statistic)}
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def measured_speeds(folder: Path, name: str) -> Speeds:
    """Write a model, and measure the rates of its sizes."""
    write_reader(folder / name)
    path = folder / name / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    width, inner, layers = MODELS[name]
    rope = {**config["text_config"]["rope_parameters"], "mrope_section": [6, 5, 5]}
    sizes = {"hidden_size": width, "intermediate_size": inner}
    heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 64, "head_dim": 32}
    config["text_config"] |= {**sizes, **heads, "num_hidden_layers": layers, "rope_parameters": rope}
    config["vision_config"] |= {**sizes, "num_heads": width // 32, "out_hidden_size": width}
    path.write_text(json.dumps(config), encoding="utf-8")
    cost_model = resolve_cost_model(str(folder / name))
    found = resolve_architecture(str(folder / name), cost_model)
    rates = model_rates("cpu", "fp32", shapes_of(cost_model, (64, 512, 2048)), (found.heads, found.qk_dim), attend)
    peak = matmul_ceiling("cpu", "fp32").peak().flops_per_s
    blocks = timed_blocks(resolve_config(str(folder / name)), torch.device("cpu"), "fp32")
    assert blocks is not None
    return with_blocks(Speeds.measured("this CPU", peak, rates, runs_ahead=False), blocks)


def one_row(folder: Path, number: int, configuration: tuple[Any, ...], speeds: dict[str, Speeds]) -> dict[str, Any]:
    """Predict one configuration, then train it."""
    model, slots, accumulation, recompute, frozen = configuration
    shutil.rmtree(folder / f"run-{number}", ignore_errors=True)
    config = parse_config(
        {
            "model": {"path": str(folder / model), "random_init": True, "freeze": frozen},
            "data": {
                "train": [{"path": str(folder / "data/train.jsonl")}],
                "tokens_per_pack": slots, "workers": 1,
            },
            "optim": {"steps": WARM + STEPS, "lr": 1e-4, "accumulation": accumulation},
            "speed": {"compile": False, "recompute": recompute},
            "run": {"folder": str(folder / f"run-{number}"), "device": "cpu", "threads": 1},
        }
    )  # fmt: skip
    predicted = predict(config, speeds[model])
    seconds = timed_steps(config)
    return {
        "model": model, "slots": slots, "accumulation": accumulation, "recompute": recompute,
        "frozen": ", ".join(frozen),
        "predicted_s": predicted.step_s,
        "measured_s": statistics.median(seconds), "least_s": min(seconds), "most_s": max(seconds),
        "lines": {line.key: line.seconds.expected for line in predicted.lines},
    }  # fmt: skip


def timed_steps(config: TrainConfig) -> list[float]:
    """Train here; processor time of each step after the first ones [s]."""
    times: list[float] = []
    plain = Optimizer.step

    def timed(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        times.append(time.thread_time())
        return result

    with patch.object(Optimizer, "step", timed):
        train(config)
    return [after - before for before, after in pairwise(times[WARM - 1 :])]


def predict(config: TrainConfig, speeds: Speeds) -> StepForecast:
    """Predict a step from the recipe and the lengths of its samples."""
    source = open_source(str(config.data.train[0].path), name="digits")
    (index,) = build_indices([source], str(config.model.path), {})
    lengths = length_table({"digits": index}, config.data.overlong_of_all)
    learning = learning_model(config.model, resolve_cost_model(str(config.model.path)))
    packs = plan_packs(config, learning, config.parallel.mesh_shape(1), "none", ("digits", lengths))
    assert packs is not None
    saved = SavedByPrecision(partial(saved_as_trained, config.model))
    return Predictor(learning, saved, speeds=speeds).time(config, packs, 1)


def render(record: dict[str, Any]) -> str:
    """The table, and what it comes to."""
    headings = [
        "model", "slots", "packs", "recomputed", "frozen",
        "predicted ms", "measured ms", "range", "error"
    ]  # fmt: skip
    rows = [
        [
            row["model"], str(row["slots"]), str(row["accumulation"]), row["recompute"], row["frozen"],
            f"{1e3 * row['predicted_s']:.1f}", f"{1e3 * row['measured_s']:.1f}",
            f"{1e3 * row['least_s']:.1f} to {1e3 * row['most_s']:.1f}",
            f"{100 * (row['predicted_s'] / row['measured_s'] - 1):+.1f} %",
        ]
        for row in record["rows"]
    ]  # fmt: skip
    said = (
        f"{len(rows)} configurations: median error {100 * record['median_error']:.1f} %, rank correlation "
        f"{record['rank_correlation']:.3f}. Processor time of a step on one thread, median of {record['steps'] - 1}. "
        "Predicted before each ran, from the recipe, its samples' lengths and `headway ceiling --model`."
    )
    return "\n\n".join([describe_environment(record), markdown_table(headings, rows), said]) + "\n"


if __name__ == "__main__":
    main()
