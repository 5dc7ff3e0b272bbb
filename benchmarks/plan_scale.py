"""A step at up to 16,384 devices as predicted, and what planning it costs.

    .venv/bin/python benchmarks/plan_scale.py     # ten minutes of one core and 8 GB; nothing is trained

Writes benchmarks/results/plan_scale_<hardware>_<yyyymm>.json and the .md tables rendered from it.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from headway.cli.plan import named_recipe
from headway.cli.scale_text import size_record
from headway.devices import Device, named_device
from headway.packing import Budget, Items, Order, Plan, measure
from headway.predict.communication import Links
from headway.predict.failures import Reliability
from headway.predict.lengths import enough_lengths
from headway.predict.predictor import Predictor
from headway.predict.scale import at_size, sized
from headway.predict.speeds import Speeds
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

SIZES = (8, 64, 512, 4096, 16384)
RELIABILITY = Reliability(mtbf_s=50_000 * 3600, save_s=30, restart_s=300)
GIB = 2**30
SEEDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "LMMs-Engine, text": ("recipes/qwen2.5-7b-text-81920.yaml", "A800", ()),
    "LMMs-Engine, video": ("recipes/qwen3-vl-8b-video-51200-sp2.yaml", "A800", ()),
    "Megatron-Bridge, packed chats": ("qwen3-8b", "H100", ("data.tokens_per_pack=4096",)),
    "MaxText's page": ("llama-3.1-8b", "TPU v5p", ("data.tokens_per_pack=8192",)),
    "mfu-tracker's GPT-2": ("gpt2", "H100", ("data.tokens_per_pack=1024",)),
    "torchtitan, VQA": ("recipes/qwen3-vl-30b-a3b-vqa-8192.yaml", "H200", ()),
    "torchtitan, VQA, copies of eight": ("recipes/qwen3-vl-30b-a3b-vqa-8192.yaml", "H200", ("parallel.shard=8",)),
    "torchtitan, text": ("recipes/qwen3-vl-30b-a3b-text-12288.yaml", "H200", ()),
}
"""A recipe or model, its device and settings for each of the seeds' pages."""


def main() -> None:
    """Plan every size of every recipe, each in a process of its own; write the record, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the tables")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of devices")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        name, devices = json.loads(options.case)
        print(json.dumps(run_of(name, devices)))
        return
    sizes = [int(size) for size in options.sizes.split(",")]
    runs = [in_process(name, devices) for name in SEEDS for devices in sizes]
    record = {"what": "plan_scale", "environment": environment(torch.device("cpu")), "runs": runs}
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def in_process(name: str, devices: int) -> dict[str, Any]:
    """Plan a recipe for one number of devices in a new process, so that its peak memory is that of this plan alone."""
    command = [sys.executable, __file__, "--case", json.dumps([name, devices])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_of(name: str, devices: int) -> dict[str, Any]:
    """Plan a recipe for one number of devices, and compare its balance with the planner's own report."""
    recipe, device, settings = SEEDS[name]
    predictor, config = predictor_of(recipe, named_device(device), settings)
    began = time.process_time()
    run = at_size(predictor, config, devices, reliability=RELIABILITY)
    planned_s = time.process_time() - began
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = planner_report(config, predictor, devices)
    same = (report.balance, report.fill) == (run.packs.report.balance, run.packs.report.fill)
    return {
        "recipe": name,
        "device": device,
        **size_record(run, None),
        "planned_s": planned_s,
        "peak_bytes": peak,
        "samples": run.packs.report.samples,
        "balance_is_the_planners": same,
    }


def planner_report(config: Any, predictor: Predictor, devices: int) -> Any:
    """What `headway pack` reports of the same lengths."""
    config = sized(config, devices)
    ranks = config.parallel.mesh_shape(devices).data_ranks
    accumulation = config.optim.accumulation
    (_, table), _ = enough_lengths(config, predictor.cost_model, config.parallel.mesh_shape(devices))
    budget = Budget(config.data.tokens_per_pack, config.data.patches_per_pack, config.data.samples_per_pack)
    items, _ = Items.build({"any": table}, budget, config.data.overlong, predictor.cost_model)
    order = Order.epochs(items.sizes, 1, seed=config.data.seed)
    return measure(Plan(items, order, budget, ranks * accumulation, accumulation=accumulation), ranks)[0]


def predictor_of(recipe: str, device: Device, settings: tuple[str, ...]) -> tuple[Predictor, Any]:
    """What a recipe or model runs on, and its configuration."""
    cost_model, config = named_recipe(recipe, settings)
    links = Links.of_device(device)
    return Predictor.of(config, cost_model, speeds=Speeds.of_device(device, "bf16"), links=links), config


def render(record: dict[str, Any]) -> str:
    """The record as Markdown tables."""
    sections = [
        "# A step at many sizes\n\n"
        f"{describe_environment(record)}\n\n"
        "Predicted, nothing was trained: shares of datasheets' rates and links. Each rank keeps its packs. Exposed and "
        "waiting are shares of the step. Failures: one in 50,000 h of a device, 30 s for a checkpoint, 300 s to start "
        "again. The last four columns are what planning took: packs of 16 steps of all ranks, in processor time of one "
        "thread, and whether fill and balance are those that `headway pack` reports of the same lengths.\n"
    ]
    for name in dict.fromkeys(run["recipe"] for run in record["runs"]):
        runs = [run for run in record["runs"] if run["recipe"] == name]
        recipe, device, settings = SEEDS[name]
        sections.append(f"## {name}\n\n`{' --set '.join([recipe, *settings])}` on {device}\n\n{sizes_table(runs)}\n")
    return "\n".join(sections)


def sizes_table(runs: list[dict[str, Any]]) -> str:
    """A recipe's sizes."""
    headings = ["devices", "tokens a step", "step", "exposed", "waiting", "MFU", "balance", "fill",
                "gathered / weights", "memory [GiB]", "fails every [h]", "save every [min]", "goodput", "samples",
                "planned in [s]", "with [GB]", "as the planner"]  # fmt: skip
    rows = []
    for run in runs:
        step_s, lost = run["time"]["step_s"][1], run["interruptions"]
        rows.append(
            [
                f"{run['devices']:,}",
                f"{run['time']['tokens']:,.0f}",
                f"{step_s:.3g} s",
                f"{100 * run['exposed_s'][1] / step_s:.1f} %",
                f"{100 * run['waiting_s'][1] / step_s:.1f} %",
                f"{100 * run['time']['mfu'][1]:.1f} %",
                f"{run['balance']:.4f}",
                f"{run['fill']:.4f}",
                f"{run['padding']:.3g}",
                f"{run['memory_bytes'] / GIB:.1f}",
                f"{lost['mtbf_s'] / 3600:,.1f}",
                f"{lost['interval_s'] / 60:,.1f}",
                f"{100 * lost['goodput']:.1f} %",
                f"{run['samples']:,}",
                f"{run['planned_s']:.1f}",
                f"{run['peak_bytes'] / 1e9:.2f}",
                "yes" if run["balance_is_the_planners"] else "NO",
            ]
        )
    return markdown_table(headings, rows)


if __name__ == "__main__":
    main()
