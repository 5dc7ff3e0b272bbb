"""Read the logs of other tools: which tool wrote them, and what each row reports, with its rounding."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from headway.audit.intervals import Interval, Printed, printed
from headway.errors import LogError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?)"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)[,.](\d{3})")
_TORCHTITAN = re.compile(rf"\bstep:\s*(\d+)\s.*?\btps:\s*{_NUMBER}(?:\s+tflops:\s*{_NUMBER})?(?:\s+mfu:\s*{_NUMBER}%)?")
_MAXTEXT = re.compile(
    rf"completed step: (\d+), seconds: {_NUMBER}, TFLOP/s/device: {_NUMBER}(?:, Tokens/s/device: {_NUMBER})?"
)
_MEGATRON = re.compile(rf"iteration\s+(\d+)\s*/.*?elapsed time per iteration \(ms\): {_NUMBER}")
_MEGATRON_RATE = re.compile(
    rf"throughput per GPU \(TFLOP/s/GPU\): {_NUMBER}|GPU utilization: {_NUMBER}\s*MODEL_TFLOP/s/GPU"
)
_MEGATRON_BATCH = re.compile(r"global batch size:\s*(\d+)")
_NANOGPT = re.compile(rf"\biter (\d+): loss \S+, time {_NUMBER}ms, mfu (-?[0-9.]+)%")
_NANOCHAT = re.compile(
    rf"\bstep (\d+)(?:/\d+)?\b.*?\bdt: {_NUMBER}ms \| tok/sec: {_NUMBER} \| (?:bf16_)?mfu: {_NUMBER}"
)
_LMMS_MFU = re.compile(rf"train/mfu['\"]?\s*[:=]\s*{_NUMBER}")
_LMMS_STEP = re.compile(r"\bstep['\"]?\s*[:=]\s*(\d+)")
_LMMS_TOKENS = re.compile(rf"perf/global_seq_len_avg['\"]?\s*[:=]\s*{_NUMBER}")


@dataclass(frozen=True, slots=True)
class LogRow:
    """What one line reports; None where it does not.

    Attributes:
        step: its number.
        mfu: fraction.
        flops_per_s: FLOP/s, of one device unless the log says otherwise.
        tokens_per_s: token positions per second, of one device or of the job as `Log.whole_job` says.
        step_s: time of the step [s].
        tokens: token positions of the step on one device.
        sequences: sequences of the step, all devices together.
        stamp_s: when the line was written [s].
    """

    step: int
    mfu: Printed | None = None
    flops_per_s: Printed | None = None
    tokens_per_s: Printed | None = None
    step_s: Printed | None = None
    tokens: Printed | None = None
    sequences: int | None = None
    stamp_s: float | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """A tool's log.

    Attributes:
        tool: who wrote it.
        conventions: the rules that this tool has used, newest first.
        rows: in the order of the file.
        whole_job: whether tokens/s (and FLOP/s, if any) are those of all devices together.
        smoothed: whether its MFU is a running mean, so that a row does not stand for its own step.
    """

    tool: str
    conventions: tuple[str, ...]
    rows: tuple[LogRow, ...]
    whole_job: bool = False
    smoothed: bool = False


def read_log(text: str, where: str = "the log") -> Log:
    """Recognise a log and read its rows.

    Args:
        text: the whole file.
        where: its name, for the error.

    Returns:
        The rows that report a rate.

    Raises:
        LogError: no line is one that a known tool writes.
    """
    if text.lstrip().startswith("{") and (trainer := _trainer_state(text, where)) is not None:
        return trainer
    lines = [_COLOUR.sub("", line) for line in text.splitlines()]
    for tool, names, reader, whole_job, smoothed in _TEXT_LOGS:
        rows = tuple(reader(lines))
        if rows:
            return Log(tool, names, rows, whole_job, smoothed)
    raise LogError(
        f"{where} has no line that is recognised. Known are the step lines of torchtitan (`step: 7 ... tps: ... "
        "tflops: ... mfu: ...`), MaxText (`completed step: 5, seconds: ...`), Megatron-LM and -Bridge (`elapsed "
        "time per iteration (ms)` with `TFLOP/s/GPU`), nanoGPT (`iter 100: loss ..., time ...ms, mfu ...%`), nanochat "
        "(`dt: ...ms | tok/sec: ... | mfu: ...`), LMMs-Engine (`train/mfu`), and the Hugging Face Trainer's "
        "trainer_state.json. Check that the file is the training log itself and not cut off by a terminal."
    )


def _torchtitan(lines: Iterable[str]) -> Iterable[LogRow]:
    for line in lines:
        if (found := _TORCHTITAN.search(line)) is None:
            continue
        step, tokens, tflops, mfu = found.groups()
        stamp = _STAMP.search(line)
        yield LogRow(
            int(step),
            mfu=printed(mfu, 0.01) if mfu else None,
            flops_per_s=printed(tflops, 1e12) if tflops else None,
            tokens_per_s=printed(tokens),
            stamp_s=_seconds(stamp) if stamp else None,
        )


def _maxtext(lines: Iterable[str]) -> Iterable[LogRow]:
    for line in lines:
        if (found := _MAXTEXT.search(line)) is None:
            continue
        step, seconds, tflops, tokens = found.groups()
        yield LogRow(
            int(step),
            flops_per_s=printed(tflops, 1e12),
            tokens_per_s=printed(tokens) if tokens else None,
            step_s=printed(seconds),
        )


def _megatron(lines: Iterable[str]) -> Iterable[LogRow]:
    pending: str | None = None  # Megatron-Bridge writes the rate on a line of its own before the iteration's
    for line in lines:
        rate, iteration = _MEGATRON_RATE.search(line), _MEGATRON.search(line)
        tflops = (rate[1] or rate[2]) if rate else None
        if iteration is None:
            pending = tflops or pending
            continue
        batch = _MEGATRON_BATCH.search(line)
        if (tflops := tflops or pending) is not None:
            yield LogRow(
                int(iteration[1]),
                flops_per_s=printed(tflops, 1e12),
                step_s=printed(iteration[2], 1e-3),
                sequences=int(batch[1]) if batch else None,
            )
        pending = None


def _nanogpt(lines: Iterable[str]) -> Iterable[LogRow]:
    for line in lines:
        found = _NANOGPT.search(line)
        if found is not None and not found[3].startswith("-"):  # -100 % stands for "not yet"
            yield LogRow(int(found[1]), mfu=printed(found[3], 0.01), step_s=printed(found[2], 1e-3))


def _nanochat(lines: Iterable[str]) -> Iterable[LogRow]:
    for line in lines:
        if (found := _NANOCHAT.search(line)) is not None:
            yield LogRow(
                int(found[1]),
                mfu=printed(found[4], 0.01),
                tokens_per_s=printed(found[3], truncated=True),
                step_s=printed(found[2], 1e-3),
            )


def _lmms_engine(lines: Iterable[str]) -> Iterable[LogRow]:
    for number, line in enumerate(lines):
        if (found := _LMMS_MFU.search(line)) is None:
            continue
        step, tokens = _LMMS_STEP.search(line), _LMMS_TOKENS.search(line)
        yield LogRow(
            int(step[1]) if step else number,
            mfu=printed(found[1], step=0.01),  # rounded to two decimals before it is printed with more
            tokens=printed(tokens[1]) if tokens else None,
        )


# tool, its conventions (newest first), reader, whether rates are the whole job's, whether MFU is a running mean
_TEXT_LOGS: tuple[tuple[str, tuple[str, ...], Callable[[Iterable[str]], Iterable[LogRow]], bool, bool], ...] = (
    ("torchtitan", ("torchtitan", "torchtitan-2025-12-vlm"), _torchtitan, False, False),
    ("MaxText", ("maxtext", "maxtext-2025-06"), _maxtext, False, False),
    ("Megatron", ("megatron-bridge", "megatron-bridge-2025"), _megatron, False, False),
    ("nanoGPT", ("palm",), _nanogpt, False, True),
    ("nanochat", ("nanochat",), _nanochat, True, False),
    ("LMMs-Engine", ("lmms-engine",), _lmms_engine, False, False),
)


def _trainer_state(text: str, where: str) -> Log | None:
    """Read a trainer_state.json: totals of the run, as one row."""
    try:
        state = json.loads(text)
    except ValueError as error:
        raise LogError(f"{where} starts like JSON but is not: {error}. Give a whole trainer_state.json.") from error
    if not isinstance(state, dict) or "log_history" not in state:
        return None
    last: dict[str, Any] = {}
    for entry in state["log_history"]:
        last.update(entry)
    seconds, flops = last.get("train_runtime"), last.get("total_flos") or state.get("total_flos")
    tokens = state.get("num_input_tokens_seen") or last.get("num_input_tokens_seen")
    if not seconds or not flops:
        raise LogError(
            f"{where} is a trainer_state.json without {'train_runtime' if not seconds else 'total_flos'}, which the "
            "Trainer writes at the end of training: there is no rate to audit. Give the state of the finished run."
        )
    row = LogRow(
        int(state.get("global_step", 0)),
        flops_per_s=_near(flops / seconds, 1e-4),
        step_s=_near(float(seconds), 1e-4),
        tokens_per_s=_near(tokens / seconds, 1e-4) if tokens else None,
    )
    return Log("Hugging Face Trainer", ("6nd",), (row,), whole_job=True)


def _near(value: float, share: float) -> Printed:
    return Printed(value, Interval(value, value).widened(share))


def _seconds(stamp: re.Match[str]) -> float:
    return datetime.fromisoformat(f"{stamp[1]} {stamp[2]}").timestamp() + int(stamp[3]) / 1000


def per_device(log: Log, num_ranks: int) -> Log:
    """Divide rates of a whole job by its devices."""
    if not log.whole_job:
        return log

    def share(reading: Printed | None) -> Printed | None:
        return reading and Printed(reading.value / num_ranks, reading.range / num_ranks)

    rows = (replace(row, tokens_per_s=share(row.tokens_per_s), flops_per_s=share(row.flops_per_s)) for row in log.rows)
    return replace(log, rows=tuple(rows), whole_job=False)
