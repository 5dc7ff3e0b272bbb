"""Predicted throughput and memory beside what other projects print of stated configurations.

    .venv/bin/python benchmarks/plan_published.py     # a few minutes of one core; nothing is trained

Rows are facts in published.json: source, model, devices, lengths, settings and numbers as printed, with the prediction
of Headway at f54edd2 (one share of the peak for all devices) as "before". Rates of the table of devices are fitted to
the rows that are not held back. Writes benchmarks/results/plan_published_<hardware>_<yyyymm>.json and the .md table.
"""

import argparse
import functools
import json
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import headway.cli.plan
import headway.predict.saved
from headway.cli.plan import named_recipe, speeds_of
from headway.config import TrainConfig
from headway.config.read import with_overrides
from headway.count import Workload
from headway.count.units import head_features
from headway.devices import Device, named_device
from headway.packing.mesh import MeshShape
from headway.predict.activations import BFLOAT16
from headway.predict.communication import Exchanges, Links
from headway.predict.kernel_bytes import Kernels
from headway.predict.memory import MemoryPlan
from headway.predict.predictor import Predictor
from headway.predict.recipe import State
from headway.predict.speeds import ATTENTION_KERNELS, Speeds
from headway.predict.step_time import TimeLine
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

FACTS = Path(__file__).parent / "published.json"
STEPS = 4  # planned; the last of an epoch is left out
GIB = 2**30
FLEX = 0.87
"""Rate of FlexAttention over FlashAttention-2's: 90 % in forward, 85 % in backward.

Source: PyTorch's announcement, pytorch.org/blog/flexattention, 2024-08-07.
"""
BIAS_BYTES = {"gate_up_proj_bias": 14, "down_proj_bias": 68}
"""Bytes that Automodel's experts move for a number of a bias that they add: expert by expert, then joined; behind the
second product times the router's weight, in float32. Counted by the operations of its forward and their gradients.

Source: GroupedExpertsDeepEP._apply_bias, nemo_automodel/components/moe/layers.py, read 2026-11-26.
"""

# Rows of one model ask for its ledger and its activations again: each is traced once.
headway.cli.plan.resolve_cost_model = functools.cache(headway.cli.plan.resolve_cost_model)
headway.predict.saved.shipped_activations = functools.cache(headway.predict.saved.shipped_activations)


def main() -> None:
    """Predict every row, write the record and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the tables")
    parser.add_argument("--rows", help="numbers of rows, joined by commas, to print alone")
    options = parser.parse_args()
    facts = json.loads(FACTS.read_text(encoding="utf-8"))
    chosen = set(map(int, options.rows.split(","))) if options.rows else None
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in facts["rows"]:
            if chosen is None or row["number"] in chosen:
                rows.append({**row, **predicted(row, facts["models"], Path(folder))})
    record = {
        "what": "plan_published", "environment": environment(torch.device("cpu")),
        "sources": facts["sources"], "read_on": facts["read_on"], "rows": rows,
    }  # fmt: skip
    table = render(record)
    if chosen is None:
        write(result_paths(options.out, record), record, table)
    print(table)


def predicted(row: dict[str, Any], models: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Predict a row's throughput of each device [tokens/s] and its memory [GiB]."""
    model, devices = row["model"], row["devices"]
    if model in models:
        (folder / model).mkdir(exist_ok=True)
        (folder / model / "config.json").write_text(json.dumps(models[model]), encoding="utf-8")
        model = str(folder / model)
    # all samples of a row are as long as its sequence: packs of its micro-batch, exactly full
    settings = tuple(row["settings"])
    if "sequence" in row:
        lengths = folder / "lengths.csv"
        samples = STEPS * devices * row["micro_batch"] * row["accumulation"]
        lengths.write_text("tokens\n" + f"{row['sequence']}\n" * samples, encoding="utf-8")
        pack = f"data.tokens_per_pack={row['sequence'] * row['micro_batch']}"
        settings = ("plan.mix=null", f"plan.lengths={lengths}", pack, f"optim.accumulation={row['accumulation']}",
                    *settings)  # fmt: skip
    if "power_w" in row:
        settings = (*settings, f"plan.power_w={row['power_w']}")
    cost_model, config = named_recipe(model, settings)
    device = named_device(row["device"])
    if "memory_tb_per_s" in row:
        device = replace(device, memory_bytes_per_s=row["memory_tb_per_s"] * 1e12)
    planned = Predictor.of(config, cost_model, device=device).at(config, devices)
    links = Links.of_device(device, per_node=row.get("per_node")) if devices > 1 else None
    speeds = speeds_of(config, cost_model, device, devices)
    if "attention" in row:
        speeds = with_kernel(speeds, device, row["attention"])
    # what other engines do: optimizers update in one pass, some losses are one kernel, rows for experts have kernels
    # of their own, and dispatchers send as many rows of a token as a row says
    kernels = Kernels(update="one pass", fuses_loss="loss" in row.get("fused", ()), sorts_rows=False)
    predictor = Dispatching.of(config, cost_model, speeds=speeds, links=links, kernels=kernels,
                               rows_of_token=row.get("rows_of_token"))  # fmt: skip
    learning, time = predictor.cost_model, predictor.time(config, planned.work, devices)
    biases = BIAS_BYTES.keys() if "biases" in row.get("unfused", ()) else ()
    added = speeds.moving_s(
        sum(
            BIAS_BYTES[name] * p.active
            for p in learning.parameters
            for name in biases
            if p.name.endswith(f"experts.{name}")
        )
        * time.tokens
        / devices
    )
    time = replace(time, lines=(*time.lines, TimeLine("memory", "biases of experts", added)))
    # pages of multimodal models print the language model's MFU, without the tower's FLOPs
    language = sum(part.total for part in planned.packs.flops.rows if part.name.startswith("language."))
    return {
        "predicted_tokens_per_s": [rate / devices for rate in time.tokens_per_s],
        "predicted_mfu": [language / planned.packs.flops.total * mfu for mfu in time.mfu],
        "predicted_memory_gib": memory_of(row, config, predictor, planned.memory) / GIB,
    }


