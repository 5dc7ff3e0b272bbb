"""The page of the step record: every key that a record has, with the type and meaning that the code gives it."""

import inspect
import json
import re
from dataclasses import replace

from headway.count import FlopCount, FlopRow, Workload, load_cost_model
from headway.devices import Peak
from headway.log.records import SCHEMA_VERSION
from headway.meter.tally import late_rank
from headway.meter.window import PhaseUse, Window
from tools.site.markdown import cell, table

_HEAD = """# Keys of the step record

```python
from pathlib import Path

from headway.log.records import read_records

print(next(read_records(Path("runs/digits/run/metrics.jsonl"))))  # one record, as `headway train` writes it
```

Schema version {version}. These are the keys that every step record has, whoever writes it, each with the type of its
value in JSON and its meaning; a value that is not known is `null`. A record is of a window: consecutive steps of all
ranks. [The record of a step](../record.md#the-record-of-a-step) says how they add up and what `headway train` adds.
"""
# What the end of a key says of the quantity before it.
_ENDINGS = {
    "_per_device": "of one device",
    "_smoothed": "over this window and some before it; absent from the first",
}
_TOLD_HERE = {
    "schema_version": "Version of this schema: names are only added within one.",
    "kind": '"step".',
    "flops": "Useful FLOPs: total, forward, dgrad and wgrad; and recompute, which is in no total.",
    "bytes_moved": "Bytes that the steps of all ranks moved at least; null where the meter was given no optimizer.",
    "flops_share_by_component": "Share of each component in the useful FLOPs, by its name, fractions.",
    "flops_by_component": "Useful FLOPs of each component, by its name.",
    "images": "Images.",
    "videos": "Videos.",
    "patches": "Vision patches, before merging.",
    "audio_clips": "Clips of audio.",
    "audio_frames": "Feature frames of audio.",
    "latent_patches": "Patches of latents that are denoised.",
    "images_per_s": "Images per second, all devices together.",
    "patches_per_s": "Vision patches, before merging, per second, all devices together.",
    "peak_flops_per_s": "Peak of one device [FLOP/s].",
    "peak_dtype": "Compute dtype that the peak is of.",
    "peak_source": "Where the peak was read.",
    "num_sampled": "Steps that were divided into phases; the next six are null where none was.",
    "phases": "Phases that the loop names, and the rest, by name: time, FLOPs, tokens, MFU, MBU, and what binds each.",
    "supervised_per_s": "Tokens with a label per second, all devices together; null where a batch did not tell.",
    "phases_s": "Mean time of each phase of a sampled step on the first rank, by its name [s].",
    "host_s": "Time in which the host went through forward, backward and update of a sampled step [s].",
    "host_lead_s": "The most that the host was ahead of its device in a sampled step; null on a CPU [s].",
    "late_rank": "The rank that comes last to its backward; null of one rank.",
    "late_rank_s": "How much later than any other it comes [s].",
    "late_rank_phase": "The phase by which it is late most.",
    "optimizer": "How the optimizer updates: its name, number of tensors, and mode (fused, foreach, loop).",
    "places": "Code that the first rank's loop was in between phases: phase, code, purpose, and time of a step [s].",
    "extra_passes": "Passes and updates beyond the step's need, by kind, each with its number and time [s].",
    "weights_dtype": "Type of most weights.",
    "anomaly_mode": "Whether autograd looks for numbers that are not finite.",
    "device_memory_bytes": "Memory that the device has, or that the process may take of the host's [bytes].",
    "rank_flops_per_busy_s": "FLOPs of each rank's forwards over the time that it computed them [FLOP/s].",
}
_UNKNOWN = re.compile(r"\b(NaN|None)\b")  # JSON has neither
_JSON = {bool: "true or false", int: "integer", float: "number", str: "text", list: "list", dict: "object"}


_PEAK = Peak("a device", flops_per_s=312e12, dtype="bf16", source="its datasheet")


