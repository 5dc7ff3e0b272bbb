"""Rules for keys of LMMs-Engine that mean something else here, or something together with other keys.

Each rule is given a key's value and what stands beside it. Source: as for `keys`.
"""

from pathlib import Path
from typing import Any

import yaml

from headway.words import Argument
from tools.import_config.outcomes import Context, Outcome, Rule, is_off

ENDLESS = 1000  # passes over each of several datasets; the run ends with its steps


def packing(value: Any, context: Context) -> Outcome:
    """Translate packing: packs, or batches of a fixed number of samples, without padding here too."""
    length = context.get("dataset_config.packing_length")
    if value:
        return Outcome("translated", settings={"data.tokens_per_pack": length})
    batch = context.get("trainer_args.per_device_train_batch_size")
    longest = context.get("dataset_config.max_length") or length
    settings = {"data.tokens_per_pack": batch * longest, "data.samples_per_pack": batch, "data.strategy": "next_fit"}
    return Outcome("translated", f"batches of {batch} samples without padding; packing would fill more", settings)


def packing_strategy(value: Any, context: Context) -> Outcome:
    """Translate a packing strategy to the one that fills packs alike here."""
    names = {"first_fit": "next_fit", "best_fit": "best_fit", "balanced": "balanced", None: "next_fit"}
    if not context.get("dataset_config.packing"):
        return Outcome("not needed", "packing is off")
    if value not in names:
        return Outcome("refused", f"known are {', '.join(filter(None, names))}")
    reason = "its first_fit keeps one pack open, which is next_fit; 'balanced' fills more and makes ranks equal"
    return Outcome("translated", reason if names[value] == "next_fit" else "", {"data.strategy": names[value]})


def overlong(value: Any, context: Context) -> Outcome:
    """Translate what becomes of samples longer than a pack; without packing and max_length they stay there."""
    if value and not context.get("dataset_config.packing") and not context.get("dataset_config.max_length"):
        reason = "filters nothing without packing; here a sample longer than data.tokens_per_pack is an error"
        return Outcome("translated", reason, {"data.overlong": "error"})
    if value:
        return Outcome("translated", settings={"data.overlong": "drop"})
    return Outcome("refused", "a sample longer than a pack cannot be trained on whole; drop, truncate or split it")


def batch_size(value: Any, context: Context) -> Outcome:
    """Translate the batch size: packs of a micro-batch times micro-batches accumulated."""
    accumulated = context.get("trainer_args.gradient_accumulation_steps") or 1
    if not context.get("dataset_config.packing"):
        return Outcome("translated", "see dataset_config.packing", {"optim.accumulation": accumulated})
    reason = f"{value} packs in a micro-batch x {accumulated}; here one pack is a micro-batch"
    return Outcome("translated", reason, {"optim.accumulation": value * accumulated})


def datasets(value: Any, context: Context) -> Outcome:
    """Translate datasets that are listed in the configuration."""
    if value is None:
        return Outcome("not needed", "none")
    if not isinstance(value, list) or not all(isinstance(dataset, dict) and dataset.get("path") for dataset in value):
        return Outcome("refused", "must be a list of datasets, each with a path")
    return sources(value, context)


def dataset_path(value: Any, context: Context) -> Outcome:
    """Translate one dataset, or a file that lists several."""
    if value is None or context.get("dataset_config.datasets") is not None:
        return Outcome("not needed", "the datasets are listed in dataset_config.datasets")
    if context.get("dataset_config.dataset_format") != "yaml":
        return sources([{"path": value}], context)
    listed = next((path for path in (Path(value), context.folder / value) if path.is_file()), None)
    if listed is None:
        return Outcome(
            "refused",
            f"the file that lists the datasets is not here; run this where it is, or give {Argument('data.train')}",
        )
    content = yaml.safe_load(listed.read_text(encoding="utf-8"))
    return datasets(content.get("datasets") if isinstance(content, dict) else content, context)


def sources(datasets: list[dict[str, Any]], context: Context) -> Outcome:
    """Make a stage of datasets: one alone, or several mixed."""
    keys = {"path", "data_folder", "data_type"}
    unknown = sorted({key for dataset in datasets for key in dataset} - keys)
    if unknown:
        return Outcome(
            "refused", f"{', '.join(unknown)} of a dataset is not known; known are {', '.join(sorted(keys))}"
        )
    if any(dataset.get("data_type") == "csv" for dataset in datasets):
        return Outcome("refused", "CSV is not read; write JSON Lines or Parquet")
    sources = [
        {"path": dataset["path"]} | ({"root": dataset["data_folder"]} if dataset.get("data_folder") else {})
        for dataset in datasets
    ]
    if len(sources) == 1:
        return Outcome("translated", settings={"data.train": sources})
    if counts_epochs(context):
        return Outcome("translated", "every sample once an epoch", {"data.train": sources})
    mix = [{**dataset, "epochs": float(ENDLESS)} for dataset in sources]
    return Outcome("translated", "as often as each other, until the steps are done", {"data.train": [{"mix": mix}]})


