"""The keys of LMMs-Engine's configuration, and what each means here.

Source: lmms-engine 0.1.4: `DatasetConfig`, `ProcessorConfig`, `ModelConfig`, `TrainingArguments` and what its trainers
make of them; transformers 5.23's `TrainingArguments`, and keys that older versions had.
"""

from pathlib import Path
from typing import Any

import yaml

from headway.train.importing import Context, Outcome, Rule

DEFAULTS: dict[str, dict[str, Any]] = {
    "dataset_config": {"packing": False, "packing_length": 32_000, "filter_overlong": True, "data_seed": 42},
    "trainer_args": {
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-5,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.0,
        "save_steps": 500,
        "seed": 42,
        "reduce_dtype": "bfloat16",
        "output_dir": "trainer_output",
    },
}
"""What the keys are that a file does not give, as far as it changes a run."""

_ENDLESS = 1000  # passes over each of several datasets; the run ends with its steps


def sets(setting: str, reason: str = "") -> Rule:
    """The key is a setting under another name."""
    return lambda value, _: Outcome("translated", reason, {setting: value})


def unneeded(reason: str) -> Rule:
    """The key has no effect to keep, whatever its value."""
    return lambda _value, _context: Outcome("not needed", reason)


def by_hand(what: str, *off: Any) -> Rule:
    """The key is said elsewhere here; with one of the values `off` it asks for nothing."""
    return lambda value, _: Outcome("not needed", "off") if _is_off(value, off) else Outcome("by hand", what)


def only_off(reason: str, *off: Any) -> Rule:
    """Only the values `off`, or nothing, can be had."""
    return lambda value, _: Outcome("not needed", "off") if _is_off(value, off) else Outcome("refused", reason)


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    return value is None or value is False or value in ([], {}, "") or value in off


def _packing(value: Any, context: Context) -> Outcome:
    """Packs, or batches of a fixed number of samples, which are flat here too."""
    length = context.get("dataset_config.packing_length")
    if value:
        return Outcome("translated", settings={"data.tokens_per_pack": length})
    batch = context.get("trainer_args.per_device_train_batch_size")
    longest = context.get("dataset_config.max_length") or length
    settings = {"data.tokens_per_pack": batch * longest, "data.samples_per_pack": batch, "data.strategy": "next_fit"}
    return Outcome("translated", f"batches of {batch} samples without padding; packing would fill more", settings)


def _packing_strategy(value: Any, context: Context) -> Outcome:
    names = {"first_fit": "next_fit", "best_fit": "best_fit", "balanced": "balanced", None: "next_fit"}
    if not context.get("dataset_config.packing"):
        return Outcome("not needed", "packing is off")
    if value not in names:
        return Outcome("refused", f"known are {', '.join(filter(None, names))}")
    reason = "its first_fit keeps one pack open, which is next_fit; 'balanced' fills more and makes ranks equal"
    return Outcome("translated", reason if names[value] == "next_fit" else "", {"data.strategy": names[value]})


def _overlong(value: Any, _: Context) -> Outcome:
    if value:
        return Outcome("translated", settings={"data.overlong": "drop"})
    return Outcome("refused", "a sample longer than a pack cannot be trained on whole; drop, truncate or split it")


def _batch_size(value: Any, context: Context) -> Outcome:
    """Packs of a step and rank: those of a micro-batch times those accumulated."""
    accumulated = context.get("trainer_args.gradient_accumulation_steps") or 1
    if not context.get("dataset_config.packing"):
        return Outcome("translated", "see dataset_config.packing", {"optim.accumulation": accumulated})
    reason = f"{value} packs in a micro-batch x {accumulated}; here one pack is a micro-batch"
    return Outcome("translated", reason, {"optim.accumulation": value * accumulated})


def _datasets(value: Any, context: Context) -> Outcome:
    if value is None:
        return Outcome("not needed", "none")
    if not isinstance(value, list) or not all(isinstance(one, dict) and one.get("path") for one in value):
        return Outcome("refused", "must be a list of datasets, each with a path")
    return _sources(value, context)


