"""Compare the numbers of two checkouts: ledgers, traces, conventions, plans of packs and the losses of short runs.

    python tools/same_numbers.py OLD NEW      # folders of two checkouts; one environment serves both

Each checkout computes everything by its own code, through public names and commands alone, so that any inner move is
allowed. What differs is printed with both values; the exit code is 1 if anything does. Takes a few minutes.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from headway.log.records import read_records

WORKLOADS = {
    "text": ["--segments", "4096*3,512"],
    "images": ["--segments", "4096*3,512", "--images", "1x32x48*2,1x16x20"],
}
RECIPES = ("qwen2.5-7b-text-81920", "qwen3-vl-8b-image-61440", "qwen3-vl-30b-a3b-text-12288")
COUNTED = (
    "loss",
    "grad_norm",
    "tokens",
    "slots",
    "flops",
    "digest",
    "supervised",
)  # of a record: what no clock decides
COUNTS = """
from headway import Workload, load_cost_model, shipped_models

text = Workload([4096, 4096, 4096, 512])
images = Workload([4096, 4096, 4096, 512], images=[(1, 32, 48), (1, 32, 48), (1, 16, 20)])
for name in shipped_models():
    model = load_cost_model(name)
    linear = next(row.module.rpartition(".")[2] for row in model.rows if row.features is not None)
    changed = {"plain": model, "frozen": model.freeze(["language.projections"]), "lora": model.lora(16, [linear])}
    for kind, workload in {"text": text, **({"images": images} if model.has_vision else {})}.items():
        for change, one in changed.items():
            for recompute in ("none", "full", "every:2", "full,-attention"):
                for by in ("component", "module"):
                    rows = one.count(workload, recompute=recompute, by=by).rows
                    print(f"{name}-{kind}-{change}-{recompute}-{by}", repr(rows))
"""
TRACES = """
import sys
import transformers as t
from headway import trace

small = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16)
seeing = dict(depth=2, hidden_size=64, intermediate_size=96, num_heads=4, out_hidden_size=64)
configs = {
    "qwen3": t.Qwen3Config(**small),
    "gemma2": t.Gemma2Config(**small, sliding_window=32),
    "gpt_oss": t.GptOssConfig(**small, num_local_experts=4, num_experts_per_tok=2, sliding_window=32),
    "qwen3_moe": t.Qwen3MoeConfig(**small, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
    "qwen3_vl": t.Qwen3VLConfig(text_config=small, vision_config={**seeing, "deepstack_visual_indexes": [0]}),
    "t5": t.T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4),
    "mamba2": t.Mamba2Config(vocab_size=128, hidden_size=64, num_heads=8, head_dim=16, state_size=16, n_groups=1,
                             num_hidden_layers=2, expand=2),
}
for name, config in configs.items():
    print(name, repr(trace(config).rows).replace("\\n", " "))
"""


def numbers_of(checkout: Path) -> dict[str, Any]:
    """Compute everything that is compared, by the code of one checkout.

    Args:
        checkout: its folder.

    Returns:
        Values by name; long ones as digests.
    """
    # The checkout's own plug-ins stand before those that are installed.
    sources = [checkout / "src", *sorted(checkout.glob("plugins/*/src"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources)), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "HEADWAY_PEAK_FLOPS": "100e9"}

    def run(*arguments: str, folder: Path = checkout) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            return f"exit {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
        return done.stdout

    headway = ("-m", "headway")
    found: dict[str, Any] = {}
    for file in sorted((checkout / "src" / "headway" / "count").rglob("*.json")):
        found[f"shipped {file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    for program, kind in ((COUNTS, "count"), (TRACES, "trace")):
        for line in run("-c", program).splitlines():
            name, _, rows = line.partition(" ")
            found[f"{kind} {name}"] = hashlib.sha256(rows.encode()).hexdigest()
    for model in json.loads(run(*headway, "models", "--json"))["models"]:
        for kind, workload in WORKLOADS.items():
            step = ("--device", "H100 SXM", "--step-time", "60")
            found[f"compare {model['name']} {kind}"] = run(
                *headway, "compare", model["name"], *workload, *step, "--json"
            )
    with tempfile.TemporaryDirectory() as folder:
        found |= _packs(lambda *arguments: run(*headway, *arguments), Path(folder))
        for recipe in RECIPES:
            kept = Path(folder) / recipe
            options = ("--scale-down", "--set", f"run.folder={kept}", "--set", "run.log_every=1", "--json")
            run(*headway, "train", str(checkout / "recipes" / f"{recipe}.yaml"), *options, folder=Path(folder))
            found |= _records(kept, recipe)
        run(*headway, "demo", "--steps", "20", "--folder", f"{folder}/digits", "--set", "run.log_every=1", "--json")
        found |= _records(Path(folder) / "digits" / "run", "demo")
    return found


def _packs(headway: Any, folder: Path) -> dict[str, str]:
    """Plan packs of lengths that a formula makes, by every strategy."""
    rows = ["tokens,patches", *(f"{1 + (i * i * 7919) % 4000},{4 * ((i * 104729) % 300)}" for i in range(3000))]
    (folder / "lengths.csv").write_text("\n".join(rows))
    planned = ("pack", "--lengths", str(folder / "lengths.csv"), "--packing-length", "8192", "--ranks", "4", "--json")
    found = {}
    for strategy in ("balanced", "best_fit", "first_fit", "none"):
        text = headway(*planned, "--strategy", strategy)
        record = json.loads(text) if text.startswith("{") else {"said": text}
        found[f"pack {strategy}"] = json.dumps(_without_times(record))
    return found


def _without_times(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_times(value) for key, value in node.items() if not key.startswith("us_per_")}
    return node


def _records(run: Path, name: str) -> dict[str, Any]:
    (file,) = run.rglob("metrics.jsonl")  # a recipe that is scaled down runs in a folder of its own below
    steps = [record for record in read_records(file) if record.get("kind") == "step"]
    kept = [{key: record[key] for key in COUNTED if key in record} for record in steps]
    return {f"{name} step {i}": json.dumps(record, sort_keys=True) for i, record in enumerate(kept)}


def _parsed(value: Any) -> Any:
    """Read a record that is JSON, of which the order of keys says nothing; anything else is itself."""
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        return value


def main() -> int:
    """Print what differs, and how much was compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="folder of the earlier checkout")
    parser.add_argument("new", type=Path, help="folder of the later checkout")
    options = parser.parse_args()
    old, new = (numbers_of(folder.resolve()) for folder in (options.old, options.new))
    differing = [name for name in dict.fromkeys([*old, *new]) if _parsed(old.get(name)) != _parsed(new.get(name))]
    for name in differing:
        print(f"{name}\n  old {str(old.get(name))[:300]}\n  new {str(new.get(name))[:300]}")
    failed = sum(str(value).startswith("exit") for value in new.values())
    print(f"{len(new)} numbers or records compared, {len(differing)} differ, {failed} are errors in the new checkout")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