def schedule(value: Any, context: Context) -> Outcome:
    """Translate the learning-rate schedule; transformers' schedules end at 0 unless told otherwise."""
    extra = dict(context.get("trainer_args.lr_scheduler_kwargs") or {})
    # what is left of `extra` in the end has no counterpart here
    lr = context.get("trainer_args.learning_rate")
    names = {
        "linear": "linear",
        "cosine": "cosine",
        "cosine_with_min_lr": "cosine",
        "constant": "constant",
        "constant_with_warmup": "constant",
        "polynomial": "linear",  # by a power of 1, which is transformers' own
        "inverse_sqrt": "inverse_sqrt",
        "wsd": "wsd",
        "warmup_stable_decay": "wsd",
    }
    if value not in names:
        return Outcome("refused", f"known are {', '.join(names)}")
    settings: dict[str, Any] = {"optim.schedule": names[value]}
    # what each schedule has beside its name, under the names of transformers
    if names[value] in ("linear", "cosine", "wsd"):
        # the least rate: a share of the rate, or a rate itself
        least = extra.pop("min_lr_ratio", None) or extra.pop("min_lr_rate", None)
        least = least or (extra.pop("min_lr", None) or extra.pop("lr_end", 0.0)) / lr
        settings["optim.min_lr_ratio"] = least
    if value == "polynomial" and extra.get("power") == 1.0:
        extra.pop("power")
    if names[value] == "wsd":
        steps, decay = context.get("trainer_args.max_steps"), extra.pop("num_decay_steps", None)
        falls = {"1-sqrt": "wsd", "cosine": "wsd-cosine"}
        settings["optim.schedule"] = falls.get(extra.pop("decay_type", "linear"), "wsd-linear")
        if decay is not None and steps:
            settings["optim.decay_share"] = decay / steps
    if extra:
        return Outcome("refused", f"lr_scheduler_kwargs {', '.join(extra)} is not known with {value}")
    return Outcome("translated", settings=settings)


def warmup_ratio(value: Any, context: Context) -> Outcome:
    """Translate warm-up given as a share of the steps."""
    steps = context.get("trainer_args.max_steps")
    if not value:
        return Outcome("not needed", "off")
    if not steps or steps < 0:
        return Outcome(
            "by hand", f"a share of the steps, which only {Argument('optim.steps')} says: set optim.warmup_steps"
        )
    return Outcome("translated", settings={"optim.warmup_steps": int(steps * value)})


def warmup_steps(value: Any, context: Context) -> Outcome:
    """Translate warmup_steps: 100 is a number of steps, 0.1 a share of them; a warmup_ratio beside it wins."""
    if not value or context.get("trainer_args.warmup_ratio"):
        return Outcome("not needed", "warmup_ratio goes before it" if value else "off")
    if 0 < value < 1:
        return warmup_ratio(value, context)
    return Outcome("translated", settings={"optim.warmup_steps": int(value)})


def counts_epochs(context: Context) -> bool:
    """Whether epochs say how long the run is: steps go before them, as in transformers."""
    steps = context.get("trainer_args.max_steps") or 0
    return steps <= 0 and bool(context.get("trainer_args.num_train_epochs"))


def max_steps(value: Any, context: Context) -> Outcome:
    """Translate max_steps; 0 or less means that epochs decide."""
    if value > 0:
        return Outcome("translated", settings={"optim.steps": value})
    if counts_epochs(context):
        return Outcome("not needed", "num_train_epochs says how long the run is")
    return Outcome("by hand", f"the steps of the whole run are not said; give {Argument('optim.steps')}")


def epochs(value: Any, context: Context) -> Outcome:
    """Translate num_train_epochs; steps go before them."""
    if not counts_epochs(context):
        return Outcome("not needed", "max_steps ends the run")
    return Outcome("translated", settings={"optim.epochs": float(value)})


def beta(number: int) -> Rule:
    """Translate one of Adam's two decays, which are one setting here."""

    def rule(_value: Any, context: Context) -> Outcome:
        betas = [context.get("trainer_args.adam_beta1"), context.get("trainer_args.adam_beta2")]
        return Outcome("translated", f"beta {number}", {"optim.betas": betas})

    return rule


def optim(value: Any, context: Context) -> Outcome:
    """Translate the optimizer, which fsdp2_trainer does not look at."""
    if context.get("trainer_type") in (None, "fsdp2_trainer"):
        return Outcome("not needed", "fsdp2_trainer takes AdamW whatever it says; so does this recipe")
    if value in ("adamw_torch", "adamw_torch_fused", "adamw_hf"):
        return Outcome("not needed", "AdamW is the default, fused where it can be")
    if value in ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"):
        return Outcome("translated", settings={"optim.state": "8bit"})
    return Outcome("refused", "known are AdamW and its 8-bit form; use_muon is a key of its own")


