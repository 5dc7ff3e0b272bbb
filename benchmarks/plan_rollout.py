"""A step of reinforcement learning as `headway plan` predicts it, beside the timings that verl and NeMo RL publish.

    .venv/bin/python benchmarks/plan_rollout.py     # three to twelve minutes of one core; nothing is trained

Writes benchmarks/results/plan_rollout_<hardware>_<yyyymm>.json and the .md tables rendered from it. No constant of the
plan was chosen by these rows.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

PROMPT = 128
"""Tokens of a prompt where a page gives prompt and answer together: word problems in a chat template."""

_NEMO = "NeMo RL v{0}, docs/about/performance-summary.md at {1}, {2}"
_V04 = _NEMO.format("0.4", "cff17f83b", "2025-12-01")
_V05 = _NEMO.format("0.5", "9dbd9adc9", "2026-02-06")
_V06 = _NEMO.format("0.6", "69c7ca117", "2026-04-29")
_FULL, _EXPERTS = ("speed.recompute=full",), ("speed.recompute=full", "parallel.expert=8")
_NVL72 = ("--link", "900", "--network", "50", "--per-node", "72")


def _nemo(
    page: str,
    model: str,
    device: str,
    devices: int,
    mean: int,
    most: int,
    tensor: int,
    step_s: float,
    *settings: str,
    prompts: int = 64,
    group: int = 32,
    updates: int = 4,
    apart: bool = False,
) -> dict[str, Any]:
    """A row of NeMo RL's pages.

    Args:
        page: where it stands.
        model: as Headway names it.
        device: kind of the GPUs.
        devices: GPUs in all.
        mean: mean tokens of a prompt with its answer ("G-Average Seq len").
        most: most of them ("T-Max Sequence Length").
        tensor: GPUs of an engine.
        step_s: printed time of a step [s].
        settings: of the recipe.
        prompts: of a step, by the recipe beside the page.
        group: answers to each.
        updates: G-GBS / T-GBS.
        apart: whether half of the GPUs write beside the update ("1-step Off").
    """
    rollout = {"prompts": prompts, "group": group, "updates": updates, "tensor": tensor, "prompt_tokens": PROMPT,
               "answer_tokens": mean - PROMPT, "longest_answer": most - PROMPT}  # fmt: skip
    rollout |= (
        {"memory": 0.8, "devices": devices // 2, "asynchronous": True} if apart else {"memory": 0.6, "offload": True}
    )
    links = _NVL72 if device == "GB200" else ()
    return {"page": page, "model": model, "device": device, "devices": devices // 2 if apart else devices,
            "mode": "1-step off" if apart else "on policy", "rollout": rollout, "settings": settings, "links": links,
            "printed": {"step": step_s}}  # fmt: skip


PUBLISHED: tuple[dict[str, Any], ...] = (
    _nemo(_V04, "llama-3.1-8b", "H100", 16, 1060, 4096, 1, 97.7, *_FULL),
    _nemo(_V04, "llama-3.1-8b", "H100", 16, 1129, 4096, 1, 74.6, *_FULL, apart=True),
    _nemo(_V04, "qwen3-32b", "H100", 32, 3206, 4096, 4, 393.0),
    _nemo(_V05, "llama-3.1-8b", "H100", 16, 1019, 4096, 1, 92.8, *_FULL),
    _nemo(_V05, "llama-3.1-8b", "H100", 16, 1123, 4096, 1, 64.8, *_FULL, apart=True),
    _nemo(_V05, "qwen3-32b", "H100", 32, 3251, 4096, 4, 376.0),
    _nemo(_V05, "qwen3-32b", "H100", 64, 3252, 4096, 4, 200.0, apart=True),
    _nemo(_V05, "qwen3-30b-a3b", "H100", 32, 3196, 4096, 2, 198.0),
    _nemo(_V05, "llama-3.1-8b", "GB200", 8, 1066, 4096, 1, 91.0, *_FULL),
    _nemo(_V05, "qwen3-32b", "GB200", 16, 3253, 4096, 1, 381.0),
    _nemo(_V06, "qwen3-30b-a3b", "H100", 32, 3203, 4096, 2, 192.0),
    _nemo(_V06, "qwen3-30b-a3b", "H100", 32, 3201, 4096, 2, 152.0, apart=True),
    _nemo(_V06, "qwen3-30b-a3b", "GB200", 16, 3199, 4096, 1, 221.0),
    _nemo(_V06, "deepseek-v3", "H100", 256, 701, 1536, 32, 134.0, *_EXPERTS, prompts=32, group=16, updates=1),
    _nemo(_V06, "deepseek-v3", "H100", 512, 697, 1536, 32, 111.0, *_EXPERTS, prompts=32, group=16, updates=1),
)  # fmt: skip
"""Rows of NeMo RL: model, GPUs, mean and longest sequence, GPUs of an engine, printed time of a step."""

_VERL_SYNC = "verl, docs/advance/fully_async.md at df340d703, 2026-01-19: colocate sync"
_H20 = ("--link", "450", "--network", "50", "--per-node", "8")


def _verl_7b(devices: int, step: float, gen: float, old_log_prob: float, update: float) -> dict[str, Any]:
    """A row of verl's page on Qwen2.5-Math-7B, which has the size of Qwen2.5-7B."""
    rollout = {"prompts": 512, "group": 16, "updates": 16, "tensor": 4, "prompt_tokens": 256,
               "longest_answer": 28 * 1024, "memory": 0.8, "offload": True, "reference": False}  # fmt: skip
    settings = ("speed.recompute=full", "data.tokens_per_pack=61440", "parallel.sequence=4")
    return {"page": _VERL_SYNC, "model": "qwen2.5-7b", "device": "H20", "devices": devices, "mode": "on policy",
            "rollout": rollout, "settings": settings, "links": _H20,
            "printed": {"step": step, "rollout": gen, "scoring": old_log_prob, "update": update}}  # fmt: skip


