"""Read the logs of other tools: which tool wrote them, and what each row reports, with its rounding.

Text logs are told by their lines (`formats.py`); JSON is the Hugging Face Trainer's trainer_state.json, or our records.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from headway.audit.formats import FORMATS, KNOWN_LINES, TRL, WITHOUT_RATES, Format, read_losses
from headway.audit.rows import Log, LogRow, RecordBasis, near, printed
from headway.errors import LogError, UsageError
from headway.log.records import RecordReader, is_header
from headway.report.quantity import finite, integer
from headway.words import Argument

_JSON = re.compile(r'\s*\{\s*"')
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = re.compile(r"^\[(?:rank|default)(\d+)\]:")  # prefix of a line by torchrun's --tee or torchtitan's LOG_RANK


def _cumulative_note() -> str:
    return (
        "total_flos counts from the first step, but train_runtime counts from the last start. If this run was "
        "resumed from a checkpoint, the rates here are too high. Name the step of the resume with "
        f"{Argument('resumed_at', example='STEP')}"
    )


def read_log(text: str, where: str = "the log", *, resumed_at: int | None = None, needs_rate: bool = True) -> Log:
    """Recognise a log and read its rows.

    Args:
        text: the whole file.
        where: its name, for the error.
        resumed_at: step that the run went on from, for a trainer_state.json, whose totals do not say it.
        needs_rate: refuse a log that tells losses alone.

    Returns:
        The rows that report a rate, and the losses.

    Raises:
        LogError: no line is one that a known tool writes.
        UsageError: `resumed_at` is given for another log, or is no step of the run.
    """
    log = _own_records(text) if _JSON.match(text) else None  # a line of LMMs-Engine begins with {', as none of JSON
    lines = [_COLOUR.sub("", line) for line in text.splitlines()]
    if log is None and not (_JSON.match(text) and '"log_history"' in text):
        log = next((log for form in FORMATS if (log := _log_of(lines, form)) is not None), None)
    if log is None and _JSON.match(text):
        log = _trainer_state(text, where, resumed_at, needs_rate=needs_rate)
    elif resumed_at is not None:
        raise UsageError(
            Argument("resumed_at", resumed_at), f" is for a trainer_state.json, and {where} is none. Leave it out."
        )
    if log is None and not needs_rate:
        log = _losses_alone(lines)
    if log is not None:
        return replace(log, notes=(*log.notes, *_went_back(log.rows)))
    for pattern, reason in WITHOUT_RATES:
        if any(pattern.search(line) for line in lines):
            raise LogError(f"{where} {reason}")
    raise LogError(
        f"{where} has no line that Headway recognises as a training step. Check that the file is the training log "
        "itself, and that no terminal cut its lines. Headway reads the Hugging Face Trainer's trainer_state.json, "
        f"its own metrics.jsonl, and the step lines of {', '.join(dict.fromkeys(KNOWN_LINES))}."
    )


def _losses_alone(lines: Sequence[str]) -> Log | None:
    """Read a log that has losses and no rate: a tool's that is known, or a metrics.csv of Lightning."""
    if losses := read_losses(lines, has_columns=True):
        return Log("Lightning", (), (), losses=losses)
    if any(pattern.search(line) for pattern, _ in WITHOUT_RATES for line in lines) and (losses := read_losses(lines)):
        return Log("a trainer", (), (), losses=losses, notes=("lines that tell no step are numbered.",))
    return None


def _went_back(rows: Sequence[LogRow]) -> Iterable[str]:
    """Warn of steps that begin again: a log of two runs, or of a run and its continuation from a checkpoint."""
    breaks = [(before.step, after.step) for before, after in pairwise(rows) if after.step <= before.step]
    if breaks:
        (before, after), count = breaks[0], f"{len(breaks)} times" if len(breaks) > 1 else "once"
        yield (
            f"steps go back {count}, first from {before:,} to {after:,}. The file holds several runs, or a resumed "
            "run, and the means cover all of them"
        )


