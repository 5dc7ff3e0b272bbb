"""Error of gradients that FSDP2 sums in bfloat16, against sums in float32, by the number of processes.

    .venv/bin/python benchmarks/reduce_precision.py         # a minute; needs no GPU and no quiet machine

Every process computes the same model on tokens of its own over gloo, in bfloat16 as on a GPU, once for each precision
of the sum; all else is the same bits. Writes benchmarks/results/reduce_precision_<hardware>_<yyyymm>.json and the .md
table rendered from it.
"""

import argparse
import json
import math
import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen3Config

from headway.models.init_weights import init_weights
from headway.models.load import load_model
from headway.models.parallel.mesh import build_mesh
from headway.models.parallel.shard import shard_model
from headway.packing.mesh import MeshShape
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

COUNTS, SEEDS, TOKENS = (2, 3, 4), (0, 1, 2), 512
SIZES: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2048, "tie_word_embeddings": False,
}  # fmt: skip
ROUNDING = 2.0**-9
"""Largest relative error of rounding to bfloat16, whose significands have eight bits."""


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    options = parser.parse_args()
    record: dict[str, Any] = {"what": "reduce_precision", "environment": environment(torch.device("cpu"))}
    record |= {"model": SIZES, "tokens": TOKENS}
    with TemporaryDirectory() as folder:
        record["rows"] = [row for count in COUNTS for row in measured(count, Path(folder) / f"{count}.json")]
    write(result_paths(options.out, record), record, render(record))
    print(render(record))


def measured(count: int, result: Path) -> list[dict[str, Any]]:
    """Errors with so many processes, by seed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_compute, (count, port, result), nprocs=count)
    rows: list[dict[str, Any]] = json.loads(result.read_text())
    return rows


def _compute(rank: int, count: int, port: int, result: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    mesh, rows = build_mesh(MeshShape.of(count), "cpu"), []
    for seed in SEEDS:
        sums = [_gradients(mesh, seed, dtype) for dtype in (torch.float32, torch.bfloat16)]
        exact, rounded = ([gradient.full_tensor() for gradient in gradients] for gradients in sums)
        error = math.sqrt(sum(float((b - a).square().sum()) for a, b in zip(exact, rounded, strict=True)))
        norm = math.sqrt(sum(float(a.square().sum()) for a in exact))
        worst = max(float((b - a).norm() / a.norm()) for a, b in zip(exact, rounded, strict=True))
        rows.append({"processes": count, "seed": seed, "error": error / norm, "worst_parameter": worst})
    if rank == 0:
        result.write_text(json.dumps(rows))
    dist.destroy_process_group()


def _gradients(mesh: Any, seed: int, dtype: torch.dtype) -> list[Any]:
    model = load_model(Qwen3Config(**SIZES), device="meta", random_init=True)
    shard_model(model, mesh, compute_dtype=torch.bfloat16, reduce_dtype=dtype)
    torch.manual_seed(seed)
    init_weights(model, "cpu")
    torch.manual_seed(1000 * seed + dist.get_rank())
    ids = torch.randint(SIZES["vocab_size"], (1, TOKENS))
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    (loss / (TOKENS * dist.get_world_size())).backward()
    return [parameter.grad for parameter in model.parameters()]


def render(record: dict[str, Any]) -> str:
    """Render the record."""
    rows = []
    for count in COUNTS:
        of_count = [row for row in record["rows"] if row["processes"] == count]
        mean = sum(row["error"] for row in of_count) / len(of_count)
        worst = max(row["worst_parameter"] for row in of_count)
        rows.append([str(count), f"{mean:.2e}", f"{mean / ROUNDING:.2f}", f"{worst:.2e}"])
    heading = "# Gradients summed in bfloat16\n\nNorm of the difference to sums in float32, over theirs; mean of "
    heading += f"{len(SEEDS)} seeds.\n\n"
    names = ["processes", "error", "of 2^-9", "worst parameter"]
    return f"{heading}{markdown_table(names, rows)}\n\n{describe_environment(record)}\n"


if __name__ == "__main__":
    main()
