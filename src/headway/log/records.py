"""Records of steps: the entries that a file keeps, the entries that follow, and the one reader of such files.

A file begins with a line of kind "run", which has the entries that its steps share. A step's line has what was measured
and differs from that line, which it names. `read_records` gives whole records. Files of older versions, whose lines are
whole records, are read by it too.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from headway.count import modalities
from headway.count.generation import GENERATION_QUANTITIES
from headway.errors import LogError
from headway.files import open_plain
from headway.log.jsonl import as_object

SCHEMA_VERSION = 1
"""Version of a whole record, within which names are only added."""
_FILE_VERSION = 2
"""Version of lines that hold measured entries alone; lines of version 1 are whole records."""
LISTED = 128
"""Most ranks that a record lists one by one."""
_HEADER = "run_header"  # entry of a line: the header that it belongs to
# Entries that rates and fractions are computed from, and that no whole record has.
_INPUTS = (
    "components",
    "rank_busy_s",
    "rank_busy_flops",
    "num_batches",
    "packing_length",
    "ceiling_flops_per_s",
    "peak_bytes_per_s",
)
# Facts of a run: where one changes, a header follows.
_FACTS = (
    "components",
    "convention",
    "peak_flops_per_s",
    "peak_dtype",
    "peak_source",
    "peak_bytes_per_s",
    "ceiling_flops_per_s",
    "packing_length",
    "world_size",
    "device_memory_bytes",
    "weights_dtype",
    "optimizer",
    "anomaly_mode",
)
# Counts that are mostly those of the step before; a line has one that differs.
_USUAL = ("schema_version", "num_steps", "num_batches", "packs")
_PASSES = ("forward", "dgrad", "wgrad", "recompute")


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Divide numbers that were measured; None, "not known", where they have no ratio.

    A step may have had no work, no time or no rank that worked, and what only observes it is not to fail of that.

    >>> ratio(3, 4), ratio(0, 0), ratio(None, 2)
    (0.75, None, None)
    """
    if numerator is None or denominator is None:
        return None
    try:
        quotient = numerator / denominator
        is_known = math.isfinite(quotient) and math.isfinite(denominator)
    except (ZeroDivisionError, OverflowError):  # counts are integers of any size
        return None
    return quotient if is_known else None


def known(node: Any) -> Any:
    """Replace numbers that are not finite, for which JSON has no word, by None: they are not known."""
    if isinstance(node, float):
        return node if math.isfinite(node) else None
    if isinstance(node, dict):
        return {key: known(value) for key, value in node.items()}
    return [known(value) for value in node] if isinstance(node, list | tuple) else node


class Measured(dict[str, Any]):
    """Entries of a step or of some steps that a file keeps, from which `StepRecord` makes a record."""


class StepRecord(dict[str, Any]):
    """The record of a step, or of some steps: measured entries, and the entries that follow.

    Args:
        measured: entries that JSON has words for, of which some are only inputs of others.

    Attributes:
        measured: those that a file keeps.
    """

    def __init__(self, measured: dict[str, Any]) -> None:
        self.measured = measured
        super().__init__(derived(measured))


