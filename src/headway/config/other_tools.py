"""Words for settings in LLaMA-Factory, ms-swift, TRL and transformers' Trainer, and axolotl, and what they are here.

An answer names settings in backticks, by their dotted names, with a value behind an equals sign where one is meant.
"""

_SAME: dict[str, str] = {
    # model
    "model_name_or_path base_model pretrained_model_name_or_path model_id": "`model.path`",
    "lora_rank lora_r lora.r": "`model.lora.rank`",
    "lora_alpha": "`model.lora.alpha`",
    "lora_dropout": "`model.lora.dropout`",
    "disable_dropout attention_dropout hidden_dropout resid_pdrop dropout_rate": "`model.dropout`, on or off",
    "lora_target lora_target_modules target_modules target_linear lora_target_linear": "`model.lora.targets`",
    "finetuning_type tuner_type train_type adapter use_peft use_lora peft_config peft": "`model.lora`",
    "load_in_4bit load_in_8bit quantization quantization_bit quantization_method quant_method quant_bits "
    "bnb_4bit_quant_type qlora": "`model.base`, nf4 for 4 bits and int8 for 8, beside `model.lora`",
    "freeze_vision_tower freeze_vision_encoder freeze_vit freeze_vision": "`model.freeze=[vision]`",
    "freeze_language_model freeze_llm freeze_backbone": "`model.freeze=[language]`",
    "tune_mm_llm tune_mm_mlp tune_mm_vision tune_mm_mlp_adapter train_mm_proj_only": (
        "`model.freeze`, such as [vision] or [language], for what does not learn"
    ),
    "adapter_name_or_path lora_model_dir adapters resume_from_adapter": (
        "`model.path`, which takes a run's folder or its export"
    ),
    "model_name llm_path": "`model.path`",
    "nf4 quantization_config bnb_config bitsandbytes": "`model.base`, nf4 beside `model.lora`",
    "bnb_4bit_compute_dtype compute_dtype": "`run.dtype`, in which a base of 4 bits computes",
    "enable_thinking": "`model.chat_template_kwargs`, as in {enable_thinking: false}",
    "freeze_parameters freeze_multi_modal_projector freeze_aligner freeze_projector unfrozen_parameters "
    "trainable_parameters": "`model.freeze`, which takes patterns over the names of parameters",
    "add_tokens add_new_tokens extra_tokens tokens_to_add": "`model.new_tokens`",
    "add_special_tokens additional_special_tokens extra_special_tokens special_tokens": "`model.new_special_tokens`",
    "resize_vocab resize_token_embeddings resize_embeddings resize_token_embeddings_to_32x embedding_resize": (
        "`model.new_tokens`, which get rows in the embedding and the head"
    ),
    "template": "`model.chat_template`, a file; a model's own template is read by itself",
    "trainable_token_indices lora_modules_to_save modules_to_save additional_target": (
        "`model.new_tokens`, whose rows learn beside adapters; the other rows and whole modules do not"
    ),
    # data
    "image_max_pixels image_resolution": "`data.max_pixels`, or `data.train.N.max_pixels` of a source",
    "image_min_pixels": "`data.min_pixels`, or `data.train.N.min_pixels` of a source",
    "video_fps video_sample_fps sample_fps": "`data.fps`, or `data.train.N.fps` of a source",
    "video_maxlen fps_max_frames max_num_frames video_max_frames": (
        "`data.max_frames`, or `data.train.N.max_frames` of a source"
    ),
    "video_total_pixels": "`data.video_max_pixels`, for models that bound a whole video",
    "image_size img_size resolution max_image_size": "`data.max_pixels`, an area in pixels",
    "dataset_dir dataset_use hf_dataset custom_dataset data_file data_files data_root train_data train_path "
    "training_data training_file": "`data.train`, a file or a folder",
    "val_data val_path val_file valid_data validation_data validation_dataset eval_data eval_file eval_dataset_path "
    "test_data test_file": "`data.eval`, a file or a folder",
    "max_train_samples num_train_samples dataset_sample": "`data.train.N.limit`",
    "dataset datasets train_dataset train_file train_files dataset_name dataset_path data_path": "`data.train`",
    "eval_dataset val_dataset val_datasets validation_file test_datasets": "`data.eval`",
    "val_size val_set_size split_dataset_ratio eval_split": "`data.eval`, a file of held-out samples",
    "max_length max_seq_length max_seq_len seq_length seq_len sequence_len cutoff_len model_max_length "
    "block_size context_length": "`data.tokens_per_pack`, the tokens of a packed row",
    "batch_size per_device_train_batch_size micro_batch_size train_batch_size per_device_batch_size mbs": (
        "`data.tokens_per_pack`, since a batch is a pack of as many samples as fit; `optim.accumulation` packs are a "
        "step"
    ),
    "global_batch_size effective_batch_size": "`optim.accumulation`, packs per step and rank",
    "packing sample_packing neat_packing multipack padding_free group_by_length": (
        "`data.strategy`, as samples are always packed; none for one sample in a pack"
    ),
    "pad_to_sequence_len data_flatten data_packing flatten_packing": "`data.strategy`, as samples are always packed",
    "batchsize bs batch_size_training per_gpu_train_batch_size": (
        "`data.tokens_per_pack`, since a batch is a pack of as many samples as fit"
    ),
    "max_prompt_length max_completion_length max_target_length max_source_length": (
        "`data.overlong`, for samples longer than `data.tokens_per_pack`; prompts and answers have no bounds of their "
        "own"
    ),
    "sequence_length max_tokens max_len": "`data.tokens_per_pack`, the tokens of a packed row",
    "truncation_strategy excess_length_strategy truncation": "`data.overlong`, or `data.train.N.overlong` of a source",
    "streaming": "`data.stream`",
    "dataloader_num_workers num_workers preprocessing_num_workers dataset_num_proc": "`data.workers`",
    "media_dir image_folder image_root": "`data.train.N.root`",
    "column_mapping": "`data.train.N.columns`",
    "dataset_text_field": "`data.train.N.text_column`",
    "interleave_probs": "`data.train.N.weight`",
    # optimizer
    "learning_rate max_lr peak_lr": "`optim.lr`",
    "vit_lr vision_lr vision_tower_lr aligner_lr merger_lr projector_lr embedding_lr": "`optim.lr_of`",
    "num_train_epochs num_epochs max_epochs n_epochs": "`optim.epochs`",
    "max_steps train_iters total_steps num_steps": "`optim.steps`",
    "gradient_accumulation_steps grad_accum accumulate_grad_batches gradient_accumulation": "`optim.accumulation`",
    "warmup_ratio lr_warmup_fraction": "`optim.warmup_steps`, a number of steps",
    "num_warmup_steps lr_warmup_iters": "`optim.warmup_steps`",
    "lr_scheduler_type lr_scheduler lr_decay_style scheduler": "`optim.schedule`",
    "min_lr min_lr_rate cosine_min_lr_ratio": "`optim.min_lr_ratio`, a fraction of `optim.lr`",
    "mm_projector_lr mm_vision_tower_lr loraplus_lr_ratio": "`optim.lr_of`",
    "grad_accum_steps grad_accumulation_steps": "`optim.accumulation`",
    "ema_decay use_ema": "`optim.ema`",
    "max_grad_norm grad_clip clip_grad gradient_clip_val gradient_clipping": "`optim.clip`",
    "optimizer optim_type optimizer_type": "`optim.name`, and `optim.state=8bit` for moments in 8 bits",
    "adam_beta1 adam_beta2 beta1 beta2": "`optim.betas`, both in a list",
    "adam_epsilon epsilon": "`optim.eps`",
    # speed and memory
    "gradient_checkpointing activation_checkpointing recompute_granularity": "`speed.recompute=full`",
    "use_gradient_checkpointing grad_checkpointing vit_gradient_checkpointing": "`speed.recompute=full`",
    "use_unsloth unsloth xformers_attention": "`speed.attention` and `speed.kernels=liger`",
    "nproc_per_node nnodes num_nodes num_gpus num_processes n_gpu ngpu gpus gpu_ids world_size accelerator "
    "cuda_visible_devices": (
        "`run.device` for one; for several, `parallel.shard` processes that torchrun starts, as docs/parallel.md has it"
    ),
    "activation_offloading enable_activation_offloading fine_grained_activation_offloading cpu_offloading": (
        "`speed.offload` beside `speed.recompute`, for the inputs of recomputed blocks"
    ),
    "flash_attn attn_impl attn_implementation flash_attention use_flash_attn": "`speed.attention`",
    "use_liger_kernel enable_liger_kernel use_liger liger_kernel": "`speed.kernels=liger`",
    "torch_compile": "`speed.compile`",
    "bf16 fp16 torch_dtype mixed_precision precision": "`run.dtype`",
    "fsdp fsdp_config deepspeed deepspeed_config zero_stage": (
        "`parallel.shard`, since processes share weights, gradients and optimizer state by FSDP2 without a file of its "
        "own; `parallel.offload` for the host's memory"
    ),
    "context_parallel_size sequence_parallel_size cp_size sp_size ulysses context_parallel context_parallel_degree "
    "sequence_parallel parallel.context parallel.cp parallel.sp parallel.ring": (
        "`parallel.sequence`, where processes of a pack swap tokens for heads (Ulysses); no ring"
    ),
    "expert_model_parallel_size expert_parallel_size ep_size expert_parallel_degree parallel.ep": "`parallel.expert`",
    # the run
    "output_dir save_dir": "`run.folder`",
    "log_dir project_name experiment_name wandb_name wandb_run_name": "`run.folder`, and `run.trackers` for trackers",
    "wandb tensorboard mlflow swanlab comet trackio": "`run.trackers`, as in `run.trackers=[wandb]`",
    "report_to wandb_project use_wandb logger loggers use_swanlab use_mlflow swanlab_project": (
        "`run.trackers`, as in `run.trackers=[wandb]`"
    ),
    "logging_steps log_interval": "`run.log_every`",
    "ddp_timeout": "`run.watchdog_s`",
    "logging_dir run_name": "`run.folder`, which holds all that a run writes",
    "save_steps save_interval saves_per_epoch save_strategy": "`checkpoint.every`",
    "save_total_limit": "`checkpoint.keep`",
    "save_every save_freq checkpoint_every checkpoint_interval checkpointing_steps ckpt_interval": (
        "`checkpoint.every`"
    ),
    "keep_last_n max_checkpoints checkpoints_total_limit": "`checkpoint.keep`",
    "save_best_only": "`checkpoint.keep_best`",
    "eval_every validation_steps validation_interval val_check_interval": "`eval.every`",
    "patience early_stopping": "`eval.stop_after`, in evaluations",
    "greater_is_better": "`eval.best_by`, whose direction is known",
    "max_eval_samples": "`eval.max_samples`",
    "predict_with_generate": "`eval.generate`",
    "max_generated_tokens generation_max_length": "`eval.max_new_tokens`",
    "per_device_eval_batch_size": "`data.tokens_per_pack`, also of evaluations",
    "eval_steps eval_interval evals_per_epoch eval_strategy evaluation_strategy": "`eval.every`",
    "early_stopping_patience early_stopping_steps": "`eval.stop_after`, in evaluations",
    "load_best_model_at_end save_best": "`checkpoint.keep_best`",
    "metric_for_best_model": "`eval.best_by`",
    "random_seed data_seed": "`run.seed`, and `data.seed` for the order of the samples",
}
_ABSENT: dict[str, str] = {
    "task stage rl rlhf_type rlhf dpo kto orpo reward_model": (
        "training is supervised, or on answers of which some are better, without GRPO; nearest: leave it out, and "
        "write a section `preference` for DPO and its kin, KTO and reward models"
    ),
    "use_dora use_rslora neftune_noise_alpha label_smoothing_factor": (
        "adapters and the loss are the plain ones; nearest: `model.lora.alpha` and `model.lora.dropout`"
    ),
    "optim.label_smoothing train.label_smoothing training.label_smoothing model.label_smoothing "
    "optim.z_loss z_loss z_loss_weight z_loss_coef z_loss_multiplier entropy_coef entropy_bonus focal_loss "
    "contrastive contrastive_loss info_nce loss_fn loss_function custom_loss compute_loss_func loss loss.name": (
        "tokens are learnt by their cross-entropy alone; nearest: `preference.loss`, for answers that are compared"
    ),
    "teacher teacher_model teacher_path teacher_model_name_or_path model.teacher distill distillation kd "
    "kd_temperature kd_loss kd_ratio distill_alpha gkd gkd_lambda soft_targets logit_distillation student": (
        "no second model teaches; nearest: answers that `headway generate` had the teacher write, in `data.train`"
    ),
    "router_aux_loss_coef aux_loss aux_loss_coef aux_loss_alpha moe_aux_loss_coeff router_z_loss_coef "
    "load_balancing_loss load_balance_loss_coef moe_z_loss_coeff output_router_logits router_aux_loss": (
        "no loss of routers is added, as it would depend on accumulation and ranks (docs/experts.md); nearest: "
        "`model.freeze`, which may hold the routers"
    ),
    "mtp mtp_num_layers mtp_loss_weight mtp_loss_scaling_factor num_nextn_predict_layers multi_token_prediction "
    "eagle medusa draft_model speculative": (
        "one next token is learnt, by the model's own head; nearest: `model.path`"
    ),
    "qat quantization_aware_training fake_quant qat_config pruning prune sparsity sparse": (
        "weights are learnt as they are; nearest: `run.dtype=float8` for products, `model.base` for frozen weights"
    ),
    "callbacks callback hooks plugins trainer_callbacks custom_callbacks": (
        "a run calls no code of yours; nearest: `run.trackers`, and headway.Meter in a loop of your own"
    ),
    "tasks benchmarks benchmark eval_tasks lm_eval lm_eval_tasks lmms_eval eval_benchmarks mmlu metrics "
    "compute_metrics eval_metrics": (
        "held-out samples are judged by loss and exact match; nearest: `data.eval`, and lm-evaluation-harness on an "
        "export (docs/evaluate.md)"
    ),
    "grpo ppo num_generations reward_funcs reward_fn reward_function vllm use_vllm reward_model_path": (
        "no answers are generated in a step; nearest: `preference.loss`, and headway.Meter around TRL's or verl's loop "
        "(docs/rl.md)"
    ),
    "assistant_only_loss completion_only_loss do_train do_eval overwrite_output_dir remove_unused_columns tf32": (
        "only answers are learnt, `eval.every` evaluates, and what is in `run.folder` is never written over; nearest: "
        "leave it out"
    ),
    "trust_remote_code": "no code of a model's folder is run; nearest: a `model.path` of transformers' own",
    "model_type tokenizer_type processor_type tokenizer processor vision_tower mm_vision_tower mm_projector_type "
    "is_llama_derived_model tokenizer_name tokenizer_name_or_path use_fast_tokenizer": (
        "a folder says by itself what it holds; nearest: `model.path`"
    ),
    "overwrite_cache lazy_preprocess dataset_prepared_path tokenized_path dataloader_pin_memory dataset_kwargs "
    "formatting_func response_template instruction_template save_only_model save_safetensors plot_loss strict "
    "logging_first_step local_rank do_predict prediction_loss_only skip_prepare_dataset": (
        "lengths are kept in an index, chats learn their answers alone, and a run writes all that is needed; nearest: "
        "leave it out; `data.train` and `run.folder` suffice"
    ),
    "rope_scaling rope_theta": "positions are the model's own; nearest: its config.json in `model.path`",
    "init_lora_weights pissa_init lora_bias lora_fan_in_fan_out lora_init_scale": (
        "adapters begin at zero and have no bias; nearest: `model.lora.rank` and `model.lora.alpha`"
    ),
    "bnb_4bit_use_double_quant double_quantization bnb_config_kwargs gptq awq hqq eetq": (
        "a frozen base is nf4 or int8; nearest: `model.base`"
    ),
    "use_galore galore use_apollo apollo use_badam badam lisa_activated_layers use_adalora": (
        "every weight that learns has its own moments; nearest: `optim.name` and `optim.state=8bit`"
    ),
    "drop_last dataloader_drop_last": (
        "packs are planned, the last ones too; nearest: `data.strategy`, how they are filled"
    ),
    "num_classes num_labels label_column class_names": (
        "classes are words that the model writes; nearest: a file with the column label in `data.train`"
    ),
    "default_system_message default_system system_prompt system": (
        "a system message stands in the rows; nearest: the column system in `data.train`, or `model.chat_template`"
    ),
    "split train_split dataset_split dataset_config": (
        "a file or a folder is read whole; nearest: the split's own file in `data.train`"
    ),
    "mix_strategy": "sources are mixed by their weights; nearest: `data.train.N.weight`",
    "do_sample num_beams temperature top_p top_k": (
        "evaluations write the likeliest answer; nearest: `eval.max_new_tokens`"
    ),
    "train_on_prompt train_on_inputs": (
        "prompts of chats are never learnt; nearest: documents in `data.train`, which are learnt from end to end"
    ),
    "tensor_parallel_size tensor_model_parallel_size tp_size tensor_parallel tensor_parallel_degree parallel.tensor "
    "parallel.tp": (
        "no layer is cut over processes; nearest: `parallel.shard`, which cuts weights, gradients and optimizer state, "
        "and `parallel.sequence`, which cuts packs"
    ),
    "pipeline_parallel_size pipeline_model_parallel_size pp_size pipeline_parallel pipeline_parallel_degree "
    "parallel.pipeline parallel.pp": (
        "layers are not dealt over processes; nearest: `parallel.shard`, with `parallel.replicate` between nodes"
    ),
    "resume_from_checkpoint resume auto_resume": (
        "a run goes on by `headway train --resume`; nearest: `checkpoint.every`, which keeps states to go on from"
    ),
    "push_to_hub hub_model_id": (
        "a run uploads nothing; nearest: `checkpoint.export`, whose folder `headway export --push-to-hub` sends"
    ),
    "hub_token hub_private_repo hf_token hf_use_auth_token hub_strategy": (
        "a run uploads nothing, and hf auth login keeps the token; nearest: `checkpoint.export`, whose folder "
        "`headway export --push-to-hub` sends"
    ),
}

