"""Memory of a run: what held it when it ran out and what needs less, and what was predicted and measured of its end.

The first is the text of an error. The second is kept beside the run as memory.json, on CUDA alone: a CPU has no
allocator of its own to ask, and the memory of the whole process says little of tensors.
"""

import json
import re
from collections.abc import Collection, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from headway.config import TrainConfig
from headway.errors import HeadwayError
from headway.log.run_files import write_json
from headway.meter.environment import used_memory
from headway.predict.fitting import gentlest_first, room_in
from headway.predict.memory import PARTS
from headway.predict.predictor import Predictor
from headway.predict.recipe import fullest_pack
from headway.predict.saved import saved_of_recipe
from headway.report import format_bytes, format_count
from headway.tracing.unwrap import local
from headway.train.prepare import Run
from headway.train.watch import LoopPhase
from headway.words import Argument

FILE_NAME = "memory.json"
SCHEMA_VERSION = 1
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMG]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class Explanation:
    """Says why memory ran out, in one paragraph. Made before the first step, when nothing is held but what stays.

    Args:
        run: its model, optimizer and device.
        config: its settings.
        phase: what it is doing.
    """

    def __init__(self, run: Run, config: TrainConfig, phase: LoopPhase) -> None:
        self._run, self._config, self._phase = run, config, phase
        self._program = max(0, used_memory(run.device) - sum(held_bytes(run).values()))

    def __call__(self, error: BaseException) -> str:
        """Explain an error while its traceback still holds the tensors of the pack that failed."""
        run, phase = self._run, self._phase
        holders = held_bytes(run)
        activations = max(0, used_memory(run.device) - sum(holders.values()) - self._program)
        holders |= {"activations and temporaries": activations, "the program": self._program}
        requested, total = asked_bytes(error), sum(holders.values())
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in holders.items() if size)
        pack = ""
        if phase.batch is not None:
            load = phase.batch.workload
            pack = (
                f" The pack had {format_count(load.tokens)} tokens in {format_count(load.num_segments)} segments"
                f" ({format_count(load.slots)} slots) and {format_count(load.patches)} vision patches."
            )
        return (
            f"out of memory on {run.device} (rank {run.ranks.rank}) in "
            f"{phase}{f', when {format_bytes(requested)} more were asked for' if requested else ''}. In use: "
            f"{format_bytes(total)}: {parts}.{pack} {self._way_out()} {self._snapshot()}The last checkpoint is "
            "complete. If the setting may change in a resumed run, change it and go on with "
            f"{Argument('resume', True)}."
        )

    def _snapshot(self) -> str:
        """Write what CUDA's allocator holds, for https://docs.pytorch.org/memory_viz; say where."""
        run = self._run
        if run.device.type != "cuda":
            return ""
        path = self._config.run.folder / f"memory-rank-{run.ranks.rank}.pickle"
        try:
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]  # torch leaves it so
        except (OSError, RuntimeError, AttributeError) as error:
            return f"No snapshot of the allocator could be written: {error}. "
        return f"{path} shows the allocator's memory. Open the file at https://docs.pytorch.org/memory_viz. "

    def _way_out(self) -> str:
        """Say which settings fit the device by the memory plan; without a plan, which would need less."""
        run, phase = self._run, self._phase
        if run.device.type == "cuda" and phase.batch is not None:
            total = torch.cuda.get_device_properties(run.device).total_memory
            load = phase.batch.workload
            planned = planned_ways(run, self._config, load.slots, load.patches, total)
            if planned is not None:
                return planned
        gentlest = "; ".join(" and ".join(settings) for settings in gentlest_first(self._config))
        return (
            f"These settings need less memory, the gentlest first: {gentlest}; more processes, which share the "
            f"weights ({run.ranks.size} now). `headway train --dry-run` shows how much memory each needs."
        )


