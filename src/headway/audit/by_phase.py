"""Steps of trainers that generate, by phase: read from their logs, and restated in useful FLOPs by the lengths there.

A log tells means. What grows with tokens is exact by them; pairs of attention are fewest where all samples are as long
as the mean, and most where each is as long as the shortest or the longest. Both ends are given.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from headway.audit.rows import LengthSpread, Log, LogRow, PhasedStep, near, printed
from headway.count import CostModel, Workload
from headway.devices import Peak
from headway.integrations.rl import TRAINERS, TrainerPhases
from headway.words import Argument

_MOST_SAMPLES, _MOST_TOKENS = 1_000_000, 10**8  # bounds of a step and of a sample; no log has larger numbers
_ANY_PEAK = Peak("not stated", 1.0, "", "not stated")


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One phase of one step, restated."""

    step: int
    phase: str  # the trainer's name of it; "rest" for what none claims
    seconds: float
    share: float  # fraction of the step's time
    printed_mfu: float | None  # fraction
    printed_flops_per_s: float | None  # FLOP/s of one device
    # useful FLOPs of all devices together, at least and at most; None where the log does not tell lengths. The same
    # number where all samples are equally long, and None for the most where it tells no longest sample
    flops: tuple[int, int | None] | None
    flops_per_s: float | None  # FLOP/s of one device at least; None where the number of devices is not known
    mfu: tuple[float, float | None] | None  # useful, at least and at most; None without a peak


def restated(
    log: Log, cost_model: CostModel | None, peak: Peak | None, num_ranks: int | None, mean_sample: int | None
) -> tuple[tuple[PhaseRow, ...], tuple[str, ...]]:
    """Restate the phases of a log's steps.

    Args:
        log: as `read_log` gives it.
        cost_model: of the policy, if it is known; scoring and the reference are taken to be of it too.
        peak: of one device, for MFU.
        num_ranks: devices of the job; what the log implies when None.
        mean_sample: mean length of prompt and answer together [tokens], where the log does not tell.

    Returns:
        Rows, and remarks on what they rest on.
    """
    rows: list[PhaseRow] = []
    remarks = Counter[str]()
    for step in log.phased:
        sized = _sized(step, mean_sample) if cost_model is not None else None
        if sized is None:
            remarks[
                "steps have times without lengths or a number of samples. Give the mean length of prompt and answer "
                f"together with {Argument('mean_segment', example='L')}"
            ] += 1
        rows += _rows(step, sized, cost_model, peak, num_ranks or step.num_devices)
    counted = tuple(f"{count:,} {remark}" for remark, count in remarks.items())
    return tuple(rows), (*counted, *_remarks(log, rows))


def sample_workload(log: Log) -> Workload | None:
    """Samples of a log's first step that tells their lengths, all as long as the mean."""
    sized = next((sized for step in log.phased if (sized := _sized(step, None))), None)
    if sized is None:
        return None
    prompts, answers = _even(sized, least=True), _even(sized, least=False)
    return Workload([p + a for p, a in zip(prompts, answers, strict=True)])


@dataclass(frozen=True, slots=True)
class _Sizes:
    number: int
    prompt_tokens: int
    answer_tokens: int
    prompt: LengthSpread
    answer: LengthSpread


def _sized(step: PhasedStep, mean_sample: int | None) -> _Sizes | None:
    """Put the lengths of a step together from what its log tells; None where that is too little, or no sizes."""
    answer, prompt, number = step.answer, step.prompt, step.num_samples
    if answer is None:
        return None
    if prompt is None and mean_sample is not None:
        prompt = LengthSpread(mean_sample - answer.mean)
    if prompt is None and step.tokens and number:
        prompt = LengthSpread(step.tokens / number - answer.mean)
    if prompt is None or prompt.mean < 1 or not 0 <= answer.mean <= _MOST_TOKENS or prompt.mean > _MOST_TOKENS:
        return None
    if number is None and step.tokens:
        number = round(step.tokens / (prompt.mean + answer.mean))
    if not number or number > _MOST_SAMPLES:
        return None
    answer_tokens = round(number * answer.mean)
    prompt_tokens = (step.tokens or round(number * (prompt.mean + answer.mean))) - answer_tokens
    return None if prompt_tokens < number else _Sizes(number, prompt_tokens, answer_tokens, prompt, answer)