def _dataset_path(value: Any, context: Context) -> Outcome:
    if value is None or context.get("dataset_config.datasets") is not None:
        return Outcome("not needed", "the datasets are listed in dataset_config.datasets")
    if context.get("dataset_config.dataset_format") != "yaml":
        return _sources([{"path": value}], context)
    listed = next((path for path in (Path(value), context.folder / value) if path.is_file()), None)
    if listed is None:
        return Outcome("refused", "the file that lists the datasets is not here; run this where it is")
    content = yaml.safe_load(listed.read_text(encoding="utf-8"))
    return _datasets(content.get("datasets") if isinstance(content, dict) else content, context)


def _sources(datasets: list[dict[str, Any]], context: Context) -> Outcome:
    """Datasets as stages: one plays on, several play together."""
    known = {"path", "data_folder", "data_type"}
    unknown = sorted({key for one in datasets for key in one} - known)
    if unknown:
        return Outcome(
            "refused", f"{', '.join(unknown)} of a dataset is not known; known are {', '.join(sorted(known))}"
        )
    if any(one.get("data_type") == "csv" for one in datasets):
        return Outcome("refused", "CSV is not read; write JSON Lines or Parquet")
    epochs = None if (context.get("trainer_args.max_steps") or 0) > 0 else context.get("trainer_args.num_train_epochs")
    sources = [
        {"path": one["path"]} | ({"root": one["data_folder"]} if one.get("data_folder") else {}) for one in datasets
    ]
    if len(sources) == 1:
        stage = sources[0] | ({"epochs": float(epochs)} if epochs else {})
        return Outcome("translated", settings={"data.train": [stage]})
    passes = float(epochs or _ENDLESS)
    reason = "as often as each other, until the steps are done" if not epochs else ""
    return Outcome("translated", reason, {"data.train": [{"mix": [{**one, "epochs": passes} for one in sources]}]})


def _schedule(value: Any, context: Context) -> Outcome:
    """The course of the learning rate; transformers' schedules end at 0 unless told otherwise."""
    extra = dict(context.get("trainer_args.lr_scheduler_kwargs") or {})
    lr = context.get("trainer_args.learning_rate")
    names = {
        "linear": "linear",
        "cosine": "cosine",
        "cosine_with_min_lr": "cosine",
        "constant": "constant",
        "constant_with_warmup": "constant",
        "polynomial": "polynomial",
        "inverse_sqrt": "inverse_sqrt",
        "wsd": "wsd",
        "warmup_stable_decay": "wsd",
    }
    if value not in names:
        return Outcome("refused", f"known are {', '.join(names)}")
    settings: dict[str, Any] = {"optim.schedule": names[value]}
    if names[value] in ("linear", "cosine", "polynomial", "wsd"):
        least = extra.pop("min_lr_ratio", None) or extra.pop("min_lr_rate", None)
        least = least or (extra.pop("min_lr", None) or extra.pop("lr_end", 0.0)) / lr
        settings["optim.min_lr_ratio"] = least
    if names[value] == "polynomial":
        settings["optim.power"] = float(extra.pop("power", 1.0))
    if names[value] == "inverse_sqrt" and "timescale" in extra:
        settings["optim.timescale"] = extra.pop("timescale")
    if names[value] == "wsd":
        steps, decay = context.get("trainer_args.max_steps"), extra.pop("num_decay_steps", None)
        settings["optim.decay_shape"] = {"1-sqrt": "1-sqrt", "cosine": "cosine"}.get(
            extra.pop("decay_type", "linear"), "linear"
        )
        if decay is not None and steps:
            settings["optim.decay_share"] = decay / steps
    if extra:
        return Outcome("refused", f"lr_scheduler_kwargs {', '.join(extra)} is not known with {value}")
    return Outcome("translated", settings=settings)


def _warmup_ratio(value: Any, context: Context) -> Outcome:
    steps = context.get("trainer_args.max_steps")
    if not value:
        return Outcome("not needed", "off")
    if not steps or steps < 0:
        return Outcome("by hand", "a share of the steps, which only --steps says: set optim.warmup_steps")
    return Outcome("translated", settings={"optim.warmup_steps": int(steps * value)})


