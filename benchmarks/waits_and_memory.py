"""Host waits and memory of one training step of every recipe, on a pretended CUDA device; needs no GPU.

    .venv/bin/python benchmarks/waits_and_memory.py
    .venv/bin/python benchmarks/waits_and_memory.py --only qwen2.5-7b-text-81920 --dtype bfloat16-params
    .venv/bin/python benchmarks/waits_and_memory.py --render benchmarks/results/waits_and_memory_*.json

Each recipe's model and fullest pack, at full size, on one device: forward, backward, clipping and the optimizer run on
fake tensors, above which every read by the host and every living byte is seen (tests/fake_cuda). Waits are counted with
what the collator knows told to the model, and without, as transformers asks. Memory is held against what
`headway train --dry-run --devices 1` predicts.

Writes benchmarks/results/waits_and_memory_<hardware>_<yyyymm>.json after every recipe, and the .md table.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fake_cuda.steps import RECIPES, model_of, recipe, run_step
from headway.config import TrainConfig
from headway.count import load_cost_model
from headway.count.activations import shipped_activations
from headway.count.models import shipped_name
from headway.predict.predictor import Predictor
from headway.predict.recipe import precision_of
from headway.predict.saved import learning_model
from headway.tracing import trace
from headway.tracing.activations import saved_by_block
from headway.tracing.build import model_on_shapes
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

SHALLOW = 4  # blocks of each tower where waits are counted: three layers of Qwen3-VL take features of the tower
GIB = 2**30


def main() -> None:
    """Run every recipe's step, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=RECIPES, help="some of the recipes")
    parser.add_argument("--dtype", nargs="+", default=["auto"], help="values of run.dtype that memory is found for")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--render", type=Path, help="only render this JSON record again")
    options = parser.parse_args()
    if options.render:
        print(render(json.loads(options.render.read_text(encoding="utf-8"))))
        return
    record: dict[str, Any] = {
        "what": "waits_and_memory",
        "environment": environment(torch.device("cpu")),
        "rows": [],
    }
    known: dict[str, dict[str, Any]] = {}  # recipes that differ in what one eager process has no use for
    for name in options.only:
        for dtype in options.dtype:
            config = recipe(name, f"run.dtype={dtype}")
            key = _step_of(config)
            if key not in known:
                known[key] = measure(config, name)
            record["rows"].append({**known[key], "recipe": name, "dtype": dtype})
            write(result_paths(options.out, record), record, render(record))
            print(json.dumps(record["rows"][-1]), flush=True)
    print(render(record))


def measure(config: TrainConfig, name: str) -> dict[str, Any]:
    """Run a recipe's step on the pretended device, and its dry run."""
    start_s = time.perf_counter()
    layers = None if name == "digits" else SHALLOW
    before, after = (run_step(config, layers=layers, ahead=ahead).waits for ahead in (False, True))
    found, planned = run_step(config), _planned(config)
    return {
        "waits_before": [list(wait) for wait in before],
        "waits_after": [list(wait) for wait in after],
        "slots": found.slots,
        "patches": found.patches,
        "peaks": {moment: size for moment, size in found.peaks.items() if moment},
        "held": found.held,
        "planned": planned,
        "seconds": time.perf_counter() - start_s,
    }


def _step_of(config: TrainConfig) -> str:
    whole = config.to_dict()
    whole["run"].pop("folder")
    whole.pop("checkpoint")
    return json.dumps(whole, sort_keys=True, default=str)


def _planned(config: TrainConfig) -> dict[str, int]:
    """What the dry run says of one device."""
    precision = precision_of(config, 1)
    shipped = shipped_name(config.model.path)
    if shipped is not None:
        cost_model, saved = load_cost_model(shipped), shipped_activations(shipped, precision)
    else:
        model: Any = model_on_shapes(model_of(config), torch.float32)
        cost_model = trace(model)
        saved = saved_by_block(model, autocast=torch.bfloat16 if precision == "bfloat16-autocast" else None)
    return Predictor(learning_model(config.model, cost_model), {precision: saved}).at(config, 1).memory.to_dict()


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page from the record."""
    waits, memory = [], []
    for row in record["rows"]:
        peaks, planned = row["peaks"], row["planned"]
        peak = max(peaks.values())
        if row["dtype"] == record["rows"][0]["dtype"]:
            waits.append([row["recipe"], str(len(row["waits_before"])), str(len(row["waits_after"]))])
        memory.append(
            [
                f"{row['recipe']}, {row['dtype']}",
                f"{row['slots']:,}",
                f"{row['patches']:,}",
                *(f"{peaks[moment] / GIB:.1f}" for moment in ("forward", "backward", "update")),
                f"{peak / GIB:.2f}",
                f"{planned['peak'] / GIB:.2f}",
                f"{100 * (planned['peak'] / peak - 1):+.1f} %",
            ]
        )
    parts = [
        "# Waits and memory of a step, on a pretended device",
        "",
        markdown_table(["waits of the host for each pack and its update", "transformers asks", "told ahead"], waits),
        "",
        markdown_table(
            ["one device", "slots", "patches", "forward", "backward", "update", "peak GiB", "dry run GiB", "error"],
            memory,
        ),
        "",
        "No GPU ran this. One step of each recipe's model and fullest pack on fake CUDA tensors, on one device, eager, "
        "with torch's kernels; the step is a run's second, so moments are there. Waits do not depend on depth and are "
        f"counted with {SHALLOW} blocks in each tower; memory is that of all blocks, without the CUDA context, what a "
        "kernel takes for itself and what the allocator wastes. The dry run is `headway train --dry-run` with one "
        "device, whose largest pack may differ by a few tokens.",
        "",
        describe_environment(record),
        "",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    main()