def memory_of(row: dict[str, Any], config: TrainConfig, predictor: Predictor, planned: MemoryPlan) -> int:
    """Plan the fullest device's memory as the engine of a row holds it, and as its page prints it [bytes].

    Args:
        row: `bytes_per_logit` is what its loss holds, or reserves, where that is fullest; `keeps` names linear modules
            whose results its checkpointing keeps beside attention's; `gradients` may come "at once".
        config: the recipe.
        predictor: of its model.
        planned: by the recipe alone.
    """
    if "bytes_per_logit" not in row:
        return planned.peak
    learning = predictor.cost_model
    tokens, features = row["sequence"] * row["micro_batch"], head_features(learning)
    assert features is not None
    logits = tokens * features[1]
    keeps = tuple(row.get("keeps", ()))
    # without logits: as forward ends, and at the fullest point of backward
    settings = ["speed.loss_chunk=1", *(["speed.recompute=full,-attention"] if keeps else [])]
    bare = with_overrides(config.to_dict(), settings)
    memory = predictor.memory(bare, row["devices"], (tokens, 0))
    forward = memory.at("forward")
    points = [forward.total - forward.parts["head"] + row["bytes_per_logit"] * logits, memory.peak]
    if row.get("gradients") == "at once":  # beside those of earlier packs, as long as the loop holds logits
        points.append(memory.always + 2 * memory.gradients + BFLOAT16 * logits)
    kept = sum(r.forward // (2 * r.features[0]) for r in learning.rows if r.features and r.module.endswith(keeps))
    return max(points) + (BFLOAT16 * tokens * kept if keeps else 0)


@dataclass(frozen=True)
class Dispatching(Predictor):
    """Predicts steps of an engine that sends a token's hidden state so many times, all that belongs to it included.

    Attributes:
        rows_of_token: how many; None for as many as Headway sends where experts are chosen at random.
    """

    rows_of_token: int | None = None

    def exchanges(self, config: TrainConfig, pack: Workload, state: State, shape: MeshShape) -> Exchanges:
        """List exchanges with the engine's own dispatch."""
        exchanges = super().exchanges(config, pack, state, shape)
        features = head_features(self.cost_model)
        if self.rows_of_token is None or features is None:
            return exchanges
        row_bytes = pack.slots * features[0] * state.compute_bytes
        # smaller ones are weights and numbers of experts, which these engines send with the rows
        needed = [each for each in exchanges.all if each.kind != "all-to-all" or each.num_bytes >= row_bytes]
        sent = [
            replace(each, num_bytes=self.rows_of_token * row_bytes) if each.kind == "all-to-all" else each
            for each in needed
        ]
        return replace(exchanges, all=tuple(sent), _timelines={})


def with_kernel(speeds: Speeds, device: Device, name: str) -> Speeds:
    """Rates with a kernel of attention that `speed.attention` does not have."""
    kernel, share = ("fa2", FLEX) if name == "flex" else (name, 1.0)
    share *= device.attention_shares[kernel] / device.attention_shares["fa2"]
    return replace(
        speeds, attention_shares=speeds.attention_shares.times(share), attention_kernel=ATTENTION_KERNELS[kernel]
    )


def error_of(row: dict[str, Any], before: bool = False) -> float | None:
    """Predicted over printed throughput, less 1; of a printed range of MFU, to its nearer end."""
    if "tokens_per_s" in row:
        rate = row.get("before") if before else row["predicted_tokens_per_s"][1]
        return None if rate is None else rate / row["tokens_per_s"] - 1
    if "mfu" not in row or (before and "before" not in row):
        return None
    (low, high), mfu = row["mfu"], row["before"] if before else row["predicted_mfu"][1]
    return 0.0 if low <= mfu <= high else mfu / (low if mfu < low else high) - 1


def group_of(row: dict[str, Any]) -> str:
    """Group of a row in the medians: its device, with what needs rates of its own apart."""
    device = "A100 and A800" if row["device"].startswith("A") else row["device"].partition(" v")[0]
    return f"{device}, {row['group']}" if "group" in row else device


def render(record: dict[str, Any]) -> str:
    """The record as Markdown tables."""
    timed = [row for row in record["rows"] if error_of(row) is not None]
    fitted = [row for row in timed if not row.get("held_back")]
    held = [row for row in timed if row.get("held_back")]
    remembered = [row for row in record["rows"] if "memory_gib" in row]
    sources = [f"* {name}: [{source['title']}]({source['address']})" for name, source in record["sources"].items()]
    sections = [
        "# Plans beside published runs\n\n"
        f"{describe_environment(record)}\n\n"
        "Predicted by `headway plan`'s own functions, nothing was trained. Rates of devices are fitted to the rows of "
        "the first table; those of the second were held back. before: Headway at f54edd2, one share of the peak for "
        f"all devices. Facts as read on {record['read_on']} from:\n\n" + "\n".join(sources) + "\n",
        "## Medians of the error\n\n" + medians_table(fitted, held) + "\n",
        "## Rows that rates are fitted to\n\n" + rows_table(fitted) + "\n",
        "## Rows held back\n\n" + rows_table(held) + "\n",
        "## Memory\n\nThe fullest device [GiB], as printed and as planned.\n\n" + memory_table(remembered) + "\n",
    ]
    return "\n".join(sections)


def medians_table(fitted: list[dict[str, Any]], held: list[dict[str, Any]]) -> str:
    """Median and absolute median of the error by group, before and after; the spread is 80 % of a group's rows."""
    cells = []
    for label, rows in (("fitted", fitted), ("held back", held)):
        groups = sorted({group_of(row) for row in rows})
        for group in (*groups, "all"):
            of_group = [row for row in rows if group in ("all", group_of(row))]
            before = [error for row in of_group if (error := error_of(row, before=True)) is not None]
            after = [error for row in of_group if (error := error_of(row)) is not None]
            within = sum(inside(row) for row in of_group)
            cells.append([f"{group}, {label}", str(len(after)), *_medians(before), *_medians(after),
                          f"{within} of {len(after)}"])  # fmt: skip
    headings = ["rows", "number", "median before", "absolute", "median now", "absolute", "within the range"]
    return markdown_table(headings, cells)


def _medians(errors: list[float]) -> list[str]:
    if not errors:
        return ["-", "-"]
    return [f"{100 * statistics.median(errors):+.0f} %", f"{100 * statistics.median(map(abs, errors)):.1f} %"]


def inside(row: dict[str, Any]) -> bool:
    """Whether what was printed lies in the predicted range."""
    if "tokens_per_s" in row:
        best, _, worst = row["predicted_tokens_per_s"]
        return bool(worst <= row["tokens_per_s"] <= best)
    best, _, worst = row["predicted_mfu"]
    return bool(worst <= row["mfu"][1] and row["mfu"][0] <= best)


def rows_table(rows: list[dict[str, Any]]) -> str:
    """Predictions beside pages."""
    cells = []
    for row in rows:
        if "tokens_per_s" in row:
            printed, (best, expected, worst) = f"{row['tokens_per_s']:,}", row["predicted_tokens_per_s"]
            now = f"{expected:,.0f} ({worst:,.0f} to {best:,.0f})"
        else:
            (low, high), (best, expected, worst) = row["mfu"], row["predicted_mfu"]
            printed = f"{100 * low:.0f} to {100 * high:.0f} % MFU"
            now = f"{100 * expected:.1f} % ({100 * worst:.1f} to {100 * best:.1f})"
        errors = [error_of(row, before=True), error_of(row)]
        power = f", {row['power_w']} W" if "power_w" in row else ""
        packs = f"{row['sequence']:,} x {row['micro_batch']} x {row['accumulation']}" if "sequence" in row else "-"
        settings = " ".join(setting.partition(".")[2] for setting in row["settings"])
        cells.append([str(row["number"]), row["source"], row["model"].removeprefix("recipes/").removesuffix(".yaml"),
                      f"{row['devices']:,} {row['device']}{power}", packs, settings or "-", printed, now,
                      *("-" if error is None else f"{100 * error:+.0f} %" for error in errors)])  # fmt: skip
    headings = ["row", "source", "model", "devices", "sequence x micro-batch x accumulation", "settings", "printed",
                "predicted", "before", "now"]  # fmt: skip
    return markdown_table(headings, cells)


def memory_table(rows: list[dict[str, Any]]) -> str:
    """Planned memory beside pages."""
    cells = [
        [str(row["number"]), row["source"], row["model"], f"{row['devices']:,} {row['device']}",
         f"{row['memory_gib']:.1f}", f"{row['predicted_memory_gib']:.1f}",
         f"{100 * (row['predicted_memory_gib'] / row['memory_gib'] - 1):+.0f} %"]
        for row in rows
    ]  # fmt: skip
    return markdown_table(["row", "source", "model", "devices", "printed", "planned", "error"], cells)


if __name__ == "__main__":
    main()
