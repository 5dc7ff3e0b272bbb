"""Configurations of LMMs-Engine as recipes. Expected values are those that its own code would train with."""

import dataclasses

import pytest
import transformers
import yaml

from headway.config import parse_config
from headway.errors import ConfigError
from headway.words import Options, speaking
from tools.import_config import import_config
from tools.import_config.keys import RULES

# The key settings of its MFU reference, as printed there.
TEXT_PAGE = """
dataset_config:
  packing: true
  packing_strategy: first_fit
  packing_length: 81920

trainer_args:
  use_rmpad: true
  use_liger_kernel: true
  fsdp2: true
"""
PAGE = {
    "text": (TEXT_PAGE, {"data.tokens_per_pack": 81_920}),
    "image": (TEXT_PAGE.replace("81920", "61440"), {"data.tokens_per_pack": 61_440}),
    "video": (
        TEXT_PAGE.replace("81920", "51200") + "  sp_ulysses_degree: 2  # Sequence parallel degree\n",
        {"data.tokens_per_pack": 51_200, "parallel.sequence": 2},
    ),
}
GIVEN = {"model.path": "Qwen/Qwen2.5-7B-Instruct", "data.train": [{"path": "a.jsonl"}], "optim.steps": 100}

# A whole file in the manner of its examples.
WHOLE = {
    "trainer_type": "fsdp2_trainer",
    "dataset_config": {
        "dataset_type": "vision_iterable",
        "dataset_format": "yaml",
        "datasets": [
            {"path": "one/a.parquet", "data_folder": "one/media", "data_type": "parquet"},
            {"path": "two/b.jsonl", "data_folder": "", "data_type": "jsonl"},
        ],
        "processor_config": {"processor_name": "Qwen/Qwen3-VL-8B-Instruct", "processor_type": "qwen3_vl"},
        "packing": True,
        "packing_strategy": "balanced",
        "packing_length": 16_384,
        "filter_overlong": True,
        "video_backend": "qwen_vl_utils",
        "video_max_frames": 512,
        "extra_kwargs": {"packing_kwargs": {"num_buckets": 8}},
    },
    "model_config": {
        "load_from_pretrained_path": "Qwen/Qwen3-VL-8B-Instruct",
        "attn_implementation": "flash_attention_2",
        "monkey_patch_kwargs": None,
    },
    "trainer_args": {
        "output_dir": "out/run",
        "run_name": "first",
        "project": "vlm",
        "report_to": ["wandb"],
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "max_steps": 2000,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.03,
        "weight_decay": 0.01,
        "adam_beta2": 0.95,
        "max_grad_norm": 0.5,
        "bf16": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "use_liger_kernel": True,
        "use_rmpad": True,
        "fsdp2": True,
        "fsdp_config": {
            "transformer_layer_cls_to_wrap": ["Qwen3VLTextDecoderLayer"],
            "reshard_after_forward": False,
        },
        "sp_ulysses_degree": 2,
        "freeze_modules": ["visual"],
        "save_steps": 250,
        "save_total_limit": 3,
        "dataloader_num_workers": 8,
        "ema_enabled": True,
        "ema_decay": 0.999,
        "ema_update_every": 4,
        "group_by_length": True,
        "eval_strategy": "no",
    },
}


@pytest.fixture
def write(tmp_path):
    def file(content):
        path = tmp_path / "config.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return path

    return file


def flat(recipe, prefix=""):
    found = {}
    for key, value in recipe.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


@pytest.mark.parametrize("name", PAGE)
def test_the_pages_snippets_become_recipes(name, write):
    text, expected = PAGE[name]
    imported = import_config(write(text), GIVEN)
    settings = flat(imported.recipe)
    shared = {
        "data.strategy": "next_fit",
        "speed.kernels": "liger",
        "data.overlong": "drop",
        "parallel.reduce_dtype": "bfloat16",
    }
    for key, value in (expected | shared).items():
        assert settings[key] == value
    fates = {key.key: key.outcome.fate for key in imported.keys if key.is_set}
    assert fates["trainer_args.use_rmpad"] == fates["trainer_args.fsdp2"] == "not needed"
    assert set(fates.values()) <= {"translated", "not needed"}
    parse_config(imported.recipe)