def derived(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Make a whole record of measured entries."""
    entry = measured
    wall_s, world_size, tokens, slots = (entry[name] for name in ("wall_s", "world_size", "tokens", "slots"))
    total, flops = _all_passes(entry["flops"])
    by_component = dict(zip(entry["components"], entry["flops_by_component"], strict=True))
    # rates of all devices together, of one, and as shares of what they could do
    flops_per_s, peak = ratio(total, wall_s), _times(entry["peak_flops_per_s"], world_size)
    devices_s = _times(wall_s, world_size)
    of_tokens = ratio(tokens, slots)
    phases = {name: phase_entries(phase, entry) for name, phase in entry["phases"].items()}
    elsewhere = [(name, entry["phases"][name]) for name, phase in phases.items() if phase["num_devices"] is not None]
    everywhere = total + sum(phases[name]["flops"]["total"] for name, _ in elsewhere)
    peak_everywhere = peak
    for _, phase in elsewhere:
        of_phase = _times(phase["peak_flops_per_s"], phase["num_devices"])
        peak_everywhere = None if peak_everywhere is None or of_phase is None else peak_everywhere + of_phase
    return {
        **{name: value for name, value in entry.items() if name not in _INPUTS},
        "data_wait_share": ratio(entry["data_wait_s"], wall_s),
        "tokens_per_s": ratio(tokens, wall_s),
        "slots_per_s": ratio(slots, wall_s),
        "padding_share": None if of_tokens is None else 1 - of_tokens,
        "flops": flops,
        "flops_by_component": by_component,
        "mfu": ratio(flops_per_s, peak),
        "hfu": ratio(ratio(total + flops["recompute"], wall_s), peak),
        "phases": phases,
        "step_s": ratio(wall_s, entry["num_steps"]),
        "flops_per_s": flops_per_s,
        "flops_per_s_per_device": ratio(flops_per_s, world_size),
        "tokens_per_s_per_device": ratio(tokens, devices_s),
        "slots_per_s_per_device": ratio(slots, devices_s),
        "supervised_per_s": ratio(entry["supervised"], wall_s),
        "images_per_s": ratio(entry["images"], wall_s),
        "patches_per_s": ratio(entry["patches"], wall_s),
        "flops_share_by_component": {name: ratio(n, total) for name, n in by_component.items()} if total else {},
        "mfu_of_all_devices": ratio(ratio(everywhere, wall_s), peak_everywhere),
        "mfu_of_ceiling": ratio(flops_per_s, _times(entry["ceiling_flops_per_s"], world_size)),
        "mbu": _mbu(entry["bytes_moved"], wall_s, entry["peak_bytes_per_s"], world_size),
        "fill": ratio(tokens, entry["num_batches"] * (entry["packing_length"] or 0)),
        "joules_per_token": ratio(entry["energy_j"], tokens),
        **(of_ranks(entry) if "rank_flops" in entry else {}),
    }


def of_ranks(entry: Mapping[str, Any], *, is_listed: bool = True) -> dict[str, Any]:
    """Differences between ranks: the rank with the most work, and the slowest device among ranks that had work.

    Args:
        entry: FLOPs of each rank, those of its forwards and their time.
        is_listed: whether the speed of each rank is among them.
    """
    works, busy_flops = entry["rank_flops"], entry["rank_busy_flops"]
    heaviest = max(works, default=0)
    balance = ratio(sum(works), len(works) * heaviest)
    # A rank without work says nothing of its device. If one rank with work was not timed, no rank is called slowest.
    speeds = [ratio(n, busy_s) if n else None for n, busy_s in zip(busy_flops, entry["rank_busy_s"], strict=True)]
    of_workers = {rank: speed for rank, speed in enumerate(speeds) if busy_flops[rank]}
    known_speeds = {rank: speed for rank, speed in of_workers.items() if speed is not None}
    slowest = None
    if known_speeds and len(known_speeds) == len(of_workers):
        slowest = min(known_speeds, key=known_speeds.__getitem__)
    return {
        "balance": balance,
        "straggler_share": None if balance is None else 1 - balance,
        "heaviest_rank": works.index(heaviest) if any(works) else None,
        "heaviest_rank_load": ratio(1, balance),
        "slowest_rank": slowest,
        "slowest_rank_speed": None if slowest is None else ratio(speeds[slowest], median(known_speeds.values())),
        **({"rank_flops_per_busy_s": speeds} if is_listed else {}),
    }


def phase_entries(phase: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Make the whole entry of a named phase.

    Args:
        phase: what was measured, without counts of 0.
        run: the record's entries about devices, for a phase without devices of its own.
    """
    is_elsewhere = phase.get("num_devices") is not None
    # A phase with devices of its own has their time and their peaks.
    num_devices = phase["num_devices"] if is_elsewhere else run["world_size"]
    peak, peak_bytes = ((phase if is_elsewhere else run)[name] for name in ("peak_flops_per_s", "peak_bytes_per_s"))
    seconds = phase["devices_s"] if is_elsewhere else phase.get("busy_s", phase["wall_s"])
    total, flops = _all_passes(phase.get("flops", {}))
    tokens, generated = phase.get("tokens", 0), phase.get("generated_tokens", 0)
    mfu = ratio(ratio(total, seconds), _times(peak, num_devices))
    mbu = _mbu(phase.get("bytes_moved"), seconds, peak_bytes, num_devices)
    bound = None if mfu is None or mbu is None or not (mfu or mbu) else "compute" if mfu >= mbu else "memory"
    return {
        "wall_s": phase["wall_s"],
        "devices_s": phase.get("devices_s"),
        "num_devices": phase.get("num_devices"),
        "flops": flops,
        "tokens": tokens,
        **{name: phase.get(name, 0) for name in ("slots", "supervised", *GENERATION_QUANTITIES, "scored_tokens")},
        "tokens_per_s": ratio(tokens, seconds),
        "generated_tokens_per_s": ratio(generated, seconds),
        "mfu": mfu,
        "mbu": mbu,
        "bytes_moved": phase.get("bytes_moved"),
        "weight_bytes": phase.get("weight_bytes"),
        "bound": bound,
    }


def _all_passes(counted: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """Useful FLOPs, recomputation left out, and the FLOPs of each pass."""
    passes = {name: counted.get(name, 0) for name in _PASSES}
    total = sum(passes.values()) - passes["recompute"]
    return total, {"total": total, **passes}


def _times(rate: float | None, number: int) -> float | None:
    return None if rate is None else rate * number


def _mbu(moved: int | None, seconds: float | None, peak_bytes_per_s: float | None, num_devices: int) -> float | None:
    return ratio(ratio(moved, seconds), _times(peak_bytes_per_s, num_devices)) if moved else None


_SUMMED = {
    "num_steps", "wall_s", "data_wait_s", "tokens", "slots", "supervised", "segments", "num_batches", "num_left_out",
    "left_out_s", "away_s", "compile_s", "evaluation_s", "checkpoint_s", "collection_s", "num_profiled", "num_skipped",
    "bytes_moved", "energy_j", "flops", "rank_flops", "rank_busy_s", "rank_busy_flops", "phases", "num_sampled",
    "recompiles", "packs", "making_s", "extra_passes", "core_wait_s",
}  # fmt: skip
_LAST = ("step", "lr", "epoch")  # numbers of the last step
_PER_SAMPLED = ("phases_s", "host_s", "host_lead_s")  # means of sampled steps
_OF_DEVICES = ("num_devices", "peak_flops_per_s", "peak_bytes_per_s")


def can_be_joined(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Tell whether the records of some steps, and of the steps behind them, had the same devices and settings."""
    return all(before.get(name) == after.get(name) for name in _FACTS if name != "components")


def joined(before: Mapping[str, Any], after: Mapping[str, Any]) -> Measured:
    """Join the records of some steps and of the steps behind them into one window.

    Times, counts and FLOPs are sums, and so the rates that follow are a total over a total. Other fractional numbers,
    such as a loss, are means over the steps. A digest of samples, which has no sum here, is left out.
    """
    numbers = before["num_steps"], after["num_steps"]
    sampled = before["num_sampled"], after["num_sampled"]
    summed = _SUMMED | modalities.totals({}).keys()
    window = {**before, **after}
    window.pop("samples_digest", None)
    for name in window.keys() & before.keys() & after.keys():
        first, second = before[name], after[name]
        if name in summed:
            window[name] = _sum(first, second)
        elif name == "sources":
            window[name] = {source: _of_source(first.get(source), second.get(source)) for source in {**first, **second}}
        elif name in _PER_SAMPLED:
            window[name] = _mean(first, second, sampled)
        elif name == "peak_memory_bytes":
            window[name] = max(first, second)
        elif isinstance(first, bool) and isinstance(second, bool):
            window[name] = first or second
        elif name not in _LAST and name not in _FACTS and isinstance(first or second, float):
            window[name] = _mean(first, second, numbers)
    by_component = _sum(
        *(dict(zip(part["components"], part["flops_by_component"], strict=True)) for part in (before, after))
    )
    return Measured(window | {"components": [*by_component], "flops_by_component": [*by_component.values()]})


def _sum(first: Any, second: Any) -> Any:
    """Add numbers, lists of numbers and objects of them; an unknown number makes an unknown sum."""
    if isinstance(first, dict) and isinstance(second, dict):
        both = first.keys() & second.keys()
        sums = {name: second[name] if name in _OF_DEVICES else _sum(first[name], second[name]) for name in both}
        return {name: sums.get(name, value) for name, value in {**first, **second}.items()}
    if isinstance(first, list):
        return [_sum(*pair) for pair in zip(first, second, strict=True)]
    return None if first is None or second is None else first + second


def _mean(first: Any, second: Any, numbers: tuple[int, int]) -> Any:
    """Mean of two numbers or objects of them, by how many each stands for; an unknown number is left out."""
    if first is None or second is None or not all(numbers):
        return second if first is None or not numbers[0] else first
    if isinstance(first, dict):
        return {name: _mean(value, second.get(name), numbers) for name, value in first.items()}
    return (first * numbers[0] + second * numbers[1]) / sum(numbers)


def _of_source(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any]:
    if first is None or second is None:
        return {**(first or second or {})}
    # a loss is a mean over its units: pairs, say, or targets
    units = first.get("units", first["supervised"]), second.get("units", second["supervised"])
    loss = _mean(first["loss"], second["loss"], units)
    waste = _mean(first["waste"], second["waste"], (first["tokens"], second["tokens"]))
    of_units = {"units": sum(units)} if "units" in {**first, **second} else {}
    return {**_sum(first, second), "loss": loss, "waste": waste, **of_units}


class RecordLines:
    """Turns records into lines of a file; a `StepRecord` leaves out the entries of its header.

    Attributes:
        headers: lines of all headers so far.
    """

    def __init__(self) -> None:
        self.headers, self._name = b"", ""
        self._shared: dict[str, Any] = {}
        self._known: dict[str, tuple[str, dict[str, Any]]] = {}  # names and entries of headers, by their facts

    def encode(self, record: Mapping[str, Any]) -> bytes:
        """Give the line of a record, behind a header where facts of the run are new."""
        if not isinstance(record, StepRecord):
            return _as_line(record)
        measured, begin = record.measured, b""
        if not self._shared or any(self._shared.get(name) != measured.get(name) for name in _FACTS):
            begin = self._turn_to(measured)
        shared = self._shared
        line = {name: value for name, value in measured.items() if name not in shared or not _same(shared[name], value)}
        if missing := [name for name in shared if name not in measured]:
            line["without"] = missing
        return begin + _as_line({_HEADER: self._name, **line})

    def _turn_to(self, measured: Mapping[str, Any]) -> bytes:
        """Take the header of a record's facts; returns the line of a new one."""
        facts = json.dumps([measured.get(name) for name in _FACTS])
        if facts in self._known:  # the facts of a header may come again: of steps with pictures, for example
            self._name, self._shared = self._known[facts]
            return b""
        # Values that are zero, empty or unknown in the first step of a header are so in most of its steps.
        self._shared = {n: value for n, value in measured.items() if n in _FACTS or n in _USUAL or not value}
        self._name = hashlib.blake2b(json.dumps(self._shared).encode(), digest_size=4).hexdigest()
        self._known[facts] = self._name, self._shared
        header = {"kind": "run", "schema_version": _FILE_VERSION, "name": self._name, "shared": self._shared}
        self.headers += _as_line(header)
        return _as_line(header)


def _same(shared: Any, value: Any) -> bool:
    return shared == value and type(shared) is type(value)


def _as_line(entries: Mapping[str, Any]) -> bytes:
    return json.dumps(entries, allow_nan=False).encode() + b"\n"


class RecordReader:
    """Reads the lines of one file, in their order.

    Args:
        decoder: of `headway.log.jsonl.sharing_decoder`, where many records are kept.
    """

    def __init__(self, decoder: json.JSONDecoder | None = None) -> None:
        self._decoder = decoder
        self._headers: dict[str, dict[str, Any]] = {}

    def read(self, line: bytes, *, derives: bool = True) -> dict[str, Any] | None:
        """Give the whole record of a line, and a header as it is; None for an unreadable line.

        Args:
            line: with its line break.
            derives: False for what was measured alone, a `Measured`, where the file has no whole record.
        """
        entries = as_object(line)
        if entries is None:
            return None
        if is_header(entries):
            self._headers[str(entries.get("name"))] = entries["shared"]
            return entries
        if _HEADER not in entries:  # a whole record: of an older file, or not of a step
            return entries if self._decoder is None else as_object(line, self._decoder)
        shared = self._headers.get(str(entries.pop(_HEADER)))
        if shared is None:
            return None
        missing = entries.pop("without", ())
        try:
            measured = Measured({name: value for name, value in (shared | entries).items() if name not in missing})
            return StepRecord(measured) if derives else measured
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):  # the line was edited
            return None


def is_header(entries: Mapping[str, Any]) -> bool:
    """Tell whether a line's object is no record, but a header with the entries that the records behind it share."""
    return entries.get("kind") == "run" and isinstance(entries.get("shared"), dict)


def records_of(lines: Iterable[bytes], source: object) -> Iterator[dict[str, Any]]:
    """Read whole records one by one; a fragment that a kill left at the end is passed over.

    Args:
        lines: of a file, each with its line break.
        source: its name, for the error.

    Raises:
        LogError: a line before the last cannot be read.
    """
    reader, number_of_unreadable = RecordReader(), 0
    for number, line in enumerate(lines, start=1):
        if number_of_unreadable:
            raise LogError(
                f"{source}, line {number_of_unreadable} cannot be read as a record. Repair or delete the line, then "
                "try again."
            )
        record = reader.read(line)
        if record is None:
            number_of_unreadable = number if line.strip() else 0
        elif not is_header(record):
            yield record


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Read the whole records of a file one by one, so that a long file takes no more memory than a short one.

    Raises:
        LogError: the file cannot be read, or a line before the last cannot be read.

    >>> [record["mfu"] for record in read_records(Path("runs/digits/run/metrics.jsonl"))]    # doctest: +SKIP
    """
    try:
        with open_plain(path) as file:
            yield from records_of(file, path)
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror}.") from error
