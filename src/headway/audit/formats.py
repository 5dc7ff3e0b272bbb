"""Text logs of other tools: the lines that report a step, and those that only look like it.

`formats.toml` has a row for each format; its patterns say it all where a line is a step. The readers below are of steps
over several lines. Each reader takes the lines of one process and counts what it leaves out, by reason.
"""

import csv
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from headway.audit.by_phase import PHASES, READERS, ReadPhases, ReadRows
from headway.audit.rows import NUMBER, STEP_NUMBER, Counted, Interval, LogRow, Reading, near, printed
from headway.log.losses import StepLoss

_ANY = r"(?:np\.float\d+\()?([0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][+-]?\d+)?)"
_JSON_NUMBER = r"([0-9]{1,18}(?:\.[0-9]+)?(?:[eE][+-]?\d{1,2})?)(?![0-9.eE])"
_STAMP = r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[,.]\d{3})"
_MEGATRON = re.compile(rf"iteration\s+{STEP_NUMBER}\s*/.*?elapsed time per iteration \(ms\): {NUMBER}")
_MEGATRON_RATE = re.compile(
    rf"(?:throughput|compute) per GPU \(TFLOP/s/GPU\): {NUMBER}|GPU utilization: {NUMBER}\s*MODEL_TFLOP/s/GPU"
)
_MEGATRON_BATCH = re.compile(r"global batch size:\s*(\d{1,18})")
_PRIMUS_TOKENS = re.compile(rf"\(tokens/s/GPU\): {NUMBER}|tokens/s/GPU inst/harmonic mean: {NUMBER}")
_PRIMUS_MFU = re.compile(rf"\| mfu: {NUMBER}%")
_RL_HEAD = re.compile(r"=+ Step (\d{1,18})/\d+ =+")
_RL_RATE = re.compile(rf"Training FLOPS: [0-9.,]+ TFLOPS \({NUMBER} TFLOPS per rank\)")
_RL_VALUES = {
    "mfu": re.compile(rf"Training Model Floating Point Utilization: {NUMBER}%"),
    "tokens": re.compile(rf"Policy Training \(Tokens/sec/gpu\): {NUMBER}"),
    "seconds": re.compile(rf"policy_training: {NUMBER}s"),
}
_AUTOMODEL = re.compile(rf'"step": {STEP_NUMBER}, .*?"tps_per_gpu": {_JSON_NUMBER}, "mfu": (?:{_JSON_NUMBER}|null)')
_AUTOMODEL_TOKENS = re.compile(rf'"tps": {_JSON_NUMBER}, .*"num_tokens_per_step": {_JSON_NUMBER}')
_AUTOMODEL_TIME = re.compile(rf"Max iter time: {NUMBER} seconds")
_AUTOMODEL_MFU = re.compile(rf"(?<!Average )MFU: {NUMBER}%")
_SWIFT_STEP = re.compile(r"['\"]global_step/max_steps['\"]: ['\"](\d{1,18})/\d+['\"]")
_SWIFT_MFU = re.compile(rf"['\"]MFU['\"]: {_JSON_NUMBER}")
_SWIFT_SPEED = re.compile(rf"['\"]train_speed\(s/it\)['\"]: {_JSON_NUMBER}")
_LIGHTNING = {  # columns, with the stage and the separator that its user chose before them
    "mfu": re.compile(r"(?:train\W)?device\Wmfu"),
    "flops": re.compile(r"(?:train\W)?device\Wflops_per_sec"),
    "tokens": re.compile(r"(?:train\W)?device\Witems_per_sec"),
}
_SUFFIX = {"": 1.0, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
# tqdm: description, bar, updates/all, elapsed and left, time of an update, and what the script sets behind it
_DIFFUSERS = re.compile(rf"\| {STEP_NUMBER}/\d+ \[[^\]]*?,\s*{NUMBER}(s/it|it/s), (?:step_)?loss=[^,\]]+, lr=")
_SCALES = {"": 1.0, "%": 0.01, "T": 1e12, "ms": 1e-3}
_FIELD = re.compile(r"<(\w+)(?::([^>]+))?>")


class _LineReader:
    """Reads a format of which each step is a line, as its row of `formats.toml` says."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        texts = [row["pattern"], *row.get("also", ())]
        number = _ANY if row.get("numbers") == "any" else NUMBER

        def named(match: re.Match[str]) -> str:
            text = {"step": STEP_NUMBER, "stamp": _STAMP}.get(match[1], number)
            start = text.index("([0-9]") if text is number else 0
            return f"{text[:start]}(?P<{match[1]}>{text[start + 1 :]}"

        self._row = row
        self._scales = {name: _SCALES[unit] for text in texts for name, unit in _FIELD.findall(text)}
        self._pattern, *self._also = (re.compile(_FIELD.sub(named, text)) for text in texts)
        self._looks = [(re.compile(text), reason) for text, reason in row.get("looks", ())]

    def __call__(self, lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
        """Read a row of every line that the pattern matches; count those that only look like it."""
        for number, line in enumerate(lines):
            if (match := self._pattern.search(line)) is None:
                if reason := next((reason for look, reason in self._looks if look.search(line)), None):
                    skipped[reason] += 1
                continue
            texts = match.groupdict()
            if "zero" in self._row and not all(_float(text) for name, text in texts.items() if name != "step"):
                skipped[self._row["zero"]] += 1
                continue
            for pattern in self._also:
                texts |= match.groupdict() if (match := pattern.search(line)) else {}
            step, stamp, share = (texts.pop(name, None) for name in ("step", "stamp", "memory_share"))
            readings: dict[str, Any] = {name: self._reading(name, text) for name, text in texts.items() if text}
            yield LogRow(
                int(step) if step else number,
                stamp_s=datetime.fromisoformat(stamp.replace(",", ".")).timestamp() if stamp else None,
                memory_share=float(share) / 100 if share else None,
                **readings,
            )

    def _reading(self, name: str, text: str) -> Reading:
        if "exact" in self._row:
            return near(_float(text), self._row["exact"])
        step = self._row.get("steps", {}).get(name)
        return printed(text, self._scales[name], truncated=name in self._row.get("truncated", ()), step=step)


def _float(text: str) -> float:
    return float(text.replace(",", ""))


def _megatron(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read the lines of Megatron and of Primus, which prints the step's number before a mean: 567.6/568.0."""
    pending: str | None = None  # Megatron-Bridge writes the rate on a line of its own before the iteration's
    for line in lines:
        rate, iteration = _MEGATRON_RATE.search(line), _MEGATRON.search(line)
        tflops = (rate[1] or rate[2]) if rate else None
        if iteration is None:
            pending = tflops or pending
            continue
        batch, tokens, mfu = (pattern.search(line) for pattern in (_MEGATRON_BATCH, _PRIMUS_TOKENS, _PRIMUS_MFU))
        if (tflops := tflops or pending) is not None:
            yield LogRow(
                int(iteration[1]),
                mfu=printed(mfu[1], 0.01) if mfu else None,
                flops_per_s=printed(tflops, 1e12),
                tokens_per_s=printed(tokens[1] or tokens[2]) if tokens else None,
                step_s=printed(iteration[2], 1e-3),
                sequences=int(batch[1]) if batch else None,
            )
        else:
            skipped["an iteration without TFLOP/s/GPU (--log-throughput was off)"] += 1
        pending = None


def _megatron_bridge(lines: Sequence[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read Megatron's lines where Megatron-Bridge's own, of the step's time, stand before them."""
    return _megatron(lines, skipped) if any("MODEL_TFLOP/s/GPU" in line for line in lines) else iter(())


def _primus(added: str, lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read Primus' lines: Megatron's, and what its backend adds to them, tokens/s or, torchtitan's alone, an MFU."""
    return (row for row in _megatron(lines, skipped) if getattr(row, added))


def _nemo_rl(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read NeMo RL's summaries: a step's marker, then its rates in any order; without markers, from rate to rate."""
    lines = list(lines)
    marked = [(int(marker[1]), block) for marker, block in _split(lines, _RL_HEAD)]
    for step, block in marked or list(enumerate((block for _, block in _split(lines, _RL_RATE)), 1)):
        rates = [match[1] for line in block if (match := _RL_RATE.search(line))]
        values = {
            name: match[1] for line in block for name, pattern in _RL_VALUES.items() if (match := pattern.search(line))
        }
        if not rates:
            skipped["a step without FLOPS, which it prints for types that it has a formula for"] += 1
            continue
        yield LogRow(
            step,
            mfu=printed(values["mfu"], 0.01) if "mfu" in values else None,
            flops_per_s=printed(rates[0], 1e12),
            tokens_per_s=printed(values["tokens"]) if "tokens" in values else None,
            step_s=printed(values["seconds"]) if "seconds" in values else None,
        )


def _automodel(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read the JSON lines of NeMo Automodel's training.jsonl; its console has no MFU."""
    for line in lines:
        if (match := _AUTOMODEL.search(line)) is None:
            continue
        step, rate, mfu = match.groups()
        if mfu is None or not float(mfu):
            skipped["a step whose MFU is null or 0, which stands for a model or a device that it does not know"] += 1
            continue
        job = _AUTOMODEL_TOKENS.search(line)  # tokens/s and tokens of a step, all devices together
        yield LogRow(
            int(step),
            mfu=near(float(mfu) / 100, 1e-6),
            tokens_per_s=near(float(rate), 1e-6),
            step_s=near(float(job[2]) / float(job[1]), 1e-6) if job and float(job[1]) else None,
        )


def _automodel_benchmark(lines: Iterable[str], _: Counter[str]) -> Iterator[LogRow]:
    """Read the console of NeMo Automodel's benchmark: the time of an iteration, and its MFU on the next line."""
    seconds, number = None, 0
    for line in lines:
        if (time := _AUTOMODEL_TIME.search(line)) is not None:
            seconds = time[1]
        elif seconds is not None and (mfu := _AUTOMODEL_MFU.search(line)) is not None:
            number += 1
            yield LogRow(number, mfu=printed(mfu[1], 0.01), step_s=printed(seconds))
            seconds = None


def _ms_swift(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read ms-swift's logging.jsonl or console: the last MFU, each of which is the mean since the start."""
    last = None
    for line in lines:
        step, mfu, speed = (pattern.search(line) for pattern in (_SWIFT_STEP, _SWIFT_MFU, _SWIFT_SPEED))
        if step is None or mfu is None:
            continue
        if last is not None:
            skipped["an MFU from the start to an earlier step, while the last stands for the run"] += 1
        last = LogRow(
            int(step[1]), mfu=near(float(mfu[1]), 1e-6), step_s=near(float(speed[1]), 1e-6) if speed else None
        )
    if last is not None:
        yield last


def _lightning(lines: Iterable[str], _: Counter[str]) -> Iterator[LogRow]:
    """Read the metrics.csv of Lightning's CSVLogger, with the columns of ThroughputMonitor."""
    columns: dict[str, int] = {}
    for cells in _rows_of_csv(lines):
        indices = {key: i for key, name in _LIGHTNING.items() for i, cell in enumerate(cells) if name.fullmatch(cell)}
        if indices and "step" in cells:
            columns = {**indices, "step": cells.index("step")}
            continue
        values = {key: cells[i] for key, i in columns.items() if i < len(cells) and _is_number(cells[i])}
        if "step" in values and {"mfu", "flops"} & values.keys():  # other rows are of other metrics
            rates = {key: near(float(value), 1e-9) for key, value in values.items()}
            yield LogRow(
                int(float(values["step"])),
                mfu=rates.get("mfu"),
                flops_per_s=rates.get("flops"),
                tokens_per_s=rates.get("tokens"),
            )


def _rows_of_csv(lines: Iterable[str]) -> Iterator[list[str]]:
    """Split lines at their commas, each by itself; one that csv refuses, as for a value of megabytes, is no row."""
    for line in lines:
        if "," in line:
            with suppress(csv.Error):
                yield next(csv.reader([line]))


def _is_number(text: str) -> bool:
    return re.fullmatch(_JSON_NUMBER, text) is not None


def _progress_bar(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read the progress bar of diffusers' training scripts: the last line of each update, and its time."""
    last: LogRow | None = None
    for line in lines:
        if (match := _DIFFUSERS.search(line)) is None:
            continue
        step, number, unit = int(match[1]), match[2], match[3]
        if last is not None and last.step != step:
            yield last
        if not float(number):
            skipped["an update whose time is not known yet"] += 1
            continue
        rate = printed(number)
        if unit == "it/s":
            low, high = rate.range.low, rate.range.high
            rate = Reading(1 / rate.value, Interval(1 / high, 1 / low if low else 2 / rate.value))
        last = LogRow(step, step_s=rate)
    if last is not None:
        yield last


def _block_rows(row: Mapping[str, Any]) -> ReadRows:
    """Make the reader of a format of blocks: a marker of the step, and an indented line for each metric."""
    head, value = re.compile(row["head"]), re.compile(row["value"].replace("<number>", NUMBER))

    def read(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
        for step, values in _blocks(lines, head, value):
            flops, mfu, tokens = (values.get(name) for name in row["names"])
            if flops is None and mfu is None:
                skipped[row["without"]] += 1
                continue
            yield LogRow(
                step,
                mfu=printed(mfu[0], row["mfu_unit"]) if mfu else None,
                flops_per_s=printed(flops[0], _SUFFIX[flops[1]]) if flops else None,
                tokens_per_s=printed(tokens[0], _SUFFIX[tokens[1]], truncated="." not in tokens[0]) if tokens else None,
            )

    return read


def _blocks(
    lines: Iterable[str], head: re.Pattern[str], value: re.Pattern[str]
) -> Iterator[tuple[int, dict[str, tuple[str, str]]]]:
    """Collect the values below each marker: its last number, and name -> digits and suffix."""
    step, values = 0, dict[str, tuple[str, str]]()
    has_marker = False
    for line in lines:
        if (match := head.search(line)) is not None:
            if has_marker:
                yield step, values
            step, values, has_marker = int([part for part in match.groups() if part][-1]), {}, True
        elif (match := value.search(line)) is not None:
            values[match[1]] = (match[2], (*match.groups(), "")[2])
    if has_marker:
        yield step, values


def _split(lines: Iterable[str], head: re.Pattern[str]) -> Iterator[tuple[re.Match[str], list[str]]]:
    """Give each marker, with the lines from its own to the next marker."""
    marker, block = None, list[str]()
    for line in lines:
        if (match := head.search(line)) is not None:
            if marker is not None:
                yield marker, block
            marker, block = match, []
        block.append(line)
    if marker is not None:
        yield marker, block


@dataclass(frozen=True, slots=True)
class Format:
    """A tool's lines."""

    tool: str  # name of the tool that writes the lines
    lines: str  # description of the lines
    conventions: tuple[str, ...]  # the rules that it has used, newest first
    read_rows: ReadRows  # finds the rows in the lines of one process
    whole_job: bool = False  # whether rates are those of all devices together
    smoothed: bool = False  # whether its MFU is a running mean
    counted: Counted = "billed"  # token positions that its tokens/s, or its sequences, are of
    note: str = ""  # a remark on its numbers, "" for none
    read_phases: ReadPhases | None = None  # finds the steps by phase, of a trainer that generates
    total: bool = False  # whether its last row stands for all steps before it
    has_columns: bool = False  # whether losses stand in columns, not behind their names


_READERS: dict[str, ReadRows] = {
    "megatron": _megatron,
    "megatron_bridge": _megatron_bridge,
    "primus_of_torchtitan": partial(_primus, "mfu"),
    "primus_of_megatron": partial(_primus, "tokens_per_s"),
    "nemo_rl": _nemo_rl,
    "automodel": _automodel,
    "automodel_benchmark": _automodel_benchmark,
    "ms_swift": _ms_swift,
    "lightning": _lightning,
    "progress_bar": _progress_bar,
    **READERS,
}


def _format_of(row: Mapping[str, Any]) -> Format:
    read_rows = _LineReader(row) if "pattern" in row else _block_rows(row) if "head" in row else _READERS[row["reader"]]
    facts = {name: row[name] for name in ("whole_job", "smoothed", "counted", "note", "total") if name in row}
    phases, has_columns = PHASES.get(row.get("phases", "")), "losses" in row
    return Format(
        row["tool"], row["lines"], tuple(row["conventions"]), read_rows, read_phases=phases, has_columns=has_columns,
        **facts,
    )  # fmt: skip


_TABLE = tomllib.loads(Path(__file__).with_name("formats.toml").read_text("utf-8"))
FORMATS = tuple(map(_format_of, _TABLE["format"]))
WITHOUT_RATES = tuple((re.compile(row["pattern"]), row["reason"]) for row in _TABLE["without_rates"])
"""Logs of known tools that hold no rate, and what to give instead."""
TRL = next(form for form in FORMATS if form.tool == "TRL")

_LOSS_TABLE = _TABLE["losses"]
# A number as printf, Python, numpy and JSON write it.
_VALUE = (
    r"['\"]?(?:np\.float\d{2,3}\()?([+-]?(?:\d[\d,]{0,30}(?:\.\d{0,30})?(?:e[+-]?\d{1,3})?|nan|inf(?:inity)?))"
    r"(?!\w)(?!\.\w)"
)
_STEPS = tuple(map(re.compile, _LOSS_TABLE["steps"]))
_OF_LEARNING = {
    name: re.compile(_LOSS_TABLE[name].replace("<number>", _VALUE))
    for name in ("loss", "grad_norm", "num_skipped", "num_nan")
}
_BEFORE_LOSS, _WITHOUT_LOSS = (re.compile(_LOSS_TABLE[name]) for name in ("before_loss", "without"))
_LONGEST_PREFIX = 16  # characters of what stands before the name of a loss
_COLUMNS = {name: re.compile(text) for name, text in _LOSS_TABLE["columns"].items()}


def read_losses(lines: Iterable[str], *, has_columns: bool = False) -> tuple[StepLoss, ...]:
    """Read what lines tell of learning; of a step that several lines tell of, the last one that has a number counts.

    >>> read_losses(["step: 7  loss:  9.5000  grad_norm:     nan  memory: 47.6GiB(60.27%)  tps: 5,800"])
    (StepLoss(step=7, loss=9.5, grad_norm=nan, num_skipped=0, num_nan=0),)
    """
    by_step: dict[int, StepLoss] = {}
    for step, values in _values_in_columns(lines) if has_columns else _values_behind_names(lines):
        if values.get("loss") == _LOSS_TABLE["none"]:
            del values["loss"]
        counts = {name: int(values.pop(name, 0)) for name in ("num_skipped", "num_nan")}
        before = by_step.get(step, StepLoss(step))
        if values or any(counts.values()):
            by_step[step] = StepLoss(
                step, values.get("loss", before.loss), values.get("grad_norm", before.grad_norm), **counts
            )
    return tuple(by_step[step] for step in sorted(by_step))


def _values_behind_names(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, float]]]:
    """Read the lines of steps; dictionaries of a console that has no steps are numbered."""
    last, count = None, 0
    for line in map(str.lower, lines):
        match = next((match for pattern in _STEPS if (match := pattern.search(line))), None)
        last = int(match[1]) if match else last
        is_numbered = last is None and line.startswith("{")
        if match is None and not line[:1].isspace() and not is_numbered:
            continue
        values = _values(line)
        if values and (last is not None or is_numbered) and not _WITHOUT_LOSS.search(line):
            count += is_numbered
            yield count if last is None else last, values


def _values(line: str) -> dict[str, float]:
    values = {}
    for name, pattern in _OF_LEARNING.items():
        for match in pattern.finditer(line):
            start = match.start()
            if name != "loss" or _BEFORE_LOSS.search(line[max(0, start - _LONGEST_PREFIX) : start]):
                values[name] = _float(match[1])
                break
    return values


def _values_in_columns(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, float]]]:
    columns: dict[str, int] = {}
    for cells in _rows_of_csv(lines):
        if "step" in cells:
            of_learning = {name: i for name, text in _COLUMNS.items() for i, c in enumerate(cells) if text.fullmatch(c)}
            columns = {**of_learning, "step": cells.index("step")}
            continue
        values = {}
        for name, i in columns.items():
            with suppress(ValueError, IndexError):
                values[name] = float(cells[i])
        if len(values) > 1 and "step" in values:
            yield int(values.pop("step")), values


_OWN = re.compile(r'\{"schema_version": \d+, "kind": "')


def is_log(lines: Sequence[str]) -> bool:
    """Tell whether some other tool's reader finds a step in these lines; Headway's own records are none."""
    if lines and _OWN.match(lines[0]):  # Headway's own records name their MFU as other tools do
        return False
    return any(next(iter(form.read_rows(lines, Counter())), None) is not None for form in FORMATS)


KNOWN_LINES = tuple(f"{form.tool} (`{form.lines}`)" for form in FORMATS)
"""Every tool with a description of its lines."""