def _warmup_steps(value: Any, context: Context) -> Outcome:
    if not value or context.get("trainer_args.warmup_ratio"):
        return Outcome("not needed", "warmup_ratio goes before it" if value else "off")
    if 0 < value < 1:
        return _warmup_ratio(value, context)
    return Outcome("translated", settings={"optim.warmup_steps": int(value)})


def _max_steps(value: Any, _: Context) -> Outcome:
    if value <= 0:
        return Outcome("by hand", "the steps of the whole run are not said; give --steps")
    return Outcome("translated", settings={"optim.steps": value})


def _beta(number: int) -> Rule:
    def rule(_value: Any, context: Context) -> Outcome:
        betas = [context.get("trainer_args.adam_beta1"), context.get("trainer_args.adam_beta2")]
        return Outcome("translated", f"beta {number}", {"optim.betas": betas})

    return rule


def _optim(value: Any, context: Context) -> Outcome:
    if context.get("trainer_type") in (None, "fsdp2_trainer"):
        return Outcome("not needed", "fsdp2_trainer takes AdamW whatever it says; so does this recipe")
    if value in ("adamw_torch", "adamw_torch_fused", "adamw_hf"):
        return Outcome("not needed", "AdamW is the default, fused where it can be")
    if value in ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"):
        return Outcome("translated", settings={"optim.state": "8bit"})
    return Outcome("refused", "known are AdamW and its 8-bit form; use_muon is a key of its own")


def _bf16(value: Any, _: Context) -> Outcome:
    if value:
        return Outcome("translated", "weights and their moments are bfloat16 there", {"run.dtype": "bfloat16-params"})
    return Outcome("not needed", "run.dtype is bfloat16 over float32 weights on CUDA by default; float16 is not used")


def _freeze(value: Any, _: Context) -> Outcome:
    if not value:
        return Outcome("not needed", "off")
    aliases = {"visual": "model.visual", "language_model": "model.language_model", "model.language_model.lm_head": ""}
    patterns = [f"{aliases.get(path) or path}.*" for path in value]
    return Outcome("translated", "a pattern that matches nothing is an error here", {"model.freeze": patterns})


def _fsdp_config(value: Any, context: Context) -> Outcome:
    rest = dict(value or {})
    settings: dict[str, Any] = {}
    reshard, group = rest.pop("reshard_after_forward", None), rest.pop("hsdp_shard_size", 0)
    if reshard is not None:
        settings["parallel.reshard"] = bool(reshard)
    if group and group > 1:
        sequence = context.get("trainer_args.sp_ulysses_degree") or 1
        settings["parallel.shard"] = group // sequence
    for name in ("transformer_layer_cls_to_wrap", "min_num_params", "version", "activation_checkpointing"):
        rest.pop(name, None)
    wanted = [name for name, setting in rest.items() if not _is_off(setting, (0,))]
    if wanted:
        return Outcome("refused", f"{', '.join(wanted)} of it is not known; blocks are found without being named")
    if "parallel.shard" in settings:
        reason = f"set parallel.replicate to the number of processes / {group}"
        return Outcome("by hand", reason, settings)
    return Outcome("translated" if settings else "not needed", "blocks are found without being named", settings)


def _ema(value: Any, context: Context) -> Outcome:
    if not value:
        return Outcome("not needed", "off")
    decay = context.get("trainer_args.ema_decay")
    every = context.get("trainer_args.ema_update_every")
    ema = {"decay": 0.9999 if decay is None else decay, "every": every or 1, "warmup": False}
    return Outcome("translated", settings={"optim.ema": ema})


def _profiler(value: Any, context: Context) -> Outcome:
    if not value:
        return Outcome("not needed", "off")
    window = context.get("trainer_args.profiler_config") or {}
    start, end = window.get("start_step", 0), window.get("end_step", 5)
    return Outcome("translated", settings={"run.profile": {"start": start + 1, "steps": max(1, end - start)}})


