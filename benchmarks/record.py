"""What every benchmark writes: a JSON record of hardware, versions and numbers, and the table rendered from it."""

import json
import os
import re
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import headway
from headway.devices.names import cpu_name

RESULTS = Path(__file__).parent / "results"


def environment(device: torch.device) -> dict[str, Any]:
    """Describe what the numbers were measured with."""
    on_cuda = device.type == "cuda"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if on_cuda else cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_1min_at_start": round(os.getloadavg()[0], 2),
        "headway": headway.__version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "accelerate": _version_if_there("accelerate"),
    }


def _version_if_there(package: str) -> str | None:
    """Version of a package that not every benchmark needs; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def result_paths(folder: Path, record: dict[str, Any]) -> tuple[Path, Path]:
    """Name the record and the table: <what>_<hardware>_<yyyymm>.json and .md."""
    env = record["environment"]
    name = re.sub(r"[^a-z0-9]+", "-", env["device"].lower()).strip("-")
    hardware = name if "nvidia" in name else f"{name}-{env['threads']}threads"
    stem = f"{record['what']}_{hardware}_{env['date'][:7].replace('-', '')}"
    return folder / f"{stem}.json", folder / f"{stem}.md"


def write(paths: tuple[Path, Path], record: dict[str, Any], table: str) -> None:
    """Write the record and its table; whoever is ended in the middle of it leaves what was there before."""
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, (json.dumps(record, indent=1) + "\n", table), strict=True):
        beside = path.with_name(f".{path.name}.new")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range; three to five rounds support no finer statistics."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a Markdown table; the first column stands left, the others right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows))


def describe_environment(record: dict[str, Any]) -> str:
    """One line on hardware and versions, for the foot of a table."""
    env = record["environment"]
    return (
        f"{env['device']}, {env['cores']} cores, {env['threads']} thread{'' if env['threads'] == 1 else 's'}, load "
        f"{env['load_1min_at_start']} at the start; {env['date']}; Headway {env['headway']}, "
        f"torch {env['torch']}, transformers {env['transformers']}, accelerate {env['accelerate'] or 'not installed'}."
    )