PREFERENCE: dict[str, str] = {
    "loss": "pref_loss dpo_loss_type loss_type",
    "beta": "pref_beta rl_beta dpo_beta orpo_alpha",
    "label_smoothing": "dpo_label_smoothing",
    "gamma": "simpo_gamma",
    "desirable_weight": "kto_chosen_weight kto_desirable_weight",
    "undesirable_weight": "kto_rejected_weight kto_undesirable_weight",
    "center": "center_rewards_coefficient",
    "sft": "pref_ftx rpo_alpha cpo_alpha",
    "reference": "ref_model ref_adapters ref_model_adapters reference_free precompute_ref_log_probs",
}
"""Settings of the section `preference`, and what other tools call them.

Source: LLaMA-Factory at ff6d4d12e, finetuning_args.py; ms-swift at 3602360a5, rlhf_args.py; axolotl at 067b021c8,
utils/schemas; TRL 1.16, DPOConfig and RewardConfig.
"""
_SAME |= {words: f"`preference.{name}`" for name, words in PREFERENCE.items()}


def _by_word(table: dict[str, str]) -> dict[str, str]:
    return {word: answer for words, answer in table.items() for word in words.split()}


SAME = _by_word(_SAME)
"""Settings of other tools, and the setting here."""
ABSENT = _by_word(_ABSENT)
"""Settings of other tools that there are none of here, and what is nearest."""


def translated(name: str) -> str | None:
    """Translate another tool's setting into the one here, as the end of a sentence; None for a name of no other tool.

    Args:
        name: dotted; its last part counts, or its last two where they are one tool's name.

    >>> translated("training.learning_rate")
    'in Headway it is `optim.lr`'
    """
    parts = name.lower().replace("-", "_").split(".")
    for word in (".".join(parts[-2:]), parts[-1]):
        if word in SAME:
            return f"in Headway it is {SAME[word]}"
        if word in ABSENT:
            return f"there is none in Headway: {ABSENT[word]}"
    return None
