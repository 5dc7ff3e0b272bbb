import re
from itertools import pairwise
from typing import get_args

import pytest
import yaml

from headway.config import TrainConfig, load_config, parse_config, with_overrides
from headway.config.advice import warnings
from headway.config.data import DataConfig, DatasetConfig
from headway.config.mistakes import ABSENT, SAME, translated
from headway.config.optim import factor_of
from headway.config.read import without_effect
from headway.config.sections import Section
from headway.config.tree import walk
from headway.data.media.images import MAX_IMAGE_PIXELS
from headway.data.sources import FORMATS
from headway.data.sources.documents import DTYPES, SampleBy
from headway.errors import ConfigError, UnknownModelError

MINIMAL = """
model: {path: some/model}
data: {train: [{path: a.jsonl}], tokens_per_pack: 1024}
optim: {steps: 100, lr: 1e-3}
run: {folder: runs/x}
"""


@pytest.fixture
def minimal(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(MINIMAL)
    return path


def test_a_minimal_file_is_completed_with_defaults(minimal):
    config = load_config(minimal)
    assert config.optim.lr == 0.001
    assert config.optim.accumulation == 1
    assert config.data.train[0].epochs is None
    assert config.run.dtype == "auto"


def test_the_resolved_configuration_reads_back_as_itself(minimal):
    config = load_config(minimal)
    assert parse_config(config.to_dict()) == config


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("optim.lr=3e-4", lambda c: c.optim.lr, 3e-4),
        ("optim.min_lr_ratio=40%", lambda c: c.optim.min_lr_ratio, 0.4),
        ("data.tokens_per_pack=32k", lambda c: c.data.tokens_per_pack, 32_000),
        ("run.watchdog_s=30min", lambda c: c.run.watchdog_s, 1800),
        ("optim.lr_of={vision: x10%}", lambda c: factor_of(c.optim.lr_of["vision"], 1.0), 0.1),
        ("optim.clip=null", lambda c: c.optim.clip, None),
        ("optim.betas=[0.8, 0.9]", lambda c: c.optim.betas, (0.8, 0.9)),
        ("data.train.0.epochs=3", lambda c: c.data.train[0].epochs, 3),
        ("data.train=[b.jsonl, {path: c.jsonl}]", lambda c: len(c.data.train), 2),
        ("data.train={mix: [a, b]}", lambda c: [part.path for part in c.data.train[0].mix], ["a", "b"]),
        ("data.eval=e.jsonl", lambda c: c.data.eval.path, "e.jsonl"),
        ("optim.epochs=1.5", lambda c: (c.optim.steps, c.optim.epochs), (None, 1.5)),
        ("optim.eps=null", lambda c: c.optim.eps, 1e-8),
        ("eval=null", lambda c: c.eval.evaluates, False),
        ("model.random_init=true", lambda c: c.model.random_init, True),
        ("checkpoint.every=50", lambda c: c.checkpoint.every, 50),
        ("model.path=a=b", lambda c: c.model.path, "a=b"),
    ],
)
def test_set_lays_a_yaml_value_over_the_file(minimal, override, read, expected):
    assert read(load_config(minimal, (override,))) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.momentum=1", "unknown key 'optim.momentum', did you mean 'optim.muon.momentum'?"),
        ("optim.warmup=1", "unknown key 'optim.warmup', did you mean 'warmup_steps'?"),
        ("data.train.0.epoch=1", "unknown key 'data.train.0.epoch', did you mean 'epochs'?"),
        ("modle.path=x", "unknown key 'modle', did you mean 'model'?"),
        ("optim.lr=fast", "optim.lr = 'fast': give a number above 0, such as 0.5, 40%, 1e-3"),
        ("optim.lr=2,5e-4", "the comma of 2,5e-4 may stand before decimals or thousands. Write 2.5e-4 or 25e-4"),
        ("optim.lr=1m", "optim.lr = '1m': 1m may be millions or thousandths. Write 1M or 1e-3. Give a number above 0"),
        ("optim.warmup_steps=3%", "3% is a share, but this is a count. Give a whole number"),
        ("run.watchdog_s=2m", "2m may be minutes, milliseconds or months. Write 2min or 2ms, and months in days. Give"),
        ("parallel.reduce=step", "parallel.reduce 'step' has no effect with one pack per step"),
        ("optim.lr=-1", "optim.lr = -1: must be above 0"),
        ("optim.steps=0", "optim.steps = 0: must be at least 1"),
        ("optim.schedule=triangle", "optim.schedule = 'triangle': give cosine, constant, linear"),
        ("optim.steps=null", "say how long the run is, with 'steps' or with 'epochs'"),
        ("lr=1", "unknown key 'lr', did you mean 'optim.lr'?"),
        ("seed=1", "unknown key 'seed', did you mean 'data.seed' or 'run.seed'?"),
        ("model.lora.r=8", "unknown key 'model.lora.r', in Headway it is `model.lora.rank`"),
        ("optim.xyz=1", "unknown key 'optim.xyz', allowed here: name, steps, epochs, lr"),
        ("optim.lr=-1", "`headway config optim` lists what can be set"),
        ("optim.betas=[0.9, 1.0]", "both must be below 1"),
        ("data.stages=[{path: a}, {path: b}]", "stage 0 needs 'epochs'"),
        (
            "data.train=[{path: a, epochs: 1}, {path: b}]",
            "one after the other, write data.stages instead of data.train",
        ),
        ("data.train=[]", "give the training data either in 'train'"),
        ("data.train=[a, {path: b, weight: 1}]", "need a 'weight' each, or 'epochs' each, or neither"),
        ("data.train=5", "5 is no dataset. Give its path, or its settings, such as {path: chats.jsonl}"),
        ("data.eval=[a, b]", "['a', 'b'] is no dataset"),
        ("data.stages.0.path=a", "data.stages is {}, which has no '0' in it"),
        ("eval.every=10", "data.eval names no file"),
        (
            "speed.recompute=half",
            "'half' is not none, full, every:N, one of these for a tower (language, vision, audio) as",
        ),
        ("speed.recompute=visual:full", "'visual:full' is not none, full, every:N"),
        ("speed.recompute=vision:attention", "'vision:attention' is not none, full, every:N"),
        ("speed.recompute=every:0", "'every:0' is not none, full, every:N"),
        ("speed.recompute=-attention", "'-attention' is not none, full"),
        ("speed.recompute=full,-experts", "'full,-experts' is not none, full"),
        ("speed.recompute=memory:40", "units are KiB, MiB, GiB, TiB, KB, MB, GB, TB"),
        ("speed.compile=inductor", "speed.compile = 'inductor': give true, false or auto"),
        ("optim.lr", "is not an assignment. Write section.key=value"),
        ("data.train.5.path=x", "data.train has items 0 to 0, and no '5'"),
        ("optim.lr.x=1", "optim.lr is '1e-3', which has no"),
        ("optim.lr=[1", "is not YAML"),
        ("checkpoint={keep: 1, keep: 2}", "the key 'keep' stands twice"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(minimal, override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, (override,))
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


SETTABLE = [
    name.replace("data.train.N", "data.train.0")
    for name in (setting.name for setting in walk(TrainConfig))
    if ".N" not in name.replace("data.train.N", "")
]
JUNK = (
    "junk",
    "1.5x",
    "[]",
    "[[1]]",
    "[junk, 1]",
    "{a: {b: 1}}",
    "true",
    "-1",
    "1.5",
    "1e60",
    "2020-01-01",
    "5",
    "0.5s",
)


@pytest.mark.parametrize("name", SETTABLE)
def test_no_wrong_value_is_told_in_the_words_of_the_library_that_checks_it(name):
    foreign = ("input should", "instance of", "unable to", "valid ", "config", "required positional", "ctx", "literal[")
    for value in JUNK:
        try:
            with_overrides(yaml.safe_load(MINIMAL), (f"{name}={value}",), source="file")
        except ConfigError as error:
            clauses = str(error).lower().split("`headway config")[0].replace("config.json", "")
            clauses = clauses.replace("config, versions", "")  # from the meaning of run.folder
            assert not [words for words in foreign if words in clauses], clauses
            assert name.partition(".")[0] in clauses or "datetime" in clauses


LISTS = [
    *("run.trackers", "model.freeze", "model.lora.targets", "run.profile.ranks"),
    *("model.new_tokens", "model.new_special_tokens"),
]


def test_all_lists_of_any_length_are_known():
    of_values = {setting.name for setting in walk(TrainConfig) if re.match(r"list of (?!\d)", setting.values)}
    assert of_values == set(LISTS)


@pytest.mark.parametrize("name", LISTS)
def test_a_value_alone_is_a_list_of_it(name, minimal):
    beside = {
        "model.lora.targets": ("model.lora.rank=8",),
        "run.profile.ranks": ("run.profile.start=2",),
    }.get(name, ())
    values = {"run.profile.ranks": 1, "run.trackers": "tensorboard:x"}
    value = values.get(name, "q_proj")
    alone, listed = (load_config(minimal, (*beside, f"{name}={text}")) for text in (value, f"[{value}]"))
    assert alone == listed
    assert alone != load_config(minimal, beside)


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("model.lora=16", "model.lora={rank: 16}"),
        ("run.profile=2", "run.profile={start: 2}"),
        ("optim.ema=0.999", "optim.ema={decay: 0.999}"),
        ("model.lora={rank: 8, targets: all-linear}", "model.lora=8"),
        ("data.tokens_per_pack=32k", "data.tokens_per_pack=32000"),
        ("data.tokens_per_pack=8192 tokens", "data.tokens_per_pack=8192"),
        ("optim.steps=1e6", "optim.steps=1000000"),
        ("optim.steps=1.5k", "optim.steps=1500"),
        ("optim.weight_decay=10%", "optim.weight_decay=0.1"),
        ("optim.betas=[90%, 99%]", "optim.betas=[0.9, 0.99]"),
        ("data.prefetch_bytes=2GiB", "data.prefetch_bytes=2147483648"),
        ("run.watchdog_s=1.5h", "run.watchdog_s=5400"),
    ],
)
def test_a_value_as_people_write_it_is_the_value(override, same, minimal):
    assert load_config(minimal, (override,)) == load_config(minimal, (same,))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optim.steps=100%",
            "100% is a share, but this is a count. Give a whole number at least 1 or null, such as 32768, 32k",
        ),
        ("data.prefetch_bytes=2G", "such as 2GiB or 2147483648; units are KiB"),
        ("run.watchdog_s=30m", "such as 0.5s, 90min or 2d; without a unit it is in seconds"),
        ("data.bad.fraction=half", "such as 0.5 or 40%"),
        ("parallel.shard=0", "parallel.shard = 0: must be at least 1 ("),
        ("optim.betas=[0.8]", "optim.betas = [0.8]: give a list of 2, each number"),
        ("model=some/model", "model = 'some/model': give its settings, such as {path: ...}"),
        ("data.tokens_per_pack=2s", "data.tokens_per_pack = '2s': give a whole number"),
    ],
)
def test_a_value_that_is_none_names_what_can_be_written(override, message, minimal):
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, (override,))
    assert message in str(caught.value)


