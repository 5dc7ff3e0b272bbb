"""Plans by the command that users have, beside throughput and memory that other projects print.

    .venv/bin/python benchmarks/plan_published.py     # a few minutes of one core; nothing is trained

Rows are facts in published.json: source, model, devices, lengths, settings and numbers as printed. Each is planned by
`headway plan --json` with its settings alone, the engine among them (plan.engine). Rates of the table of devices and of
engines are fitted to the rows that are not held back. Writes benchmarks/results/plan_published_<hardware>_<yyyymm>.json
and the .md table.
"""

import argparse
import functools
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

import headway.cli.plan
import headway.predict.saved
from headway.cli.app import app
from headway.config import ModelConfig
from headway.count.activations import SavedActivations
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

FACTS = Path(__file__).parent / "published.json"
STEPS = 4  # planned; the last of an epoch is left out
GIB = 2**30
MEMORY_KINDS = """The fullest device [GiB], as printed and as planned. A plan counts the bytes that tensors hold, which
is the peak of allocated memory. Reserved memory is what the allocator has taken from the driver, so it is more.

| source | what its code prints |
| --- | --- |
| torchtitan, torchao | `reserved_bytes.all.peak` / 2**30 (torchtitan/components/metrics.py at b5bcd76) |
| ms-swift | `max_memory_reserved` / 2**30 (swift/utils/torch_utils.py at 3602360); scripts say GB or GiB |
| KempnerForge | `max_memory_allocated` / 2**30 (kempnerforge/metrics/memory.py) |
| LitGPT | `max_memory_allocated` / 10**9 (litgpt/utils.py at 2685705) |
"""
SLOW_MEMORY = """
[h100-500w]
names = ["H100 with HBM2e, 500 W"]
tflops = { bf16 = 989.4, fp8 = 1978.9 }
memory_gb = 96
memory_gb_per_s = 2400
board_power_w = 700
link_gb_per_s = 450
network_gb_per_s = 50
devices_per_node = 8
link_source = "as H100"
link_read_on = 2026-11-25
products = [0.69, 0.59, 0.5]
attention = { fa1 = 0.18, fa2 = 0.23, fa3 = 0.48, cudnn = 0.39 }
rates_source = "as H100"
source = "torchtitan benchmarks: H100s with less power and memory rate than the data sheet's, 500 W and 2.4 TB/s"
read_on = 2026-11-25
"""
"""A card of torchtitan's pages, as a user's own table has it."""

_saved_as_trained = headway.predict.saved.saved_as_trained


@functools.cache
def _saved_once(model: str, precision: str, packages: frozenset[str]) -> SavedActivations:
    return _saved_as_trained(ModelConfig.model_validate_json(model), precision, packages=packages)


def saved_as_trained(model: ModelConfig, precision: str, *, packages: frozenset[str]) -> SavedActivations:
    """Activations of a model, traced once for all rows that ask."""
    return _saved_once(model.model_dump_json(), precision, packages)