def _rows(
    step: PhasedStep, sized: _Sizes | None, cost_model: CostModel | None, peak: Peak | None, num_devices: int | None
) -> list[PhaseRow]:
    trainer = TRAINERS[step.trainer]
    times = {name: seconds for name, seconds in step.times.items() if name != trainer.total}
    step_s = step.times.get(trainer.total) or sum(times.values())
    runs = {name: [run for run in trainer.phases[name] if not run.startswith("critic")] for name in times}
    computed = [name for name in times if runs[name]]
    ends: list[dict[str, int]] = []
    if sized is not None and cost_model is not None and computed:
        phases = TrainerPhases(step.trainer, cost_model, _ANY_PEAK, prefix="own")
        for prompts, answers in _lengths(sized):
            window = phases.window(dict.fromkeys(computed, 1.0), prompts, answers)
            ends.append({name: window.phases[name].flops.total for name in computed})

    def row(name: str, seconds: float) -> PhaseRow:
        work = [end[name] for end in ends] if name in computed else []
        flops = (work[0], work[1] if len(work) > 1 else None) if work else None
        device_s = seconds * num_devices if num_devices else None
        rates = [flop / device_s for flop in work] if device_s else []
        shares = [rate / peak.flops_per_s for rate in rates] if peak is not None else []
        return PhaseRow(
            step.step, name, seconds, seconds / step_s if step_s else 0.0, step.mfu.get(name),
            step.flops_per_s.get(name), flops, rates[0] if rates else None,
            (shares[0], shares[1] if len(shares) > 1 else None) if shares else None,
        )  # fmt: skip

    rest_s = step_s - sum(times.values())
    return [row(name, seconds) for name, seconds in times.items()] + ([row("rest", rest_s)] if rest_s > 0 else [])


def _lengths(sized: _Sizes) -> Iterable[tuple[list[int], list[int]]]:
    """Give prompts and answers all alike, and, where their ends are known, as unlike as these allow."""
    yield _even(sized, least=True), _even(sized, least=False)
    prompts = _unlike(sized.number, sized.prompt_tokens, sized.prompt)
    answers = _unlike(sized.number, sized.answer_tokens, sized.answer)
    if prompts is not None and answers is not None:
        yield prompts, answers  # the longest prompt has the longest answer


def _even(sized: _Sizes, *, least: bool) -> list[int]:
    """Lengths that differ by one token at most; long prompts (`least`) have the short answers."""
    total = sized.prompt_tokens if least else sized.answer_tokens
    short, more = divmod(total, sized.number)
    lengths = [short + 1] * more + [short] * (sized.number - more)
    return lengths if least else lengths[::-1]


def _unlike(number: int, total: int, lengths: LengthSpread) -> list[int] | None:
    """Lengths of a sum between two ends that differ the most: each at one end, but for one of them."""
    if lengths.least is None or lengths.most is None:
        return None
    least, most = int(lengths.least), int(lengths.most)
    if not 0 <= least * number <= total <= most * number or most > _MOST_TOKENS:
        return None
    num_long, over = divmod(total - least * number, most - least) if most > least else (0, 0)
    between = [least + over] if num_long < number else []
    return [most] * num_long + between + [least] * (number - num_long - len(between))


def _remarks(log: Log, rows: list[PhaseRow]) -> list[str]:
    remarks = []
    flops = [row.flops for row in rows if row.flops is not None]
    if flops:
        remarks.append(
            "FLOPs of phases are of mean lengths: what grows with tokens is exact to the printed digits; pairs of "
            "attention are at least those"
            + ("; at most those of the shortest and longest samples" if any(most for _, most in flops) else "")
        )
        remarks.append("prompts are billed once for each answer, but an engine that caches prompts computes fewer")
    if any("critic" in run for name in {row.phase for row in rows} for run in _runs(log, name)):
        remarks.append("work of a critic, if there is one, is left out, because the log does not name its model")
    if flops and not any(row.flops_per_s for row in rows):
        remarks.append(f"the log does not tell the number of devices. Give {Argument('num_ranks', example='N')}")
    return remarks


def _runs(log: Log, phase: str) -> tuple[str, ...]:
    return TRAINERS[log.phased[0].trainer].phases.get(phase, ()) if log.phased else ()


