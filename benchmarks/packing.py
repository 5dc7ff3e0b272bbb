"""Packing on four mixes of lengths: Headway's strategies and the packers of LMMs-Engine, and plans of millions.

    .venv/bin/python benchmarks/packing.py         # some minutes; run on a quiet machine

Everyone packs the same samples, shuffled once, for 32 ranks with one pack each per step. Writes
benchmarks/results/packing_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headway.packing import STRATEGIES, Budget, Items, Order, Plan, PlannedStep, measure
from headway.packing.measure import report_on
from length_mixes import MIXES, LengthMix
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write
from their_packers import ONLINE, VERSION, install, naive_packers, online_packers, pack_online

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RANKS, SEED = 32, 1
WINDOWS = (2_048, 8_192, 32_768, 131_072)
BALANCES = (0.0, 0.9, 0.95, 0.97, 0.98, 0.986, 0.99, 1.0)
CURVE = ("fill", "balance", "mixing", "us_per_sample")


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--samples", type=int, help="samples of each mix, instead of 100,000 to 400,000")
    parser.add_argument("--large", type=int, nargs="*", default=[1_000_000, 10_000_000], help="samples of large plans")
    parser.add_argument("--wheel", type=Path, help="folder where the wheel of LMMs-Engine is or shall be installed")
    parser.add_argument("--ours", action="store_true", help="leave LMMs-Engine out, which must be downloaded")
    parser.add_argument("--plan-only", nargs=2, metavar=("MIX", "N"), help="plan N samples, print time and memory")
    options = parser.parse_args()
    if options.plan_only:
        print(json.dumps(plan_only(options.plan_only[0], int(options.plan_only[1]))))
        return
    record: dict[str, Any] = {"what": "packing", "environment": environment(torch.device("cpu")), "ranks": RANKS}
    with tempfile.TemporaryDirectory() as folder:
        record["lmms_engine"] = VERSION
        datasets = None if options.ours else install(options.wheel or Path(folder))
        record["mixes"] = [compare(mix, options.samples, datasets) for mix in MIXES]
    record["windows"] = [curve(mix, options.samples, "window", WINDOWS) for mix in MIXES]
    record["balances"] = [curve(mix, options.samples, "balance", BALANCES) for mix in MIXES]
    record["plans"] = [
        {"mix": mix.name, "samples": count, **in_a_process_of_its_own(mix, count)}
        for count in options.large
        for mix in MIXES
    ]
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def compare(mix: LengthMix, num_samples: int | None, datasets: Path | None) -> dict[str, Any]:
    """Let everyone pack a mix."""
    items = mix.items(num_samples)
    order, budget = Order.epochs(items.sizes, 1, seed=SEED), Budget(mix.packing_length)
    contenders = {}
    for strategy in STRATEGIES:
        report, _ = measure(Plan(items, order, budget, RANKS, strategy=strategy), RANKS)
        contenders[f"Headway {strategy}"] = report.to_dict()
    if datasets is not None:
        contenders |= theirs(items, order, budget, datasets)
    for name, numbers in contenders.items():
        print(f"{mix.name} {name}: fill {numbers['fill']:.4f}, balance {numbers['balance']:.4f}", flush=True)
    return {
        "name": mix.name,
        "description": mix.description,
        "packing_length": mix.packing_length,
        "model": mix.model,
        "samples": len(items),
        "mean_tokens": float(items.tokens.mean()),
        "contenders": contenders,
    }


def theirs(items: Items, order: Order, budget: Budget, datasets: Path) -> dict[str, Any]:
    """Let LMMs-Engine's packers pack the same samples in the same order."""
    shuffle = order.draw(0, len(items))
    lengths = items.tokens[shuffle].tolist()
    online, naive = online_packers(datasets), naive_packers(datasets)
    packers: dict[str, Callable[[], list[list[int]]]] = {
        f"LMMs-Engine iterable {name}": lambda name=name: pack_online(online, name, lengths, budget.tokens, RANKS)
        for name in ONLINE
    }
    packers |= {
        f"LMMs-Engine naive {name}": lambda pack=pack: pack(lengths, budget.tokens) for name, pack in naive.items()
    }
    contenders = {}
    for name, pack in packers.items():
        start_s = time.process_time()
        packs = pack()
        cpu_s = time.process_time() - start_s
        steps = in_steps([shuffle[members] for members in packs], items, shuffled="naive" in name)
        contenders[name] = report_on(steps, items, order, budget, RANKS, name, cpu_s)[0].to_dict()
    return contenders


def in_steps(packs: list[Any], items: Items, *, shuffled: bool) -> list[PlannedStep]:
    """Take packs by 32; a map-style dataset's packs are shuffled by its sampler first."""
    if shuffled:
        packs = [packs[number] for number in np.random.default_rng(SEED).permutation(len(packs))]
    steps = []
    for first in range(0, len(packs), RANKS):
        members = packs[first : first + RANKS]
        members += [np.zeros(0, dtype=np.int64)] * (RANKS - len(members))
        steps.append(PlannedStep(members, np.array([items.costs[pack].sum() for pack in members])))
    return steps


