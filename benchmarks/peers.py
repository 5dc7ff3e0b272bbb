"""One card, one model, four engines: transformers' Trainer, TRL, torchtitan's Qwen3 and Headway's step, side by side.

    .venv/bin/python benchmarks/peers.py --scale small --steps 2      # the same code on a CPU: losses are compared
    python3 benchmarks/peers.py --budget-s 500 --out gpu-results      # on a GPU; call again to go on

Every side trains Qwen3-8B on packs of the same token ids and segments, with as many tokens a step, from the same
weights, by AdamW with the same clipping, in bfloat16 on CUDA. Each has three ways to pack and to recompute: its default
is measured in three rounds in turn, the other two once. Tokens per second and useful MFU are of one meter and one
ledger. Trainer and TRL take Liger's kernels where they are installed, and FlashAttention-2 by the wheel of
benchmarks/flash_attn_wheel, torchtitan its own varlen attention, per-operator checkpoints and compiled blocks.

What is measured stays in the record of --out. Exit code 1 if a default was not measured, or first losses differ by 1 %.
Writes peers_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_case
import peer_sides
from engine_case import Conditions
from engine_gpu import ENVIRONMENT, LEAST_S, in_process
from engine_setups import PEERS
from peer_sides import SIDES, Way
from record import RESULTS, describe_environment, markdown_table, result_paths, write

ROUNDS, WARMUP, PACKS = 3, 2, 2
MOST_S = 150.0  # that a round may take
APART = 0.01  # share by which first losses of sides may differ
NAMES = {"trainer": "transformers' Trainer", "trl": "TRL SFT", "torchtitan": "torchtitan", "headway": "Headway"}


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES], help="some of them")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each side's default")
    parser.add_argument("--defaults", action="store_true", help="each side's default alone")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds for all")
    parser.add_argument("--scale", choices=["full", "small"], default="full", help="small: sizes for a smoke test")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    end_s = time.monotonic() + options.budget_s
    machine = in_process(engine_case.describe_machine, (), end_s, lambda _: None)
    if machine["status"] != "done":
        sys.exit(f"the device cannot be used: {machine['error']}")
    if machine["device_type"] != "cuda" and options.scale == "full":
        sys.exit("there is no CUDA device here; --scale small runs the same code on a CPU")
    record = {"what": "peers", "scale": options.scale, **machine, "runs": {}}
    paths = result_paths(options.out, record)
    if paths[0].exists() and (before := json.loads(paths[0].read_text(encoding="utf-8")))["scale"] == options.scale:
        record["runs"] = before["runs"]
    for name, side, way in turns(options):
        left_s = end_s - time.monotonic()
        if record["runs"].get(name, {}).get("status") in ("done", "out of memory"):
            continue
        if left_s < LEAST_S:
            print(f"{name}: no time left", flush=True)
            break
        conditions = Conditions(options.scale == "small", PACKS, way.recompute, WARMUP, accumulation=way.packs,
                                tokens_per_pack=PEERS.packing_length // way.packs)  # fmt: skip
        deadline_s = min(end_s, time.monotonic() + MOST_S)
        arguments = (side, way, options.steps, conditions, deadline_s)
        begun = {"side": side, "way": vars(way), "case": name, "status": "running"}
        record["runs"][name] = in_process(peer_sides.measure, arguments, deadline_s, lambda _: None, begun)
        write(paths, record, render(record))
        print(json.dumps({**record["runs"][name], "memory": None}), flush=True)
    print(render(record))
    sys.exit(why_not(record, options.sides))


def turns(options: argparse.Namespace) -> Iterator[tuple[str, str, Way]]:
    """Runs in the order of their worth: rounds of the defaults in turn, then each other way once."""
    for number in range(1, options.rounds + 1):
        for side in options.sides:
            yield f"{side}, default, round {number}", side, SIDES[side][0]
    if not options.defaults:
        for number in (1, 2):
            for side in options.sides:
                yield f"{side}, way {number + 1}", side, SIDES[side][number]


def why_not(record: dict[str, Any], sides: list[str]) -> str | None:
    """The reason for exit code 1; None if every side's default was measured and first losses agree."""
    for side in sides:
        if not any("mfu" in run for run in record["runs"].values() if run["side"] == side):
            return f"{NAMES[side]} was not measured; call again with the same --out"
    for packs, losses in losses_of(record).items():
        if max(losses.values()) > (1 + APART) * min(losses.values()):
            return f"first losses of steps of {packs} packs differ: {losses}"
    return None


def losses_of(record: dict[str, Any]) -> dict[int, dict[str, float]]:
    """First losses of the sides, by packs of a step."""
    losses: dict[int, dict[str, float]] = {}
    for run in record["runs"].values():
        if "first_loss" in run:
            losses.setdefault(run["way"]["packs"], {})[run["side"]] = run["first_loss"]
    return losses


def render(record: dict[str, Any]) -> str:
    """The record as a Markdown table: each side's default, and the best of its ways."""
    cells = []
    for side in dict.fromkeys(run["side"] for run in record["runs"].values()):
        runs = [run for run in record["runs"].values() if run["side"] == side]
        measured = [run for run in runs if "mfu" in run]
        default = [run for run in measured if ", default" in run["case"]]
        best = max(measured, key=lambda run: run["mfu"], default=None)
        cells += [_row(NAMES[side], "default", default)] if default else []
        cells += [_row(NAMES[side], "best of three", [best])] if best is not None else []
        failed = [run for run in runs if run not in measured]
        cells += [[NAMES[side], run["case"].partition(", ")[2], run["status"], *["-"] * 5] for run in failed]
    headings = ["", "way", "packs", "recomputes", "first loss", "tokens/s", "MFU useful/1", "rounds"]
    note = "Small sizes: a smoke test, whose rates mean nothing.\n\n" if record["scale"] == "small" else ""
    return (
        f"# Four engines on one device\n\n{describe_environment(record)}\n\n{note}Qwen3-8B on packs of chats from the "
        f"same weights, {PEERS.packing_length:,} tokens a step, the same token ids and segments in each number of "
        "packs; AdamW with clipping. Rates are medians of rounds, by `headway.Meter` over one ledger. The head is "
        "billed on tokens that have a label, of all sides alike; only Headway leaves the others out.\n\n"
        f"{markdown_table(headings, cells)}\n"
    )


def _row(side: str, way: str, runs: list[dict[str, Any]]) -> list[str]:
    rates = [run["mfu"] for run in runs]
    spread = f" ({100 * min(rates):.1f} to {100 * max(rates):.1f})" if len(runs) > 1 else ""
    return [
        side, way, f"{runs[0]['way']['packs']} x {runs[0]['tokens_per_pack']:,}", runs[0]["way"]["recompute"] or "none",
        f"{runs[0]['first_loss']:.4f}", f"{statistics.median(run['tokens_per_s'] for run in runs):,.0f}",
        f"{100 * statistics.median(rates):.1f} %{spread}", str(len(runs)),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