def _log_of(lines: list[str], form: Format) -> Log | None:
    """Read the rows of one process: a step of several processes is one step."""
    by_process: dict[int, list[str]] = {}
    for line in lines:
        match = _PROCESS.match(line)
        by_process.setdefault(int(match[1]) if match else -1, []).append(line)
    if len(by_process.keys() - {-1}) < 2:
        by_process = {-1: lines}
    rows: tuple[LogRow, ...] = ()
    skipped = Counter[str]()
    for _, own in sorted(by_process.items()):
        ignored = Counter[str]()
        own_rows = tuple(_once(form.read_rows(own, ignored), ignored))
        if rows and own_rows:
            skipped["a step's line of another process, while one stands for the step"] += len(own_rows)
        elif own_rows:
            rows = own_rows
            skipped += ignored
    phased = () if form.read_phases is None else tuple(form.read_phases(lines))
    if not rows and not any(step.answer for step in phased):
        return None
    notes = (form.note,) if form.note else ()
    return Log(
        form.tool, form.conventions, rows, form.whole_job, form.smoothed, skipped=skipped, notes=notes,
        counted=form.counted, phased=phased, losses=read_losses(lines, has_columns=form.has_columns),
        mean_step_s=rows[-1].step_s.value if form.total and rows and rows[-1].step_s else None,
    )  # fmt: skip


def _once(rows: Iterable[LogRow], skipped: Counter[str]) -> Iterable[LogRow]:
    """Drop a step that is printed again right after itself, as processes do that write into one file."""
    before: int | None = None
    for row in rows:
        if row.step == before:
            skipped["a step's line of another process, while one stands for the step"] += 1
            continue
        before = row.step
        yield row


def _trainer_state(text: str, where: str, resumed_at: int | None, *, needs_rate: bool) -> Log | None:
    """Read a trainer_state.json: TRL's own rates, else totals since the last start of the run as one row.

    Returns:
        None for other JSON.
    """
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LogError(f"{where} starts like JSON but is not: {error}. Give a whole trainer_state.json.") from error
    if not isinstance(state, dict) or "log_history" not in state:
        return None
    try:
        lines = [json.dumps(entry) for entry in state["log_history"]]
        log = _log_of(lines, TRL)
        if log is not None and resumed_at is not None:
            raise UsageError(
                Argument("resumed_at", resumed_at),
                f" is for the totals of a trainer_state.json, but {where} has rates of each step. Leave it out.",
            )
        losses = read_losses(lines)
        if log is None and losses and not needs_rate and not _has_totals(state):
            return Log("Hugging Face Trainer", (), (), losses=losses)
        return log or replace(_totals(state, where, resumed_at), losses=losses)
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise LogError(f"{where} is a trainer_state.json with a value that no Trainer writes: {error}.") from error


def _ends(state: Mapping[str, Any]) -> dict[str, Any]:
    """The last value of each name: the totals are those of the last entry that has them."""
    last: dict[str, Any] = {}
    for entry in state["log_history"]:
        last.update(entry)
    return last


def _has_totals(state: Mapping[str, Any]) -> bool:
    last = _ends(state)
    return bool(last.get("train_runtime") and (last.get("total_flos") or state.get("total_flos")))


