"""A checkpoint's model folder is what transformers itself would have saved, and opens and generates."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from headway.checkpoint import CheckpointSaver, Contents, random_state, training_tensors
from headway.checkpoint.export import export, find_checkpoint_in
from headway.errors import CheckpointError, UsageError
from headway.models.attention import use_attention
from headway.models.load import load_model, load_processor
from headway.models.lora import add_adapters, initialise_adapters, write_adapter_config
from headway.models.parallel.ranks import Ranks
from helpers.cases import some
from helpers.models import FAMILIES, tiny_config

# Each stores weights its own way: transposed, tied, fused experts, latent attention, towers.
OFTEN = {"gpt2", "qwen3_tied", "gpt_oss_sinks", "deepseek_v3", "qwen2_5_vl", "qwen3_vl_moe"}


def saved(root, model, average=None):
    tensors = training_tensors(model, None, average)
    with CheckpointSaver(root / "checkpoints", Ranks(0, 1), keep=1) as saver:
        saver.save(3, Contents(tensors, random_state(), {}, {"data": 1}, model.config.save_pretrained))
        return saver.wait()


def tensors_in(folder):
    """Every tensor in a folder's weight files, by name, and the file that holds it."""
    found, where = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                assert name not in found
                found[name], where[name] = opened.get_tensor(name), path.name
    return found, where


@pytest.mark.parametrize("family", some(FAMILIES, OFTEN.__contains__))
def test_the_folder_holds_what_save_pretrained_would_have_written(family, tmp_path):
    torch.manual_seed(0)
    model = load_model(tiny_config(family), random_init=True)
    checkpoint = saved(tmp_path, model)
    export(checkpoint, tmp_path / "ours", max_file_bytes=20_000)
    model.save_pretrained(tmp_path / "theirs")
    ours, where = tensors_in(tmp_path / "ours")
    theirs, _ = tensors_in(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
    assert index["weight_map"] == where
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in theirs.values())
    for path in (tmp_path / "ours").glob("*.safetensors"):
        inside = [ours[name] for name, file in where.items() if file == path.name]
        assert len(inside) == 1 or sum(tensor.nbytes for tensor in inside) <= 20_000
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert config["dtype"] == "float32"
    opened = load_model(tmp_path / "ours")
    for (name, tensor), after in zip(model.named_parameters(), opened.parameters(), strict=True):
        assert torch.equal(tensor, after), name


def test_a_run_leaves_a_folder_that_opens_and_generates(raw):
    from headway.config import parse_config
    from headway.train.run import train

    raw["checkpoint"] = {"every": 2, "export": "every", "keep": 2}
    config = parse_config(raw)
    summary = train(config)
    folder = config.run.folder / "export"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000004", "step-000006"]
    assert summary.model == folder / "step-000006"
    model = AutoModelForImageTextToText.from_pretrained(summary.model, attn_implementation="sdpa")
    tokenizer = load_processor(str(summary.model)).tokenizer
    ids = torch.tensor([tokenizer("Read the digits.").input_ids])
    answer = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert answer.shape[1] > ids.shape[1]
    before = AutoModelForImageTextToText.from_pretrained(folder / "step-000004")
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def test_where_auto_processor_cannot_open_a_folder_the_way_that_works_is_told(digits, tmp_path, monkeypatch):
    """transformers opens processors with a video processor by torchvision alone; nothing in a folder changes that."""
    from headway.models import load

    note = load.processor_note(digits / "model")
    try:
        AutoProcessor.from_pretrained(digits / "model")
    except ImportError:
        assert note == (
            f"headway.models.load_processor({str(digits / 'model')!r}); AutoProcessor needs torchvision, which is not "
            "installed"
        )
    else:
        assert note is None
    monkeypatch.setattr(load, "is_torchvision_available", lambda: True)
    assert load.processor_note(digits / "model") is None
    monkeypatch.setattr(load, "is_torchvision_available", lambda: False)
    assert load.processor_note(tmp_path) is None
    load_processor(digits / "model").tokenizer.save_pretrained(tmp_path)
    assert load.processor_note(tmp_path) is None


