"""A configuration for a model and data that somebody brings: it runs as it is, and gives its reasons.

What can be measured is: lengths come from the index, memory from the dry run's plan, steps from the plan of packs. The
rest are rules, each named in the comment beside its value.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import yaml

from headway.config import TrainConfig, parse_config, with_overrides
from headway.count import CostModel
from headway.data.index.length_index import LengthIndex, length_table
from headway.devices import Device
from headway.errors import ConfigError, DataError, PlanError
from headway.packing import Budget, Items, Order, Plan, measure
from headway.packing.lengths import LengthTable
from headway.plugins import objectives
from headway.predict.fitting import LORA_RANK, room_of
from headway.predict.prediction import OtherPacks, Prediction
from headway.predict.predictor import Predictor
from headway.predict.recipe import precision_of
from headway.predict.speeds import Speeds
from headway.predict.tune import same_step
from headway.report import format_bytes, format_count, format_share
from headway.words import Argument

_EPOCHS = 3  # chats, as LLaMA-Factory's examples/train_full (0.9.3)
_CORPUS_EPOCHS = 1  # documents, as language models are trained on theirs
_FROM_SCRATCH_STEPS = 300  # with fewer, a small model with random weights has hardly left its first loss (tutorial.md)
_MOST_EPOCHS = 50
_LEAST_PACK, _MOST_PACK = 512, 32768  # [tokens]
_MEDIANS = 8  # samples of the median's length that a pack holds, so that packs can be made equal
_LEAST_STEPS = 10  # in an epoch, where there are samples for so many
_SAMPLES_PER_STEP = 16  # at least, by accumulation
_SMALL_MODEL = 100_000_000  # parameters; nobody fine-tunes so few


_LEAST_RUN = {
    "model": {"path": "model"},
    "data": {"train": [{"path": "data"}], "tokens_per_pack": 1},
    "optim": {"steps": 1, "lr": 1.0},
    "run": {"folder": "run"},
}
"""Settings that every configuration needs, around an objective's own."""


@dataclass(frozen=True)
class MeasuredLengths:
    """Lengths of all samples that can be used."""

    tokens: np.ndarray[Any, np.dtype[Any]]  # tokens of each sample, shape (N,)
    bad: int  # rows that cannot be used
    images: int  # pictures and videos in them
    are_documents: bool  # true if every token is learnt, so that long samples can be split
    empty: int = 0  # rows that hold nothing to learn, which training leaves out
    are_pairs: bool = False  # true if every sample is answers with better ones among them

    @classmethod
    def of(cls, indices: Sequence[LengthIndex]) -> "MeasuredLengths":
        """Join indices.

        Raises:
            DataError: no row can be used.
        """
        tokens = np.concatenate([index.tokens[index.ok] for index in indices])
        if not len(tokens):
            reasons = [str(error) for index in indices for error in index.bad.values()]
            first = reasons[0] if reasons else "it holds no words"
            raise DataError(f"Headway can use no sample of the data. The first sample: {first}")
        supervised = sum(int(index.supervised.sum(dtype=np.int64)) for index in indices)
        images = sum(len(index.media[name].values) for index in indices for name in ("images", "videos"))
        bad, empty = sum(len(index.bad) for index in indices), sum(int(index.empty.sum()) for index in indices)
        are_pairs = all(bool((index.num_answers[index.ok] > 0).all()) for index in indices if index.ok.any())
        return cls(tokens, bad, images, supervised == int((tokens - 1).sum()), empty, are_pairs)

    @property
    def median(self) -> int:
        """Median [tokens]."""
        return int(np.percentile(self.tokens, 50, method="inverted_cdf"))

    @property
    def p95(self) -> int:
        """Length that 95 % of the samples do not exceed [tokens]."""
        return int(np.percentile(self.tokens, 95, method="inverted_cdf"))

    @property
    def longest(self) -> int:
        """Longest sample [tokens]."""
        return int(self.tokens.max())

    def __str__(self) -> str:
        return (
            f"{format_count(len(self.tokens))} samples, median {format_count(self.median)}, 95 % up to "
            f"{format_count(self.p95)}, longest {format_count(self.longest)} tokens"
            + (f"; {format_count(self.empty)} empty rows left out" if self.empty else "")
        )