NAMES = {setting.name for setting in walk(TrainConfig)}
SECTIONS = ["", *(f"{setting.name}." for setting in walk(TrainConfig) if setting.section and not setting.is_list)]


@pytest.mark.parametrize("answer", sorted({*SAME.values(), *ABSENT.values()}))
def test_every_setting_that_stands_for_another_tools_exists_and_takes_the_value(answer, minimal):
    settings = [text for text in re.findall(r"`([^`]+)`", answer) if not text.startswith("headway ")]
    assert settings
    for text in settings:
        name, equals, _ = text.partition("=")
        assert name in NAMES
        if equals:
            load_config(minimal, (text,))


def test_no_word_of_another_tool_is_a_setting_here_at_the_same_time():
    """Or the table would speak of a setting that was only put into the wrong section."""
    own = {name.rpartition(".")[2] for name in NAMES} - {"loss"}  # preference.loss; that of tokens cannot be chosen
    assert not own & (SAME.keys() | ABSENT.keys())


@pytest.mark.parametrize("section", SECTIONS)
def test_words_of_other_tools_are_understood_at_every_level(section, minimal):
    """Of LLaMA-Factory, ms-swift, TRL and axolotl in turn, with the settings that were looked up by hand."""
    for word, setting in [
        ("learning_rate", "`optim.lr`"),
        ("cutoff_len", "`data.tokens_per_pack`"),
        ("per_device_train_batch_size", "`data.tokens_per_pack`"),
        ("lora_rank", "`model.lora.rank`"),
        ("freeze_vit", "`model.freeze=[vision]`"),
        ("report_to", "`run.trackers`"),
        ("load-in-4bit", "`model.base`, nf4 for 4 bits"),
        ("gradient_checkpointing", "`speed.recompute=full`"),
        ("sample_packing", "`data.strategy`"),
        ("image_max_pixels", "`data.max_pixels`, or `data.train.N.max_pixels`"),
        ("video_fps", "`data.fps`, or `data.train.N.fps`"),
        ("fps_max_frames", "`data.max_frames`"),
        ("truncation_strategy", "`data.overlong`, or `data.train.N.overlong`"),
        ("resize_vocab", "`model.new_tokens`"),
        ("add_special_tokens", "`model.new_special_tokens`"),
        ("stage", "write a section `preference` for DPO"),
        ("pref_loss", "`preference.loss`"),
        ("rl_beta", "`preference.beta`"),
        ("nproc_per_node", "`parallel.shard` processes that torchrun starts"),
        ("image_size", "`data.max_pixels`, an area in pixels"),
        ("train_data", "`data.train`, a file or a folder"),
        ("patience", "`eval.stop_after`, in evaluations"),
        ("bnb_4bit_use_double_quant", "a frozen base is nf4 or int8"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_config(minimal, (f"{section}{word}=x",))
        assert f"unknown key '{section}{word}', " in str(caught.value)
        assert setting in str(caught.value)


PUBLISHED = {
    # blog.csdn.net/kjzd123/article/details/139794858, a llamafactory-cli train command
    "LLaMA-Factory": "stage model_name_or_path preprocessing_num_workers finetuning_type flash_attn dataset cutoff_len "
    "learning_rate num_train_epochs per_device_train_batch_size gradient_accumulation_steps lr_scheduler_type "
    "max_grad_norm logging_steps save_steps packing report_to output_dir fp16 lora_rank lora_alpha lora_dropout "
    "lora_target deepspeed",
    # gist.github.com/richinseattle/0fdef10bf798289fa49af1eb5d775f4c, a configuration of axolotl
    "axolotl": "base_model load_in_8bit load_in_4bit datasets adapter lora_r lora_alpha lora_dropout "
    "lora_target_linear val_set_size output_dir sequence_len sample_packing wandb_project gradient_accumulation_steps "
    "micro_batch_size num_epochs optimizer lr_scheduler learning_rate train_on_inputs group_by_length bf16 fp16 "
    "gradient_checkpointing",
    # QwenLM/Qwen2.5-VL, qwen-vl-finetune/scripts/sft_7b.sh
    "Qwen-VL": "model_name_or_path dataset_use data_flatten tune_mm_vision tune_mm_mlp tune_mm_llm bf16 output_dir",
}


@pytest.mark.parametrize("tool", PUBLISHED)
def test_settings_of_configurations_that_others_published_are_understood(tool):
    assert [word for word in PUBLISHED[tool].split() if translated(word) is None] == []


@pytest.mark.parametrize(
    "override",
    [
        "loss=contrastive", "optim.label_smoothing=0.1", "eval.tasks=[mmlu]", "model.teacher=x", "run.callbacks=[a]",
        "router_aux_loss_coef=1", "model.mtp=true", "optim.z_loss=1e-4", "model.qat=true",
    ],
)  # fmt: skip
def test_what_others_have_and_headway_has_not_is_said(minimal, override):
    with pytest.raises(ConfigError, match=r"there is none in Headway: .*; nearest: "):
        load_config(minimal, (override,))


def test_a_setting_below_a_number_is_told_as_one_that_there_is_or_not(minimal):
    with pytest.raises(ConfigError, match=r"no 'use_dora' in it\. There is none in Headway: adapters and the loss"):
        load_config(minimal, ("model.lora=8", "model.lora.use_dora=true"))
    with pytest.raises(ConfigError, match=r"no 'alpha' in it\. To set single settings, give model.lora a mapping"):
        load_config(minimal, ("model.lora=8", "model.lora.alpha=4"))


@pytest.mark.parametrize("key", ["tokens", "grip", "datum", "calling", "mode", "use_kl"])
def test_a_name_that_is_near_nothing_is_not_guessed(minimal, key):
    with pytest.raises(ConfigError, match=f"unknown key 'optim.{key}', allowed here: name, steps"):
        load_config(minimal, (f"optim.{key}=1",))


def test_a_resolved_configuration_can_be_read_again(minimal):
    """A resumed run compares itself with what the first one wrote, all defaults included."""
    config = load_config(minimal, ("optim.schedule=constant",))
    assert parse_config(config.to_dict()) == config


def test_min_lr_ratio_without_a_cosine_is_refused(minimal):
    with pytest.raises(ConfigError, match="min_lr_ratio has no effect"):
        load_config(minimal, ("optim.schedule=constant", "optim.min_lr_ratio=0.5"))


def test_all_mistakes_are_named_at_once(minimal):
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, ("optim.lr=no", "run.foldr=x"))
    assert "optim.lr" in str(caught.value)
    assert "did you mean 'folder'" in str(caught.value)


def test_a_missing_key_says_what_it_means(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(MINIMAL.replace("lr: 1e-3", ""))
    with pytest.raises(ConfigError, match=r"'optim.lr' is required \(Peak learning rate\)"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no configuration"),
        ("a: [", "is not YAML"),
        ("a:\n\tb: 1", "line 2, column 1 begins with a tab. Indent with spaces"),
        ("- 1", "holds no"),
        (
            "a: &a [1, 1, 1]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefgh")),
            "its aliases make .* values, but at most 1,000,000",
        ),
        ("# " + "x" * 1_000_000, "1,000,002 characters, but at most 1,000,000"),
        (
            "model: {path: m}\nrun: {}\nmodel: {path: q}\n",
            "line 3, column 1: the key 'model' stands twice .* lines 1 and 3",
        ),
        ("optim:\n  lr: 1\n  'lr': 2\n", "the key 'lr' stands twice in one mapping, in lines 2 and 3"),
        ("data: {train: [{path: a, path: b}]}", "the key 'path' stands twice in one mapping, in line 1"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_key_that_a_merged_mapping_has_too_stands_once(tmp_path):
    path = tmp_path / "c.yaml"
    optim = "optim: {<<: &common {steps: 100, lr: 1.0}, lr: 1.0e-3}\neval: {<<: {every: null}, every: null}"
    path.write_text(MINIMAL.replace("optim: {steps: 100, lr: 1e-3}", optim))
    assert load_config(path).optim.lr == 1e-3


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(tmp_path / "none.yaml")


def test_every_setting_is_described():
    def check(section):
        for name, field in section.model_fields.items():
            kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
            nested = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
            for one in nested:
                check(one)
            assert nested or field.description, f"{section.__name__}.{name} has no description"

    check(TrainConfig)


MIX = "data.train=[{mix: [{path: a.jsonl, weight: 2}, {path: b.jsonl, name: b, weight: 1, limit: 9}], samples: 100}]"


def test_sources_mix_by_weight_or_by_epochs(minimal):
    (stage,) = load_config(minimal, (MIX,)).data.train
    assert [(part.path, part.weight, part.limit) for part in stage.parts] == [("a.jsonl", 2, None), ("b.jsonl", 1, 9)]
    assert not stage.is_endless
    config = load_config(minimal, (MIX, "data.stream={lanes: 4}", "data.bad={policy: skip}"))
    assert parse_config(config.to_dict()) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train=[{epochs: 1}]", "a source needs either 'path', or 'mix' with several sources"),
        ("data.train=[{epochs: 2, mix: [{path: b, weight: 1}]}]", "epochs have no effect beside 'mix'"),
        ("data.train=[{mix: [{path: b, weight: 1, epochs: 1}]}]", "b: give either 'weight' or 'epochs'"),
        ("data.train=[{mix: [{weight: 1}]}]", "a part of a mix needs 'path'"),
        (
            "data.train=[{mix: [{path: a, weight: 1}, {path: b, epochs: 1}]}]",
            "need a 'weight' each, or 'epochs' each",
        ),
        ("data.train=[{path: a, samples: 5}]", "'samples' is the length of a mix with weights"),
        ("data.train=[{mix: [{path: a}]}, {path: b}]", "2 sources that play together, and entry 0 has 'mix'"),
        ("data.train=[{mix: [{path: a, wight: 1}]}]", "unknown key 'data.train.0.mix.0.wight', did you mean 'weight'?"),
        ("data.train.0.schem=x", "unknown key 'data.train.0.schem', did you mean 'schema'?"),
        ("data.bad={limit: 5}", "limit and fraction have no effect with policy 'error'"),
        ("data.stream.lane=5", "unknown key 'data.stream.lane', did you mean 'lanes'?"),
        ("data={train: [{path: a}], tokens_per_pack: 9, window: 5, stream: {}}", "window has no effect on a stream"),
        ("data.strategy=best", "give balanced, best_fit"),
        ("data.workers=-1", "data.workers = -1: must be at least 0"),
    ],
)
def test_wrong_settings_of_data_are_one_clear_error(minimal, override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, (override,))
    assert message in str(caught.value)


