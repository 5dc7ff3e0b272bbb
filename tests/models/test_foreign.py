"""Files of models that strangers wrote: refused in one error, whatever the libraries that read them raise."""

import copy
import io
import json
import logging
import os
import random
import re

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from headway.count.models import presets
from headway.data.encoders import open_encoder
from headway.data.sources import open_source
from headway.errors import CheckpointError, DataError, HeadwayError
from headway.models.foreign import check_config, check_tokenizer
from headway.models.load import load_model, load_model_config, load_processor
from headway.models.lora import add_saved_adapters
from headway.synthetic.digits import write_reader
from helpers.cases import ODD
from helpers.folders import QUESTIONS, picture, text_model, tiny_tokenizer
from helpers.models import tiny_config

REGEX = {"type": "Split", "behavior": "Isolated", "invert": False}


def _replace(pattern, content):
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def _sequence(*steps):
    return {"type": "Sequence", "normalizers": steps}


def _added(number):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"added_tokens": [{"id": number, "content": "<x>", "special": True, **flags}]}


# What is put into tokenizer.json, and whether a text is refused or the folder already.
TOKENIZERS = {
    "a pattern that tries every way": ({"pre_tokenizer": {**REGEX, "pattern": {"Regex": "(a+)+$"}}}, False),
    "a token that is not known": (
        {
            "post_processor": {
                "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "zz", "type_id": 0}}], "pair": [],
                "special_tokens": {},
            }
        },
        False,
    ),
    "a negative id": (_added(-1), True),
    "letters that become millions": (
        {"normalizer": _sequence(*[_replace("a", "a" * 100)] * 4)},
        True,
    ),
    "letters that become millions in a sequence of sequences": (
        {"normalizer": _sequence(*[_sequence(_replace("é", "é" * 9))] * 9)},
        True,
    ),
    "a decoder of millions": ({"decoder": {"type": "Sequence", "decoders": [_replace("w", "w" * 99)] * 3}}, True),
    "no tokenizer": ({"model": None}, True),
    "a kind that is not known": ({"normalizer": {"type": "Nonsense"}}, True),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(("change", "at_once"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_hostile_tokenizer_is_one_error_of_the_folder_or_of_the_row(change, at_once, folder, tmp_path):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if at_once:
        with pytest.raises(CheckpointError, match=r"model holds no tokenizer"):
            load_processor(folder)
        return
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a" * 40 + "!"}) + "\n")
    ((_, sample),) = open_source(tmp_path / "rows.jsonl").shards[0].rows()
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: the model's tokenizer refuses this text"):
        open_encoder(str(folder)).encode(sample)


@pytest.mark.parametrize("text", ["{", "null", "[" * 100_000, "[1]", '{"a": ' + "9" * 5000 + "}", "\ud7ff\x00"])
@pytest.mark.parametrize("file", ["tokenizer.json", "config.json"])
def test_a_file_that_is_no_object_is_one_error(text, file, folder):
    (folder / file).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{file} (is no JSON|holds no object)"):
        load_processor(folder) if file == "tokenizer.json" else load_model_config(folder)


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json"])
def test_a_pipe_in_a_model_folder_is_not_waited_for(file, folder):
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    with pytest.raises(CheckpointError):
        load_processor(folder) if file == "tokenizer.json" else load_model_config(folder)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "chat_template.jinja", "config.json"])
def test_a_device_behind_a_link_in_a_model_folder_is_not_read(file, folder):
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"{file} is a pipe or a device|has no config.json"):
        load_model_config(folder)
    with pytest.raises(CheckpointError, match=f"{file} is a pipe or a device"):
        load_processor(folder)


def test_names_of_tensors_do_not_reach_the_terminal_as_they_are(tmp_path, monkeypatch):
    folder = text_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors") | {"evil\x1b]0;pwn\x07": torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    handler = logging.getLogger("transformers").handlers[0]
    monkeypatch.setattr(handler, "stream", io.StringIO())
    load_model(str(folder))
    assert r"evil\x1b]0;pwn\x07" in handler.stream.getvalue()
    assert "\x1b" not in handler.stream.getvalue()


def test_adapters_in_a_models_folder_are_not_laid_over_it(tmp_path):
    folder = text_model(tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds the weights of a model and adapters \(adapter_config.json\)"):
        load_model(str(folder))


@pytest.fixture(scope="module")
def adapters():
    """The settings of honest adapters, and a model without memory to put them into."""
    config = LoraConfig(r=2, target_modules=r".*layers\.\d+\.(self_attn|mlp)\..*_proj", task_type="CAUSAL_LM")
    with torch.device("meta"):
        return config.to_dict(), load_model(tiny_config("qwen3"), random_init=True, device="meta")


def _put_in(settings, model, folder):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings, default=list))
    model = copy.deepcopy(model)
    add_saved_adapters(model, folder)
    return sum(".lora_A." in name for name, _ in model.named_parameters())