def _totals(state: Mapping[str, Any], where: str, resumed_at: int | None) -> Log:
    last = _ends(state)
    seconds, flops = last.get("train_runtime"), last.get("total_flos") or state.get("total_flos")
    tokens = state.get("num_input_tokens_seen") or last.get("num_input_tokens_seen")
    if not seconds or not flops:
        raise LogError(
            f"{where} is a trainer_state.json without {'train_runtime' if not seconds else 'total_flos'}, so there "
            "is no rate to audit. The Trainer writes it at the end of training. Give the state of the finished run."
        )
    steps = integer(state.get("global_step", 0))
    # total_flos counts from the first start, train_runtime from the last: only the last start's share has a time.
    start = _start(state["log_history"], steps) if resumed_at is None else resumed_at
    if start and not 0 <= start < steps:
        raise UsageError(
            Argument("resumed_at", start), f": the run has {steps} steps; give one of them that is not its last."
        )
    share = (steps - start) / steps if start else 1.0
    # The Trainer keeps more digits than its clock is worth.
    row = LogRow(
        steps,
        flops_per_s=near(share * flops / seconds, 1e-4),
        step_s=near(float(seconds), 1e-4),
        tokens_per_s=near(share * tokens / seconds, 1e-4) if tokens else None,
    )
    if start:
        note = f"taken as resumed at step {start:,}: {share:.1%} of the FLOPs belong to its last start"
    else:
        note = "" if resumed_at == 0 else _cumulative_note()
    return Log(
        "Hugging Face Trainer", ("6nd",), (row,), whole_job=True, notes=(note,) if note else (),
        mean_step_s=float(seconds) / max(1, steps - start),
    )  # fmt: skip


def _start(history: list[Mapping[str, Any]], steps: int) -> int:
    """Find the step that the run was last resumed at, where entries with a clock show it: the clock goes back there."""
    start, before = 0, 0.0
    latest = 0  # the step of the last entry before the clock goes back
    for entry in history:
        clock, step = entry.get("train_runtime"), entry.get("step")
        if clock is not None:
            if clock < before:
                start = latest
            before = clock
        latest = int(step) if isinstance(step, int) else latest
    return start if start < steps else 0


def _own_records(text: str) -> Log | None:
    """Read a metrics.jsonl that Headway wrote, in useful FLOPs already; give None for any other file."""
    rows, skipped, changes = [], Counter[str](), list[RecordBasis]()
    # Lines that are no step are counted, so that a reader sees why they are missing.
    reader = RecordReader()
    for line in text.splitlines():
        if not line.strip():
            continue
        record = reader.read(line.encode())
        if record is None:
            skipped["a line that a kill left unfinished"] += 1
            continue
        if is_header(record):
            continue
        # The file holds evaluations and other events too, which are no steps.
        if "flops_per_s_per_device" not in record:
            skipped[f"{record.get('kind', 'another record')}, which is no step"] += 1
            continue
        try:
            row, basis = _row(record), _recorded(record)
        except (KeyError, TypeError, ValueError, ArithmeticError):
            skipped["a step whose numbers cannot be read"] += 1
            continue
        rows.append(row)
        # A run that went on elsewhere changes its peak or its convention; the last one counts.
        if basis not in changes[-1:]:
            changes.append(basis)
    if not rows:
        return None
    several = len({(basis.convention, basis.peak_flops_per_s) for basis in changes}) > 1
    notes = (
        ("the records divide by several peaks or conventions, as of a run that went on elsewhere",) if several else ()
    )
    return Log("Headway", ("useful",), tuple(rows), recorded=changes[-1], skipped=skipped, notes=notes)


def _row(record: Mapping[str, Any]) -> LogRow:
    mfu, tokens = record.get("mfu"), record.get("tokens_per_s_per_device")
    return LogRow(
        integer(record["step"]),
        mfu=near(finite(mfu), 1e-9) if mfu is not None else None,
        flops_per_s=near(finite(record["flops_per_s_per_device"]), 1e-9),
        tokens_per_s=near(finite(tokens), 1e-9) if tokens else None,
        step_s=near(finite(record["wall_s"]), 1e-9) if record.get("wall_s") else printed("0"),
    )


def _recorded(record: Mapping[str, Any]) -> RecordBasis:
    peak = record.get("peak_flops_per_s")
    return RecordBasis(
        str(record.get("convention", "useful/1")),
        None if peak is None else finite(peak),
        str(record.get("peak_source") or "not recorded"),
        integer(record.get("world_size", 1)),
    )