def test_recompilations_are_judged_where_blocks_may_be_compiled(minimal):
    with pytest.raises(ConfigError, match="recompiles has no effect with compile: false"):
        load_config(minimal, ("speed.compile=false", "speed.recompiles=error"))
    assert load_config(minimal, ("speed.recompiles=error",)).speed.compile == "auto"


def test_inputs_of_recomputed_blocks_alone_are_offloaded(minimal):
    with pytest.raises(ConfigError, match="offload has no effect with recompute: none"):
        load_config(minimal, ("speed.offload=inputs",))
    assert load_config(minimal, ("speed.offload=inputs", "speed.recompute=memory:1GiB")).speed.offload == "inputs"


def test_a_chunk_of_the_loss_beside_kernels_that_choose_their_own_is_refused(minimal):
    with pytest.raises(ConfigError, match="loss_chunk has no effect with kernels 'liger'"):
        load_config(minimal, ("speed.kernels=liger", "speed.loss_chunk=512"))
    config = load_config(minimal, ("speed.kernels=liger",))
    assert parse_config(config.to_dict()) == config
    assert load_config(minimal, ("speed.kernels=liger", "speed.loss_chunk=null")).speed.loss_chunk is None


def test_a_file_changes_and_adds_to_the_one_that_it_extends(minimal):
    (minimal.parent / "more").mkdir()
    second = minimal.parent / "more" / "second.yaml"
    second.write_text("extends: ../c.yaml\noptim: {lr: 3e-4}\ndata: {train: [{path: b.jsonl, epochs: 1}]}\n")
    third = minimal.parent / "third.yaml"
    third.write_text("extends: more/second.yaml\nrun: {seed: 7}\n")
    config = load_config(third, ("optim.steps=5",))
    assert (config.optim.lr, config.optim.steps, config.run.seed, config.run.folder.name) == (3e-4, 5, 7, "x")
    assert [stage.path for stage in config.data.train] == ["b.jsonl"]
    assert config.data.tokens_per_pack == 1024


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: c.yaml", "extends itself"),
        ("extends: gone.yaml", "gone.yaml: No such file"),
        ("extends: [a, b]", "is no path. Name one YAML file"),
    ],
)
def test_a_file_that_cannot_be_extended_is_refused(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("{mix: chat}", "no such mix of lengths. Known mixes are chats, images"),
        ("{mix: chats, lengths: a.csv}", "give either 'mix' or 'lengths'"),
    ],
)
def test_a_plan_has_lengths_from_one_known_place(minimal, plan, message):
    with pytest.raises(ConfigError, match=message):
        load_config(minimal, (f"plan={plan}",))