def test_without_packing_nothing_is_filtered_and_an_overlong_sample_is_an_error(write):
    batches = {**WHOLE["dataset_config"], "packing": False, "packing_strategy": None}
    settings = flat(import_config(write({**WHOLE, "dataset_config": batches}), {}).recipe)
    assert settings["data.overlong"] == "error"
    limited = flat(import_config(write({**WHOLE, "dataset_config": {**batches, "max_length": 4096}}), {}).recipe)
    assert limited["data.overlong"] == "drop"


def test_a_whole_file_is_translated_key_by_key(write):
    imported = import_config(write(WHOLE), {})
    assert flat(imported.recipe) == {
        "model.path": "Qwen/Qwen3-VL-8B-Instruct",
        "model.freeze": ["model.visual.*"],
        "data.train": [
            {
                "mix": [
                    {"path": "one/a.parquet", "root": "one/media", "epochs": 1000.0},
                    {"path": "two/b.jsonl", "epochs": 1000.0},
                ]
            }
        ],
        "data.tokens_per_pack": 16_384,
        "data.strategy": "balanced",
        "data.overlong": "drop",
        "data.seed": 42,
        "data.workers": 8,
        "optim.steps": 2000,
        "optim.lr": 2e-5,
        "optim.betas": [0.9, 0.95],
        "optim.eps": 1e-8,
        "optim.weight_decay": 0.01,
        "optim.clip": 0.5,
        "optim.accumulation": 6,  # 2 packs in a micro-batch x 3
        "optim.schedule": "cosine",
        "optim.min_lr_ratio": 0.0,
        "optim.warmup_steps": 60,
        "optim.ema.decay": 0.999,
        "optim.ema.every": 4,
        "optim.ema.warmup": False,
        "parallel.sequence": 2,
        "parallel.reshard": False,
        "parallel.reduce_dtype": "bfloat16",
        "speed.kernels": "liger",
        "speed.recompute": "full",
        "checkpoint.every": 250,
        "checkpoint.keep": 3,
        "run.folder": "out/run",
        "run.seed": 42,
        "run.dtype": "bfloat16-params",
        "run.trackers": ["wandb:vlm"],
    }
    given = {key.key for key in imported.keys if key.is_set}
    assert given == {
        f"{section}.{key}" if isinstance(values, dict) else section
        for section, values in WHOLE.items()
        for key in (values if isinstance(values, dict) else [""])
    }
    parse_config(imported.recipe)
    by_hand = {key.key: key.outcome.reason for key in imported.keys if key.outcome.fate == "by hand" and key.is_set}
    assert by_hand.keys() == {"dataset_config.video_max_frames"}
    assert "# " + "  dataset_config.video_max_frames = 512: " in imported.as_yaml()


def test_the_recipe_reads_back(write):
    imported = import_config(write(WHOLE), {})
    assert yaml.safe_load(imported.as_yaml()) == imported.recipe


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, {"schedule": "linear", "min_lr_ratio": 0.0}),
        ({"lr_scheduler_type": "constant"}, {"schedule": "constant"}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}, "learning_rate": 1e-5},
            {"schedule": "cosine", "min_lr_ratio": pytest.approx(0.1), "lr": 1e-5},
        ),
        (
            {"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": {"num_decay_steps": 20, "min_lr_ratio": 0.05}},
            {"schedule": "wsd-linear", "decay_share": 0.2, "min_lr_ratio": 0.05},
        ),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 1.0, "lr_end": 5e-6}},
            {"schedule": "linear", "min_lr_ratio": pytest.approx(0.1)},
        ),
        ({"warmup_steps": 10}, {"warmup_steps": 10}),
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, {"warmup_steps": 10}),
    ],
)
def test_schedules_keep_their_course(schedule, expected, write):
    args = {"max_steps": 100, **schedule}
    config = {"trainer_args": args, "dataset_config": {"dataset_path": "a.jsonl", "dataset_format": "jsonl"}}
    optim = import_config(write(config), {"model.path": "m"}).recipe["optim"]
    assert {key: optim.get(key) for key in expected} == expected