LENGTH_NOT_PRINTED: tuple[dict[str, Any], ...] = (
    _verl_7b(32, 790.10, 357.41, 107.71, 269.80),
    _verl_7b(64, 365.28, 150.72, 70.26, 133.41),
    _verl_7b(128, 356.30, 177.85, 53.92, 113.81),
    {"page": _VERL_SYNC, "model": "qwen3-30b-a3b", "device": "H20", "devices": 128, "mode": "on policy",
     "rollout": {"prompts": 512, "group": 16, "updates": 4, "tensor": 4, "prompt_tokens": 256,
                 "longest_answer": 8192, "memory": 0.6, "offload": True},
     "settings": ("speed.recompute=full", "data.tokens_per_pack=24576"), "links": _H20,
     "printed": {"step": 497.89, "rollout": 348.05, "scoring": 28.73, "reference": 20.86, "update": 86.27}},
)  # fmt: skip
"""Rows of verl with the time of each phase, and no mean length of the answers."""

DEEPSEEK_ON_H20: dict[str, Any] = {
    "page": "verl, docs/perf/dpsk.md at 4c7812c40, 2025-09-10", "model": "deepseek-v3", "device": "H20", "devices": 96,
    "mode": "on policy",
    "rollout": {"prompts": 96, "group": 8, "updates": 3, "tensor": 32, "prompt_tokens": 256, "answer_tokens": 1960,
                "longest_answer": 9632, "memory": 0.6, "offload": True},
    "settings": ("speed.recompute=full", "data.tokens_per_pack=11680", "parallel.expert=8"), "links": _H20,
    "printed": {"step": 1700.0, "rollout": 1050.0},
}  # fmt: skip


def main() -> None:
    """Plan every row; write the record, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the tables")
    options = parser.parse_args()
    rows = [{**row, "predicted": planned(row)} for row in (*PUBLISHED, DEEPSEEK_ON_H20)]
    fitted = [with_length(row) for row in LENGTH_NOT_PRINTED]
    record = {"what": "plan_rollout", "environment": environment(torch.device("cpu")), "rows": rows, "fitted": fitted}
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def planned(row: dict[str, Any], **rollout: Any) -> dict[str, Any]:
    """What `headway plan` predicts of a row: the record of its step."""
    settings = [f"plan.rollout.{name}={json.dumps(value)}" for name, value in {**row["rollout"], **rollout}.items()]
    command = [sys.executable, "-m", "headway", "plan", row["model"], "--json", "--device", row["device"], "--devices",
               str(row["devices"]), *row["links"]]  # fmt: skip
    command += [text for setting in (*row["settings"], *settings) for text in ("--set", setting)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    record: dict[str, Any] = json.loads(done.stdout)["time"]
    record.pop("update")  # the lines of one optimizer step
    return record


def with_length(row: dict[str, Any]) -> dict[str, Any]:
    """Set a row's mean answer length so that the predicted update takes the printed time."""
    low, high, off = 64, row["rollout"]["longest_answer"] // 2, 1.0
    while abs(off) > 0.02 and high - low > 16:
        mean = (low + high) // 2
        step = planned(row, answer_tokens=mean)
        off = step["phases"]["update"]["wall_s"][1] / row["printed"]["update"] - 1
        low, high = (mean, high) if off < 0 else (low, mean)
    return {**row, "rollout": {**row["rollout"], "answer_tokens": mean}, "predicted": step}


