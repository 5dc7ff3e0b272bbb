"""What `headway explain` can attribute of real traces: a small Qwen3-VL, eager, compiled, recomputed, and sharded.

    .venv/bin/python benchmarks/explain_traces.py        # some ten minutes on 2 cores

Each configuration trains the same model on the same images with `headway train`, with a window of profiled steps. Of
the traces it is told which share of the time in which something ran goes to a component of the model or to a named
activity, and, for each component, the rate at which its products ran (FLOPs, recomputed ones included / time of
matmul-class operators) beside the best that products reach on this machine (`headway ceiling`), measured on as many
threads as the training has.

Writes benchmarks/results/explain_traces_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from headway.devices import Peak
from headway.devices.ceilings import matmul_ceiling
from headway.explain.breakdown import attributed_share, break_down
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from headway.report import format_flops, format_rate, format_share
from headway.synthetic.digits import write_digits, write_reader
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

# What each configuration changes of the recipe, and its number of processes.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], int]] = {
    "eager": ({"compile": False}, 1),
    "compiled": ({"compile": True}, 1),
    "recomputed": ({"compile": False, "recompute": "full"}, 1),
    "sharded over 2 processes": ({"compile": False}, 2),
}
FIRST, STEPS = 5, 3  # profiled steps; those before warm up, and compile
SIZES = {"hidden_size": 256, "intermediate_size": 768}


def main() -> None:
    """Train, explain, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument(
        "--runs", type=Path, help="folder of data and runs, which is kept; a temporary one if not given"
    )
    parser.add_argument("--only", choices=[*CONFIGURATIONS], action="append", help="configurations; all if not given")
    parser.add_argument("--slots", type=int, default=512, help="slots of a pack; two packs a step")
    parser.add_argument("--render", type=Path, help="only render this JSON record again")
    options = parser.parse_args()
    if options.render:
        print(render(json.loads(options.render.read_text(encoding="utf-8"))))
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.runs or Path(temporary)
        record: dict[str, Any] = {"what": "explain_traces", "environment": environment(torch.device("cpu"))}
        record |= {"slots": options.slots, "steps": STEPS, "configurations": {}}
        ceilings = [measured_ceiling()]
        for name in options.only or CONFIGURATIONS:
            record["configurations"][name] = explained(train(folder, name, options.slots))
            ceilings.append(measured_ceiling())
    best = max(ceilings, key=lambda ceiling: ceiling.flops_per_s)
    record |= {"ceiling_flops_per_s": best.flops_per_s, "ceiling_source": best.source, "ceilings": len(ceilings)}
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def train(folder: Path, name: str, slots: int) -> list[Path]:
    """Train one configuration, on one thread a process; returns the traces, one of each rank."""
    speed, processes = CONFIGURATIONS[name]
    if not (folder / "model").exists():
        write_digits(folder / "data", num_one_digit=200, num_train=2000, num_eval=4, renderings=1)
        enlarge(write_reader(folder / "model"))
    run = folder / name.replace(" ", "-")
    recipe = {
        "model": {"path": str(folder / "model"), "random_init": True},
        "data": {"train": [{"path": str(folder / "data/train.jsonl")}], "tokens_per_pack": slots, "workers": 0},
        "optim": {"steps": FIRST + STEPS, "lr": 1e-3, "accumulation": 2},
        "speed": speed,
        "run": {
            "folder": str(run), "device": "cpu", "threads": 1,
            "profile": {"start": FIRST, "steps": STEPS, "ranks": [*range(processes)]},
        },
    }  # fmt: skip
    path = folder / f"{run.name}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    launch = (
        ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"] if processes > 1 else []
    )
    subprocess.run(
        [sys.executable, "-m", *launch, "headway", "train", str(path)],
        check=True,
    )
    return sorted((run / "profile").glob("*.json.gz"))


def measured_ceiling() -> Peak:
    """The best that products reach now, as `headway ceiling --refresh` measures it."""
    return matmul_ceiling(torch.device("cpu"), "fp32", refresh=True).peak()