@dataclass(frozen=True)
class Suggestion:
    """A configuration and the facts it is founded on."""

    text: str  # YAML
    config: TrainConfig  # the same, read
    lengths: MeasuredLengths  # lengths of the data
    epochs: int  # passes over all samples
    steps_per_epoch: int  # optimizer steps that play every sample once, on one device
    planned: Prediction | None  # memory plan; None where no device was named


def suggest(
    model: str,
    data: Mapping[str, LengthIndex],
    cost_model: CostModel,
    *,
    device: Device | None,
    run_folder: str,
    has_weights: bool,
    columns: Mapping[str, str] | None = None,
    held_out: str | None = None,
    chat_template: str | None = None,
    new_tokens: Mapping[str, Sequence[str]] | None = None,
) -> Suggestion:
    """Write a configuration.

    Args:
        model: as in `model.path`.
        data: the length index of each dataset, by its path.
        cost_model: of the model.
        device: whose memory it must fit, None not to look.
        run_folder: folder of the run.
        has_weights: whether the model has weights to begin with.
        columns: the datasets' own names of columns, as in `data.train`.
        held_out: path of samples that the run answers after its last step, as in `data.eval`.
        chat_template: file of a template in place of the model's own, as in `model.chat_template`.
        new_tokens: tokens to add, by the settings that do.

    Raises:
        DataError: no sample can be used.
        ConfigError: nothing makes it fit the device.
    """
    objective = _objective(MeasuredLengths.of(list(data.values())))
    data = _as_packed(data, objective, cost_model)
    lengths = MeasuredLengths.of(list(data.values()))
    pack = pack_length(lengths)
    # the recipe without what depends on the device
    added = {setting: list(tokens) for setting, tokens in (new_tokens or {}).items() if tokens}
    raw: dict[str, Any] = {
        "model": {"path": model}
        | ({} if has_weights else {"random_init": True})
        | ({} if chat_template is None else {"chat_template": chat_template})
        | added,
        "data": {"train": _train(data, columns or {}), "tokens_per_pack": pack},
        "optim": {"steps": 1, "lr": _learning_rate(cost_model, lengths, adapters=False)},
        **({} if objective is None else objective.sections),
        "run": {"folder": run_folder},
    }
    if lengths.longest > pack:
        raw["data"]["overlong"] = "split" if lengths.are_documents else "drop"
    if held_out is not None:
        raw["data"]["eval"] = {"path": held_out, "columns": dict(columns)} if columns else held_out
        raw["eval"] = {"at_end": True}
    # packs of a step for enough samples
    per_step = math.ceil(lengths.tokens.mean() * _SAMPLES_PER_STEP / pack)
    steps, accumulation = _steps(data, raw, cost_model, max(1, min(_SAMPLES_PER_STEP, per_step)))
    raw["optim"] |= {"accumulation": accumulation} if accumulation > 1 else {}
    planned = None
    # packs of as many tokens a step that fit the device's memory and train fastest there, else other settings
    if device is not None:
        table = ", ".join(data), length_table(data, raw["data"].get("overlong", "error"))
        raw, planned = _fitted(raw, cost_model, device, _learning_rate(cost_model, lengths, adapters=True), table)
        raw["plan"] = {"device": device.key}
        steps, accumulation = _steps(data, raw, cost_model, raw["optim"].get("accumulation", 1))
        raw["optim"] |= {"accumulation": accumulation} if "accumulation" in raw["optim"] else {}
    # epochs for enough steps
    epochs = _epochs(steps, cost_model, lengths, from_scratch=not has_weights)
    total = epochs * steps
    del raw["optim"]["steps"]
    raw["optim"] = {"epochs": epochs} | raw["optim"]
    raw["optim"]["warmup_steps"] = min(total // 2, max(1, round(0.03 * total)))
    raw["checkpoint"] = {"every": max(1, min(steps, total // 2))}
    # the text is read back, so that what is written is what runs
    text = _commented(raw, _comments(raw, lengths, steps, planned, cost_model))
    return Suggestion(text, parse_config(yaml.safe_load(text)), lengths, epochs, steps, planned)


def _epochs(steps: int, cost_model: CostModel, lengths: MeasuredLengths, *, from_scratch: bool) -> int:
    """Suggest how often the data play: a corpus once, chats thrice, and more for a model that knows nothing yet.

    Args:
        steps: of one pass.
        cost_model: of the model; one of few parameters is taken to have been made here.
        lengths: of the data.
        from_scratch: whether the model's folder holds no weights.
    """
    usual = _CORPUS_EPOCHS if lengths.are_documents else _EPOCHS
    if not from_scratch and cost_model.params.total >= _SMALL_MODEL:
        return usual
    return max(usual, min(_MOST_EPOCHS, math.ceil(_FROM_SCRATCH_STEPS / steps)))


def _why_epochs(epochs: int, lengths: MeasuredLengths) -> str:
    if epochs > _EPOCHS:
        return f"passes over all samples (a model from scratch gets {_FROM_SCRATCH_STEPS} steps or more)"
    return "one pass over a corpus" if lengths.are_documents and epochs == _CORPUS_EPOCHS else "passes over all samples"


def pack_length(lengths: MeasuredLengths) -> int:
    """Suggest a token budget: a power of two that holds the longest sample and eight of the median's length.

    Less where the data would fill fewer than ten packs, or where the longest are rare and would make packs of 32,768.
    """
    wanted = max(lengths.longest, _MEDIANS * lengths.median)
    ceiling = max(lengths.longest, int(lengths.tokens.sum()) // _LEAST_STEPS)
    least = lengths.longest if lengths.longest <= _MOST_PACK else min(_MOST_PACK, 2 * lengths.p95)
    tokens = max(least, min(wanted, ceiling, _MOST_PACK))
    return max(_LEAST_PACK, 1 << (tokens - 1).bit_length())


def _train(data: Mapping[str, LengthIndex], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """One source, or several in proportion to their samples."""
    own_columns = {"columns": dict(columns)} if columns else {}
    if len(data) == 1:
        return [{"path": path, **own_columns} for path in data]
    return [{"mix": [{"path": path, "weight": int(index.ok.sum()), **own_columns} for path, index in data.items()]}]


def _learning_rate(cost_model: CostModel, lengths: MeasuredLengths, *, adapters: bool) -> float:
    """Peak learning rate by rule of thumb.

    Source: adapters 2e-4 (Dettmers et al. 2023, QLoRA, table 9); fine-tuning 1e-5, as LLaMA-Factory's
    examples/train_full (0.9.3); below 100 M parameters 0.003239 - 0.0001395 ln(parameters) (Kaplan et al. 2020,
    equation D.1); times the factor of an objective that suits the samples.
    """
    parameters = cost_model.params.total
    rate = 2e-4 if adapters else 1e-5
    if not adapters and parameters < _SMALL_MODEL:
        rate = 0.003239 - 0.0001395 * math.log(parameters)
    objective = _objective(lengths)
    return float(f"{rate * (1.0 if objective is None else objective.rate):.1e}")


class SuggestedObjective(NamedTuple):
    """Objective that suits the samples better than cross-entropy."""

    sections: Mapping[str, Any]  # sections of the configuration that ask for it
    comments: Mapping[str, str]  # comments on its settings, by their names
    rate: float  # factor on the usual learning rate
    why_rate: str  # words on the rate, for its comment


def _objective(lengths: MeasuredLengths) -> SuggestedObjective | None:
    """Ask the registered objectives for one that suits the samples; None if cross-entropy suits them."""
    hooks = [plugin.hook("suggested") for plugin in objectives()]
    suggestions = [hook(are_pairs=lengths.are_pairs) for hook in hooks if hook is not None]
    return next((suggestion for suggestion in suggestions if suggestion is not None), None)


def _as_packed(
    data: Mapping[str, LengthIndex], objective: SuggestedObjective | None, cost_model: CostModel
) -> Mapping[str, LengthIndex]:
    """Indices with the lengths that packs hold: a prompt once, where the run and the model share prompts."""
    if objective is None or cost_model.mixed_otherwise:
        return data
    section = TrainConfig.model_validate({**_LEAST_RUN, **objective.sections}).objective_section
    if section is None or not section.shares_prompts:
        return data
    return {path: index.with_prompts_once() for path, index in data.items()}


def _fitted(
    raw: dict[str, Any],
    cost_model: CostModel,
    device: Device,
    rate_of_adapters: float,
    lengths: tuple[str, LengthTable],
) -> tuple[dict[str, Any], Prediction]:
    """Settings for a device: the fastest packs, else the gentlest setting that is enough, adapters, or both."""
    room = room_of(device) or 0
    for adapters in (False, True):
        if adapters:
            raw = raw | {"model": raw["model"] | {"lora": {"rank": LORA_RANK}}}
            raw["optim"] = raw["optim"] | {"lr": rate_of_adapters}
        config = parse_config(raw)
        predictor = Predictor.of(config, cost_model, device=device)
        planned = predictor.at(config, 1, lengths)
        others = [other.choice for other in _other_packs(predictor, config, device, lengths) if not other.leaves_out]
        ways: list[tuple[str, ...]] = [others[0].settings] if others else []
        if not ways and planned.fit in ("fits", None):
            ways = [()]
        for way in planned.ways:
            # shorter packs are tried above, and adapters, which are tried next, learn at a rate of their own
            is_tried_apart = any(setting.startswith(("data.tokens_per_pack", "model.lora")) for setting in way.settings)
            gentle = adapters or len(way.settings) == 1  # adapters do less harm than several roundings together
            if way.devices == 1 and way.settings and gentle and way.peak_bytes <= room and not is_tried_apart:
                ways.append(way.settings)
        if ways:
            changed = copy.deepcopy(raw)
            return changed, predictor.at(with_overrides(changed, ways[0]), 1, lengths)
    raise ConfigError(
        f"Headway found no settings that fit {raw['model']['path']} on one {device.title}. Even LoRA of rank "
        f"{LORA_RANK} needs {format_bytes(planned.memory.peak)}. Give a smaller model or another {Argument('device')}, "
        "or plan several devices with headway train --dry-run --devices N."
    )


def _other_packs(
    predictor: Predictor, config: TrainConfig, device: Device, lengths: tuple[str, LengthTable]
) -> tuple[OtherPacks, ...]:
    """Faster packs of as many tokens a step; none where the device's rates are not known."""
    try:
        speeds = Speeds.of_device(device, "fp32" if precision_of(config, 1) == "float32" else "bf16")
    except PlanError:
        return ()
    return same_step(config, replace(predictor, speeds=speeds), 1, lengths)


def _steps(
    data: Mapping[str, LengthIndex], raw: dict[str, Any], cost_model: CostModel, accumulation: int
) -> tuple[int, int]:
    """Steps of one pass over all data on one device, and the accumulation that leaves enough of them."""
    config = parse_config(raw)
    budget = Budget(config.data.tokens_per_pack, None, None)
    sources = {str(number): index for number, index in enumerate(data.values())}
    overlong, skips = config.data.overlong, config.skips_unlabelled
    items, _ = Items.build(sources, budget, overlong, cost_model, skips_unlabelled=skips)
    if not len(items):
        raise DataError(f"No sample fits a pack of {budget.tokens} tokens.")
    order = Order.epochs(items.sizes, 1, seed=0)
    report, _ = measure(Plan(items, order, budget, 1), 1)
    accumulation = max(1, min(accumulation, report.packs // _LEAST_STEPS))
    return max(1, math.ceil(report.packs / accumulation)), accumulation


def _comments(
    raw: dict[str, Any], lengths: MeasuredLengths, steps: int, planned: Prediction | None, cost_model: CostModel
) -> dict[str, str]:
    pack, optim = raw["data"]["tokens_per_pack"], raw["optim"]
    adapters = "lora" in raw["model"]
    rate = "adapters learn at higher rates (QLoRA)" if adapters else "the usual rate of full fine-tuning"
    if not adapters and cost_model.params.total < _SMALL_MODEL:
        rate = f"by size, for {format_count(cost_model.params.total)} parameters (Kaplan et al. 2020, D.1)"
    objective = _objective(lengths)
    if objective is not None:
        rate = objective.why_rate
    # numbers that the comments name
    over = int((lengths.tokens > pack).sum())
    samples_per_pack = max(1.0, pack / float(lengths.tokens.mean()))
    # for each setting that a suggestion may have
    comments = {
        "model": "All weights learn, unless you set lora or freeze.",
        "model.path": "folder, config.json or Hub id",
        "model.random_init": "the folder has no weights, so Headway draws them with run.seed",
        "model.chat_template": "replaces the model's own template, in exports too",
        "model.new_tokens": "tokens of the tokenizer that the model has no row for yet",
        "model.new_special_tokens": "tokens of the tokenizer that the model has no row for yet",
        "model.lora": f"all weights do not fit {planned.device.title}" if planned and planned.device else "adapters",
        "model.base": "frozen weights have 4 bits, because 16 bits do not fit (QLoRA)",
        "data": f"{lengths}.",
        "data.train": "each row becomes a sample (docs/data-formats.md lists the forms)",
        "data.tokens_per_pack": f"one micro-batch: about {samples_per_pack:,.0f} samples without padding [tokens]",
        "data.overlong": f"{format_count(over)} samples exceed a pack ({format_share(over / len(lengths.tokens))})",
        "data.eval": "held-out samples",
        "eval": "The model answers the held-out samples. The summary says how many answers are exact.",
        "eval.at_end": "once after the last step (eval.every: N evaluates every N steps)",
        "optim": f"One epoch is {format_count(steps)} steps on one device, and fewer on several.",
        "optim.epochs": _why_epochs(optim["epochs"], lengths),
        "optim.lr": f"{rate} (if you tune one setting, tune this one)",
        "optim.accumulation": f"packs per step, for {_SAMPLES_PER_STEP} samples a step or more",
        "optim.warmup_steps": "the learning rate rises in the first 3 % of the steps [steps]",
        "optim.state": "precision of the optimizer's states, lowered to save memory",
        "speed": "The fastest settings that fit the device's memory.",
        "checkpoint": "Headway exports the last checkpoint as a folder that transformers opens.",
        "checkpoint.every": "steps between checkpoints (`headway train --resume` continues from the newest)",
        **({} if objective is None else objective.comments),
        "run": "The folder gets metrics.jsonl, checkpoints/, summary.json and export/.",
        "run.folder": "one folder for each run",
    }
    # memory, where it was planned for a device
    if planned is not None and planned.device is not None:
        share = planned.memory.peak / (planned.device.total_memory_bytes or planned.memory.peak)
        peak = f"{format_bytes(planned.memory.peak)} at most, {format_share(share)} of {planned.device.title}"
        comments |= {
            "plan": f"Memory by the plan: {peak}.",
            "plan.device": "`headway train --dry-run` shows the memory on this device by part",
        }
    comments |= {f"optim.{key}": comments.get(f"optim.{key}", "") for key in optim}
    return comments


def _commented(raw: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """YAML of two levels with a comment above each section and behind each setting."""
    lines = [
        "# Written by `headway init`. `headway train FILE --dry-run --device NAME` plans this run's memory.",
        "",
    ]
    for section, settings in raw.items():
        lines += [f"# {comments[section]}"] if comments.get(section) else []
        lines.append(f"{section}:")
        rows: list[tuple[str, str]] = []
        for key, value in settings.items():
            rows.append((f"  {key}: {_flow(value)}", comments.get(f"{section}.{key}", "")))
        width = max(len(line) for line, comment in rows if comment or line) if rows else 0
        lines += [f"{line:<{min(width, 60)}}  # {comment}" if comment else line for line, comment in rows]
        if section == "data" and "eval" not in settings:
            lines.append("  # eval: held_out.jsonl  # held-out samples (set eval.every too)")
        lines.append("")
    return "\n".join(lines)


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True).strip()
    return text.removesuffix("\n...").strip()
