"""The keys of LMMs-Engine's configuration, and what each means here.

Source: lmms-engine 0.1.4: `DatasetConfig`, `ProcessorConfig`, `ModelConfig`, `TrainingArguments` and what its trainers
make of them; transformers 5.23's `TrainingArguments`, and keys that older versions had.
"""

from typing import Any

from tools.import_config import rules
from tools.import_config.outcomes import Outcome, Rule, by_hand, degree, one_of, only_off, sets, switch, unneeded

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

_FRAMES = by_hand("how frames are read is said in the model folder's video_preprocessor_config.json (fps, max_frames)")
_DATASET: dict[str, Rule] = {
    "dataset_type": one_of(
        ("vision", "vision_iterable", "qwen3_vl", "qwen3_vl_iterable", "llava_video", "fineweb_edu"),
        "rows say themselves what they hold, and are indexed; data.stream reads without an index",
    ),
    "dataset_format": one_of(("json", "jsonl", "yaml", "arrow"), "files are told by their extension"),
    "processor_config": rules.processor,
    "dataset_path": rules.dataset_path,
    "datasets": rules.datasets,
    "shuffle": lambda value, _: (
        Outcome("not needed", "always so")
        if value
        else Outcome("refused", "samples are always shuffled; data.stream with shuffle 1 keeps their order")
    ),
    "data_seed": lambda value, _: Outcome("translated", settings={"data.seed": 42 if value is None else value}),
    "eval_dataset_path": by_hand("held-out samples are judged by exact match here: set data.eval and eval.every"),
    "object_storage": by_hand("write the store into the paths, such as s3://bucket/file.jsonl", "none"),
    "bucket_name": by_hand("write the store into the paths, such as s3://bucket/file.jsonl"),
    "packing": rules.packing,
    "packing_strategy": rules.packing_strategy,
    "packing_length": unneeded("see dataset_config.packing"),
    "filter_overlong": rules.overlong,
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
    # its own examples have these, and its ModelConfig passes over what it does not know
    "torch_dtype": unneeded("ignored there: weights are as trainer_args.bf16 says"),
    "model_type": unneeded("ignored there: the kind of model follows from its config.json"),
}

_NOT_HERE = only_off("Headway has none of it")
_TRAINER: dict[str, Rule] = {
    "output_dir": sets("run.folder"),
    "max_steps": rules.max_steps,
    "num_train_epochs": rules.epochs,
    "per_device_train_batch_size": rules.batch_size,
    "gradient_accumulation_steps": unneeded("in optim.accumulation, see per_device_train_batch_size"),
    "learning_rate": sets("optim.lr"),
    "lr_scheduler_type": rules.schedule,
    "lr_scheduler_kwargs": unneeded("see lr_scheduler_type"),
    "warmup_ratio": rules.warmup_ratio,
    "warmup_steps": rules.warmup_steps,
    "weight_decay": sets("optim.weight_decay", "matrices decay; norms and biases do not"),
    "adam_beta1": rules.beta(1),
    "adam_beta2": rules.beta(2),
    "adam_epsilon": sets("optim.eps"),
    "max_grad_norm": lambda value, _: Outcome("translated", settings={"optim.clip": value or None}),
    "optim": rules.optim,
    "use_muon": switch("optim.name", "muon"),
    "seed": sets("run.seed"),
    "data_seed": unneeded("see dataset_config.data_seed"),
    "bf16": rules.bf16,
    "fp16": only_off("float16 needs loss scaling, which is not there; bf16 does not"),
    "tf32": unneeded("products are bfloat16 on CUDA"),
    "use_rmpad": unneeded("packs never hold padding between samples"),
    "use_liger_kernel": switch("speed.kernels", "liger"),
    "torch_compile": switch("speed.compile", True),
    "gradient_checkpointing": switch("speed.recompute", "full"),
    "fsdp2": unneeded("several processes always shard with FSDP2"),
    "fsdp": unneeded("several processes always shard with FSDP2"),
    "fsdp_config": rules.fsdp_config,
    "reduce_dtype": sets("parallel.reduce_dtype"),
    "sp_ulysses_degree": degree("parallel.sequence"),
    "ep_degree": degree("parallel.expert"),
    "tp_degree": only_off("there is no tensor parallelism; shard, sequence and expert parallelism take its place", 1),
    "freeze_modules": rules.freeze,
    "ema_enabled": rules.ema,
    "ema_param_filter": only_off("the average is of all weights that learn"),
    "ema_start_step": only_off("the average starts with the run; ema.warmup shortens its memory at first", 0),
    "enable_profiler": rules.profiler,
    "report_to": rules.trackers,
    "save_steps": rules.save_steps,
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
    unneeded("a checkpoint is the whole state; `headway train --resume` goes on from it, and `headway export` writes a "
             "model folder"),
)  # fmt: skip

RULES: dict[str, Rule] = {
    **{f"dataset_config.{name}": rule for name, rule in _DATASET.items()},
    **{f"trainer_args.{name}": rule for name, rule in _TRAINER.items()},
    **{f"model_config.{name}": rule for name, rule in _MODEL.items()},
    "trainer_type": one_of(("fsdp2_trainer", "hf_trainer"), "there is one trainer"),
    "config_yaml": unneeded("a switch of its command line"),
    "defaults": unneeded("a switch of its command line"),
    "extra_kwargs": only_off("nothing reads it"),
}
"""What each key, dotted, means."""
