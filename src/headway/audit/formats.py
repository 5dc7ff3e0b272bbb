"""Text logs of other tools: the lines that report a step, and those that only look like it.

Each reader takes the lines of one process and counts what it leaves out, by reason.
"""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from headway.audit import rl_formats
from headway.audit.progress_bars import BAR_NOTE, progress_bar
from headway.audit.rl_formats import ReadPhases
from headway.audit.rows import NUMBER, STEP_NUMBER, Counted, LogRow, near, printed

_ANY = r"(?:np\.float\d+\()?([0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][+-]?\d+)?)"
_JSON_NUMBER = r"([0-9]{1,18}(?:\.[0-9]+)?(?:[eE][+-]?\d{1,2})?)(?![0-9.eE])"
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)[,.](\d{3})")
_RATES = rf"\btps:\s*{NUMBER}(?:\s+tflops:\s*{NUMBER})?(?:\s+mfu:\s*{NUMBER}%)?"
_TORCHTITAN = re.compile(rf"(?<!validate )\bstep:\s*{STEP_NUMBER}\s+loss:\s*\S+\s.*?\bmemory:\s.*?{_RATES}")
_TITAN_MEMORY = re.compile(r"\bmemory:\s*[0-9.]+GiB\(([0-9]+(?:\.[0-9]+)?)%\)")
_MAXTEXT, _MAXTEXT_OLD = (
    re.compile(rf"completed step: {STEP_NUMBER}, seconds: {NUMBER}, {rate}: {NUMBER}(?:, Tokens/s/device: {NUMBER})?")
    for rate in ("TFLOP/s/device", "TFLOP/s")
)
_MEGATRON = re.compile(rf"iteration\s+{STEP_NUMBER}\s*/.*?elapsed time per iteration \(ms\): {NUMBER}")
_MEGATRON_RATE = re.compile(
    rf"(?:throughput|compute) per GPU \(TFLOP/s/GPU\): {NUMBER}|GPU utilization: {NUMBER}\s*MODEL_TFLOP/s/GPU"
)
_MEGATRON_BATCH = re.compile(r"global batch size:\s*(\d{1,18})")
_PRIMUS_TOKENS = re.compile(rf"\(tokens/s/GPU\): {NUMBER}|tokens/s/GPU inst/harmonic mean: {NUMBER}")
_PRIMUS_MFU = re.compile(rf"\| mfu: {NUMBER}%")
_NANOGPT = re.compile(rf"\biter {STEP_NUMBER}: loss \S+, time {NUMBER}ms, mfu (-?[0-9.]+)%")
_NANOCHAT = re.compile(
    rf"\bstep {STEP_NUMBER}(?:/\d+)?\b.*?\bdt: {NUMBER}ms \| tok/sec: {NUMBER} \| (?:bf16_)?mfu: {NUMBER}"
)
_VERL_MFU = re.compile(rf"(?:train/mfu|perf/mfu/actor)['\"]?\s*[:=]\s*{_ANY}")
_LMMS_MFU = re.compile(rf"(?:\btrain/|['\"])mfu['\"]?\s*[:=]\s*['\"]?{_ANY}")
_STEP = re.compile(r"\bstep['\"]?\s*[:=]\s*(\d{1,18})")
_VERL = re.compile(r"perf/mfu/actor\b|train/global_tokens\b")
_LMMS_TOKENS = re.compile(rf"perf/global_seq_len_avg['\"]?\s*[:=]\s*{_ANY}")
_LMMS_RATE = re.compile(rf"train/tokens_per_gpu['\"]?\s*[:=]\s*{_ANY}")
_OLMO_HEAD = re.compile(r"\[step=(\d{1,18})/[^\]]*,epoch=[^\]]*\]")
_OLMO_VALUE = re.compile(rf"^\s+throughput/device/(TPS|flopsPS|MFU)={NUMBER}([BTPE]?)\s*$")
_COMPOSER_HEAD = re.compile(r"^\[[a-z]+=(\d{1,18})(?:/\d+)?\](?:\[batch=(\d{1,18})(?:/\d+)?\])?:?\s*$")
_COMPOSER_VALUE = re.compile(rf"^\s+Train throughput/device/(tokens_per_sec|flops_per_sec|mfu):\s*{NUMBER}\s*$")
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