def planned_ways(run: Run, config: TrainConfig, slots: int, patches: int, total_bytes: int) -> str | None:
    """Say with which settings a pack fits a device, by the memory plan.

    Returns:
        A sentence; None where what the model saves cannot be traced.
    """
    room = room_in(total_bytes)
    try:
        predictor = Predictor(run.trained.cost_model, saved_of_recipe(config))
        planned = predictor.memory(config, run.ranks.size, (slots, patches))
        if planned.peak <= room:  # memory ran out nevertheless: settings below the plan's own peak are ways
            room = int(0.99 * planned.peak)
        ways = predictor.ways(config, run.ranks.size, room, (slots, patches))
    except HeadwayError:
        return None
    # The fullest moment by its parts, the largest first.
    now, fullest = planned.peak, planned.fullest
    largest, *others = sorted(fullest.parts.items(), key=lambda part: -part[1])
    smaller = ", ".join(f"{part} {format_bytes(size)}" for part, size in others)
    expected = (
        f"The memory plan expects {format_bytes(now)} of this pack, where {format_bytes(total_bytes)} are there; it is "
        f"fullest in {fullest.name}, and most of that is {largest[0]}, {PARTS[largest[0]]}: {format_bytes(largest[1])} "
        f"(then {smaller})"
    )
    # Ways out come gentlest first; where none fits, the smallest stands alone.
    if ways[0].peak_bytes > room:
        return f"{expected}, and no settings that fit; the least is {ways[0]}, {format_bytes(ways[0].peak_bytes)}."
    fitting = "; ".join(
        f"{way}: {format_bytes(way.peak_bytes)}, {format_bytes(now - way.peak_bytes)} less" for way in ways
    )
    return f"{expected}. What fits, by the plan, the gentlest first: {fitting}."


def held_bytes(run: Run) -> dict[str, int]:
    """Memory of this process's slices of weights, gradients, optimizer state and averages [bytes]."""
    parameters = list(run.model.parameters())
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    averages = [] if run.ema is None else list(run.ema.state_dict().values())
    return {
        "weights": local_bytes([*parameters, *run.model.buffers()], run.device),
        "gradients": local_bytes((p.grad for p in parameters if p.grad is not None), run.device),
        "optimizer": local_bytes((value for value in states if isinstance(value, torch.Tensor)), run.device),
        "average": local_bytes(averages, run.device),
    }


def local_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Memory of this process's slices of tensors on a device; shared storage counts once [bytes]."""
    storages = {}
    for tensor in tensors:
        own = local(tensor)
        if own.device.type == device.type:
            storage = own.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def asked_bytes(error: BaseException) -> int | None:
    """Read the size of the allocation that failed [bytes]; None if the error does not say.

    >>> asked_bytes(RuntimeError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ..."))
    1610612736
    """
    match = _ASKED.search(str(error))
    return int(float(match[1]) * _UNITS[match[2].lower()]) if match else None


def record_memory(run: Run, config: TrainConfig, peak_bytes: int) -> Path | None:
    """Write a run's predicted and measured memory by part.

    Args:
        run: after its last step.
        config: its settings.
        peak_bytes: the most that tensors held on any rank [bytes].

    Returns:
        The file; None on a CPU, and where what the model saves cannot be traced.
    """
    if run.device.type != "cuda":
        return None
    cost_model = run.trained.cost_model
    pack = fullest_pack(config, cost_model)
    try:
        predictor = Predictor(cost_model, saved_of_recipe(config))
        planned = predictor.memory(config, run.ranks.size, (pack.tokens, pack.patches))
    except HeadwayError:
        return None
    # Other processes hold all that is neither free nor reserved by this allocator.
    free, total = torch.cuda.mem_get_info(run.device)
    reserved = torch.cuda.memory_reserved(run.device)
    measured = {**held_bytes(run), "peak": peak_bytes, "reserved": reserved, "outside": total - free - reserved}
    path = config.run.folder / FILE_NAME
    write_json(
        path,
        {
            "schema_version": SCHEMA_VERSION,
            "device": torch.cuda.get_device_name(run.device),
            "torch": torch.__version__,
            "processes": run.ranks.size,
            "predicted": planned.to_dict(),
            "measured": measured,
        },
    )
    return path


def last_residual(folder: Path, names: Collection[str]) -> dict[str, Any] | None:
    """Memory that the last run in a folder held beyond its prediction.

    Args:
        folder: of the run.
        names: of the device, as its driver gives them.

    Returns:
        `predicted` and `more` [bytes], and `torch`; None without a whole record of this device and the installed torch.
    """
    try:
        record = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        if record["device"] not in names or record["torch"] != version("torch"):
            return None
        predicted, measured = int(record["predicted"]["peak"]), int(record["measured"]["peak"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # none, or one that is not whole
        return None
    return {"predicted": predicted, "more": measured - predicted, "torch": record["torch"]}