def _phase(flops: int, generated_tokens: int = 0) -> PhaseUse:
    readings = {"wall_s": 0.25, "flops": {"forward": flops}, "tokens": 1500, "slots": 2048, "bytes_moved": 10**10}
    readings |= {"generated_tokens": generated_tokens, "weight_bytes": 10**9}
    return PhaseUse(FlopCount((FlopRow("language.mlp", "tokens", forward=flops),)), _PEAK, 2, 2e12, readings)


def example() -> Window:
    """A window of two steps on two ranks in which every number is known."""
    model = load_cost_model("qwen3-0.6b")
    counts = [model.count(Workload(segments=[1024, 512])), model.count(Workload(segments=[700, 800]))]
    readings = {
        "wall_s": 0.5, "data_wait_s": 0.01, "tokens": 3036, "slots": 4096, "world_size": 2, "step": 20, "num_steps": 2,
        "segments": 4, "images": 1, "patches": 1536, "rank_flops": (counts[0].total, counts[1].total),
        "rank_busy_s": (0.2, 0.2), "rank_busy_flops": (counts[0].total, counts[1].total), "peak_memory_bytes": 2**30,
        "ceiling_flops_per_s": 250e12, "num_batches": 2, "packing_length": 2048, "energy_j": 300.0,
        "bytes_moved": 10**10, "peak_bytes_per_s": 2e12, "supervised": 1200,
        "num_sampled": 1, "host_s": 0.05, "host_lead_s": 0.15, "phases_s": {
            "data": 0.005, "input": 0.001, "exchange": 0.0, "forward": 0.07, "loss": 0.001, "backward": 0.15,
            "inference": 0.0, "gradients": 0.003, "optimizer": 0.015, "after": 0.005,
        },
        **late_rank([{"data": 0.005, "forward": 0.07}, {"data": 0.005, "forward": 0.09}]),
        "device_memory_bytes": 80 * 2**30, "weights_dtype": "float32", "anomaly_mode": False,
        "optimizer": {"name": "AdamW", "num_tensors": 310, "mode": "fused"},
        "places": [{"phase": "after", "code": "train.py:30 in log", "purpose": "logging", "s": 0.004}],
        "machine_state": {"sm_mhz": 1410, "most_sm_mhz": 1980, "power_mw": 690_000, "utilisation_percent": 98},
    }  # fmt: skip
    phases = {"rollout": _phase(counts[0].total // 2, generated_tokens=700), "rest": _phase(0)}
    window = Window(counts[0] + counts[1], _PEAK, readings, phases)
    return replace(window, smoothed=window)


def record_page() -> str:
    """Write the page of keys, in the order of a record.

    Raises:
        LookupError: the code says of a key neither as attribute nor as property what it means.
    """
    record = example().to_dict()
    rows = [(f"`{key}`", _JSON[type(value)], cell(meaning(key))) for key, value in record.items()]
    shown = json.dumps(record, indent=1)
    return "\n".join(
        [
            _HEAD.format(version=SCHEMA_VERSION),
            table(("key", "type", "meaning"), rows),
            "## One record\n",
            "Of two steps on two ranks; its values are made up, and every key is in it.\n",
            f"```json\n{shown}\n```",
            "",
        ]
    )


def meaning(key: str) -> str:
    """Say what a key of a record means, in the words of the class that makes it."""
    if key in _TOLD_HERE:
        return _TOLD_HERE[key]
    for ending, note in _ENDINGS.items():
        if key.endswith(ending):
            quantity = meaning(key.removesuffix(ending)).removesuffix(".")
            return f"{quantity.replace(', all devices together', '')}; {note}."
    if isinstance(found := inspect.getattr_static(Window, key, None), property):
        return _UNKNOWN.sub("null", str(found.__doc__))
    attributes = inspect.getdoc(Window).partition("Attributes:\n")[2]  # type: ignore[union-attr]
    if found := re.search(rf"^    {key}: (.*(?:\n     .*)*)", attributes, flags=re.MULTILINE):
        text = " ".join(found[1].split())
        return _UNKNOWN.sub("null", text[0].upper() + text[1:])
    raise LookupError(f"no attribute or property of Window says what {key!r} of a record means; give it a docstring")