def _trackers(value: Any, context: Context) -> Outcome:
    names = [value] if isinstance(value, str) else list(value or [])
    names = [name for name in names if name not in ("none", "console")]
    folder = context.get("trainer_args.output_dir")
    project = context.get("trainer_args.project") or "huggingface"  # transformers' default
    known = {
        "wandb": f"wandb:{project}",
        "tensorboard": f"tensorboard:{folder}/tensorboard",
        "mlflow": "mlflow",
    }
    if unknown := [name for name in names if name not in known]:
        return Outcome("refused", f"{', '.join(unknown)} is no tracker here; known are {', '.join(known)}")
    if not names:
        return Outcome("not needed", "metrics.jsonl is always written")
    return Outcome("translated", settings={"run.trackers": [known[name] for name in names]})


def _save_steps(value: Any, context: Context) -> Outcome:
    if context.get("trainer_args.save_strategy") == "no":
        return Outcome("not needed", "save_strategy is 'no'")
    steps = context.get("trainer_args.max_steps") or 0
    if 0 < steps < value:
        return Outcome("not needed", f"never reached in {steps} steps; the end of a run always saves")
    return Outcome("translated", settings={"checkpoint.every": value})


def _processor(value: Any, context: Context) -> Outcome:
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


def _degree(setting: str) -> Rule:
    return lambda value, _: Outcome(
        *(("translated", "", {setting: value}) if (value or 1) > 1 else ("not needed", "1"))
    )


def _one_of(names: tuple[str, ...], reason: str) -> Rule:
    def rule(value: Any, _: Context) -> Outcome:
        if value in names:
            return Outcome("not needed", reason)
        return Outcome("refused", f"{reason}; known are {', '.join(names)}")

    return rule


_FRAMES = by_hand("how frames are read is said in the model folder's video_preprocessor_config.json (fps, max_frames)")
_DATASET: dict[str, Rule] = {
    "dataset_type": _one_of(
        ("vision", "vision_iterable", "qwen3_vl", "qwen3_vl_iterable", "llava_video", "fineweb_edu"),
        "rows say themselves what they hold, and are indexed; data.stream reads without an index",
    ),
    "dataset_format": _one_of(("json", "jsonl", "yaml", "arrow"), "files are told by their extension"),
    "processor_config": _processor,
    "dataset_path": _dataset_path,
    "datasets": _datasets,
    "shuffle": lambda value, _: (
        Outcome("not needed", "always so")
        if value
        else Outcome("refused", "samples are always shuffled; data.stream with shuffle 1 keeps their order")
    ),
    "data_seed": lambda value, _: Outcome("translated", settings={"data.seed": 42 if value is None else value}),
    "eval_dataset_path": by_hand("held-out samples are judged by exact match here: set data.eval and eval.every"),
    "object_storage": by_hand("write the store into the paths, such as s3://bucket/file.jsonl", "none"),
    "bucket_name": by_hand("write the store into the paths, such as s3://bucket/file.jsonl"),
    "packing": _packing,
    "packing_strategy": _packing_strategy,
    "packing_length": unneeded("see dataset_config.packing"),
    "filter_overlong": _overlong,
    "filter_overlong_workers": unneeded("the length index knows all lengths beforehand"),
    "max_length": by_hand("samples are cut at a pack's length, with data.overlong: truncate, and nowhere else"),
    "video_sampling_strategy": _FRAMES,
    "video_max_pixels": _FRAMES,
    "video_max_frames": _FRAMES,
    "video_min_pixels": _FRAMES,
    "frame_num": _FRAMES,
    "fps": _FRAMES,
    "video_backend": unneeded("videos are read by PyAV"),
    "extra_kwargs": lambda value, _: (
        Outcome("not needed", "of its packer")
        if not set(value or {}) - {"packing_kwargs"}
        else Outcome("refused", f"{', '.join(sorted(set(value) - {'packing_kwargs'}))} of it is not known")
    ),
}

_MODEL: dict[str, Rule] = {
    "load_from_pretrained_path": lambda value, _: (
        Outcome("translated", settings={"model.path": value}) if value else Outcome("not needed", "off")
    ),
    "load_from_config": only_off("write it as config.json, name that as model.path and set model.random_init"),
    "attn_implementation": unneeded("packs always run on a kernel for segments of varied length"),
    "model_general_type": only_off("the kind of model follows from its config.json", "causal_lm", "image_text_to_text"),
    "overwrite_config": only_off("write it into the model folder's config.json"),
    "monkey_patch_kwargs": by_hand("nothing is patched; speed.kernels chooses the kernels"),
    "extra_kwargs": only_off("arguments of from_pretrained are not passed on"),
}

