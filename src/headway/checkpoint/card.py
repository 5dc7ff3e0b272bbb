"""The model card of an exported checkpoint, made from the records of its run: the README.md that hubs read.

huggingface_hub writes the card, from `card.md.jinja`. Paths of the machine that trained are not in it: data are named
as the run's records name them, and a base model by its name on the Hub alone.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from headway.checkpoint.folder import Checkpoint
from headway.config import TrainConfig, load_config
from headway.config.data import MediaConfig
from headway.config.sections import settings_off_default
from headway.data.sources.files import without_query
from headway.errors import HeadwayError
from headway.log.jsonl import as_object
from headway.log.records import RecordReader
from headway.log.run_files import CONFIG, METRICS, RUN, LossTally
from headway.report import Column, format_count, format_duration, format_rate, format_share
from headway.report.section import markdown_code, markdown_table, markdown_text

FILE_NAME = "README.md"
_ON_HUB = "hf://datasets/"  # prefix by which fsspec names a dataset of the Hub; OWNER/NAME[@REVISION]/FILE follows
_SHOWN = {  # settings that are in a card where they are set, beside those that are changed; none of them is a path
    "model": ["freeze", "lora", "base", "new_tokens", "new_special_tokens"],
    "data": ["tokens_per_pack", "patches_per_pack", "samples_per_pack", "strategy", "overlong", "seed",
             *MediaConfig.model_fields],
    "optim": ["name", "lr", "schedule", "warmup_steps", "weight_decay", "betas", "clip", "accumulation", "steps"],
    "speed": [], "parallel": [], "run": ["dtype", "seed"],
}  # fmt: skip


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
        facts, data, last = _records(run / METRICS, checkpoint.step, config, machine)
        if not last:
            return None
        base, kind = _base(config), str((machine.get("model") or {}).get("class", "model"))
        sees = last.get("patches") or any(name.startswith("vision") for name in last["flops_by_component"])
        scores = ["reward-model"] if config.model.scores else []
        card = ModelCard.from_template(
            ModelCardData(
                base_model=base,
                datasets=_hub_datasets(config) or None,
                library_name="peft" if adapters else "transformers",
                pipeline_tag="text-classification" if scores else "image-text-to-text" if sees else "text-generation",
                tags=["headway", *(["lora"] if config.model.lora is not None else []), *scores],
            ),
            template_path=str(Path(__file__).with_name("card.md.jinja")),
            title=markdown_text(kind),
            step=f"{checkpoint.step:,}",
            model=markdown_code(kind),
            adapters=adapters,
            start="from random weights"
            if config.model.random_init
            else f"from {markdown_text(base or 'other weights')}",
            software=machine.get("software") or {},
            stops=" and ".join(map(markdown_code, _stops_of(folder))),
            adds_tokens=config.model.adds_tokens,
            held=config.model.base,
            data=data,
            hyperparameters=yaml.safe_dump(_hyperparameters(config), sort_keys=False).strip(),
            **facts,
        )
    except (HeadwayError, OSError, KeyError, TypeError, ValueError, ArithmeticError):
        return None
    path = folder / FILE_NAME
    card.save(path)
    return path


def _records(file: Path, step: int, config: TrainConfig, machine: Mapping[str, Any]) -> tuple[Any, str, Any]:
    """Sum the records up to a step: tokens and facts of the training, a table of its data, and the last record."""
    losses, sums, sources = LossTally(), Counter[str](), Counter[str]()
    evaluation: Mapping[str, Any] | None = None
    last: Mapping[str, Any] = {}
    at_peak = wall_s = 0.0  # FLOPs that the devices could have computed meanwhile; time [s]
    with file.open("rb") as lines:
        for record in filter(None, map(RecordReader().read, lines)):
            if record.get("step", 0) > step:
                continue
            evaluation = record if record.get("kind") == "evaluation" else evaluation
            if record.get("kind") != "step":
                continue
            last = record
            losses.add(record)
            sums.update(
                tokens=record["tokens"], flops=record["flops"]["total"], recomputed=record["flops"]["recompute"]
            )
            wall_s += record["wall_s"]
            at_peak += record["wall_s"] * record["peak_flops_per_s"] * record["world_size"]
            sources.update({name: source["tokens"] for name, source in (record.get("sources") or {}).items()})
    if not last:
        return {}, "", last
    kind, software = machine.get("model") or {}, machine.get("software") or {}
    rows = [("parameters", f"{kind['parameters']:,}, {kind['trainable']:,} of them trained")] if kind else []
    if losses.last is not None:
        rows.append(("loss", f"{losses.first:.4f} first, {losses.last:.4f} at the end"))
    if evaluation is not None:
        if "pairs" in evaluation:
            right = f"{format_share(evaluation['accuracy'])} of {evaluation['pairs']:,} pairs right, "
        elif evaluation["exact_match"] is None:  # documents have no answer
            right = ""
        else:
            counts = f"{evaluation['exact']:,} of {evaluation['samples']:,}"
            right = f"{format_share(evaluation['exact_match'])} exact ({counts}), "
        rows.append(("held-out samples", f"{right}loss {evaluation['loss']:.4f} after step {evaluation['step']:,}"))
    rows += [
        ("FLOPs", f"{sums['flops']:.4g} of the model, convention `{last['convention']}`"),
        ("time in steps", format_duration(wall_s)),
        ("MFU", f"{format_share(sums['flops'] / at_peak)} over all steps"),
    ]
    if sums["recomputed"]:  # HFU bills recomputation as well; without any it is MFU
        rows.append(("HFU", format_share((sums["flops"] + sums["recomputed"]) / at_peak)))
    versions = [f"{name} {software[name]}" for name in ("headway", "torch", "transformers") if software.get(name)]
    device = (machine.get("device") or {}).get("name", "unknown device")
    rows += [
        ("peak", f"{format_rate(last['peak_flops_per_s'])} {last['peak_dtype']} a device; {last['peak_source']}"),
        ("hardware", f"{last['world_size']:,} x {device}"),
        ("software", ", ".join([*versions, *([machine["precision"]] if machine.get("precision") else [])])),
    ]
    tokens, total = format_count(sums["tokens"]), max(1, sources.total())
    if sources:
        shares = [(name, format_count(n), format_share(n / total)) for name, n in sources.most_common() if n]
        data = markdown_table((Column("source", "left"), Column("tokens"), Column("share")), shares, None)
    else:
        data = f"{tokens} tokens of {', '.join(markdown_code(_name(path)) for path in _paths(config))}."
    facts = markdown_table((Column("", "left"), Column("", "left")), rows, None)
    return {"tokens": tokens, "facts": facts}, data, last


def _stops_of(folder: Path) -> list[str]:
    files = (folder / "generation_config.json", folder / "tokenizer.json")
    settings, words = ((as_object(file.read_bytes()) if file.is_file() else None) or {} for file in files)
    names = {token["id"]: token["content"] for token in words.get("added_tokens", ())}
    own = settings.get("eos_token_id")
    return [names.get(token, str(token)) for token in (own if isinstance(own, list) else [own]) if token is not None]


def _paths(config: TrainConfig) -> list[str]:
    return [part.path or "" for stage in config.data.played for part in stage.parts]


def _hub_datasets(config: TrainConfig) -> list[str]:
    names = (path.removeprefix(_ON_HUB).split("/") for path in _paths(config) if path.startswith(_ON_HUB))
    return list(dict.fromkeys("/".join(parts[:2]).partition("@")[0] for parts in names if len(parts) > 1))


def _name(path: str) -> str:
    return without_query(path).rstrip("/").rpartition("/")[-1]


def _hyperparameters(config: TrainConfig) -> dict[str, Any]:
    raw, shown = config.to_dict(), {}
    for section, names in _SHOWN.items():
        more = settings_off_default(getattr(config, section)) if section in ("optim", "speed", "parallel") else ()
        values = {name: value for name, value in raw[section].items() if name in more or name in names}
        shown[section] = {name: value for name, value in values.items() if name in more or value not in (None, [], {})}
    return {section: settings for section, settings in shown.items() if settings}


def _base(config: TrainConfig) -> str | None:
    path = config.model.path
    owner, slash, name = path.partition("/")
    is_name = bool(owner and slash and name) and "/" not in name and not owner.startswith((".", "~"))
    return path if is_name and not config.model.random_init and not Path(path).exists() else None