def test_what_is_to_be_trained_on_is_a_path_or_a_list_that_plays_together(minimal):
    (alone,) = load_config(minimal, ("data.train=a.jsonl",)).data.played
    assert (alone.path, alone.is_endless) == ("a.jsonl", True)
    (together,) = load_config(minimal, ("data.train=[a.jsonl, {path: b/a.jsonl, limit: 9}]",)).data.played
    assert [(part.path, part.weight, part.limit) for part in together.parts] == [
        ("a.jsonl", None, None),
        ("b/a.jsonl", None, 9),
    ]
    first, second = load_config(minimal, ("data.stages=[{path: a, epochs: 1}, b]",)).data.played
    assert (first.path, second.path, second.is_endless) == ("a", "b", True)


def test_a_setting_takes_the_place_of_the_one_that_says_the_same_otherwise(minimal):
    other = minimal.parent / "other.yaml"
    other.write_text("extends: c.yaml\noptim: {epochs: 1}\ndata: {stages: [{path: b, epochs: 1}, c]}\n")
    config = load_config(other)
    assert (config.optim.steps, config.optim.epochs, config.data.train) == (None, 1, ())
    assert load_config(other, ("optim.steps=7", "optim.epochs=null")).optim.steps == 7


def test_both_ways_to_say_how_long_a_run_is_in_one_file_are_refused(minimal):
    minimal.write_text(MINIMAL.replace("steps: 100", "steps: 100, epochs: 2"))
    with pytest.raises(ConfigError, match="Both are given, so set one of them to null"):
        load_config(minimal)