def _torchtitan(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    for line in lines:
        if (match := _TORCHTITAN.search(line)) is None:
            if "validate step:" in line:
                skipped["validation, which trains nothing"] += 1
            elif "tps:" in line and "step:" in line:
                skipped["text with tps in it that is no step's line"] += 1
            continue
        step, tokens, tflops, mfu = match.groups()
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
        if (match := pattern.search(line)) is not None:
            step, seconds, tflops, tokens = match.groups()
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


def _megatron_bridge(lines: Sequence[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read Megatron's lines where Megatron-Bridge's own, of the step's time, stand before them."""
    return _megatron(lines, skipped) if any("MODEL_TFLOP/s/GPU" in line for line in lines) else iter(())


def _primus(added: str, lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read Primus' lines: Megatron's, and what its backend adds to them, tokens/s or, torchtitan's alone, an MFU."""
    return (row for row in _megatron(lines, skipped) if getattr(row, added))


def _nanogpt(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    for line in lines:
        if (match := _NANOGPT.search(line)) is None:
            continue
        if match[3].startswith("-"):
            skipped["an MFU of -100 %, which stands for none yet"] += 1
            continue
        yield LogRow(int(match[1]), mfu=printed(match[3], 0.01), step_s=printed(match[2], 1e-3))


def _nanochat(lines: Iterable[str], _: Counter[str]) -> Iterator[LogRow]:
    for line in lines:
        if (match := _NANOCHAT.search(line)) is not None:
            yield LogRow(
                int(match[1]),
                mfu=printed(match[4], 0.01),
                tokens_per_s=printed(match[3], truncated=True),
                step_s=printed(match[2], 1e-3),
            )


def _verl(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read verl's console lines: the MFU of the actor's update, or of a step of supervised training."""
    for number, line in enumerate(lines):
        if _VERL.search(line) is None:
            continue
        match, step = _VERL_MFU.search(line), _STEP.search(line)
        if match is None or not float(match[1].replace(",", "")):
            skipped["an MFU of 0, which verl prints for what it does not know"] += 1
            continue
        yield LogRow(int(step[1]) if step else number, mfu=near(float(match[1].replace(",", "")), 1e-6))


def _lmms_engine(lines: Iterable[str], skipped: Counter[str]) -> Iterator[LogRow]:
    """Read LMMs-Engine's dictionaries: with the step behind them, or its Hugging Face trainer's with the MFU alone."""
    for number, line in enumerate(lines):
        if (match := _LMMS_MFU.search(line)) is None:
            continue
        if not float(match[1].replace(",", "")):
            skipped["an MFU of 0.0, which LMMs-Engine prints for what it does not know, and for less than 0.5 %"] += 1
            continue
        step, tokens, rate = (pattern.search(line) for pattern in (_STEP, _LMMS_TOKENS, _LMMS_RATE))
        yield LogRow(
            int(step[1]) if step else number,
            mfu=printed(match[1], step=0.01),  # rounded to two decimals before it is printed with more
            tokens_per_s=printed(rate[1]) if rate else None,
            tokens=printed(tokens[1]) if tokens else None,
        )


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
    """Give each marker, and its line with those up to the next one."""
    marker, block = None, list[str]()
    for line in lines:
        if (match := head.search(line)) is not None:
            if marker is not None:
                yield marker, block
            marker, block = match, []
        block.append(line)
    if marker is not None:
        yield marker, block


def _seconds(stamp: re.Match[str]) -> float:
    return datetime.fromisoformat(f"{stamp[1]} {stamp[2]}").timestamp() + int(stamp[3]) / 1000


@dataclass(frozen=True, slots=True)
class Format:
    """A tool's lines."""

    tool: str  # name of the tool that writes the lines
    lines: str  # description of the lines
    conventions: tuple[str, ...]  # the rules that it has used, newest first
    read_rows: Callable[[Sequence[str], Counter[str]], Iterator[LogRow]]  # finds the rows in the lines of one process
    whole_job: bool = False  # whether rates are those of all devices together
    smoothed: bool = False  # whether its MFU is a running mean
    counted: Counted = "billed"  # token positions that its tokens/s, or its sequences, are of
    note: str = ""  # a remark on its numbers, "" for none
    read_phases: ReadPhases | None = None  # finds the steps by phase, of a trainer that generates


_LM_RULES = ("megatron-lm", "megatron-lm-2026-05")
_BRIDGE_RULES = ("megatron-bridge", "megatron-bridge-2026-05", "megatron-bridge-2025")
_MEGATRON_RULES = (*_LM_RULES, *_BRIDGE_RULES)
_RL_NOTE = "its rates divide by the time of the policy's training alone, without generation and log-probabilities"
_PRIME_NOTE = (
    "prime-rl divides by the time of forward and backward alone, and by that of whole steps in supervised training"
)
_SWIFT_NOTE = (
    "ms-swift divides by a peak that it measures by products of 8,192 at the start (`Perf: ... TFLOPS`), unless "
    "DEVICE_TFLOPS states one, and by the time of steps alone; if the run was resumed, its MFU is too high: the FLOPs "
    "are of all starts"
)
_OF_PRIMUS = "elapsed time per iteration (ms): ... | tokens per GPU (tokens/s/GPU): ..."
_MAXTEXT_RULES = ("maxtext", "maxtext-2026-03", "maxtext-2025-06")
_TORCHTITAN_RULES = ("torchtitan", "torchtitan-2026-06", "torchtitan-2025-12-vlm", "torchtitan-flux")
TRL = Format(
    "TRL",
    "'perf/mfu_wall_clock': ..., 'perf/forwarded_tok_s_wall_clock': ...",
    ("trl", "trl-2026-07"),
    rl_formats.trl,
    whole_job=True,
    note=rl_formats.TRL_NOTE,
)
FORMATS = (
    Format("torchtitan", "step: 7 loss: ... memory: ... tps: ... mfu: ...", _TORCHTITAN_RULES, _torchtitan),
    Format(
        "MaxText", "completed step: 5, seconds: ..., TFLOP/s/device: ...", _MAXTEXT_RULES, partial(_maxtext, _MAXTEXT)
    ),
    # lines of before July 2025
    Format(
        "MaxText",
        "completed step: 5, seconds: ..., TFLOP/s: ...",
        ("maxtext-2025-06",),
        partial(_maxtext, _MAXTEXT_OLD),
    ),
    Format("Primus", _OF_PRIMUS, _TORCHTITAN_RULES, partial(_primus, "mfu")),
    Format(
        "Primus", _OF_PRIMUS, (*_MEGATRON_RULES, *_TORCHTITAN_RULES), partial(_primus, "tokens_per_s"), counted="rows"
    ),
    Format(
        "Megatron-Bridge",
        "GPU utilization: ...MODEL_TFLOP/s/GPU",
        (*_BRIDGE_RULES, *_LM_RULES),
        _megatron_bridge,
        counted="rows",
    ),
    Format(
        "Megatron",
        "elapsed time per iteration (ms): ... | throughput per GPU (TFLOP/s/GPU): ...",
        _MEGATRON_RULES,
        _megatron,
        counted="rows",
    ),
    Format("nanoGPT", "iter 100: loss ..., time ...ms, mfu ...%", ("palm",), _nanogpt, smoothed=True),
    Format("nanochat", "dt: ...ms | tok/sec: ... | mfu: ...", ("nanochat",), _nanochat, whole_job=True),
    Format("OLMo-core", "throughput/device/MFU=...", ("olmo-core",), _olmo_core),
    Format("llm-foundry", "Train throughput/device/mfu: ...", ("llm-foundry",), _llm_foundry),
    Format(
        "NeMo RL",
        "Training FLOPS: ... TFLOPS (... TFLOPS per rank)",
        ("nemo-rl",),
        _nemo_rl,
        note=_RL_NOTE,
        read_phases=rl_formats.nemo_rl_steps,
    ),
    Format(
        "slime",
        "perf 3: {..., 'perf/actor_train_tflops': ...}",
        ("slime", "miles"),
        partial(rl_formats.slime, has_mfu=False),
        read_phases=partial(rl_formats.slime_steps, trainer="slime"),
    ),
    Format(
        "miles",
        "perf 3: {..., 'perf/actor_train_mfu': ...}",
        ("miles", "slime"),
        partial(rl_formats.slime, has_mfu=True),
        read_phases=partial(rl_formats.slime_steps, trainer="miles"),
    ),
    Format(
        "prime-rl",
        "Step 7 | ... | Throughput ... tokens/s | MFU ...% | Peak Mem. ...",
        ("prime-rl",),
        rl_formats.prime_rl,
        whole_job=True,
        counted="rows",
        note=_PRIME_NOTE,
    ),
    Format(
        "OpenRLHF",
        "Global step 7: {..., 'timing/ppo_train': ...}",
        (),
        rl_formats.no_rates,
        read_phases=rl_formats.openrlhf_steps,
    ),
    Format("NeMo Automodel", '"tps_per_gpu": ..., "mfu": ...', ("nemo-automodel",), _automodel, counted="real"),
    Format("NeMo Automodel", "Max iter time: ... seconds, MFU: ...%", ("nemo-automodel",), _automodel_benchmark),
    Format(
        "ms-swift", '"MFU": ..., "global_step/max_steps": ...', ("6nd",), _ms_swift, smoothed=True, note=_SWIFT_NOTE
    ),
    Format("Lightning", "metrics.csv with train/device/mfu", ("flop-counter",), _lightning, smoothed=True),
    Format("verl", "perf/mfu/actor:...", ("verl", "verl-2025-12"), _verl, read_phases=rl_formats.verl_steps),
    Format("LMMs-Engine", "'train/mfu': ...", ("lmms-engine",), _lmms_engine),
    TRL,
    Format(
        "diffusers",
        "Steps: ... [..., 1.25s/it, loss=..., lr=...]",
        (),
        progress_bar,
        smoothed=True,
        note=BAR_NOTE,
    ),
)

_OWN = re.compile(r'\{"schema_version": \d+, "kind": "')


def is_log(lines: Sequence[str]) -> bool:
    """Tell whether some other tool's reader finds a step in these lines; Headway's own records are none."""
    if lines and _OWN.match(lines[0]):  # Headway's own records name their MFU as other tools do
        return False
    return any(next(iter(form.read_rows(lines, Counter())), None) is not None for form in FORMATS)


KNOWN_LINES = tuple(f"{form.tool} (`{form.lines}`)" for form in FORMATS)
"""Every tool with what its lines look like."""
