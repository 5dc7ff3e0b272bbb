"""An exported folder answers in plain transformers as it does here, and stops by itself.

The other process knows nothing of this package: what makes it stop lies in the folder.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trl
from PIL import Image
from transformers import Qwen3Config

from headway.answer.generate import Decoding, Generator
from headway.answer.model_folder import find_model, open_model
from headway.config import parse_config
from headway.data import Chat, ImagePart, Media, Message, Origin, TextPart
from headway.synthetic.small_model import write_small_model
from headway.train.run import train
from helpers.families import SIDE
from helpers.folders import VLM_FOLDERS, write_vlm

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
# Of processors that give lists where numpy wants arrays, as transformers saves them.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")

QUESTION, ANSWER = "what is this", "the red circle"
LIMIT = 24  # tokens; the answers have fewer

PLAIN = """
import json, sys
import transformers

folder, question, limit = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
config = transformers.AutoConfig.from_pretrained(folder)
kind = getattr(transformers, config.architectures[0])
model, tokenizer = kind.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)
turns = [{"role": "user", "content": question}]
inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
new = model.generate(**inputs, max_new_tokens=limit, do_sample=False)[0, inputs["input_ids"].shape[1]:].tolist()
text = tokenizer.decode(new, skip_special_tokens=True).strip()
print(json.dumps({"tokens": len(new), "text": text, "headway": "headway" in sys.modules}))
"""
# With a picture, as model cards write it: the processor fills the template in, and opens the file.
SEEING = (
    PLAIN.replace("tokenizer.apply_chat_template(", "processor.apply_chat_template(")
    .replace("inputs = ", "processor = transformers.AutoProcessor.from_pretrained(folder)\ninputs = ")
    .replace("return_dict=True)", "return_dict=True, tokenize=True)")
)


def text_folder(root, template, *, special=(), base=False):
    """A small model of text with a template as some model ships it."""
    text = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(**text, head_dim=64, intermediate_size=512, vocab_size=1000)
    folder = write_small_model(root / "model", config, [QUESTION, ANSWER], max_pixels=1)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    unused = [token for token in tokenizer["added_tokens"] if token["content"].startswith("<|vision")]
    for token, name in zip(unused, special, strict=False):  # of the markers that the template writes
        tokenizer["model"]["vocab"][name] = tokenizer["model"]["vocab"].pop(token["content"])
        token["content"] = name
    file.write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text())
    if base:  # as Qwen2.5's base models: text ends with another token than answers
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
        model_settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(model_settings | {"eos_token_id": 0}))
    return folder


def trained(root, folder, question=QUESTION, **model):
    """The export of a run that has learnt one answer by heart."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": ANSWER}]
    (root / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    raw = {
        "model": {"path": str(folder), "random_init": True, **model},
        "data": {"train": [str(root / "chats.jsonl")], "tokens_per_pack": 256, "workers": 0},
        "optim": {"steps": 60, "lr": 3e-3, "warmup_steps": 5},
        "speed": {"compile": False},
        "run": {"folder": str(root / "run"), "threads": 1, "log_every": 60},
    }
    train(parse_config(raw, source="a test"))
    (export,) = (root / "run/export").iterdir()
    return export


def answers_alike(folder, question, image=None):
    """Make sure that plain transformers gives the answer that this package gives, and stops where it does."""
    command = [sys.executable, "-c", PLAIN if image is None else SEEING, folder, json.dumps(question), str(LIMIT)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    plain = json.loads(run.stdout.splitlines()[-1])
    cpu = torch.device("cpu")
    opened = open_model(find_model(str(folder)), dtype=torch.float32, device=cpu, for_generation=True)
    pictures = () if image is None else (ImagePart(Media(str(image))),)
    asked = Chat((Message("user", (*pictures, TextPart(QUESTION))),), Origin("", "a question", 0, "it"))
    (ours,) = Generator(opened, cpu).answer([asked], Decoding(max_new_tokens=LIMIT))
    assert not plain["headway"]
    assert ours.is_whole
    assert plain["tokens"] == ours.tokens < LIMIT
    assert plain["text"] == ours.text
    return ours.text


@pytest.mark.parametrize(
    ("template", "settings", "model"),
    [
        pytest.param("qwen2_5", {"base": True}, {}, id="base model"),
        pytest.param(
            "glm4moe", {"special": ("<|user|>", "<|assistant|>")}, {}, id="next turn's marker", marks=pytest.mark.long
        ),
        pytest.param("qwen3", {}, {"lora": {"rank": 8}}, id="adapters merged", marks=pytest.mark.long),
    ],
)
def test_an_export_stops_in_plain_transformers_with_the_answer_it_gives_here(template, settings, model, tmp_path):
    folder = trained(tmp_path, text_folder(tmp_path, template, **settings), **model)
    text = answers_alike(folder, QUESTION)
    if not model:  # adapters beside random weights learn less
        assert text.endswith(ANSWER)
    assert "Generation stops at" in (folder / "README.md").read_text()


NEEDS_IMAGE = ("paligemma2",)  # whose processor takes no text without one


@pytest.mark.long
@pytest.mark.parametrize("family", [family for family in VLM_FOLDERS if family not in NEEDS_IMAGE])
def test_an_export_of_every_family_stops_in_plain_transformers(family, tmp_path):
    folder = trained(tmp_path, write_vlm(tmp_path / "model", family))
    assert answers_alike(folder, [{"type": "text", "text": QUESTION}]) == ANSWER


@pytest.mark.long
@pytest.mark.parametrize("family", [*NEEDS_IMAGE, "llava", "gemma3", "idefics3"])
def test_an_export_stops_in_plain_transformers_behind_a_picture(family, tmp_path):
    image = tmp_path / "a.png"
    Image.new("RGB", (SIDE, SIDE), "red").save(image)
    words = {"type": "text", "text": QUESTION}
    rows = [{"type": "image", "image": "a.png"}, words]
    folder = trained(tmp_path, write_vlm(tmp_path / "model", family), rows)
    assert answers_alike(folder, [{"type": "image", "path": str(image)}, words], image) == ANSWER
