"""Predicted and measured memory of a run, written to memory.json in the run's folder; on CUDA alone.

A CPU has no allocator of its own to ask, and the memory of the whole process says little of tensors.
"""

import json
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from headway.config import TrainConfig
from headway.errors import HeadwayError
from headway.log.run_files import write_json
from headway.predict.fitting import memory_plan
from headway.predict.recipe import fullest_pack
from headway.predict.saved import saved_of_recipe
from headway.train.memory_error import held_bytes
from headway.train.prepare import Run

FILE_NAME = "memory.json"
SCHEMA_VERSION = 1


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
        planned = memory_plan(config, cost_model, saved_of_recipe(config), run.ranks.size, pack.tokens, pack.patches)
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