def curve(mix: LengthMix, num_samples: int | None, setting: str, values: "Sequence[float]") -> dict[str, Any]:
    """What a setting of the plan gives."""
    items = mix.items(num_samples)
    order, budget = Order.epochs(items.sizes, 1, seed=SEED), Budget(mix.packing_length)
    points = []
    for value in values:
        changed: dict[str, Any] = {setting: value}
        report, _ = measure(Plan(items, order, budget, RANKS, **changed), RANKS)
        points.append({"value": value, **{name: getattr(report, name) for name in CURVE}})
    return {"mix": mix.name, "points": points}


def in_a_process_of_its_own(mix: LengthMix, num_samples: int) -> dict[str, float]:
    """Plan in a fresh process, so that its memory is the plan's alone."""
    command = [sys.executable, __file__, "--plan-only", mix.name, str(num_samples)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    numbers: dict[str, float] = json.loads(done.stdout)
    return numbers


def plan_only(name: str, num_samples: int) -> dict[str, float]:
    """Plan all steps of one pass and keep none; seconds, and peak memory before and after [bytes]."""
    mix = next(mix for mix in MIXES if mix.name == name)
    items = mix.items(num_samples)
    before = peak_memory_bytes()
    plan = Plan(items, Order.epochs(items.sizes, 1, seed=SEED), Budget(mix.packing_length), RANKS)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    first_s = 0.0
    for _ in plan.steps():
        first_s = first_s or time.perf_counter() - start_s
    wall_s = time.perf_counter() - start_s
    return {
        "wall_s": wall_s,
        "cpu_s": time.process_time() - start_cpu_s,
        "first_step_s": first_s,
        "items_bytes": items.tokens.nbytes + items.patches.nbytes + items.costs.nbytes,
        "memory_before_bytes": before,
        "memory_bytes": peak_memory_bytes(),
    }


def peak_memory_bytes() -> int:
    """Peak resident memory of this process [bytes]; Linux."""
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return 1024 * int(found[1])


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page from the record."""
    lines = [
        "# Packing",
        "",
        f"{record['ranks']} ranks, one pack each per step. fill: tokens over the packs' budget; balance: mean over "
        "steps of mean / max FLOPs over ranks; mixing: spread over steps of the token-weighted mean segment length, "
        "relative to random packing. The last, incomplete step of a pass is left out; us per sample is processor time.",
        f"LMMs-Engine {record['lmms_engine']}: its iterable dataset packs a contiguous part of the shuffled data on "
        "each rank, and a step is the next pack of each; its naive dataset packs all, and its packs are shuffled.",
        "",
    ]
    for mix in record["mixes"]:
        rows = [
            [
                name,
                f"{numbers['fill']:.4f}",
                f"{numbers['balance']:.4f}",
                f"{numbers['mixing']:.2f}",
                f"{numbers['steps']:,}",
                f"{numbers['us_per_sample']:.2f}",
            ]
            for name, numbers in mix["contenders"].items()
        ]
        headings = ["packer", "fill", "balance", "mixing", "steps", "us per sample"]
        lines += [
            f"## {mix['name']}, packs of {mix['packing_length']:,} tokens",
            "",
            f"{mix['samples']:,} samples, mean {mix['mean_tokens']:,.0f} tokens; {mix['description']}. Costs of "
            f"{mix['model']}.",
            "",
            markdown_table(headings, rows),
            "",
        ]
    for setting, heading in (("windows", "window [samples]"), ("balances", "balance asked for")):
        rows = [
            [
                entry["mix"],
                f"{point['value']:,}",
                f"{point['fill']:.4f}",
                f"{point['balance']:.4f}",
                f"{point['mixing']:.2f}",
                f"{point['us_per_sample']:.2f}",
            ]
            for entry in record[setting]
            for point in entry["points"]
        ]
        lines += [
            f"## Headway balanced, by {heading.partition(' [')[0]}",
            "",
            markdown_table(["mix", heading, "fill", "balance", "mixing", "us per sample"], rows),
            "",
        ]
    rows = [
        [
            entry["mix"],
            f"{entry['samples']:,}",
            f"{entry['wall_s']:.2f}",
            f"{1e6 * entry['cpu_s'] / entry['samples']:.2f}",
            f"{1e3 * entry['first_step_s']:.0f}",
            f"{entry['items_bytes'] / 1e6:.0f}",
            f"{entry['memory_bytes'] / 1e6:.0f}",
        ]
        for entry in record["plans"]
    ]
    lines += [
        "## Whole plans",
        "",
        "One process each, all steps of one pass; its peak memory holds the imports, torch included, and the drawing "
        "of the lengths.",
        "",
        markdown_table(
            ["mix", "samples", "wall s", "us per sample", "ms to the first step", "items MB", "peak memory MB"], rows
        ),
        "",
        describe_environment(record),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