def main() -> None:
    """Plan every row, write the record and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the tables")
    parser.add_argument("--rows", help="numbers of rows, joined by commas, to print alone")
    options = parser.parse_args()
    facts = json.loads(FACTS.read_text(encoding="utf-8"))
    chosen = set(map(int, options.rows.split(","))) if options.rows else None
    # Rows of one model ask for its ledger and its activations again: each is traced once.
    headway.cli.plan.resolve_cost_model = functools.cache(headway.cli.plan.resolve_cost_model)
    headway.predict.saved.saved_as_trained = saved_as_trained
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        table_of_devices = Path(folder, "peaks.toml")
        table_of_devices.write_text(SLOW_MEMORY, encoding="utf-8")
        os.environ["HEADWAY_PEAKS"] = str(table_of_devices)
        for row in facts["rows"]:
            if chosen is None or row["number"] in chosen:
                rows.append({**row, **planned(row, facts["models"], Path(folder))})
    record = {
        "what": "plan_published", "environment": environment(torch.device("cpu")),
        "sources": facts["sources"], "read_on": facts["read_on"], "rows": rows,
    }  # fmt: skip
    table = render(record)
    if chosen is None:
        write(result_paths(options.out, record), record, table)
    print(table)


def command_of(row: dict[str, Any], models: dict[str, Any], folder: Path) -> list[str]:
    """Arguments of `headway` that plan a row."""
    model, devices, settings = row["model"], row["devices"], list(row["settings"])
    if model in models:
        (folder / model).mkdir(exist_ok=True)
        (folder / model / "config.json").write_text(json.dumps(models[model]), encoding="utf-8")
        model = str(folder / model)
    device = "H100 with HBM2e, 500 W" if "memory_tb_per_s" in row else row["device"]
    command = ["plan", model, "--device", device, "--devices", str(devices), "--json"]
    if "sequence" in row:  # all samples of a row are as long as its sequence: packs of its micro-batch, exactly full
        lengths = folder / "lengths.csv"
        samples = STEPS * devices * row["micro_batch"] * row["accumulation"]
        lengths.write_text("tokens\n" + f"{row['sequence']}\n" * samples, encoding="utf-8")
        command += ["--lengths", str(lengths), "--epochs", "1"]
        settings.append(f"data.tokens_per_pack={row['sequence'] * row['micro_batch']}")
        settings.append(f"optim.accumulation={row['accumulation']}")
    if "power_w" in row:
        settings.append(f"plan.power_w={row['power_w']}")
    if "per_node" in row:
        command += ["--per-node", str(row["per_node"])]
    return [*command, *(part for setting in settings for part in ("--set", setting))]


def planned(row: dict[str, Any], models: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Plan a row's throughput of each device [tokens/s] and its memory [GiB]."""
    result = CliRunner().invoke(app, command_of(row, models, folder))
    if result.exit_code not in (0, 1) or not result.stdout:
        raise SystemExit(f"row {row['number']}: {result.stderr}{result.exception}")
    plan = json.loads(result.stdout)
    time, flops = plan["time"], plan["flops"]
    # pages of multimodal models print the language model's MFU, without the tower's FLOPs
    language = sum(part for name, part in flops["components"].items() if name.startswith("language."))
    return {
        "predicted_tokens_per_s": [rate / row["devices"] for rate in time["tokens_per_s"]],
        "predicted_mfu": [language / flops["total"] * mfu for mfu in time["mfu"]],
        "predicted_memory_gib": plan["memory"]["peak"] / GIB,
        "kind": "experts" if plan["params"]["active"] < plan["params"]["total"] else "dense",
        "fits": plan["fits"],
    }


def error_of(row: dict[str, Any]) -> float | None:
    """Predicted over printed throughput, less 1; of a printed range of MFU, to its nearer end."""
    if "tokens_per_s" in row:
        return float(row["predicted_tokens_per_s"][1] / row["tokens_per_s"] - 1)
    if "mfu" not in row:
        return None
    (low, high), mfu = row["mfu"], row["predicted_mfu"][1]
    return 0.0 if low <= mfu <= high else mfu / (low if mfu < low else high) - 1


def device_of(row: dict[str, Any]) -> str:
    """Device of a row, with the limit of its power."""
    return f"{row['device']} at {row['power_w']} W" if "power_w" in row else str(row["device"])


def kind_of(row: dict[str, Any]) -> str:
    """Name the kind of a row's model, and the precision of its products."""
    what = "adapters" if any(setting.startswith("model.lora") for setting in row["settings"]) else row["kind"]
    return f"{what}, {'float8' if 'run.dtype=float8' in row['settings'] else 'bfloat16'}"


