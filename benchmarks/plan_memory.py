"""Memory that the plan predicts, held against what the engine's code holds, by part and by moment; needs no GPU.

    .venv/bin/python benchmarks/plan_memory.py
    .venv/bin/python benchmarks/plan_memory.py --only text "2 processes"
    .venv/bin/python benchmarks/plan_memory.py --render benchmarks/results/plan_memory_*.json

Two steps of small models of text, images, videos and experts (17 to 80 M parameters) run through the engine's own head,
loss, recomputation, clipping and optimizers, and every living storage is counted:

* one CUDA device: fake tensors on a pretended device (tests/fake_cuda/moments.py), exact for eager code;
* one CPU: real tensors, in float32;
* 2 to 64 processes: real tensors on a CPU with torch's fake process group, which moves no data
  (tests/fake_cuda/shared.py).

On a CPU every row runs a second time under torch.distributed's MemTracker, a witness that knows nothing of this code;
but for those in which something is frozen or Muon gathers, where it ends with an error of its own (torch 2.13).

Takes about five minutes on one core. Writes
benchmarks/results/plan_memory_<hardware>_<yyyymm>.json after every row, and the .md table.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fake_cuda.moments import MOMENTS, run_moments, settings
from fake_cuda.shared import Witness, run_shared
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

MIB = 2**20
TARGET = 0.05  # of the peak

_FULL, _HALF, _KEPT = "speed.recompute=full", "speed.recompute=every:2", "speed.recompute=full,-attention"
_CHUNK, _WHOLE, _PARAMS = "speed.loss_chunk=512", "speed.loss_chunk=null", "run.dtype=bfloat16-params"
_CODES, _MUON, _LORA = "optim.state=8bit", "optim.name=muon", "model.lora={rank: 8}"
_TWICE, _NF4, _INT8 = "optim.accumulation=2", "model.base=nf4", "model.base=int8"
ON_CUDA: tuple[tuple[str, ...], ...] = (
    ("text",), ("text", _WHOLE), ("text", _CHUNK), ("text", _FULL), ("text", _KEPT), ("text", _HALF),
    ("text", _FULL, _CHUNK), ("text", _TWICE), ("text", _TWICE, _FULL), ("text", _PARAMS),
    ("text", _PARAMS, _FULL, _CHUNK), ("text", _PARAMS, "optim.state=float32", _FULL), ("text", _CODES),
    ("text", _CODES, _PARAMS, _FULL, _CHUNK), ("text", "optim.state=bfloat16"), ("text", _MUON),
    ("text", _MUON, _FULL, _CHUNK), ("text", _MUON, _PARAMS, _FULL, _CHUNK), ("text", "optim.ema={decay: 0.999}"),
    ("text", _LORA), ("text", _LORA, _PARAMS, _FULL), ("text", "model.freeze=[language.mlp]"), ("tied",),
    ("tied", _FULL), ("tied", _PARAMS), ("image",), ("image", _FULL), ("image", _FULL, _PARAMS),
    ("image", "speed.recompute=vision:full"), ("image", "speed.recompute=full,-attention,vision:full"),
    ("video", "speed.recompute=language:full,-attention,vision:every:2"),
    ("image", "model.freeze=[vision]"), ("image", _TWICE, _HALF), ("image", _LORA, _FULL), ("video",), ("video", _FULL),
    ("video", _PARAMS, _KEPT), ("video", "model.freeze=[language]"), ("video", "model.freeze=[vision]"), ("experts",),
    ("experts", _FULL), ("experts", _PARAMS), ("experts", _CODES, _HALF), ("experts", _MUON), ("experts", _LORA),
    # adapters under autocast, whose blocks are computed again
    ("text", _LORA, _FULL, _CHUNK), ("text", _LORA, _KEPT, _CHUNK), ("text", _LORA, _PARAMS, _FULL, _CHUNK),
    ("experts", _LORA, _FULL, _CHUNK), ("experts", _FULL, _CHUNK), ("mixtral", _LORA, _FULL, _CHUNK),
    # models on which no rule of the plan was mended
    ("llama",), ("llama", _KEPT), ("llama", _PARAMS, _MUON), ("llama", _CODES, _FULL), ("llama", _LORA, _TWICE),
    ("mixtral",), ("mixtral", _FULL), ("mixtral", _PARAMS, _CHUNK),
    # frozen bases in 4 and 8 bits
    ("text", _LORA, _NF4), ("text", _LORA, _NF4, _FULL), ("text", _LORA, _NF4, _PARAMS), ("llama", _LORA, _NF4, _FULL),
    ("experts", _LORA, _NF4, _FULL), ("image", _LORA, _NF4), ("text", _LORA, _INT8, _FULL),
    ("text", _LORA, _NF4, _FULL, _CHUNK), ("llama", _LORA, _FULL, _CHUNK),
)  # fmt: skip
"""Kind of model and settings, on one pretended CUDA device."""

_SEQUENCE, _STEP = "parallel.sequence=2", "parallel.reduce=step"
AMONG: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("text", 1, ()), ("text", 1, (_FULL,)), ("text", 1, (_WHOLE,)), ("image", 1, ()), ("experts", 1, ()),
    ("text", 2, ()), ("text", 4, ()), ("text", 2, (_FULL,)), ("text", 4, (_KEPT,)),
    ("text", 2, (_FULL, "parallel.reshard=false")), ("text", 2, (_TWICE,)), ("text", 2, (_TWICE, _STEP)),
    ("text", 2, ("parallel.reduce_dtype=bfloat16",)), ("text", 2, (_WHOLE,)), ("text", 2, (_SEQUENCE,)),
    ("text", 4, (_SEQUENCE, _FULL)), ("tied", 2, ()), ("image", 2, ()), ("image", 4, (_FULL,)),
    ("image", 2, (_SEQUENCE,)), ("image", 2, ("model.freeze=[vision]",)), ("experts", 2, ()), ("experts", 4, (_FULL,)),
    ("text", 1, (_LORA, _NF4)), ("text", 2, (_LORA, _NF4, _FULL)), ("experts", 4, (_LORA, _NF4, _FULL)),
    ("text", 2, (_MUON,)), ("text", 2, (_CODES, _FULL)), ("text", 2, (_LORA,)),
    # 8 experts in slices for more processes, and spread over some of them
    ("experts", 32, ()), ("experts", 32, (_FULL,)), ("experts", 8, ("parallel.expert=2",)),
    ("experts", 8, ("parallel.expert=2", _FULL)), ("experts", 64, ("parallel.expert=4",)),
    ("experts", 64, ("parallel.expert=4", _FULL)), ("experts", 64, ("parallel.expert=4", _TWICE, _STEP)),
)  # fmt: skip
"""Kind of model, processes and settings, on a CPU."""


def main() -> None:
    """Measure every row, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="rows whose name holds one of these")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--render", type=Path, help="only render this JSON record again")
    options = parser.parse_args()
    if options.render:
        print(render(json.loads(options.render.read_text(encoding="utf-8"))))
        return
    record: dict[str, Any] = {"what": "plan_memory", "environment": environment(torch.device("cpu")), "rows": []}
    rows = [(kind, 0, overrides) for kind, *overrides in ON_CUDA] + [*AMONG]
    for kind, processes, overrides in rows:
        name = _name(kind, processes, overrides)
        if options.only and not any(part in name for part in options.only):
            continue
        record["rows"].append({"name": name, **measure(kind, processes, tuple(overrides))})
        write(result_paths(options.out, record), record, render(record))
        print(json.dumps(record["rows"][-1]), flush=True)
    print(render(record))


