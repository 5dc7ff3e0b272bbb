"""The file of a profile: torch's trace, with the facts that explain it alone under the key `headway`."""

import gzip
import hashlib
import json
import math
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from headway.cache import write_whole
from headway.count import CostModel, FlopCount, Workload
from headway.count.flop_count import USEFUL
from headway.count.models import to_dict
from headway.count.step_facts import components_of, flops_on_padding
from headway.count.step_facts import step_facts as what_it_computed
from headway.meter.batches import workload_of
from headway.meter.energy import clocks_of
from headway.meter.environment import largest_memory, memory_of
from headway.meter.pending import PendingStep
from headway.meter.step_meter import StepMeter
from headway.version import __version__

SCHEMA_VERSION = 1
_LEVEL = 5  # level of gzip: twice as fast as gzip's default, for a file a tenth larger


def facts_of(meter: StepMeter, *, rank: int, world_size: int, overhead_s: float | None) -> dict[str, Any]:
    """Collect the facts by which a trace of a meter's loop can be explained alone, its steps aside.

    Args:
        meter: of the loop.
        rank: of this process.
        world_size: number of processes.
        overhead_s: time that the profiler adds to a step [s]; None where it is not known.
    """
    # A peak that was measured on this device, as on a CPU, is the ceiling.
    measured = meter.peak if meter.ceiling is None and meter.peak.kind == "ceiling" else meter.ceiling
    ceiling = math.nan if measured is None else measured.flops_per_s
    return {
        "schema_version": SCHEMA_VERSION,
        "rank": rank,
        "world_size": world_size,
        "loop": "headway train" if meter.by_messages else "a loop of one's own",
        "device": meter.peak.name,
        "versions": _versions(),
        "peak_flops_per_s": _finite_or_none(meter.peak.flops_per_s),
        "peak_source": meter.peak.source,
        "ceiling_flops_per_s": _finite_or_none(ceiling),
        "memory_bytes_per_s": _finite_or_none(meter.memory_bytes_per_s),
        "convention": USEFUL,
        "recompute": meter.recompute,
        "components": components_of(*meter.models),
        "cost_model": {"name": meter.cost_model.name, "digest": digest_of(meter.cost_model)},
        "profiler_overhead_s": overhead_s,
        "memory": _memory(meter.device),
        "clocks": clocks_of(meter.device),
    }


def digest_of(cost_model: CostModel) -> str:
    """Return the SHA-256 of a cost model's rows and parameters: the same wherever it was traced or read."""
    data = to_dict(cost_model)
    return hashlib.sha256(json.dumps([data["rows"], data["parameters"]]).encode()).hexdigest()


def step_facts(meter: StepMeter, step: PendingStep) -> dict[str, Any]:
    """Describe the work of one step on this rank, and its FLOPs by the meter's own count.

    Ranks that work on each batch together have equal shares of its FLOPs, as far as this one was told of the batch.

    Args:
        meter: of the loop.
        step: one that the device has passed.
    """
    trained, count = [], FlopCount()
    for batch, billed in step.batches:
        if billed.phase in meter.phase_devices:
            continue  # other devices ran it, which are not in the trace
        workload = workload_of(batch, meter.models[billed.model])
        trained += [workload] if billed.trains else []
        count += billed.flops(workload, meter.models)
    workload = Workload.total(trained)
    shares = count.split(meter.batch_share.ranks)
    padding = flops_on_padding(meter.cost_model, workload, meter.recompute, meter.batch_share.ranks)
    return {**what_it_computed(shares[0], workload, padding), "packs": _packs(meter, step)}


def _packs(meter: StepMeter, step: PendingStep) -> list[dict[str, Any]]:
    """Describe the work of each pass of the meter's model, in order, and the FLOPs of each module that attends.

    The FLOPs of a module are a list: forward, backward, and what checkpointing runs again.
    """
    attends = {(row.module, row.driver) for row in meter.cost_model.rows if row.component.endswith(".attention")}
    packs = []
    for batch, billed in step.batches:
        if billed.model or billed.phase in meter.phase_devices:
            continue
        workload = workload_of(batch, meter.cost_model)
        count = billed.flops(workload, meter.models, by="layer").split(meter.batch_share.ranks)[0]
        attention: dict[str, list[int]] = {}
        for row in count.rows:
            if (row.name, row.driver) in attends:
                before = attention.get(row.name, [0, 0, 0])
                own = (row.forward, row.dgrad + row.wgrad, row.recompute)
                attention[row.name] = [a + b for a, b in zip(before, own, strict=True)]
        packs.append({"workload": workload.to_dict(), "attention": attention})
    return packs


def write_trace(profiler: Any, path: Path, facts: Mapping[str, Any]) -> None:
    """Write what a profiler has recorded, compressed, with the facts at the head of the file.

    Args:
        profiler: a `torch.profiler.profile` that has stopped.
        path: of the file, which ends in `.json.gz`.
        facts: for the key `headway`.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".trace-") as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))

        def join(file: BinaryIO) -> None:
            with plain.open("rb") as trace, gzip.GzipFile("", "wb", _LEVEL, file) as packed:
                trace.seek(trace.read(64).index(b"{") + 1)  # a Chrome trace is one object
                packed.write(b'{\n  "headway": ' + json.dumps(facts, allow_nan=False).encode() + b",")
                shutil.copyfileobj(trace, packed, 1 << 20)

        write_whole(path, join)


def _memory(device: Any) -> dict[str, int] | None:
    """Say how much memory the device has, or the host of a CPU, and the most that this process held so far [bytes]."""
    total = memory_of(device)
    return {"peak_bytes": largest_memory(device), "total_bytes": total} if total else None


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _versions() -> dict[str, str]:
    """Versions of Headway and Python, and of the computing packages that are loaded."""
    packages = {name: sys.modules.get(name) for name in ("torch", "transformers", "triton")}
    loaded = {name: str(getattr(package, "__version__", "unknown")) for name, package in packages.items() if package}
    return {"headway": __version__, "python": platform.python_version(), **loaded}
