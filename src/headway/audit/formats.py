"""Text logs of other tools: the lines that report a step, and those that only look like it.

Each reader takes the lines of one process and counts what it leaves out, by reason.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from headway.audit.rows import LogRow, near, printed

_WHOLE = r"(\d{1,18})"  # of 64 bits; more digits are no number of a step
_NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?)"
_ANY = r"(?:np\.float\d+\()?([0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][+-]?\d+)?)"
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)[,.](\d{3})")
_RATES = rf"\btps:\s*{_NUMBER}(?:\s+tflops:\s*{_NUMBER})?(?:\s+mfu:\s*{_NUMBER}%)?"
_TORCHTITAN = re.compile(rf"(?<!validate )\bstep:\s*{_WHOLE}\s+loss:\s*\S+\s.*?\bmemory:\s.*?{_RATES}")
_TITAN_MEMORY = re.compile(r"\bmemory:\s*[0-9.]+GiB\(([0-9]+(?:\.[0-9]+)?)%\)")
_MAXTEXT, _MAXTEXT_OLD = (
    re.compile(rf"completed step: {_WHOLE}, seconds: {_NUMBER}, {rate}: {_NUMBER}(?:, Tokens/s/device: {_NUMBER})?")
    for rate in ("TFLOP/s/device", "TFLOP/s")
)
_MEGATRON = re.compile(rf"iteration\s+{_WHOLE}\s*/.*?elapsed time per iteration \(ms\): {_NUMBER}")
_MEGATRON_RATE = re.compile(
    rf"(?:throughput|compute) per GPU \(TFLOP/s/GPU\): {_NUMBER}|GPU utilization: {_NUMBER}\s*MODEL_TFLOP/s/GPU"
)
_MEGATRON_BATCH = re.compile(r"global batch size:\s*(\d{1,18})")
_PRIMUS_TOKENS = re.compile(rf"\(tokens/s/GPU\): {_NUMBER}|tokens/s/GPU inst/harmonic mean: {_NUMBER}")
_PRIMUS_MFU = re.compile(rf"\| mfu: {_NUMBER}%")
_NANOGPT = re.compile(rf"\biter {_WHOLE}: loss \S+, time {_NUMBER}ms, mfu (-?[0-9.]+)%")
_NANOCHAT = re.compile(
    rf"\bstep {_WHOLE}(?:/\d+)?\b.*?\bdt: {_NUMBER}ms \| tok/sec: {_NUMBER} \| (?:bf16_)?mfu: {_NUMBER}"
)
_VERL_MFU = re.compile(rf"(?:train/mfu|perf/mfu/actor)['\"]?\s*[:=]\s*{_ANY}")
_LMMS_MFU = re.compile(rf"(?:\btrain/|['\"])mfu['\"]?\s*[:=]\s*['\"]?{_ANY}")
_STEP = re.compile(r"\bstep['\"]?\s*[:=]\s*(\d{1,18})")
_VERL = re.compile(r"perf/mfu/actor\b|train/global_tokens\b")
_LMMS_TOKENS = re.compile(rf"perf/global_seq_len_avg['\"]?\s*[:=]\s*{_ANY}")
_LMMS_RATE = re.compile(rf"train/tokens_per_gpu['\"]?\s*[:=]\s*{_ANY}")
_OLMO_HEAD = re.compile(r"\[step=(\d{1,18})/[^\]]*,epoch=[^\]]*\]")
_OLMO_VALUE = re.compile(rf"^\s+throughput/device/(TPS|flopsPS|MFU)={_NUMBER}([BTPE]?)\s*$")
_COMPOSER_HEAD = re.compile(r"^\[[a-z]+=(\d{1,18})(?:/\d+)?\](?:\[batch=(\d{1,18})(?:/\d+)?\])?:?\s*$")
_COMPOSER_VALUE = re.compile(rf"^\s+Train throughput/device/(tokens_per_sec|flops_per_sec|mfu):\s*{_NUMBER}\s*$")
_SUFFIX = {"": 1.0, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


def _torchtitan(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    for line in lines:
        if (found := _TORCHTITAN.search(line)) is None:
            if "validate step:" in line:
                skipped["validation, which trains nothing"] += 1
            elif "tps:" in line and "step:" in line:
                skipped["text with tps in it that is no step's line"] += 1
            continue
        step, tokens, tflops, mfu = found.groups()
        stamp, memory = _STAMP.search(line), _TITAN_MEMORY.search(line)
        yield LogRow(
            int(step),
            mfu=printed(mfu, 0.01) if mfu else None,
            flops_per_s=printed(tflops, 1e12) if tflops else None,
            tokens_per_s=printed(tokens),
            stamp_s=_seconds(stamp) if stamp else None,
            memory_share=float(memory[1]) / 100 if memory else None,
        )


def _maxtext(pattern: re.Pattern[str], lines: Iterable[str], _: Counter[str]) -> Iterator[LogRow]:
    for line in lines:
        if (found := pattern.search(line)) is not None:
            step, seconds, tflops, tokens = found.groups()
            yield LogRow(
                int(step),
                flops_per_s=printed(tflops, 1e12),
                tokens_per_s=printed(tokens) if tokens else None,
                step_s=printed(seconds),
            )


def _megatron(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read Megatron's lines, and those of Primus, which print the step's number before a mean: 567.6/568.0."""
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