def test_an_inherited_setting_is_switched_off_with_null(minimal):
    minimal.write_text(MINIMAL + "eval: {every: 10, generate: 4, max_new_tokens: 8}\ncheckpoint: {every: 50}\n")
    other = minimal.parent / "other.yaml"
    other.write_text("extends: c.yaml\neval: {every: null, generate: null, max_new_tokens: null}\ncheckpoint: null\n")
    config = load_config(other)
    assert not config.eval.evaluates
    assert (config.eval.generate, config.eval.max_new_tokens, config.checkpoint.every) == (None, 64, None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("optim.epochs=2", "data.stream={}"), "data.stream does not count them"),
        (("optim.epochs=2", "data.stages=[{path: a, epochs: 1}, b]"), "each stage sets its own length"),
    ],
)
def test_epochs_that_cannot_be_counted_are_refused(minimal, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(minimal, overrides)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((), []),
        (
            ("optim.warmup_steps=100",),
            ["optim.warmup_steps 100 leaves none of the 5 steps for a decay, so the learning rate only"],
        ),
        (("optim.schedule=wsd", "optim.warmup_steps=4", "optim.decay_share=0.5"), ["optim.decay_share 0.5 of 5 steps"]),
        (("checkpoint.every=50",), ["checkpoint.every 50 is never reached in 5 steps"]),
        (("optim.ema={decay: 0.9, every: 6}",), ["optim.ema.every 6 is never reached in 5 steps"]),
        (("run.profile={start: 4}",), ["the end of run.profile, step 6 is never reached in 5 steps"]),
        (
            ("eval.max_new_tokens=8", "data.eval=e.jsonl"),
            ["data.eval has no effect", "eval.max_new_tokens has no effect without eval.generate"],
        ),
        (("eval={every: 6, generate: 2}", "data.eval=e.jsonl"), ["eval.every 6 is never reached"]),
    ],
)
def test_a_harmless_setting_without_effect_is_told_and_not_refused(minimal, overrides, told):
    found = warnings(load_config(minimal, overrides), 5)
    assert len(found) == len(told)
    for sentence, beginning in zip(found, told, strict=True):
        assert sentence.startswith(beginning)