def render(record: dict[str, Any]) -> str:
    """The record as Markdown tables."""
    timed = [row for row in record["rows"] if error_of(row) is not None]
    fitted = [row for row in timed if not row.get("held_back")]
    held = [row for row in timed if row.get("held_back")]
    remembered = [row for row in record["rows"] if "memory_gib" in row]
    of_memory = medians_tables(remembered, memory_error, {"printed memory": memory_kind_of, "device": device_of})
    sources = [f"* {name}: [{source['title']}]({source['address']})" for name, source in record["sources"].items()]
    sections = [
        "# Plans beside published runs\n\n"
        f"{describe_environment(record)}\n\n"
        "Each row is planned by `headway plan` with the settings beside it, nothing was trained. Rates of devices and "
        "of engines are fitted to the rows of the first table; those of the second were held back. Facts as read on "
        f"{record['read_on']} from:\n\n" + "\n".join(sources) + "\n",
        "## Medians of the error\n\n"
        + medians_tables(timed, error_of, {"device": device_of, "kind": kind_of})
        + f"\n\n{sum(map(inside, timed))} of {len(timed)} lie in the predicted range.\n",
        "## Rows that rates are fitted to\n\n" + rows_table(fitted) + "\n",
        "## Rows held back\n\n" + rows_table(held) + "\n",
        f"## Memory\n\n{MEMORY_KINDS}\n{of_memory}\n\n{memory_table(remembered)}\n",
    ]
    return "\n".join(sections)


def medians_tables(
    rows: list[dict[str, Any]],
    error: Callable[[dict[str, Any]], float | None],
    groups: Mapping[str, Callable[[dict[str, Any]], str]],
) -> str:
    """Median and absolute median of an error, a table for each way to group the rows."""
    parts = {"": rows}
    parts |= {"fitted: ": [row for row in rows if not row.get("held_back")]}
    parts |= {"held back: ": [row for row in rows if row.get("held_back")]}
    names = [f"{part}{what}" for part in parts for what in ("number", "median", "absolute")]
    tables = []
    for heading, group_of in groups.items():
        cells = []
        for group in (*sorted({group_of(row) for row in rows}), "all"):
            cells.append([group])
            for part in parts.values():
                errors = [error(row) for row in part if group in ("all", group_of(row))]
                cells[-1] += [str(len(errors)), *_medians([number for number in errors if number is not None])]
        tables.append(markdown_table([heading, *names], cells))
    return "\n\n".join(tables)


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
        error = error_of(row)
        assert error is not None
        power = f", {row['power_w']} W" if "power_w" in row else ""
        packs = f"{row['sequence']:,} x {row['micro_batch']} x {row['accumulation']}" if "sequence" in row else "-"
        settings = " ".join(setting.partition(".")[2] for setting in row["settings"])
        source = f"{row['source']} {row['release']}" if "release" in row else row["source"]
        cells.append([str(row["number"]), source, row["model"].removeprefix("recipes/").removesuffix(".yaml"),
                      f"{row['devices']:,} {row['device']}{power}", packs, settings or "-", printed, now,
                      f"{100 * error:+.0f} %"])  # fmt: skip
    headings = ["row", "source", "model", "devices", "sequence x micro-batch x accumulation", "settings", "printed",
                "predicted", "error"]  # fmt: skip
    return markdown_table(headings, cells)


def memory_kind_of(row: dict[str, Any]) -> str:
    """Kind of memory that a row's page prints, and its source."""
    return f"{row['memory_kind']}, {row['source']}"


def memory_error(row: dict[str, Any]) -> float:
    """Planned over printed memory, less 1."""
    return float(row["predicted_memory_gib"] / row["memory_gib"] - 1)


def memory_table(rows: list[dict[str, Any]]) -> str:
    """Planned memory beside pages."""
    cells = [
        [str(row["number"]), row["source"], row["model"], f"{row['devices']:,} {row['device']}",
         row.get("memory_printed", f"{row['memory_gib']:g} GiB"), row["memory_kind"], f"{row['memory_gib']:.1f}",
         f"{row['predicted_memory_gib']:.1f}", f"{100 * memory_error(row):+.0f} %"]
        for row in rows
    ]  # fmt: skip
    return markdown_table(["row", "source", "model", "devices", "as printed", "kind", "GiB", "planned", "error"], cells)


if __name__ == "__main__":
    main()