def _primus(added: str, lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read Primus' lines: Megatron's, and what its backend adds to them, tokens/s or, torchtitan's alone, an MFU."""
    return (row for row in _megatron(lines, skipped) if getattr(row, added))


def _nanogpt(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    for line in lines:
        if (found := _NANOGPT.search(line)) is None:
            continue
        if found[3].startswith("-"):
            skipped["an MFU of -100 %, which stands for none yet"] += 1
            continue
        yield LogRow(int(found[1]), mfu=printed(found[3], 0.01), step_s=printed(found[2], 1e-3))


def _nanochat(lines: Iterable[str], _: Counter[str]) -> Iterator[LogRow]:
    for line in lines:
        if (found := _NANOCHAT.search(line)) is not None:
            yield LogRow(
                int(found[1]),
                mfu=printed(found[4], 0.01),
                tokens_per_s=printed(found[3], truncated=True),
                step_s=printed(found[2], 1e-3),
            )


def _verl(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read verl's console lines: the MFU of the actor's update, or of a step of supervised training."""
    for number, line in enumerate(lines):
        if _VERL.search(line) is None:
            continue
        found, step = _VERL_MFU.search(line), _STEP.search(line)
        if found is None or not float(found[1].replace(",", "")):
            skipped["an MFU of 0, which verl prints for what it does not know"] += 1
            continue
        yield LogRow(int(step[1]) if step else number, mfu=near(float(found[1].replace(",", "")), 1e-6))


def _lmms_engine(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read LMMs-Engine's dictionaries: with the step behind them, or its Hugging Face trainer's with the MFU alone."""
    for number, line in enumerate(lines):
        if (found := _LMMS_MFU.search(line)) is None:
            continue
        if not float(found[1].replace(",", "")):
            skipped["an MFU of 0.0, which LMMs-Engine prints for what it does not know, and for less than 0.5 %"] += 1
            continue
        step, tokens, rate = (pattern.search(line) for pattern in (_STEP, _LMMS_TOKENS, _LMMS_RATE))
        yield LogRow(
            int(step[1]) if step else number,
            mfu=printed(found[1], step=0.01),  # rounded to two decimals before it is printed with more
            tokens_per_s=printed(rate[1]) if rate else None,
            tokens=printed(tokens[1]) if tokens else None,
        )


def _olmo_core(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read OLMo-core's blocks: a marker of the step, and an indented line for each metric."""
    names, without = ("flopsPS", "MFU", "TPS"), "a step without a rate, such as the first one"
    return _block_rows(_blocks(lines, _OLMO_HEAD, _OLMO_VALUE), names, 0.01, without, skipped)


def _llm_foundry(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read the blocks of Composer's console logger, which llm-foundry trains with."""
    names, without = ("flops_per_sec", "mfu", "tokens_per_sec"), "a batch without a rate, such as the first ones"
    return _block_rows(_blocks(lines, _COMPOSER_HEAD, _COMPOSER_VALUE), names, 1.0, without, skipped)


def _block_rows(
    blocks: Iterable[tuple[int, dict[str, tuple[str, str]]]],
    names: tuple[str, str, str],
    mfu_unit: float,
    without: str,
    skipped: Counter[str],
) -> Iterator[LogRow]:
    """Make a row of each block; `names` are of FLOP/s, MFU and tokens/s, `without` says why a block has no row."""
    for step, values in blocks:
        flops, mfu, tokens = (values.get(name) for name in names)
        if flops is None and mfu is None:
            skipped[without] += 1
            continue
        yield LogRow(
            step,
            mfu=printed(mfu[0], mfu_unit) if mfu else None,
            flops_per_s=printed(flops[0], _SUFFIX[flops[1]]) if flops else None,
            tokens_per_s=printed(tokens[0], _SUFFIX[tokens[1]], truncated="." not in tokens[0]) if tokens else None,
        )


def _blocks(
    lines: Iterable[str], head: re.Pattern[str], value: re.Pattern[str]
) -> Iterator[tuple[int, dict[str, tuple[str, str]]]]:
    """Collect the values below each marker: its last number, and name -> digits and suffix."""
    step, values = 0, dict[str, tuple[str, str]]()
    seen = False
    for line in lines:
        if (found := head.search(line)) is not None:
            if seen:
                yield step, values
            step, values, seen = int([part for part in found.groups() if part][-1]), {}, True
        elif (found := value.search(line)) is not None:
            values[found[1]] = (found[2], (*found.groups(), "")[2])
    if seen:
        yield step, values


def _seconds(stamp: re.Match[str]) -> float:
    return datetime.fromisoformat(f"{stamp[1]} {stamp[2]}").timestamp() + int(stamp[3]) / 1000


@dataclass(frozen=True, slots=True)
class Format:
    """A tool's lines."""

    tool: str  # who writes them
    conventions: tuple[str, ...]  # the rules that it has used, newest first
    read: Callable[[Sequence[str], Counter[str]], Iterator[LogRow]]  # finds the rows in the lines of one process
    whole_job: bool = False  # whether rates are those of all devices together
    smoothed: bool = False  # whether its MFU is a running mean


_MEGATRON_RULES = ("megatron-bridge", "megatron-bridge-2026-05", "megatron-bridge-2025", "megatron-lm-2025-02")
_TORCHTITAN_RULES = ("torchtitan", "torchtitan-2026-06", "torchtitan-2025-12-vlm")
FORMATS = (
    Format("torchtitan", _TORCHTITAN_RULES, _torchtitan),
    Format("MaxText", ("maxtext", "maxtext-2025-06"), partial(_maxtext, _MAXTEXT)),
    Format("MaxText", ("maxtext-2025-06",), partial(_maxtext, _MAXTEXT_OLD)),  # lines of before July 2025
    Format("Primus", _TORCHTITAN_RULES, partial(_primus, "mfu")),
    Format("Primus", (*_MEGATRON_RULES, *_TORCHTITAN_RULES), partial(_primus, "tokens_per_s")),
    Format("Megatron", _MEGATRON_RULES, _megatron),
    Format("nanoGPT", ("palm",), _nanogpt, smoothed=True),
    Format("nanochat", ("nanochat",), _nanochat, whole_job=True),
    Format("OLMo-core", ("olmo-core",), _olmo_core),
    Format("llm-foundry", ("palm",), _llm_foundry),
    Format("verl", ("verl", "verl-2025-12"), _verl),
    Format("LMMs-Engine", ("lmms-engine",), _lmms_engine),
)