def _name(kind: str, processes: int, overrides: tuple[str, ...]) -> str:
    where = {0: "one CUDA device", 1: "one CPU, float32"}.get(processes, f"{processes} processes")
    return ", ".join([kind, where, *overrides])


def measure(kind: str, processes: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Run two steps of one row, and ask the plan."""
    start_s = time.process_time()
    witness = None
    if processes:
        dtype = "float32" if processes == 1 else "bfloat16-autocast"
        base = ("speed.loss_chunk=256", "parallel.reduce_dtype=float32", f"run.dtype={dtype}")
        row = (f"little {kind}", settings(*base, *overrides), processes)
        if not any(one.startswith(("model.freeze", "model.lora", _MUON)) for one in overrides):
            run_shared(*row, witness=(witness := Witness()))
        found, plan = run_shared(*row)
    else:
        found, plan = run_moments(kind, settings(*overrides))
    return {
        "measured": found.peaks,
        "witness": None if witness is None else witness.peak,
        "held": found.held,
        "planned": {one.name: one.total for one in plan.moments},
        "parts": plan.to_dict(),
        "error": plan.peak / found.peak - 1,
        "processor_s": time.process_time() - start_s,
    }


def _planned(parts: dict[str, Any], part: str) -> int:
    """Bytes of a part; a base in 4 or 8 bits is among the weights that are measured."""
    return int(parts[part] + (parts.get("base", 0) if part == "weights" else 0))


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page from the record."""
    rows = record["rows"]
    table = []
    for row in rows:
        measured, planned = row["measured"], row["planned"]
        cells = [f"{measured[one] / MIB:.0f} / {planned[one] / MIB:.0f}" for one in MOMENTS]
        witness = "" if row["witness"] is None else f"{row['witness'] / MIB:.0f}"
        table.append([row["name"], *cells, witness, f"{100 * row['error']:+.1f} %"])
    errors = [abs(row["error"]) for row in rows]
    seen = [row for row in rows if row["witness"] is not None]
    apart = max((abs(row["witness"] / max(row["measured"][one] for one in MOMENTS[1:]) - 1) for row in seen), default=0)
    parts = [
        [
            row["name"],
            *(f"{row['held'][part] / MIB:.1f} / {_planned(row['parts'], part) / MIB:.1f}" for part in row["held"]),
        ]
        for row in rows
    ]
    worst = sorted(rows, key=lambda row: -abs(row["error"]))[:3]
    inside = sum(error <= TARGET for error in errors)
    lines = [
        "# Memory by the plan and as measured",
        "",
        f"{inside} of {len(rows)} rows are within {TARGET:.0%} at the peak; the median error is "
        f"{100 * statistics.median(errors):.1f} %, the largest {100 * max(errors):.1f} %. The three that are worst: "
        + "; ".join(f"{row['name']} ({100 * row['error']:+.1f} %)" for row in worst)
        + ".",
        "",
        "MiB measured / planned at the fullest point of each moment. The first step's moments come before the "
        f"optimizer has state. MemTracker is torch's own count of the peak while the model trains, in {len(seen)} "
        f"rows; it is within {100 * apart:.2g} % of this one.",
        "",
        markdown_table(["settings", *MOMENTS, "MemTracker", "error at the peak"], table),
        "",
        "MiB measured / planned of what is held between backward and the next step.",
        "",
        markdown_table(["settings", "weights", "gradients", "optimizer"], parts),
        "",
        "No GPU ran this. Two steps of small models through the engine's own code, eager; living storages in units of "
        "512 bytes. One CUDA device is pretended, with fake tensors; a CPU and several processes are real tensors, the "
        "other processes made up by torch's fake process group, whose collectives take no memory of their own. CUDA's "
        "context, what kernels take for themselves and what the allocator cannot use are not in either number.",
        "",
        describe_environment(record),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