def render(record: dict[str, Any]) -> str:
    """The record as Markdown tables."""
    errors = [error(row, "step") for row in record["rows"]]
    middle = sorted(errors)[len(errors) // 2]
    return "\n".join(
        [
            "# A step of GRPO beside published timings\n",
            f"{describe_environment(record)}\n",
            "Predicted by `headway plan` with `plan.rollout`, nothing was trained: the plan's own shares of "
            "datasheets' rates. No constant of the plan was chosen by these rows. The pages train with tensor, "
            "pipeline and expert "
            "parallelism of Megatron; the plan with FSDP2 on the same GPUs, whether it fits them or not. Answers are "
            "spread below the longest round the printed mean. Where a page prints prompt and answer together, "
            f"{PROMPT} tokens are taken for the prompt. Links of H20 (450 GB/s, network 50) and GB200 (900 GB/s in "
            "NVL72) are given by hand.\n",
            f"The step's error is {100 * min(errors):+.0f} to {100 * max(errors):+.0f} %, in the middle "
            f"{100 * middle:+.0f} %: the plan is the time of products, memory and links at usual rates, and what a "
            "framework adds is not in it (the engine's scheduling and sampling between steps, waking and sleeping it, "
            "moving weights and optimizer to the host and back, refitting in Megatron's layout, rewards, collating, "
            "pipeline bubbles, and padding). Take it as what a step could take, and look for the difference.\n",
            rows_table(record["rows"]),
            "\n## Phases, where the mean length is not printed\n",
            "verl prints the time of each phase, but not how long the answers are. The mean length was set so that the "
            "predicted update takes the printed time within 2 %, which takes that number out of the comparison; the "
            "other phases are predicted with it.\n",
            phases_table(record["fitted"]),
            "",
        ]
    )


def error(row: dict[str, Any], name: str) -> float:
    """Predicted over printed, less 1."""
    return float(predicted(row, name)[1]) / float(row["printed"][name]) - 1


def predicted(row: dict[str, Any], name: str) -> list[float]:
    """Best, expected and worst time of the step or a phase [s]."""
    step = row["predicted"]
    seconds: list[float] = step["step_s"] if name == "step" else step["phases"][name]["wall_s"]
    return seconds


def rows_table(rows: list[dict[str, Any]]) -> str:
    """Steps beside their pages."""
    cells = []
    for row in rows:
        rollout, (best, expected, worst) = row["rollout"], predicted(row, "step")
        apart = f" + {rollout['devices']}" if "devices" in rollout else ""
        written = row["predicted"]["phases"]["rollout"]["devices_s"][1]
        cells.append([row["page"], row["model"], f"{row['devices']}{apart} {row['device']}", row["mode"],
                      f"{rollout['prompts'] * rollout['group']:,} x {rollout['prompt_tokens']} + "
                      f"{rollout['answer_tokens']:,}", f"{row['printed']['step']:,.1f}",
                      f"{expected:,.1f} ({best:,.1f} to {worst:,.1f})", f"{100 * error(row, 'step'):+.0f} %",
                      f"{written:,.1f}", f"{row['printed'].get('rollout', '-')}"])  # fmt: skip
    headings = ["page", "model", "GPUs", "mode", "answers x tokens", "printed step [s]", "predicted [s]", "error",
                "of it rollout", "printed rollout"]  # fmt: skip
    return markdown_table(headings, cells)


def phases_table(rows: list[dict[str, Any]]) -> str:
    """Phases beside their page."""
    cells = []
    for row in rows:
        line = [row["page"], row["model"], f"{row['devices']} {row['device']}", f"{row['rollout']['answer_tokens']:,}"]
        for name in ("rollout", "scoring", "reference", "step"):
            there = name in row["printed"]
            line.append(
                f"{row['printed'][name]} / {predicted(row, name)[1]:,.1f} ({100 * error(row, name):+.0f} %)"
                if there
                else "-"
            )
        cells.append(line)
    headings = ["page", "model", "GPUs", "mean answer, set by the update"]
    headings += [f"{name}, printed / predicted [s]" for name in ("rollout", "scoring", "reference", "step")]
    return markdown_table(headings, cells)


if __name__ == "__main__":
    main()
