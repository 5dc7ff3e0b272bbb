import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, PreTrainedTokenizerBase, Qwen3VLProcessor, SiglipVisionConfig

from headway.errors import CheckpointError, ConfigError, UnknownModelError
from headway.models import load_model, load_model_config, load_processor, rope_index


@pytest.fixture
def folder(tmp_path, tiny_config):
    load_model(tiny_config("llama"), random_init=True).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def sharded(tiny_config, target):
    load_model(tiny_config("llama"), random_init=True).save_pretrained(target, max_shard_size="40KB")
    return sorted(target.glob("model-*.safetensors"))


def test_weights_come_back_as_they_were_saved(folder):
    saved = load_file(folder / "model.safetensors")
    model = load_model(folder)
    assert model.config._attn_implementation == "headway_flash"
    for name, weight in saved.items():
        assert torch.equal(model.state_dict()[name], weight)


def test_a_config_file_or_object_initialises_at_random_from_the_global_generator(folder):
    torch.manual_seed(3)
    first = load_model(folder / "config.json", random_init=True)
    torch.manual_seed(3)
    second = load_model(load_model_config(folder), random_init=True)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, load_model(folder).lm_head.weight)
    assert load_model(load_model_config(folder), random_init=True, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_configuration_without_weights_needs_random_initialisation(folder):
    with pytest.raises(ConfigError, match=r"config\.json describes a model but holds no weights"):
        load_model(folder / "config.json")
    with pytest.raises(ConfigError, match="A configuration object describes a model but holds no weights"):
        load_model(load_model_config(folder))


@pytest.mark.parametrize("name", ["./no/such", "/no/such/folder", "a/b/c", "~/models/x"])
def test_a_path_that_does_not_exist_is_named(name):
    for load in (load_model_config, load_model, load_processor):
        with pytest.raises(UnknownModelError, match=r"There is no model folder or config.json at"):
            load(name)


def test_a_hub_name_without_network_says_what_to_do():
    for load in (load_model_config, load_model, load_processor):
        with pytest.raises(UnknownModelError) as caught:
            load("nobody/no-such-model")
        message = str(caught.value)
        assert (
            "'nobody/no-such-model' is no folder on this machine, is not in the Hub's cache" in message
            or "could not be fetched from the Hugging Face Hub" in message  # where there is a network
        )
        assert "hf download nobody/no-such-model" in message
        assert "\n" not in message


def test_a_folder_without_config_lists_what_it_holds(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"has no config.json. It holds notes.txt"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("content", ['{"model_type": ', "{}", "[]"])
def test_an_unreadable_config_is_a_clear_error(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_model_config(tmp_path)


def test_a_file_that_is_no_config_is_refused(folder):
    with pytest.raises(UnknownModelError, match=r"model\.safetensors is a file but not a config\.json"):
        load_model_config(folder / "model.safetensors")


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no weights .* ask for a random initialisation"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_weight_file_cut_short_is_named(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors \(\d+ bytes\) is cut short or damaged"):
        load_model(folder)


def test_a_missing_shard_is_named(tmp_path, tiny_config):
    shards = sharded(tiny_config, tmp_path)
    assert len(shards) > 2
    load_model(tmp_path)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 of its {len(shards)} weight files: {shards[1].name}"):
        load_model(tmp_path)


def test_a_shard_cut_short_is_named(tmp_path, tiny_config):
    shards = sharded(tiny_config, tmp_path)
    shards[-1].write_bytes(shards[-1].read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=f"{shards[-1].name} .* is cut short or damaged"):
        load_model(tmp_path)


def test_a_damaged_index_is_named(tmp_path, tiny_config):
    sharded(tiny_config, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ')
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        load_model(tmp_path)


def test_weights_that_lack_parameters_are_refused(folder):
    from safetensors.torch import save_file

    file = folder / "model.safetensors"
    kept = {name: weight for name, weight in load_file(file).items() if "layers.1" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lack \d+ of the model's parameters, such as model\.layers\.1\."):
        load_model(folder)


def test_weights_of_other_shapes_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(CheckpointError, match="do not fit its config"):
        load_model(folder)


def test_a_tower_alone_is_not_a_model_to_train():
    with pytest.raises(UnknownModelError, match=r"cannot be trained. Headway trains causal language models"):
        load_model(SiglipVisionConfig(), random_init=True)


def test_the_processor_of_a_vision_model_opens_without_torchvision(processor_folder):
    processor = load_processor(processor_folder)
    assert isinstance(processor, Qwen3VLProcessor)
    assert processor.image_processor.patch_size == 8


def test_a_processor_saved_again_opens_again(processor_folder, tmp_path):
    processor = load_processor(processor_folder)
    processor.save_pretrained(tmp_path)
    again = load_processor(tmp_path)
    assert type(again).__name__ == "Qwen3VLProcessor"
    assert again.chat_template == processor.chat_template
    assert again.image_processor.to_dict() == processor.image_processor.to_dict()


def test_a_text_models_folder_gives_its_tokenizer(processor_folder, tmp_path):
    load_processor(processor_folder).tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("processor_class", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert isinstance(load_processor(tmp_path), PreTrainedTokenizerBase)


def test_a_folder_without_tokenizer_lists_what_it_holds(folder):
    with pytest.raises(CheckpointError, match=r"holds no tokenizer or processor that can be opened: .* config\.json"):
        load_processor(folder)


def test_only_models_with_multi_axis_positions_have_a_rule(tiny_config):
    assert rope_index(load_model(tiny_config("qwen3_vl"), random_init=True)) is not None
    assert rope_index(load_model(tiny_config("qwen3"), random_init=True)) is None


def test_dtype_and_device_are_those_asked_for():
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    model = load_model(config, random_init=True, dtype=torch.bfloat16, device="meta")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_pickle_beside_other_weights_is_not_tried(folder):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"cos\nmkdir\n(Vran\ntR.")
    with pytest.raises(CheckpointError, match=r"has no weights \(model\.safetensors.* holds .*pytorch_model\.bin"):
        load_model(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_of_weights_names_files_of_its_folder_alone(name, folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match="which is no file of its folder"):
        load_model(folder)


@pytest.mark.parametrize(
    ("content", "says"),
    [({"a": 5}, "lacks 1 of its 1 weight files: 5"), ([], "cannot be read"), ({"a": ["b"]}, "lacks 1 of its 1")],
)
def test_an_index_of_weights_of_other_types_is_refused(content, says, folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": content}))
    with pytest.raises(CheckpointError, match=says):
        load_model(folder)


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="the package is there")
def test_weights_that_another_package_reads_name_it_and_the_way_without(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"requires bitsandbytes.* Install that package\. Or .*`model\.base: nf4`"
    ):
        load_model(folder)


@pytest.mark.parametrize("kind", ["pipeline", "AutoModel", "__name__", "Nothing"])
def test_a_processor_class_is_a_processor_of_transformers(kind, tmp_path):
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": kind}))
    with pytest.raises(CheckpointError, match="holds no tokenizer or processor that can be opened"):
        load_processor(tmp_path)