def bf16(value: Any, _: Context) -> Outcome:
    """Translate bf16: the dtype of the weights."""
    if value:
        return Outcome("translated", "weights and their moments are bfloat16 there", {"run.dtype": "bfloat16-params"})
    return Outcome("not needed", "run.dtype is bfloat16 over float32 weights on CUDA by default; float16 is not used")


def freeze(value: Any, _: Context) -> Outcome:
    """Translate the modules whose weights are frozen."""
    if not value:
        return Outcome("not needed", "off")
    aliases = {"visual": "model.visual", "language_model": "model.language_model", "model.language_model.lm_head": ""}
    patterns = [f"{aliases.get(path) or path}.*" for path in value]
    return Outcome("translated", "a pattern that matches nothing is an error here", {"model.freeze": patterns})


def fsdp_config(value: Any, context: Context) -> Outcome:
    """Translate how weights are sharded; blocks are found without being named."""
    others = dict(value or {})
    settings: dict[str, Any] = {}
    reshard, group = others.pop("reshard_after_forward", None), others.pop("hsdp_shard_size", 0)
    if reshard is not None:
        settings["parallel.reshard"] = bool(reshard)
    if group and group > 1:
        sequence = context.get("trainer_args.sp_ulysses_degree") or 1
        settings["parallel.shard"] = group // sequence
    for name in ("transformer_layer_cls_to_wrap", "min_num_params", "version", "activation_checkpointing"):
        others.pop(name, None)
    wanted = [name for name, setting in others.items() if not is_off(setting, (0,))]
    if wanted:
        return Outcome("refused", f"{', '.join(wanted)} of it is not known; blocks are found without being named")
    if "parallel.shard" in settings:
        reason = f"set parallel.replicate to the number of processes / {group}"
        return Outcome("by hand", reason, settings)
    return Outcome("translated" if settings else "not needed", "blocks are found without being named", settings)


def ema(value: Any, context: Context) -> Outcome:
    """Translate the moving average of the weights, with its decay."""
    if not value:
        return Outcome("not needed", "off")
    decay = context.get("trainer_args.ema_decay")
    every = context.get("trainer_args.ema_update_every")
    ema = {"decay": 0.9999 if decay is None else decay, "every": every or 1, "warmup": False}
    return Outcome("translated", settings={"optim.ema": ema})


def profiler(value: Any, context: Context) -> Outcome:
    """Translate the steps to profile; they count from 0 there and from 1 here."""
    if not value:
        return Outcome("not needed", "off")
    window = context.get("trainer_args.profiler_config") or {}
    start, end = window.get("start_step", 0), window.get("end_step", 5)
    return Outcome("translated", settings={"run.profile": {"start": start + 1, "steps": max(1, end - start)}})


def trackers(value: Any, context: Context) -> Outcome:
    """Translate the trackers that the run reports to."""
    names = [value] if isinstance(value, str) else list(value or [])
    names = [name for name in names if name not in ("none", "console")]
    folder = context.get("trainer_args.output_dir")
    project = context.get("trainer_args.project") or "huggingface"  # transformers' default
    places = {"wandb": f"wandb:{project}", "tensorboard": f"tensorboard:{folder}/tensorboard", "mlflow": "mlflow"}
    if unknown := [name for name in names if name not in places]:
        return Outcome("refused", f"{', '.join(unknown)} is no tracker here; known are {', '.join(places)}")
    if not names:
        return Outcome("not needed", "metrics.jsonl is always written")
    return Outcome("translated", settings={"run.trackers": [places[name] for name in names]})


def save_steps(value: Any, context: Context) -> Outcome:
    """Translate the steps between checkpoints."""
    if context.get("trainer_args.save_strategy") == "no":
        return Outcome("not needed", "save_strategy is 'no'")
    steps = context.get("trainer_args.max_steps") or 0
    if 0 < steps < value:
        return Outcome("not needed", f"never reached in {steps} steps; the end of a run always saves")
    return Outcome("translated", settings={"checkpoint.every": value})


def processor(value: Any, context: Context) -> Outcome:
    """Translate the processor, which comes with the model folder here."""
    config = dict(value or {})
    name, extra = config.pop("processor_name", None), config.pop("extra_kwargs", None) or {}
    config.pop("processor_type", None)
    if config:
        return Outcome("refused", f"{', '.join(config)} of it is not known")
    todo = []
    if name not in (None, context.get("model_config.load_from_pretrained_path")):
        todo.append(f"put the tokenizer and processor files of {name} into the model's folder")
    if extra:
        todo.append(f"{', '.join(extra)}: set `size` in the model folder's (video_)preprocessor_config.json")
    if todo:
        return Outcome("by hand", "; ".join(todo))
    return Outcome("not needed", "the processor comes with the model's folder")
