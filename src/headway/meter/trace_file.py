"""The file of a profile: torch's trace, with what explains it alone under the key `headway`."""

import gzip
import hashlib
import json
import math
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from headway.cache import write_whole
from headway.count import CostModel, FlopCount, Workload
from headway.count.flop_count import USEFUL
from headway.count.storage import to_dict
from headway.errors import WorkloadError
from headway.meter.batches import workload_of
from headway.meter.meter import Meter
from headway.meter.pending import PendingStep
from headway.version import __version__

SCHEMA_VERSION = 1
_LEVEL = 5  # of gzip: twice as fast as its default, for a file a tenth larger


def facts_of(meter: Meter, *, rank: int, world_size: int, overhead_s: float | None) -> dict[str, Any]:
    """Say what a trace of a meter's loop needs to be explained alone, its steps aside.

    Args:
        meter: of the loop.
        rank: of this process.
        world_size: number of processes.
        overhead_s: time that the profiler adds to a step [s]; None where it is not known.
    """
    # Where the peak was measured on this device, as on a CPU, it is the ceiling.
    measured = meter.peak if meter.ceiling is None and meter.peak.kind == "ceiling" else meter.ceiling
    ceiling = math.nan if measured is None else measured.flops_per_s
    components: dict[str, str] = {}
    for row in (row for model in meter.models for row in model.rows):
        components.setdefault(row.module, row.component)
    return {
        "schema_version": SCHEMA_VERSION,
        "rank": rank,
        "world_size": world_size,
        "device": meter.peak.name,
        "versions": _versions(),
        "peak_flops_per_s": _known(meter.peak.flops_per_s),
        "peak_source": meter.peak.source,
        "ceiling_flops_per_s": _known(ceiling),
        "convention": USEFUL,
        "recompute": meter.recompute,
        "components": components,
        "cost_model": {"name": meter.cost_model.name, "digest": digest_of(meter.cost_model)},
        "profiler_overhead_s": overhead_s,
    }


def digest_of(cost_model: CostModel) -> str:
    """Return the SHA-256 of a cost model's rows and parameters: the same wherever it was traced or read."""
    data = to_dict(cost_model)
    return hashlib.sha256(json.dumps([data["rows"], data["parameters"]]).encode()).hexdigest()


def step_facts(meter: Meter, step: PendingStep) -> dict[str, Any]:
    """Say what one step computed on this rank, and its FLOPs by the meter's own count.

    Ranks that work on each batch together have equal shares of its FLOPs, as far as this one was told of the batch.

    Args:
        meter: of the loop.
        step: one that the device has passed.
    """
    trained, count = [], FlopCount()
    for batch, billed in step.batches:
        workload = workload_of(batch, meter.models[billed.model])
        trained += [workload] if billed.trains else []
        count += billed.count(workload, meter.models, meter.recompute)
    workload = Workload.total(trained)
    useful: dict[str, dict[str, int]] = {}
    again: dict[str, int] = {}
    for row in count.split(meter.batch_ranks)[0].rows:
        phases = useful.setdefault(row.name, {"forward": 0, "backward": 0})
        phases["forward"] += row.forward
        phases["backward"] += row.dgrad + row.wgrad
        if row.recompute:
            again[row.name] = again.get(row.name, 0) + row.recompute
    return {
        "workload": as_dict(workload),
        "tokens": workload.tokens,
        "slots": workload.slots,
        "useful_flops": useful,
        "recomputed_flops": again,
        "padding_flops": _padding_flops(meter, workload),
    }


def as_dict(workload: Workload) -> dict[str, Any]:
    """Write a workload as plain lists, by the names of `Workload`'s arguments."""
    lists = {
        name: getattr(workload, name).tolist() for name in ("segments", "images", "videos", "sources", "audio", "past")
    }
    return {**lists, "slots": workload.slots, "packs": workload.num_packs}


def _padding_flops(meter: Meter, workload: Workload) -> int | None:
    """Count what layers that run on every slot spend on padding, attention left out; None where it is not known."""
    padding = workload.slots - workload.tokens
    if not padding:
        return 0
    try:
        count = meter.cost_model.count(Workload([padding]), recompute=meter.recompute)
    except WorkloadError:  # a model that reads an encoder: its padding is the decoder's or the encoder's
        return None
    rows = [row for row in count.split(meter.batch_ranks)[0].rows if row.driver == "tokens"]
    return sum(row.total + row.recompute for row in rows)


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


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _versions() -> dict[str, str]:
    """Versions of what computes; of packages, those that are loaded."""
    packages: Sequence[Any] = [sys.modules.get(name) for name in ("torch", "transformers", "triton")]
    loaded = {package.__name__: str(package.__version__) for package in packages if package is not None}
    return {"headway": __version__, "python": platform.python_version(), **loaded}