def test_the_formats_of_the_configuration_are_those_that_are_read():
    fields = DatasetConfig.model_fields
    assert get_args(fields["format"].annotation) == ("auto", *FORMATS)
    assert get_args(get_args(fields["token_dtype"].annotation)[0]) == DTYPES
    assert get_args(get_args(fields["sample_by"].annotation)[0]) == get_args(SampleBy)
    pixels = DataConfig.model_fields["max_image_pixels"]
    assert pixels.default == MAX_IMAGE_PIXELS


def test_what_the_file_says_of_overridden_settings_is_kept_beside_equal_configurations(minimal):
    changed = load_config(minimal, ("optim.lr=0.25", "optim.lr=0.125", "run.seed=3", "optim.steps=100"))
    assert changed.recipe.path == str(minimal)
    assert changed.recipe.overridden == ('optim.lr="1e-3"', "run.seed=")  # steps are those of the file
    assert parse_config(changed.to_dict()) == changed
    assert load_config(minimal).recipe.overridden == ()


@pytest.mark.parametrize(
    ("overrides", "clauses"),
    [
        (["optim.lr=1", "optim.lr=2"], ["optim.lr=1 has no effect, because optim.lr=2 follows"]),
        (["optim.lr=1", "optim={lr: 2}"], ["optim.lr=1 has no effect, because optim={lr: 2} follows"]),
        (["data.train.0.path=a", "data.train=b"], ["data.train.0.path=a has no effect, because data.train=b follows"]),
        (["optim.steps=5", "optim.epochs=1"], ["optim.steps=5 has no effect, because optim.epochs=1 follows"]),
        (["optim={steps: 5}", "optim.clip=1", "optim.lr_of={}"], []),
        (["optim.steps=null", "optim.epochs=2"], []),
        (["optim.lr=1", "optim.lr=1"], []),
    ],
)
def test_a_setting_that_another_one_takes_back_is_named(overrides, clauses):
    assert [c[: len(says)] for c, says in zip(without_effect(overrides), clauses, strict=True)] == clauses