_DECIMAL = r"[0-9]{1,20}(?:\.[0-9]{1,25})?"
# an entry of a printed dictionary, or of verl's line: name, number, perhaps as numpy writes it
_ENTRY = re.compile(
    rf"(?<![\w/])([A-Za-z_]+(?:/[A-Za-z0-9_]+)+)['\"]?:\s*(?:np\.\w{{1,12}}\()?({_DECIMAL}(?:[eE][+-]?\d{{1,3}})?)(?![\d.])"
)
_VERL_STEP = re.compile(r"\bstep:(\d{1,18}) - ")
_SLIME_LINE = re.compile(r"\b(?:perf|rollout) (\d{1,18}): \{")
_OPENRLHF_LINE = re.compile(r"Global step (\d{1,18}): \{")
_TRL_STEP = re.compile(r"\bstep: (\d{1,18})\b")
_NEMO_HEAD = re.compile(r"=+ Step (\d{1,18})/\d+ =+")
_NEMO_TIME = re.compile(rf"• ([a-z][a-z_/]{{0,60}}): ({_DECIMAL})s \(")
_NEMO_VALUES = {
    "step_s": re.compile(rf"Total step time: ({_DECIMAL})s"),
    "answer": re.compile(rf"Mean Generation Length: ({_DECIMAL})"),
    "sample": re.compile(rf"Mean Total Tokens per Sample: ({_DECIMAL})"),
    "samples_per_s": re.compile(rf"E2E \(Samples/sec\): ({_DECIMAL})"),
    "tokens_per_s": re.compile(rf"E2E \(Tokens/sec\): ({_DECIMAL})"),
    "tokens_per_s_per_device": re.compile(rf"E2E \(Tokens/sec/gpu\): ({_DECIMAL})"),
    "mfu": re.compile(rf"Training Model Floating Point Utilization: ({_DECIMAL})%"),
    "flops_per_s": re.compile(rf"Training FLOPS: [0-9.,]{{1,40}} TFLOPS \(({_DECIMAL}) TFLOPS per rank\)"),
}
_MOST_DEVICES = 1_000_000  # a job that a log tells of has fewer


def slime(lines: Iterable[str], _: Counter[str], *, has_mfu: bool) -> Iterator[LogRow]:
    """Read the rate of the policy's update in the lines of slime, or of miles, which know the peak too."""
    for step, values in _merged(lines, _SLIME_LINE):
        rate, mfu, seconds = (values.get(f"perf/actor_train_{name}") for name in ("tflops", "mfu", "time"))
        if rate and (mfu is not None) == has_mfu:
            yield LogRow(
                step,
                mfu=near(mfu, 1e-6) if mfu else None,
                flops_per_s=near(rate * 1e12, 1e-6),
                step_s=near(seconds, 1e-6) if seconds else None,
            )


def trl(lines: Iterable[str], _: Counter[str]) -> Iterator[LogRow]:
    """Read TRL's asynchronous trainers, an entry a line; lines of the console have no step."""
    count = 0
    for line in lines:
        if "perf/mfu_" not in line:
            continue
        entry = line.replace("'", "").replace('"', "")  # transformers prints some numbers as strings
        values = dict(_ENTRY.findall(entry))
        for basis, time in (("wall_clock", "step_s"), ("fwd_bwd", "fwd_bwd_s")):
            names = (f"perf/mfu_{basis}", f"perf/forwarded_tok_s_{basis}", f"perf/{time}")
            mfu, tokens, seconds = map(values.get, names)
            if mfu and tokens:
                step = _TRL_STEP.search(entry)
                count += 1
                yield LogRow(
                    int(step[1]) if step else count,
                    mfu=printed(mfu, 0.01),
                    tokens_per_s=printed(tokens),
                    step_s=printed(seconds) if seconds else None,
                )
                break


def no_rates(_: Iterable[str], __: Counter[str]) -> Iterator[LogRow]:
    """Read nothing: the tool prints no rate, but times and lengths."""
    return iter(())


def verl_steps(lines: Iterable[str]) -> Iterator[PhasedStep]:
    """Read the times and lengths of verl's console lines."""
    for line in lines:
        if "timing_s/step:" not in line or (match := _VERL_STEP.search(line)) is None:
            continue
        values = _entries(line)
        tokens, step_s, rate = (
            values.get(f"perf/{key}") for key in ("total_num_tokens", "time_per_step", "throughput")
        )
        names = {"update_actor": "actor", "old_log_prob": "actor_infer", "ref": "ref", "update_critic": "critic"}
        yield PhasedStep(
            int(match[1]),
            "verl",
            TRAINERS["verl"].times(values),
            prompt=_spread(values, "prompt_length"),
            answer=_spread(values, "response_length"),
            tokens=_whole(tokens),
            num_devices=_devices(tokens / (step_s * rate) if tokens and step_s and rate else None),
            mfu={phase: mfu for phase, name in names.items() if (mfu := values.get(f"perf/mfu/{name}"))},
        )


