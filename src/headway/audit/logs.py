"""Read the logs of other tools: which tool wrote them, and what each row reports, with its rounding."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from headway.audit.formats import FORMATS
from headway.audit.json_logs import own_records, trainer_state
from headway.audit.rows import Log
from headway.errors import LogError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headway.audit.formats import Format
    from headway.audit.rows import LogRow

_JSON = re.compile(r'\s*\{\s*"')
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = re.compile(r"^\[(?:rank|default)(\d+)\]:")  # as torchrun's --tee and torchtitan's LOG_RANK put it


def read_log(text: str, where: str = "the log", *, resumed_at: int | None = None) -> Log:
    """Recognise a log and read its rows.

    Args:
        text: the whole file.
        where: its name, for the error.
        resumed_at: step that the run went on from, for a trainer_state.json, whose totals do not say it.

    Returns:
        The rows that report a rate.

    Raises:
        LogError: no line is one that a known tool writes.
        UsageError: `resumed_at` is given for another log, or is no step of the run.
    """
    if _JSON.match(text):  # a line of LMMs-Engine begins with {', which JSON does not
        log = own_records(text) or trainer_state(text, where, resumed_at)
        if log is not None and (resumed_at is None or log.recorded is None):
            return log
    if resumed_at is not None:
        raise UsageError(f"--resumed-at {resumed_at} is for a trainer_state.json, and {where} is none. Leave it out.")
    lines = [_COLOUR.sub("", line) for line in text.splitlines()]
    for form in FORMATS:
        if (log := _read(lines, form)) is not None:
            return log
    raise LogError(
        f"{where} has no line that is recognised. Known are the step lines of torchtitan (`step: 7 loss: ... memory: "
        "... tps: ... tflops: ... mfu: ...`), MaxText (`completed step: 5, seconds: 2.0, TFLOP/s/device: ...`), "
        "Megatron-LM, -Bridge and Primus (`elapsed time per iteration (ms)` with `TFLOP/s/GPU`), nanoGPT (`iter 100: "
        "loss ..., time ...ms, mfu ...%`), nanochat (`dt: ...ms | tok/sec: ... | mfu: ...`), OLMo-core "
        "(`throughput/device/MFU=...`), llm-foundry (`Train throughput/device/mfu: ...`), verl (`perf/mfu/actor:...`), "
        "LMMs-Engine (`'train/mfu': ...`, `'mfu': ...`), the Hugging Face Trainer's trainer_state.json and Headway's "
        "own metrics.jsonl. "
        "Check that the file is the training log itself and not cut off by a terminal."
    )


def _read(lines: list[str], form: Format) -> Log | None:
    """Read the rows of one process: a step of several processes is one step."""
    by_process: dict[int, list[str]] = {}
    for line in lines:
        found = _PROCESS.match(line)
        by_process.setdefault(int(found[1]) if found else -1, []).append(line)
    if len(by_process.keys() - {-1}) < 2:
        by_process = {-1: lines}
    rows: tuple[LogRow, ...] = ()
    skipped = Counter[str]()
    for _, own in sorted(by_process.items()):
        ignored = Counter[str]()
        read = tuple(_once(form.read(own, ignored), ignored))
        if rows and read:
            skipped["a step's line of another process, while one stands for the step"] += len(read)
        elif read:
            rows = read
            skipped += ignored
    return Log(form.tool, form.conventions, rows, form.whole_job, form.smoothed, skipped=skipped) if rows else None


def _once(rows: Iterable[LogRow], skipped: Counter[str]) -> Iterable[LogRow]:
    """Drop a step that is printed again right after itself, as processes do that write into one file."""
    before: int | None = None
    for row in rows:
        if row.step == before:
            skipped["a step's line of another process, while one stands for the step"] += 1
            continue
        before = row.step
        yield row
