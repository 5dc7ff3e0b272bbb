"""Tokens that a run adds: their rows learn, alone beside adapters, and plain transformers opens and writes them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer
from typer.testing import CliRunner

from headway.answer.model_folder import find_model, open_model
from headway.cli.app import app
from headway.config import load_config, parse_config
from headway.data.new_tokens import NewTokens, new_ids
from headway.errors import ConfigError
from headway.models.load import load_model, load_processor
from headway.models.load import load_model_config as load_architecture
from headway.models.new_rows import NEW_ROWS, embedding_rows
from headway.predict.saved import learning_model
from headway.train.run import train
from helpers.processes import TRAIN, run_processes
from helpers.runs import read_metrics

WORDS, SPECIAL = ["<point>", "<far>"], ["<|call|>"]
LORA = {"rank": 2, "targets": ["q_proj", "down_proj"]}


@pytest.fixture(params=[pytest.param(True, id="tied", marks=pytest.mark.slow), pytest.param(False, id="untied")])
def base(digits, tmp_path, request):
    """A model folder with weights, whose head is the embedding or not."""
    folder = tmp_path / "base"
    shutil.copytree(digits / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    for section in (config, config["text_config"]):
        section["tie_word_embeddings"] = request.param
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(5)
    load_model(str(folder), random_init=True).save_pretrained(folder)
    return folder


@pytest.fixture
def adding(raw, base, tmp_path):
    """A configuration that learns to answer with new tokens, as plain types."""
    rows = [("Which?", "<point>"), ("Where?", "<|call|><far>")] * 12
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in rows]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    raw["model"] = {"path": str(base), "new_tokens": WORDS, "new_special_tokens": SPECIAL}
    raw["data"] |= {"train": [{"path": str(file)}], "tokens_per_pack": 64}
    raw["optim"] |= {"lr": 0.02, "steps": 12}
    return raw


def losses(folder):
    return [record["loss"] for record in read_metrics(Path(folder) / "metrics.jsonl") if record["kind"] == "step"]


def tensors(folder):
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


PLAIN = """
import json, sys, torch
from transformers import AutoModelForImageTextToText, AutoTokenizer
folder, base = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForImageTextToText.from_pretrained(base)
if base != folder:
    from peft import PeftModel
    model.resize_token_embeddings(len(tokenizer))
    model = PeftModel.from_pretrained(model, folder)
