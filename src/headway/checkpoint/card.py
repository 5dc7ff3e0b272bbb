"""The model card of an exported checkpoint: what the records of its run tell, as the README.md that hubs read.

Front matter is written by huggingface_hub. Paths of the machine that trained are not in the card: data are named as the
run's records name them, and a base model by its name on the Hub alone.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from headway.checkpoint.folder import Checkpoint
from headway.config import TrainConfig, load_config
from headway.config.data import MediaConfig
from headway.config.sections import changed
from headway.data.sources.files import without_query
from headway.errors import HeadwayError
from headway.log.jsonl import as_object
from headway.log.run_files import CONFIG, METRICS, RUN, LossTally
from headway.report import Column, format_count, format_duration, format_rate, format_share
from headway.report.markdown import markdown_code, markdown_table, markdown_text

FILE_NAME = "README.md"
_ON_HUB = "hf://datasets/"  # as fsspec names a dataset of the Hub, with OWNER/NAME[@REVISION]/FILE behind it
_OF_MODEL = ("freeze", "lora", "base", "new_tokens", "new_special_tokens")
_OF_DATA = (
    "tokens_per_pack",
    "patches_per_pack",
    "samples_per_pack",
    "strategy",
    "overlong",
    "seed",
    *MediaConfig.model_fields,
)
_OF_OPTIM = ("name", "lr", "schedule", "warmup_steps", "weight_decay", "betas", "clip", "accumulation", "steps")
_FACTS = (Column("", "left"), Column("", "left"))


@dataclass
class _Sums:
    """Sums over the records of all steps up to the checkpoint."""

    losses: LossTally = field(default_factory=LossTally)
    tokens: int = 0
    flops: int = 0
    recomputed: int = 0
    wall_s: float = 0.0
    at_peak: float = 0.0  # FLOPs that the devices could have computed meanwhile
    energy_j: float | None = 0.0  # None where a step has none
    sources: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # tokens by source
    evaluation: Mapping[str, Any] | None = None
    last: Mapping[str, Any] = field(default_factory=dict)

    def add(self, record: Mapping[str, Any]) -> None:
        if record.get("kind") == "evaluation":
            self.evaluation = record
        if record.get("kind") != "step":
            return
        self.losses.add(record)
        self.tokens += record["tokens"]
        self.flops += record["flops"]["total"]
        self.recomputed += record["flops"]["recompute"]
        self.wall_s += record["wall_s"]
        self.at_peak += record["wall_s"] * record["peak_flops_per_s"] * record["world_size"]
        energy_j = record.get("energy_j")
        self.energy_j = None if self.energy_j is None or energy_j is None else self.energy_j + energy_j
        for name, source in (record.get("sources") or {}).items():
            self.sources[name] += source["tokens"]
        self.last = record


def write_card(checkpoint: Checkpoint, folder: Path, *, adapters: bool) -> Path | None:
    """Write a model card into an exported folder.

    Args:
        checkpoint: that was exported, in the folder of its run.
        folder: of the model or the adapters.
        adapters: whether it holds adapters alone.

    Returns:
        The card; None where the checkpoint stands in no run folder, or the run's files cannot be read.

    Raises:
        OSError: it cannot be written.
    """
    run = checkpoint.folder.parent.parent
    try:
        config = load_config(run / CONFIG)
        machine = as_object((run / RUN).read_bytes()) or {}
        sums = _Sums()
        with (run / METRICS).open("rb") as file:
            for line in file:
                record = as_object(line)
                if record is not None and record.get("step", 0) <= checkpoint.step:
                    sums.add(record)
        if not sums.losses.steps:
            return None
        stops = _stops_of(folder)
        text = _card(config, machine, sums, checkpoint.step, stops, adapters=adapters)
    except (HeadwayError, OSError, KeyError, TypeError, ValueError, ArithmeticError):
        return None
    path = folder / FILE_NAME
    path.write_text(text, encoding="utf-8")
    return path


def _stops_of(folder: Path) -> list[str]:
    """The tokens that end an answer, by the generation settings beside the tokenizer; none where there are none."""
    settings, words = (_object_in(folder / name) for name in ("generation_config.json", "tokenizer.json"))
    names = {token["id"]: token["content"] for token in words.get("added_tokens", ())}
    own = settings.get("eos_token_id")
    return [names.get(token, str(token)) for token in (own if isinstance(own, list) else [own]) if token is not None]


def _object_in(file: Path) -> Mapping[str, Any]:
    return (as_object(file.read_bytes()) if file.is_file() else None) or {}


def _card(
    config: TrainConfig, machine: Mapping[str, Any], sums: _Sums, step: int, stops: list[str], *, adapters: bool
) -> str:
    kind, software = machine.get("model") or {}, machine.get("software") or {}
    # the front matter that the Hub reads, then what people read
    base = _base(config)
    purpose = "image-text-to-text" if _sees(sums) else "text-generation"
    tags = ["headway", *(["lora"] if config.model.lora is not None else [])]
    if config.model.scores:
        purpose, tags = "text-classification", [*tags, "reward-model"]
    front = ModelCardData(
        base_model=base,
        datasets=_hub_datasets(config) or None,
        library_name="peft" if adapters else "transformers",
        pipeline_tag=purpose,
        tags=tags,
    )
    start = "from random weights" if config.model.random_init else f"from {base or 'other weights'}"
    model = str(kind.get("class", "model"))
    what = "Low-rank adapters of a" if adapters else "A"
    parts = [
        # front matter; then what it is, how it was trained, on what and with which settings
        f"---\n{front.to_yaml()}\n---",
        f"# {markdown_text(model)} after {step:,} steps",
        f"{what} {markdown_code(model)}, trained {markdown_text(start)} by Headway {software.get('headway', '')} on "
        f"{format_count(sums.tokens)} tokens.",
        *([] if adapters else [_OPENS_MESSAGE.format(software.get("transformers", ""))]),
        *([_stop_sentence(stops)] if stops else []),
        *([_ROWS_MESSAGE] if adapters and config.model.adds_tokens else []),
        *([_BASE_MESSAGES[config.model.base]] if adapters and config.model.base else []),
        "## Training",
        markdown_table(_FACTS, _facts(machine, sums), None),
        "## Data",
        _data(config, sums),
        "## Hyperparameters",
        f"````yaml\n{yaml.safe_dump(_hyperparameters(config), sort_keys=False).strip()}\n````",
    ]
    return "\n\n".join(parts) + "\n"


_OPENS_MESSAGE = (
    "transformers {} wrote these files. Settings that the base's files spell otherwise are in both spellings, so the "
    "versions of transformers that open the base open this model."
)

_ROWS_MESSAGE = (
    "The tokenizer here has tokens that the model beneath lacks. Give that model as many rows first, where it has "
    "fewer: `model.resize_token_embeddings(len(tokenizer))`, and then `PeftModel.from_pretrained`, which has their "
    "values."
)

_MERGED = "a merged export (`headway export RUN FOLDER --merge-lora`) answers exactly as in training"
_BASE_MESSAGES = {
    "nf4": "The adapters learnt beside a base in 4 bits. Give `from_pretrained` of the base "
    '`BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)`, whose weights '
    f"are nearly the same; {_MERGED}.",
    "int8": f"The adapters learnt beside a base in 8 bits; {_MERGED}.",
}


def _stop_sentence(stops: list[str]) -> str:
    tokens = " and ".join(map(markdown_code, stops))
    return f"Generation stops at {tokens}: `generation_config.json` names the tokens that ended answers in training."


def _facts(machine: Mapping[str, Any], sums: _Sums) -> list[tuple[str, str]]:
    last, kind, device = sums.last, machine.get("model") or {}, machine.get("device") or {}
    software, losses = machine.get("software") or {}, sums.losses
    facts = [("parameters", f"{kind['parameters']:,}, {kind['trainable']:,} of them trained")] if kind else []
    # what it learnt, as far as the records say
    if losses.last is not None:
        facts.append(("loss", f"{losses.first:.4f} first, {losses.last:.4f} at the end"))
    if sums.evaluation is not None:
        evaluation = sums.evaluation
        if "pairs" in evaluation:
            right = f"{format_share(evaluation['accuracy'])} of {evaluation['pairs']:,} pairs right"
        else:
            counts = f"{evaluation['exact']:,} of {evaluation['samples']:,}"
            right = f"{format_share(evaluation['exact_match'])} exact ({counts})"
        facts.append(("held-out samples", f"{right}, loss {evaluation['loss']:.4f} after step {evaluation['step']:,}"))
    facts += [
        ("FLOPs", f"{sums.flops:.4g} of the model, convention `{last['convention']}`"),
        ("time in steps", format_duration(sums.wall_s)),
        ("MFU", f"{format_share(sums.flops / sums.at_peak)} over all steps"),
    ]
    # HFU bills recomputation as well; without any it is MFU
    if sums.recomputed:
        facts.append(("HFU", format_share((sums.flops + sums.recomputed) / sums.at_peak)))
    peak = f"{format_rate(last['peak_flops_per_s'])} {last['peak_dtype']} a device; {last['peak_source']}"
    facts.append(("peak", peak))
    if sums.energy_j is not None:
        facts.append(("energy", f"{sums.energy_j / 3.6e6:.4g} kWh, as the devices measured it"))
    facts.append(("hardware", f"{last['world_size']:,} x {device.get('name', 'unknown device')}"))
    versions = [f"{name} {software[name]}" for name in ("headway", "torch", "transformers") if software.get(name)]
    facts.append(("software", ", ".join([*versions, *([machine["precision"]] if machine.get("precision") else [])])))
    return facts


def _data(config: TrainConfig, sums: _Sums) -> str:
    if not sums.sources:
        parts = [part for stage in config.data.played for part in stage.parts]
        names = ", ".join(markdown_code(_name(part.path or "")) for part in parts)
        return f"{format_count(sums.tokens)} tokens of {names}."
    rows = [
        (name, format_count(tokens), format_share(tokens / max(1, sum(sums.sources.values()))))
        for name, tokens in sorted(sums.sources.items(), key=lambda source: -source[1])
        if tokens
    ]
    return markdown_table((Column("source", "left"), Column("tokens"), Column("share")), rows, None)


def _hub_datasets(config: TrainConfig) -> list[str]:
    """Names on the Hub of the datasets that were trained on; other places are not named."""
    paths = [part.path or "" for stage in config.data.played for part in stage.parts]
    names = (path.removeprefix(_ON_HUB).split("/") for path in paths if path.startswith(_ON_HUB))
    return list(dict.fromkeys("/".join(parts[:2]).partition("@")[0] for parts in names if len(parts) > 1))


def _name(path: str) -> str:
    return without_query(path).rstrip("/").rpartition("/")[-1]


def _hyperparameters(config: TrainConfig) -> dict[str, Any]:
    """Settings that say how it was trained; none of them is a path."""
    raw, optim = config.to_dict(), config.optim
    shown = {
        "model": {name: raw["model"][name] for name in _OF_MODEL if raw["model"].get(name)},
        "data": {name: raw["data"][name] for name in _OF_DATA if raw["data"].get(name) is not None},
        "optim": {name: value for name, value in raw["optim"].items() if name in changed(optim) or name in _OF_OPTIM},
        "speed": {name: raw["speed"][name] for name in changed(config.speed)},
        "parallel": {name: raw["parallel"][name] for name in changed(config.parallel)},
        "run": {name: raw["run"][name] for name in ("dtype", "seed")},
    }
    return {section: settings for section, settings in shown.items() if settings}


def _base(config: TrainConfig) -> str | None:
    """The model's name on the Hub, where it was trained from one."""
    owner, slash, name = config.model.path.partition("/")
    is_name = bool(owner and slash and name) and "/" not in name and not owner.startswith((".", "~"))
    return (
        config.model.path if is_name and not config.model.random_init and not Path(config.model.path).exists() else None
    )


def _sees(sums: _Sums) -> bool:
    return bool(sums.last.get("patches") or any(name.startswith("vision") for name in sums.last["flops_by_component"]))
