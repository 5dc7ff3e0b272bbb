"""Logs of trainers that generate: lines with their rates, and steps by phase with lengths of prompts and answers."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from headway.audit.rows import LengthSpread, LogRow, PhasedStep, near, printed
from headway.integrations.rl import TRAINERS

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
            prompt=_lengths(values, "prompt_length"),
            answer=_lengths(values, "response_length"),
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
        answer = _lengths(values, "rollout/response_len") or _mean(values.get("rollout/response_lengths"))
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


def _lengths(values: Mapping[str, float], name: str) -> LengthSpread | None:
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