@pytest.mark.filterwarnings("ignore")  # peft's own, of settings that it does not know
def test_no_setting_of_adapters_ends_in_an_error_of_its_own(adapters, tmp_path):
    honest, model = adapters
    number = _put_in(honest, model, tmp_path)
    assert number == 7 * model.config.num_hidden_layers
    honest, refused = honest | {"target_modules": ["q_proj"]}, []  # names need no process
    spoilt = [honest | {key: value} for key in honest for value in ODD]
    for settings in random.Random(1).sample(spoilt, 80):
        try:
            _put_in(settings, model, tmp_path)
        except HeadwayError as error:
            refused.append(str(error))
    assert 20 < len(refused) < 80


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"megatron_config": {}, "megatron_core": "antigravity"}, "megatron_config is '{}', but must be null"),
        ({"layer_replication": [[0, 10**9]]}, "layer_replication is"),
        ({"r": 10**9}, "a rank is '1000000000'"),
        ({"rank_pattern": {"(a+)+$": 2}}, "is an expression with repetitions"),
        ({"target_modules": "nothing"}, "no module of the model has such a name"),
        ({"target_modules": "("}, "is no regular expression"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ],
)
def test_settings_of_adapters_that_are_not_a_strangers_are_refused(change, reason, adapters, tmp_path):
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        _put_in(adapters[0] | change, adapters[1], tmp_path)


def test_an_expression_of_adapters_that_takes_for_ever_is_stopped(adapters, tmp_path, monkeypatch):
    monkeypatch.setattr("headway.models.foreign._MATCH_S", 0.5)
    with pytest.raises(CheckpointError, match=r"takes more than 0\.5 s"):
        _put_in(adapters[0] | {"target_modules": "((((((.*)*)*)*)*)*)*x$"}, adapters[1], tmp_path)


@pytest.mark.parametrize("error", [ValueError("no such rank"), KeyError("r"), RuntimeError("shapes differ")])
def test_whatever_reading_weights_raises_is_one_error(error, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise error

    folder = text_model(tmp_path / "model")
    monkeypatch.setattr("transformers.Qwen3ForCausalLM.from_pretrained", fail)
    with pytest.raises(CheckpointError, match=r"do not fit its config\.json"):
        load_model(str(folder))


@pytest.mark.slow
def test_no_setting_of_a_processor_ends_in_an_error_of_its_own(tmp_path):
    """As its library raises where a size is 0, a mean has two values, or a picture would become as large as a town."""
    picture(tmp_path / "a.png")
    question = [{"type": "image", "image": "a.png"}, {"type": "text", "text": QUESTIONS[0]}]
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "two"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    ((_, sample),) = open_source(tmp_path / "rows.jsonl").shards[0].rows()
    path = (
        write_reader(tmp_path / "model", [*QUESTIONS, "user\n", "assistant\n", "system\n"]) / "preprocessor_config.json"
    )
    honest, refused = json.loads(path.read_text()), []
    spoilt = [honest | {key: value} for key in honest for value in ODD]
    spoilt += [honest | {"size": honest["size"] | {key: value}} for key in honest["size"] for value in ODD]
    spoilt = random.Random(0).sample(spoilt, 90)
    for settings in [honest, *spoilt]:
        path.write_text(json.dumps(settings))
        try:
            encoder = open_encoder(str(path.parent))
            lengths = encoder.measure(sample)
            assert encoder.encode(sample).tokens == lengths.tokens
        except HeadwayError as error:
            refused.append(str(error))
    assert 20 < len(refused) < len(spoilt)
    huge = honest | {"size": honest["size"] | {"shortest_edge": 10**10}}
    path.write_text(json.dumps(huge))
    with pytest.raises(CheckpointError, match="shortest_edge is 10000000000; at most 268,435,456 are allowed"):
        open_encoder(str(path.parent))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9), ("num_hidden_layers", 10**400), ("hidden_size", float("nan")),
        ("hidden_size", float("inf")), ("hidden_size", "wide"), ("vocab_size", [1]), ("model_type", 5),
        ("hidden_size", -32), ("vocab_size", 10**20), ("intermediate_size", -1),
    ],
)  # fmt: skip
def test_a_configuration_with_numbers_that_no_model_has_is_one_error(key, value, folder):
    config = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, key: value}
    (folder / "config.json").write_text(json.dumps(config))
    for load in (load_model_config, load_processor) if key not in ("model_type",) else (load_model_config,):
        with pytest.raises(CheckpointError, match=r"configuration in .*model cannot be read|without running"):
            load(folder)


@pytest.mark.slow
def test_no_configuration_of_transformers_or_of_a_shipped_model_is_too_deep(tmp_path):
    path = tmp_path / "config.json"
    seen = 0
    for name, content in presets().items():
        path.write_text(json.dumps(content))
        check_config(path)
        seen += bool(name)
    for model_type, config in CONFIG_MAPPING.items():
        try:
            text = json.dumps(config().to_dict(), default=str)
        except Exception:  # noqa: BLE001 - some have no defaults, or need a library that is not here
            continue
        path.write_text(text)
        check_config(path)
        seen += bool(model_type)
    assert seen > 300


def test_honest_steps_of_tokenizers_pass(folder):
    path = folder / "tokenizer.json"
    steps = [{"type": "Prepend", "prepend": "_" * 3}, _replace(" ", "\u2581"), {"type": "NFKC"}, _replace("``", '"')]
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "Sequence", "normalizers": steps}})
    )
    check_tokenizer(path)