def enlarge(model: Path) -> None:
    """Give the model some eight million parameters, so that products are of a size that a CPU computes well."""
    path = model / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = {**config["text_config"]["rope_parameters"], "mrope_section": [12, 10, 10]}
    config["text_config"] |= {**SIZES, "head_dim": 64, "num_hidden_layers": 4, "rope_parameters": rope}
    config["vision_config"] |= {**SIZES, "out_hidden_size": SIZES["hidden_size"]}
    path.write_text(json.dumps(config), encoding="utf-8")


def explained(traces: list[Path]) -> dict[str, Any]:
    """Explain the traces of a run: shares of all steps, and the rows of the one of median duration."""
    found = explain([read_trace(path) for path in traces])
    shown = sorted(found.steps, key=lambda one: one.duration_ns)[len(found.steps) // 2]
    attention = [row for row in break_down(shown, "attention") if row.flops is not None]
    assert shown.measured is not None
    facts = shown.measured[0].trace.headway["steps"][str(shown.step)]
    needed = sum(int(n) for name, both in facts["useful_flops"].items() if _attends(name) for n in both.values())
    needed += sum(int(flops) for name, flops in facts["recomputed_flops"].items() if _attends(name))
    if needed != sum(row.flops for row in attention):
        raise SystemExit(f"{traces[0]}: FLOPs of attention by pack and layer do not add up to the step's {needed:,}")
    return {
        "attributed": [attributed_share(break_down(step, "component")) for step in found.steps],
        "step_ms": [step.duration_ns / 1e6 for step in found.steps],
        "mfu": [step.mfu for step in found.steps],
        "shown": {"step": shown.step, "rank": shown.rank},
        "rows": [row.to_dict() for row in break_down(shown, "component")],
        "attention": [row.to_dict() for row in attention],
    }


def _attends(component: str) -> bool:
    return component.endswith(".attention")


def render(record: dict[str, Any]) -> str:
    """Render the tables from a record."""
    ceiling, configurations = record["ceiling_flops_per_s"], record["configurations"]
    summary = [
        [
            name,
            f"{statistics.median(one['step_ms']):,.0f}",
            format_share(statistics.median(one["mfu"])),
            f"{100 * min(one['attributed']):.2f} to {100 * max(one['attributed']):.2f} %",
            format_share(max(row["flops_per_s"] or 0.0 for row in one["rows"]) / ceiling),
            f"{sum(row['ns'] > 0 for row in one['attention'])} of {len(one['attention'])}",
        ]
        for name, one in configurations.items()
    ]
    headings = ["", "time [ms]", "matmul-class [ms]", "FLOPs", "GFLOP/s", "of the ceiling"]
    parts = [
        "# What of real traces is attributed",
        "",
        f"A Qwen3-VL of 8.2 M parameters on images of digits, two packs of up to {record['slots']} slots a step, one "
        f"thread a process; {record['steps']} steps profiled after {FIRST - 1} others. Attributed is the share of the "
        "time in which an operator ran that goes to a component or a named activity; Python between operators is a "
        "line of the waterfall. Of attention, the pairs of a pack and a layer whose operators were found; their FLOPs "
        "add up to those of the step exactly.",
        "",
        markdown_table(["", "step [ms]", "MFU", "attributed", "highest rate", "packs in layers"], summary),
        "",
        "Below, the step of median duration, of which the table above has the highest rate of a component. A rate is "
        "FLOPs, recomputed ones included, over the time in which matmul-class operators ran. The ceiling is "
        f"{format_rate(ceiling)}, {record['ceiling_source']}; the best of {record['ceilings']} sweeps before, between "
        "and after the runs, on one thread.",
        "",
    ]
    for name, one in configurations.items():
        rows = [cells(row, ceiling) for row in one["rows"] if row["by_phase"]]
        parts += [f"## {name.capitalize()}", "", markdown_table(headings, rows), ""]
    return "\n".join([*parts, describe_environment(record), ""])


def cells(row: dict[str, Any], ceiling: float) -> list[str]:
    """A component's row of the table."""
    times = [f"{row[key] / 1e6:,.1f}" for key in ("ns", "matmul_ns")]
    rate = row["flops_per_s"]
    if rate is None:
        return [row["name"], *times, "", "", ""]
    return [row["name"], *times, format_flops(row["flops"]), f"{rate / 1e9:,.1f}", format_share(rate / ceiling)]


if __name__ == "__main__":
    main()