chat = [{"role": "user", "content": "Which?"}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = model.generate(**prompt, max_new_tokens=4, do_sample=False)
answer = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
print(json.dumps([answer, model(**prompt).logits[0, -1].tolist()]))
assert "headway" not in sys.modules
"""


def answer_of(folder, base=None):
    """Answer and logits of plain transformers, and of peft on a base, in a process of its own."""
    arguments = [sys.executable, "-c", PLAIN, str(folder), str(base or folder)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer, logits = json.loads(done.stdout.splitlines()[-1])
    return answer, torch.tensor(logits)


@pytest.mark.slow
def test_new_tokens_are_learnt_and_plain_transformers_writes_them(adding, base):
    before, _ = embedding_rows(load_architecture(base)), adding["optim"].update(steps=40)
    summary = train(parse_config(adding))
    exported = tensors(summary.model)
    place = new_ids(str(base), NewTokens(tuple(WORDS), tuple(SPECIAL)))
    assert place.rows == before + 3
    assert embedding_rows(load_architecture(summary.model)) == before + 3
    vocabulary = [name for name, tensor in exported.items() if len(tensor) == before + 3]
    tied = load_architecture(base).tie_word_embeddings
    assert len(vocabulary) == (1 if tied else 2)
    tokenizer = AutoTokenizer.from_pretrained(summary.model)
    assert tokenizer.convert_tokens_to_ids([*WORDS, *SPECIAL]) == list(place.ids)
    assert set(SPECIAL) <= {str(each) for each in tokenizer.added_tokens_decoder.values() if each.special}
    assert summary.last_loss < 0.1 < summary.first_loss
    assert answer_of(summary.model)[0] == "<point>"


def test_first_values_are_those_of_resize_token_embeddings(base):
    rows = embedding_rows(load_architecture(base)) + 3
    ours, theirs = load_model(str(base), rows=rows, seed=7), AutoModelForImageTextToText.from_pretrained(base)
    old = theirs.get_input_embeddings().weight.detach().clone()
    theirs.resize_token_embeddings(rows)
    # both are draws around the mean whose spread is a billionth of the old rows' variance
    spread = 6 * (1e-9 * old.var(0)).sqrt() + 1e-7
    for model in (ours, theirs):
        added = model.get_input_embeddings().weight[-3:]
        assert ((added - old.mean(0)).abs() <= spread).all()
        assert torch.equal(model.get_input_embeddings().weight[:-3], old)
    assert torch.equal(
        load_model(str(base), rows=rows, seed=7).get_input_embeddings().weight, ours.get_input_embeddings().weight
    )


@pytest.mark.slow
def test_beside_adapters_the_new_rows_learn_and_no_other(adding, base, tmp_path):
    adding["model"]["lora"], adding["optim"]["lr"] = LORA, 0.1
    adding["optim"]["steps"] = 40
    config = parse_config(adding)
    summary = train(config)
    exported = tensors(summary.model)
    rows = {name: tensor for name, tensor in exported.items() if "trainable_tokens_delta" in name}
    tied = load_architecture(base).tie_word_embeddings
    assert len(rows) == (1 if tied else 2)
    assert all(len(tensor) == 3 for tensor in rows.values())
    assert all(".lora_" in name for name in exported.keys() - rows.keys())
    # in peft's form: by peft on the base model, and merged, in processes of their own
    answer, logits = answer_of(summary.model, base)
    assert answer.startswith("<point>")
    merged = tmp_path / "merged"
    result = CliRunner().invoke(app, ["export", adding["run"]["folder"], str(merged), "--merge-lora"])
    assert result.exit_code == 0, result.output
    answer_of_merged, logits_of_merged = answer_of(merged)
    assert answer_of_merged.startswith("<point>")
    torch.testing.assert_close(logits_of_merged, logits, rtol=1e-4, atol=1e-4)
    own = open_model(
        find_model(str(summary.model)), dtype=torch.float32, device=torch.device("cpu"), for_generation=True
    )
    prompt = own.processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Which?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.testing.assert_close(own.model(**prompt).logits[0, -1], logits, rtol=1e-4, atol=1e-4)
    before, after = tensors(base), tensors(merged)
    ids = new_ids(str(base), NewTokens(tuple(WORDS), tuple(SPECIAL))).ids
    for name in [name for name, tensor in after.items() if tensor.ndim and len(tensor) == ids[-1] + 1]:
        assert torch.equal(after[name][: ids[0]], before[name])
        assert not torch.equal(after[name][ids[0] :], before[name].mean(0).expand(3, -1))
    # the ledger has the parameters that learn, and a plan without weights the same
    ledger = learning_model(config.model, None)
    trained = {entry.name: entry.numel for entry in ledger.parameters if entry.trainable}
    hidden = rows[next(iter(rows))].shape[1]
    assert sum(size for name, size in trained.items() if NEW_ROWS in name) == len(rows) * 3 * hidden
    assert sum(trained.values()) == sum(tensor.numel() for tensor in exported.values())
    with pytest.raises(ConfigError, match="nothing to resume"):
        train(config, resume=True)


def test_gradients_beside_adapters_are_counted_as_they_are_computed(adding):
    """Of the head: forward 2HV and of N rows 2HN again; the inputs' gradients of both; the weight's of N rows alone."""
    adding["model"]["lora"] = LORA
    ledger = learning_model(parse_config(adding).model, None)
    architecture = load_architecture(adding["model"]["path"])
    hidden, rows = architecture.text_config.hidden_size, embedding_rows(architecture) + 3
    head = [row for row in ledger.rows if row.component == "language.head"]
    assert sum(row.forward for row in head) == 2 * hidden * (rows + 3)
    phases = {"dgrad": 0, "wgrad": 0}
    for row in head:
        for gradient in row.gradients:
            if gradient.runs(ledger.trained):
                phases[gradient.phase] += gradient.flops
    assert phases == {"dgrad": 2 * hidden * (rows + 3), "wgrad": 2 * hidden * 3}


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(adding, lora):
    adding["model"]["lora"] = lora
    adding["checkpoint"] = {"every": 6, "keep": 3}
    train(parse_config(adding))
    whole = losses(adding["run"]["folder"])
    shutil.rmtree(Path(adding["run"]["folder"]) / "checkpoints" / "step-000012")
    train(parse_config(adding), resume=True)
    assert losses(adding["run"]["folder"]) == whole


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_three_processes_train_new_tokens_as_one(adding, tmp_path, lora):
    adding["model"]["lora"] = lora
    adding["optim"]["accumulation"], adding["data"]["strategy"] = 3, "next_fit"
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(adding))
    one = train(load_config(path))
    three = tmp_path / "three"
    run_processes([*TRAIN, path, "--set", f"run.folder={three}", "--set", "optim.accumulation=1"], 3)
    assert losses(three) == pytest.approx(losses(adding["run"]["folder"]), rel=1e-5)
    (folder,) = (three / "export").glob("step-*")
    ours, theirs = tensors(one.model), tensors(folder)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["<point>", "<point>"], r"names '<point>' 2 times"),
        ([""], r"names '', which has no letters"),
        ([" "], r"names ' ', which has no letters"),
        ([3], r"new_tokens.0"),
        (["<|im_end|>"], r"'<\|im_end\|>' is a token of the model already, so it cannot be added. Take it out"),
    ],
)
def test_tokens_that_cannot_be_added_are_refused_by_name(adding, tokens, message):
    adding["model"]["new_tokens"] = tokens
    with pytest.raises(ConfigError, match=message):
        train(parse_config(adding))


def test_frozen_rows_are_refused(adding):
    adding["model"]["freeze"] = ["*language_model.embed_tokens*"]
    with pytest.raises(
        ConfigError, match=r"model.new_tokens add rows to the embedding, but model.freeze freezes the embedding"
    ):
        train(parse_config(adding))


def test_tokens_of_the_tokenizer_that_the_model_lacks_are_new_to_it(adding, base):
    processor = load_processor(base)
    processor.tokenizer.add_tokens(["<point>", "<far>"])
    processor.tokenizer.add_tokens(["<|call|>"], special_tokens=True)
    processor.save_pretrained(base)
    adding["model"]["new_tokens"] = ["<far>"]
    with pytest.raises(ConfigError, match=r"the tokenizer has '<point>' too, which the model has no row for"):
        train(parse_config(adding))
    adding["model"] |= {"new_tokens": WORDS + SPECIAL, "new_special_tokens": []}
    with pytest.raises(ConfigError, match=r"has '<\|call\|>' already: name it in model.new_special_tokens"):
        train(parse_config(adding))
    adding["model"] |= {"new_tokens": WORDS, "new_special_tokens": SPECIAL}
    assert train(parse_config(adding)).steps == 12