def test_the_type_of_the_weights_is_a_choice(tmp_path):
    model = load_model(tiny_config("qwen3_tied"), random_init=True)
    export(saved(tmp_path, model), tmp_path / "model", dtype=torch.bfloat16)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert opened.dtype is torch.bfloat16
    assert opened.lm_head.weight is opened.model.embed_tokens.weight
    assert torch.equal(opened.model.norm.weight, model.model.norm.weight.bfloat16())
    assert not (tmp_path / "model/model.safetensors.index.json").exists()


def test_the_average_takes_the_weights_place_where_there_is_one(tmp_path):
    model = load_model(tiny_config("qwen3"), random_init=True)

    class Average:
        def state_dict(self):
            return {"model.norm.weight": torch.full((32,), 0.25)}

    export(saved(tmp_path, model, Average()), tmp_path / "model", average=True)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert opened.model.norm.weight.tolist() == [0.25] * 32
    assert torch.equal(opened.lm_head.weight, model.lm_head.weight)


@pytest.fixture
def adapted(tmp_path):
    """A model with adapters in two kinds of layers and on the head, and a checkpoint of it."""
    torch.manual_seed(0)
    model = load_model(tiny_config("qwen3_moe"), random_init=True)
    model.save_pretrained(tmp_path / "base")
    names = [name for name, _ in model.named_modules() if name.endswith(("q_proj", "down_proj", "lm_head"))]
    add_adapters(model, names, rank=3, alpha=5.0, dropout=0.0, base=str(tmp_path / "base"))
    initialise_adapters(model, 0, "cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.5)

    def describe(folder):
        model.config.save_pretrained(folder)
        write_adapter_config(model, folder)

    with CheckpointSaver(tmp_path / "checkpoints", Ranks(0, 1), keep=1) as saver:
        saver.save(3, Contents(training_tensors(model), random_state(), {}, {"data": 1}, describe))
        return model.eval(), saver.wait()


def test_merged_adapters_give_the_answers_of_the_model_that_was_trained(adapted, tmp_path):
    model, checkpoint = adapted
    export(checkpoint, tmp_path / "merged", merge_adapters=True)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    ids = torch.arange(1, 20)[None]
    use_attention(model, "eager")
    torch.testing.assert_close(opened(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert not (tmp_path / "merged/adapter_config.json").exists()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_adapters_alone_are_a_folder_that_peft_opens(adapted, tmp_path):
    from peft import PeftModel

    model, checkpoint = adapted
    export(checkpoint, tmp_path / "adapters")
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors"
    ]  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    opened = PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    ids = torch.arange(1, 20)[None]
    use_attention(model, "eager")
    torch.testing.assert_close(opened(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_exported_is_told(tmp_path):
    model = load_model(tiny_config("qwen3"), random_init=True)
    checkpoint = saved(tmp_path, model)
    with pytest.raises(UsageError, match="holds no moving average"):
        export(checkpoint, tmp_path / "model", average=True)
    with pytest.raises(UsageError, match="holds no adapters to merge"):
        export(checkpoint, tmp_path / "model", merge_adapters=True)
    (tmp_path / "model").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        export(checkpoint, tmp_path / "model")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write the model folder .*: Not a directory"):
        export(checkpoint, tmp_path / "file" / "model")
    assert find_checkpoint_in(tmp_path).folder == find_checkpoint_in(checkpoint.folder).folder == checkpoint.folder
    with pytest.raises(UsageError, match="holds no checkpoint"):
        find_checkpoint_in(tmp_path / "nowhere")


def test_the_command(raw, tmp_path, capsys):
    from headway.cli.app import app
    from headway.config import parse_config
    from headway.train.run import train

    raw["checkpoint"] = {"export": "never"}
    config = parse_config(raw)
    assert train(config).model is None
    out = tmp_path / "model"
    app(["export", str(config.run.folder), str(out), "--dtype", "bfloat16", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "schema_version": 1, "folder": str(out), "step": 6
    }  # fmt: skip
    assert load_model(out, dtype=torch.bfloat16).dtype is torch.bfloat16
    assert AutoTokenizer.from_pretrained(out).vocab_size > 0