def test_a_list_of_datasets_in_a_file_of_its_own_is_read(write, tmp_path):
    (tmp_path / "sets.yaml").write_text("datasets: [{path: a.jsonl, data_folder: media, data_type: jsonl}]")
    config = {
        "dataset_config": {"dataset_format": "yaml", "dataset_path": "sets.yaml", "packing": True},
        "trainer_args": {"num_train_epochs": 2},
    }
    one = {"path": "a.jsonl", "root": "media"}
    imported = import_config(write(config), {"model.path": "m"})
    assert imported.recipe["data"]["train"] == [one]
    assert imported.recipe["optim"]["epochs"] == 2.0
    imported = import_config(write(config), {"model.path": "m", "optim.steps": 7})
    assert imported.recipe["data"]["train"] == [one]  # the steps end the run
    assert "epochs" not in imported.recipe["optim"]
    with pytest.raises(ConfigError, match=r"lacks trainer_args\.max_steps or num_train_epochs"):
        import_config(write({**config, "trainer_args": {}}), {"model.path": "m"})


def test_epochs_of_several_datasets_are_taken_over_as_such(write):
    sets = [{"path": "a.jsonl", "data_type": "jsonl"}, {"path": "b.jsonl", "data_type": "jsonl"}]
    config = {
        "dataset_config": {"dataset_format": "yaml", "datasets": sets, "packing": True},
        "trainer_args": {"num_train_epochs": 3, "max_steps": -1},
    }
    recipe = import_config(write(config), {"model.path": "m"}).recipe
    assert recipe["data"]["train"] == [{"path": "a.jsonl"}, {"path": "b.jsonl"}]
    assert recipe["optim"]["epochs"] == 3.0
    parse_config(recipe)


def test_without_packing_a_batch_is_so_many_samples(write):
    config = {
        "dataset_config": {"packing": False, "max_length": 2048},
        "trainer_args": {"per_device_train_batch_size": 4},
    }
    data = import_config(write(config), GIVEN).recipe["data"]
    assert (data["tokens_per_pack"], data["samples_per_pack"], data["strategy"]) == (8192, 4, "next_fit")


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("trainer_args", {"use_ligre_kernel": True}, "trainer_args.use_ligre_kernel = True (no key of LMMs-Engine"),
        ("trainer_args", {"tp_degree": 2}, "tp_degree = 2 (there is no tensor parallelism"),
        ("trainer_args", {"fp16": True}, "fp16 = True (float16 needs loss scaling"),
        ("trainer_args", {"fsdp_config": {"xla": True}}, "xla of it is not known"),
        ("trainer_args", {"report_to": ["swanlab"]}, "swanlab is no tracker here"),
        ("trainer_args", {"lr_scheduler_type": "reduce_lr_on_plateau"}, "known are linear, cosine"),
        ("dataset_config", {"dataset_type": "bagel_iterable"}, "dataset_type = 'bagel_iterable'"),
        (
            "dataset_config",
            {"packing_strategy": "worst_fit", "packing": True},
            "known are first_fit, best_fit, balanced",
        ),
        ("model_config", {"overwrite_config": {"rope_theta": 1}}, "write it into the model folder's config.json"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(section, values, message, write):
    path = write({section: values})
    with pytest.raises(ConfigError, match="cannot be taken over") as error:
        import_config(path, GIVEN)
    assert message in str(error.value)
    key = f"{section}.{next(iter(values))}"
    imported = import_config(path, GIVEN, leave_out=(key,))
    assert next(one for one in imported.keys if one.key == key).outcome.fate == "refused"
    assert f"#   {key} = " in imported.as_yaml()


def test_all_refusals_are_told_at_once(write):
    with pytest.raises(ConfigError, match="2 keys cannot be taken over") as error:
        import_config(write({"trainer_args": {"tp_degree": 2, "nonsense": 1}}), GIVEN)
    assert "nonsense" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: x}", "no configuration of LMMs-Engine"),
        ("[1, 2]", "no configuration of LMMs-Engine"),
        (
            "{stage: dpo, pref_beta: 0.1}",
            "Its stage: dpo has no place in one; there is none in Headway: .*section `preference`",
        ),
        ("{rlhf_type: kto, beta: 0.1}", "Its rlhf_type: kto has no place in one; .*`preference`"),
        ("{rl: orpo, orpo_alpha: 0.1}", "Its rl: orpo has no place in one"),
        ("trainer_args: [1]", r"trainer_args is \[1\], but must be a mapping"),
        ("a: b: c", "is not YAML"),
        ("trainer_args: " + "[" * 5000, "is not YAML"),
        (f"trainer_args: {{max_steps: {'9' * 5000}}}", "is not YAML"),
        ("trainer_args: {max_steps: many}", "max_steps = 'many' .it, or what it goes with, has a value of another"),
        (
            TEXT_PAGE,
            r"lacks model_config.load_from_pretrained_path \(or give model.path\); dataset_config.",
        ),
    ],
)
def test_another_file_is_refused(text, message, write):
    with pytest.raises(ConfigError, match=message):
        import_config(write(text), {})