_NOT_HERE = only_off("Headway has none of it")
_TRAINER: dict[str, Rule] = {
    "output_dir": sets("run.folder"),
    "max_steps": _max_steps,
    "num_train_epochs": lambda _, context: (
        Outcome("not needed", "max_steps ends the run")
        if (context.get("trainer_args.max_steps") or 0) > 0
        else Outcome("translated", "epochs of data.train")
    ),
    "per_device_train_batch_size": _batch_size,
    "gradient_accumulation_steps": unneeded("in optim.accumulation, see per_device_train_batch_size"),
    "learning_rate": sets("optim.lr"),
    "lr_scheduler_type": _schedule,
    "lr_scheduler_kwargs": unneeded("see lr_scheduler_type"),
    "warmup_ratio": _warmup_ratio,
    "warmup_steps": _warmup_steps,
    "weight_decay": sets("optim.weight_decay", "matrices decay; norms and biases do not"),
    "adam_beta1": _beta(1),
    "adam_beta2": _beta(2),
    "adam_epsilon": sets("optim.eps"),
    "max_grad_norm": lambda value, _: Outcome("translated", settings={"optim.clip": value or None}),
    "optim": _optim,
    "use_muon": lambda value, _: (
        Outcome("translated", settings={"optim.name": "muon"}) if value else Outcome("not needed", "off")
    ),
    "seed": sets("run.seed"),
    "data_seed": unneeded("see dataset_config.data_seed"),
    "bf16": _bf16,
    "fp16": only_off("float16 needs loss scaling, which is not there; bf16 does not"),
    "tf32": unneeded("products are bfloat16 on CUDA"),
    "use_rmpad": unneeded("packs never hold padding between samples"),
    "use_liger_kernel": lambda value, _: (
        Outcome("translated", settings={"speed.kernels": "liger"}) if value else Outcome("not needed", "off")
    ),
    "torch_compile": lambda value, _: (
        Outcome("translated", settings={"speed.compile": True}) if value else Outcome("not needed", "off")
    ),
    "gradient_checkpointing": lambda value, _: (
        Outcome("translated", settings={"speed.recompute": "full"}) if value else Outcome("not needed", "off")
    ),
    "fsdp2": unneeded("several processes always shard with FSDP2"),
    "fsdp": unneeded("several processes always shard with FSDP2"),
    "fsdp_config": _fsdp_config,
    "reduce_dtype": sets("parallel.reduce_dtype"),
    "sp_ulysses_degree": _degree("parallel.sequence"),
    "ep_degree": _degree("parallel.expert"),
    "tp_degree": only_off("there is no tensor parallelism; shard, sequence and expert parallelism take its place", 1),
    "freeze_modules": _freeze,
    "ema_enabled": _ema,
    "ema_param_filter": only_off("the average is of all weights that learn"),
    "ema_start_step": only_off("the average starts with the run; ema.warmup shortens its memory at first", 0),
    "enable_profiler": _profiler,
    "report_to": _trackers,
    "save_steps": _save_steps,
    "save_strategy": by_hand("checkpoint.every counts optimizer steps", "steps", "no"),
    "save_total_limit": lambda value, _: (
        Outcome("translated", settings={"checkpoint.keep": value})
        if value
        else Outcome("by hand", "all are kept there; checkpoint.keep keeps the newest 2 unless set")
    ),
    "logging_steps": sets("run.log_every"),
    "dataloader_num_workers": sets("data.workers"),
    "eval_strategy": by_hand("set data.eval and eval.every", "no"),
    "eval_config": by_hand("evaluate exported folders with your server"),
    "label_smoothing_factor": only_off("the loss is plain cross-entropy", 0.0, 0),
    "neftune_noise_alpha": only_off("no noise is added to embeddings"),
    "deepspeed": only_off("FSDP2 takes its place"),
    "liger_kernel_config": by_hand("speed.kernels switches all of Liger's kernels"),
    "carbon_intensity": unneeded("`headway goodput` and the meter's energy tell what was used"),
    "enable_memory_snapshot": by_hand("set run.profile with memory: true"),
}
_TRAINER |= dict.fromkeys(
    ("optim_target_modules", "push_to_hub", "auto_find_batch_size", "use_cpu", "no_cuda", "use_mps_device",
     "eval_on_start", "load_best_model_at_end", "hub_always_push", "full_determinism", "fp16_full_eval",
     "parallelism_config", "do_predict", "enable_jit_checkpoint", "adafactor"),
    _NOT_HERE,
)  # fmt: skip
_TRAINER |= dict.fromkeys(
    ("ema_decay", "ema_update_every", "ema_requires_grad_only", "ema_resume_from_ema"), unneeded("see ema_enabled")
)
_TRAINER |= dict.fromkeys(
    ("profiler_config", "memory_snapshot_config", "enable_cuda_event_profiler", "cuda_event_profiler_config",
     "print_batch_input_steps", "skip_memory_metrics", "debug", "include_tokens_per_second",
     "include_num_input_tokens_seen", "include_for_metrics", "include_inputs_for_metrics", "log_level",
     "log_level_replica", "log_on_each_node", "logging_dir", "logging_strategy", "logging_first_step",
     "logging_nan_inf_filter", "disable_tqdm", "run_name", "project", "trackio_space_id", "trackio_bucket_id",
     "trackio_static_space_id"),
    unneeded("tells about a run and does not change it; every step is in metrics.jsonl"),
)  # fmt: skip
_TRAINER |= dict.fromkeys(
    ("gradient_checkpointing_kwargs", "activation_checkpointing", "activation_checkpointing_kwargs",
     "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps", "torchdynamo", "jit_mode_eval",
     "output_dtype", "use_cache", "half_precision_backend", "fp16_opt_level", "fp16_backend", "optim_args",
     "mp_parameters", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap", "accelerator_config",
     "average_tokens_across_devices", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
     "ddp_static_graph", "ddp_backend", "ddp_timeout", "local_rank", "tpu_num_cores", "tpu_metrics_debug", "ray_scope"),
    unneeded("how the engine works, which is otherwise here"),
)  # fmt: skip
_TRAINER |= dict.fromkeys(
    ("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_drop_last",
     "dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns", "group_by_length",
     "length_column_name", "train_sampling_strategy", "label_names", "ignore_data_skip"),
    unneeded("packs are planned over lengths, and fed by data.workers within data.prefetch_bytes"),
)  # fmt: skip
_TRAINER |= dict.fromkeys(
    ("eval_steps", "eval_delay", "eval_accumulation_steps", "per_device_eval_batch_size", "prediction_loss_only",
     "eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics", "bf16_full_eval", "past_index",
     "metric_for_best_model", "greater_is_better", "use_legacy_prediction_loop", "per_gpu_eval_batch_size"),
    unneeded("evaluation is set by data.eval and eval.every"),
)  # fmt: skip
_TRAINER |= dict.fromkeys(
    ("save_safetensors", "save_only_model", "save_on_each_node", "restore_callback_states_from_checkpoint",
     "overwrite_output_dir", "resume_from_checkpoint", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy",
     "hub_revision", "push_to_hub_model_id", "push_to_hub_organization", "do_train", "do_eval",
     "per_gpu_train_batch_size"),
    unneeded("a checkpoint is the whole state; --resume goes on from it, and `headway export` writes a model folder"),
)  # fmt: skip

RULES: dict[str, Rule] = {
    **{f"dataset_config.{name}": rule for name, rule in _DATASET.items()},
    **{f"trainer_args.{name}": rule for name, rule in _TRAINER.items()},
    **{f"model_config.{name}": rule for name, rule in _MODEL.items()},
    "trainer_type": _one_of(("fsdp2_trainer", "hf_trainer"), "there is one trainer"),
    "config_yaml": unneeded("a switch of its command line"),
    "defaults": unneeded("a switch of its command line"),
    "extra_kwargs": only_off("nothing reads it"),
}
"""What each key, dotted, means."""
