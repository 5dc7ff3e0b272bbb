"""How long an answer takes: whole commands, from the shell's start to their end, and the memory they hold.

    .venv/bin/python benchmarks/answering.py         # two minutes; run on a quiet machine

Writes benchmarks/results/answering_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from headway.count.models import presets
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, spread, write

# Qwen3-235B-A22B as its model card and config.json give it.
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "moe_intermediate_size": 1536, "intermediate_size": 12288, "num_experts_per_tok": 8, "vocab_size": 151936,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip

# The command, which tells its own peak memory [KiB] at its end; a parent's account would hold its own pages too. Linux.
RUN = """
import atexit, pathlib, re, sys
status = pathlib.Path("/proc/self/status")
atexit.register(lambda: print(re.search(r"VmHWM:\\s*(\\d+)", status.read_text())[1], file=sys.stderr))
from headway.cli.app import main
main()
"""


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each command, after one that is not")
    options = parser.parse_args()
    record: dict[str, Any] = {"what": "answering", "environment": environment(torch.device("cpu")), "commands": []}
    with tempfile.TemporaryDirectory() as name:
        for what, arguments in commands(Path(name)):
            runs = [measure(arguments) for _ in range(options.runs + 1)][1:]
            record["commands"].append(
                {
                    "what": what,
                    "wall_s": spread([wall_s for wall_s, _ in runs]),
                    "memory_bytes": max(memory for _, memory in runs),
                    "runs": options.runs,
                }
            )
            print(f"{what}: {record['commands'][-1]['wall_s']['median']:.2f} s", flush=True)
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def commands(folder: Path) -> list[tuple[str, list[str]]]:
    """Name the commands; configurations that do not ship are written to `folder`."""
    qwen, deepseek = folder / "qwen3-235b-a22b.json", folder / "deepseek-v3.json"
    qwen.write_text(json.dumps(QWEN3_235B), encoding="utf-8")
    deepseek.write_text(json.dumps(presets()["deepseek-v3"]), encoding="utf-8")
    compare = ["compare", "qwen3-vl-8b", "--segments", "4096*3,512", "--images", "1x32x48*2", "--device", "H100"]
    return [
        ("flops of a shipped model", ["flops", "llama-3.1-8b", "--segments", "8192", "--json"]),
        ("compare a shipped model by every convention", [*compare, "--step-time", "1.5"]),
        ("trace Qwen3-235B-A22B from its config.json", ["flops", str(qwen), "--segments", "4096"]),
        ("trace a DeepSeek-V3 (671 B) from its config.json", ["flops", str(deepseek), "--segments", "4096"]),
    ]


def measure(arguments: list[str]) -> tuple[float, int]:
    """Run `headway` once; wall time [s] and peak memory of the process [bytes]."""
    start_s = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, check=False)
    wall_s = time.perf_counter() - start_s
    if done.returncode:
        raise SystemExit(f"headway {' '.join(arguments)} ended with exit code {done.returncode}: {done.stderr}")
    return wall_s, 1024 * int(done.stderr.split()[-1])


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page from the record."""
    rows = []
    for entry in record["commands"]:
        wall = entry["wall_s"]
        span = f"{wall['min']:.2f} to {wall['max']:.2f}"
        rows.append([entry["what"], f"{wall['median']:.2f}", span, f"{entry['memory_bytes'] / 1e9:.2f}"])
    lines = [
        "# How long an answer takes",
        "",
        f"Whole commands, imports included; {record['commands'][0]['runs']} runs each after one that is not counted.",
        "",
        markdown_table(["command", "wall s, median", "range", "peak memory GB"], rows),
        "",
        describe_environment(record),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