def test_one_command_line_leaves_out_keys_of_a_whole_folder(write):
    kept = {"trainer_args": {"tp_degree": 2, "deepspeed": "a.json"}}
    with pytest.raises(ConfigError) as error:
        import_config(write(kept), GIVEN)
    keys = error.value.value
    assert error.value.parameter == "leave_out"
    assert set(keys) == {"trainer_args.tp_degree", "trainer_args.deepspeed"}
    with speaking(Options({"leave_out": "--leave-out"})):
        assert str(error.value).endswith(f"knowingly with --leave-out {keys[0]} --leave-out {keys[1]}.")
    assert import_config(write(kept), GIVEN, leave_out=keys).absent == ()
    # another file of the folder has one of them alone
    other = import_config(write({"trainer_args": {"tp_degree": 2}}), GIVEN, leave_out=keys)
    assert other.absent == ("trainer_args.deepspeed",)
    # what is spelt wrong leaves nothing out, so the key is refused as before
    with pytest.raises(ConfigError, match="tp_degree = 2"):
        import_config(write({"trainer_args": {"tp_degree": 2}}), GIVEN, leave_out=("trainer_args.tp",))


def test_keys_that_lmms_engine_passes_over_itself_are_not_needed(write):
    imported = import_config(write({"model_config": {"torch_dtype": "bfloat16", "model_type": "qwen2_5_vl"}}), GIVEN)
    fates = {one.key: one.outcome.fate for one in imported.keys}
    assert fates["model_config.torch_dtype"] == fates["model_config.model_type"] == "not needed"


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (
            {"dataset_format": "yaml", "dataset_path": "gone.yaml"},
            "is not here; run this where it is, or give data",
        ),
        ({"datasets": [{"path": "a", "sampling": 3}]}, "sampling of a dataset is not known"),
    ],
)
def test_data_that_are_given_go_before_a_list_that_cannot_be_read(told, message, write):
    with pytest.raises(ConfigError, match=message):
        import_config(write({"dataset_config": told}), {"model.path": "a/b", "optim.steps": 1})
    imported = import_config(write({"dataset_config": told}), GIVEN)
    assert imported.recipe["data"]["train"] == GIVEN["data.train"]


def test_its_older_form_is_a_list_of_tasks(write):
    imported = import_config(write([{"type": "trainer", "config": yaml.safe_load(TEXT_PAGE)}]), GIVEN)
    assert imported.recipe["data"]["tokens_per_pack"] == 81_920


def test_every_training_argument_of_transformers_has_a_rule():
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert {name for name in names if f"trainer_args.{name}" not in RULES} == set()