def test_a_json_file_with_a_key_twice_names_both_lines(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"model": {"path": "a"},\n "optim": {"lr": 1, "lr": 2}}')
    with pytest.raises(ConfigError, match=r"the key 'lr' stands twice in one mapping, in line 2"):
        load_config(path)


def test_a_run_as_the_model_is_its_newest_export_and_so_recorded(minimal, tmp_path):
    for step in (5, 17):
        (tmp_path / f"runs/a/export/step-{step:06}").mkdir(parents=True)
        (tmp_path / f"runs/a/export/step-{step:06}/config.json").write_text("{}")
    newest = str(tmp_path / "runs/a/export/step-000017")
    config = load_config(minimal, (f"model.path={tmp_path}/runs/a",))
    assert config.model.path == config.to_dict()["model"]["path"] == newest
    (tmp_path / "runs/a/checkpoints/step-000020").mkdir(parents=True)
    with pytest.raises(UnknownModelError, match="went on to step-000020 after its newest model folder"):
        load_config(minimal, (f"model.path={tmp_path}/runs/a",))
    assert load_config(minimal, (f"model.path={newest}",)).model.path == newest


@pytest.mark.parametrize(
    ("word", "setting"),
    [
        *(
            ("learning_rate", "optim.lr"),
            ("max_length", "data.tokens_per_pack"),
            ("cutoff_len", "data.tokens_per_pack"),
        ),
        *(("max_seq_length", "data.tokens_per_pack"), ("batch_size", "data.tokens_per_pack"), ("lora_r", "lora.rank")),
        *(("per_device_train_batch_size", "optim.accumulation"), ("gradient_accumulation_steps", "optim.accumulation")),
        *(("num_train_epochs", "optim.epochs"), ("load_in_4bit", "model.base"), ("warmup_ratio", "optim.warmup_steps")),
        *(
            ("bf16", "run.dtype"),
            ("output_dir", "run.folder"),
            ("save_steps", "checkpoint.every"),
            ("seed", "run.seed"),
        ),
        *(("eval_steps", "eval.every"), ("packing", "data.strategy"), ("deepspeed", "parallel.shard")),
        *(("report_to", "run.trackers"), ("gradient_checkpointing", "speed.recompute"), ("template", "chat_template")),
        *(("eval_strategy", "eval.every"), ("save_strategy", "checkpoint.every"), ("assistant_only_loss", "answers")),
    ],
)
def test_twenty_words_of_other_tools_lead_to_ours_in_a_file_and_in_an_override(minimal, tmp_path, word, setting):
    (tmp_path / "theirs.yaml").write_text(f"extends: c.yaml\n{word}: 1\n")
    for path, overrides in ((minimal, (f"{word}=1",)), (tmp_path / "theirs.yaml", ())):
        with pytest.raises(ConfigError) as caught:
            load_config(path, overrides)
        assert (f"unknown key {word!r}" in str(caught.value), setting in str(caught.value)) == (True, True), caught


def test_what_is_allowed_in_a_section_is_listed_once(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text("H100: 2.5\nA100: 1.5\nmodle: {path: tiny}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    text = str(caught.value)
    assert "'model', 'data', 'optim' and 'run' are required (`headway init` writes them)" in text
    assert "unknown keys 'H100' and 'A100', allowed here: model, data, optim" in text
    assert "unknown key 'modle', did you mean 'model'?" in text
    assert text.count("allowed here") == 1