def slime_steps(lines: Iterable[str], *, trainer: str) -> Iterator[PhasedStep]:
    """Read slime's lines of one step together: rollout, its lengths, and the trainer's times."""
    for step, values in _merged(lines, _SLIME_LINE):
        rate, seconds = (values.get(f"perf/actor_train_{name}") for name in ("tok_per_s", "time"))
        if seconds is None or ("perf/actor_train_mfu" in values) != (trainer == "miles"):
            continue
        answer = _spread(values, "rollout/response_len") or _mean(values.get("rollout/response_lengths"))
        total = values.get("rollout/total_lengths")
        rates = {"actor_train": "actor_train", "log_probs": "log_probs", "ref_log_probs": "ref_log_probs"}
        yield PhasedStep(
            step,
            trainer,
            TRAINERS[trainer].times(values),
            prompt=_mean(total - answer.mean if total and answer else None),
            answer=answer,
            tokens=_whole(rate * seconds if rate else None),
            mfu={"actor_train": mfu} if (mfu := values.get("perf/actor_train_mfu")) else {},
            flops_per_s={phase: v * 1e12 for phase, key in rates.items() if (v := values.get(f"perf/{key}_tflops"))},
        )


def openrlhf_steps(lines: Iterable[str]) -> Iterator[PhasedStep]:
    """Read the times of OpenRLHF's lines, and the number of its answers with their mean length."""
    for step, values in _merged(lines, _OPENRLHF_LINE):
        times = TRAINERS["openrlhf"].times(values)
        answer = _mean(values.get("rollout/response_length_mean"))
        if times:
            yield PhasedStep(
                step, "openrlhf", times, answer=answer, num_samples=_whole(values.get("rollout/num_samples"))
            )


def nemo_rl_steps(lines: Iterable[str]) -> Iterator[PhasedStep]:
    """Read the times of NeMo RL's summaries, from a step's marker to the next one."""
    step, blocks = None, defaultdict[int, list[str]](list)
    for line in lines:
        if (match := _NEMO_HEAD.search(line)) is not None:
            step = int(match[1])
        if step is not None:
            blocks[step].append(line)
    for step, block in blocks.items():
        matches = ((name, pattern.search(line)) for line in block for name, pattern in _NEMO_VALUES.items())
        values = {name: float(match[1]) for name, match in matches if match}
        times = {match[1]: float(match[2]) for line in block if (match := _NEMO_TIME.search(line))}
        if "step_s" not in values or not {"generation", "exposed_generation"} & times.keys():
            continue  # the block is of supervised training, or cut off
        answer, sample = values.get("answer"), values.get("sample")
        per_device, job = values.get("tokens_per_s_per_device"), values.get("tokens_per_s")
        rate = values.get("samples_per_s")
        yield PhasedStep(
            step,
            "nemo-rl",
            TRAINERS["nemo-rl"].times({**times, "total_step_time": values["step_s"]}),
            prompt=_mean(sample - answer if sample and answer else None),
            answer=_mean(answer),
            num_samples=_whole(rate * values["step_s"] if rate else None),
            num_devices=_devices(job / per_device if job and per_device else None),
            mfu={"policy_training": values["mfu"] / 100} if "mfu" in values else {},
            flops_per_s={"policy_training": values["flops_per_s"] * 1e12} if "flops_per_s" in values else {},
        )


ReadRows = Callable[[Sequence[str], Counter[str]], Iterator[LogRow]]
ReadPhases = Callable[[Iterable[str]], Iterator[PhasedStep]]


def _entries(line: str) -> dict[str, float]:
    return {name: float(number) for name, number in _ENTRY.findall(line)}


def _merged(lines: Iterable[str], head: re.Pattern[str]) -> Iterator[tuple[int, dict[str, float]]]:
    """Join several lines of one step, in the order of the steps' first lines."""
    steps = defaultdict[int, dict[str, float]](dict)
    for line in lines:
        if (match := head.search(line)) is not None:
            steps[int(match[1])].update(_entries(line))
    return iter(steps.items())


def _spread(values: Mapping[str, float], name: str) -> LengthSpread | None:
    mean = values.get(f"{name}/mean")
    return None if mean is None else LengthSpread(mean, values.get(f"{name}/min"), values.get(f"{name}/max"))


def _mean(mean: float | None) -> LengthSpread | None:
    return None if mean is None or mean < 0 else LengthSpread(mean)


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)


def _devices(number: float | None) -> int | None:
    """Number of devices that two rates imply; None unless a whole number lies within the rates' rounding."""
    nearest = 0 if number is None else round(min(number, _MOST_DEVICES))
    return nearest if number is not None and nearest and abs(number / nearest - 1) < 0.02 else None


READERS: dict[str, ReadRows] = {
    "slime": partial(slime, has_mfu=False),
    "miles": partial(slime, has_mfu=True),
    "trl": trl,
    "no_rates": no_rates,
}
PHASES: dict[str, ReadPhases] = {
    "verl_steps": verl_steps,
    "slime_steps": partial(slime_steps, trainer="slime"),
    "miles_steps": partial(slime_steps, trainer="miles"),
    "openrlhf_steps": openrlhf_steps,
    "nemo_rl_steps": nemo_rl_steps,
}
"""Readers of rows and of steps by phase, by their names in `formats.toml`."""
