"""Images as a model's own processor gives them: samples, lengths and packs are what the processor makes of them."""

import copy
import importlib
import json
import pickle
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ProcessorMixin

from headway.cli.index import build_indices
from headway.data import Encoder, read_samples
from headway.data.bad_rows import BadSamples
from headway.data.blank_media import vision_kinds, with_blanks
from headway.data.collate import Collator
from headway.data.index import index_folder
from headway.data.samples import TextPart
from headway.data.sources import open_source
from headway.data.transfer import from_block, to_block
from headway.errors import ConfigError, DataError
from headway.models import load_model_config, load_processor
from headway.models.vision import patch_size_of
from helpers.families import FAMILIES
from helpers.folders import VLM_FOLDERS, write_vlm

# transformers' PaliGemma makes labels of a tensor by numpy, which numpy 2 warns of
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


def reads_images_otherwise(family):
    """Whether a family's images are not patches with grids alone."""
    if family not in FAMILIES or FAMILIES[family].image is None:
        return False
    module, name, _ = FAMILIES[family].image
    file = f"image_processing_pil_{module}" if name.endswith("Pil") else f"image_processing_{module}"
    made_by = getattr(importlib.import_module(f"transformers.models.{module}.{file}"), name)
    return "image_grid_thw" not in made_by.model_input_names


PROCESSED = [family for family in VLM_FOLDERS if reads_images_otherwise(family)]
PICTURES = {"a.png": (40, 52), "b.png": (90, 31), "c.png": (33, 200)}


@pytest.fixture(scope="session")
def encoder_of(tmp_path_factory):
    @cache
    def build(family):
        folder = write_vlm(tmp_path_factory.mktemp("vlm"), family)
        return Encoder(load_processor(folder), patch_size=patch_size_of(load_model_config(folder)))

    return build


def image(name):
    return {"type": "image", "image": name}


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    return {"role": "user", "content": list(parts)}


ANSWER = {"role": "assistant", "content": [text("Two.")]}
CHATS = {
    "one": [user(image("a.png"), text("Which?")), ANSWER],
    "several": [user(image("b.png"), text(" and "), image("a.png"), image("c.png"), text("?")), ANSWER],
    "turns": [user(image("c.png"), text("Which?")), ANSWER, user(text("And this "), image("a.png"), text(".")), ANSWER],
    "none": [user(text("Which?")), ANSWER],
}


@pytest.fixture
def chats(tmp_path):
    """The chats by name, and as their own files say them."""
    noise = np.random.default_rng(0)
    for name, (height, width) in PICTURES.items():
        Image.fromarray(noise.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(tmp_path / name)
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": messages}) for messages in CHATS.values()))
    return dict(zip(CHATS, read_samples(file), strict=True))


def given(processor, name, folder):
    """What the processor itself makes of a whole chat."""
    return _processed(processor, CHATS[name], folder)


def _processed(processor, turns, folder):
    messages = [dict(turn, content=[_opened(part, folder) for part in turn["content"]]) for turn in turns]
    # SmolVLM's own method asks for settings of videos, which these folders do not have
    return ProcessorMixin.apply_chat_template(processor, messages, tokenize=True, return_dict=True, return_tensors="pt")


def _opened(part, folder):
    return {"type": "image", "image": Image.open(folder / part["image"])} if part["type"] == "image" else part


@pytest.mark.parametrize("family", [family for family in PROCESSED if family != "paligemma2"])
def test_a_sample_is_what_the_processor_makes_of_the_whole_chat(encoder_of, chats, tmp_path, family):
    encoder = encoder_of(family)
    assert encoder.media.processed is not None
    for name, sample in chats.items():
        encoded, theirs = encoder.encode(sample), given(encoder.processor, name, tmp_path)
        assert torch.equal(encoded.input_ids_S, theirs["input_ids"][0]), name
        for tensor, each in encoded.processed.items():
            assert torch.equal(each.tensor_X, theirs[tensor].to(each.tensor_X.dtype)), (name, tensor)
        missing = theirs.keys() - encoded.processed.keys() - {"input_ids", "attention_mask", "labels"}
        assert missing <= ({encoded.types_name} if encoded.token_types_S is not None else set()) | {"token_type_ids"}
        assert encoder.measure(sample) == encoded.lengths


@pytest.mark.parametrize("family", PROCESSED)
def test_a_pack_joins_tensors_as_the_processor_joins_samples(encoder_of, chats, tmp_path, family):
    encoder = encoder_of(family)
    batch = Collator()([encoder.encode(sample) for sample in chats.values()])
    inputs = batch.model_inputs()
    # PaliGemma's processor rewrites each prompt, so that each answer is learnt in a view with pictures of its own.
    views = {name: encoder.template.views(sample) for name, sample in chats.items()}
    messages = [turn for name, chat in CHATS.items() for view in views[name] for turn in chat[: view.messages]]
    theirs = _processed(encoder.processor, messages, tmp_path)
    if family == "llava_onevision":  # whose images of one sample depend on each other
        words = encoder.processor.image_token
        images = [
            [
                Image.open(tmp_path / part["image"])
                for turn in chat
                for part in turn["content"]
                if part["type"] == "image"
            ]
            for chat in CHATS.values()
        ]
        texts = [" ".join([words] * len(each)) for each in images if each]
        theirs = encoder.processor(
            text=texts, images=[each for each in images if each], padding=True, return_tensors="pt"
        )
    names = encoder.media.processed.rules
    assert names
    for name in names:
        assert torch.equal(inputs[name], theirs[name].to(inputs[name].dtype)), name
    assert batch.workload.patches == sum(encoder.measure(sample).patches for sample in chats.values())
    moved = from_block(to_block(batch, lambda size: torch.empty(size, dtype=torch.uint8))).to("cpu")
    assert all(torch.equal(moved.processed[name], inputs[name]) for name in names)


def test_token_types_are_those_of_the_processor(encoder_of, chats, tmp_path):
    encoder = encoder_of("gemma3")
    for name, sample in chats.items():
        inputs = Collator(bucket_tokens=64)([encoder.encode(sample)]).model_inputs()
        theirs = given(encoder.processor, name, tmp_path)["token_type_ids"]
        assert torch.equal(inputs["token_type_ids"][:, : theirs.shape[1]].long(), theirs)
        assert not inputs["token_type_ids"][:, theirs.shape[1] :].any()
        assert "mm_token_type_ids" not in inputs


def test_a_model_without_token_types_gets_none(encoder_of, chats):
    encoder = encoder_of("llava")
    for samples in ([chats["one"], chats["none"]], []):
        inputs = Collator(blank=encoder.blank_image())([encoder.encode(sample) for sample in samples]).model_inputs()
        assert not {"mm_token_type_ids", "token_type_ids"} & inputs.keys()


def test_a_prompt_has_what_the_processor_adds_to_it(encoder_of, chats, tmp_path):
    """PaliGemma's writes the beginning of text behind the last image, and ends the line before the answer."""
    processor = encoder_of("paligemma2").processor
    encoder = Encoder(processor, patch_size=8)
    for sample in (chats["one"], chats["turns"]):
        images = [[Image.open(media.path) for media in sample.images]]
        text = encoder.template.prompt(replace(sample, messages=sample.messages[: sample.answers[-1]]))
        theirs = processor(text=[text], images=images, return_tensors="pt")["input_ids"][0].tolist()
        encoded = encoder.encode(sample)
        assert encoder.encode_prompt(sample).input_ids_S.tolist() == theirs
        last = encoded.input_ids_S[-encoded.segments[-1] if encoded.segments else 0 :].tolist()
        assert last[: len(theirs)] == theirs
        assert encoded.lengths == encoder.measure(sample)


def test_a_prefix_ends_where_the_first_answer_begins(encoder_of, chats, tmp_path):
    encoder = encoder_of("paligemma2")
    processor = copy.copy(encoder.processor)
    processor.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{% for p in m.content if p.type == 'image' %}<image>{% endfor %}"
        "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
        "{% else %}{% generation %}{{ m.content[0].text }}<eos>{% endgeneration %}{% endif %}{% endfor %}"
    )
    encoder = Encoder(processor, patch_size=8)
    encoded = encoder.encode(chats["one"])
    prompt = encoder.encode_prompt(chats["one"])
    theirs = processor(
        text="<image>Which?", images=[Image.open(tmp_path / "a.png")], suffix="Two.", return_tensors="pt"
    )
    assert encoded.input_ids_S.tolist() == theirs["input_ids"][0].tolist()
    inputs = Collator()([encoded]).model_inputs()
    assert torch.equal(inputs["token_type_ids"].long(), theirs["token_type_ids"])
    assert torch.equal(encoded.labels_S, theirs["labels"][0])
    asked = processor(text="<image>Which?", images=[Image.open(tmp_path / "a.png")], return_tensors="pt")
    assert prompt.input_ids_S.tolist() == asked["input_ids"][0].tolist()


def test_no_token_of_an_image_is_learnt_and_none_is_cut(encoder_of, chats):
    encoder = encoder_of("idefics3")
    encoded = encoder.encode(chats["turns"])
    shown = [
        int(token) for token in encoder.tokenizer.convert_tokens_to_ids(["<image>", "<row_1_col_1>", "<global-img>"])
    ]
    places = torch.isin(encoded.input_ids_S, torch.tensor(shown)).nonzero()
    assert encoded.media_end == int(places[-1]) + 2  # and the token that closes the image
    assert encoded.truncated(encoded.media_end - 1) is None
    assert not torch.isin(encoded.labels_S, torch.tensor(shown)).any()


def test_a_text_with_tokens_that_only_the_processor_writes_is_refused(encoder_of, chats):
    sample = chats["one"]
    forged = replace(sample.messages[0], parts=(*sample.messages[0].parts, TextPart("<image_soft_token>")))
    with pytest.raises(DataError, match="holds '<image_soft_token>', which only the model's processor writes"):
        encoder_of("gemma3").encode(replace(sample, messages=(forged, *sample.messages[1:])))


def test_a_pack_without_an_image_gets_a_blank_one(encoder_of, chats):
    encoder = encoder_of("gemma3")
    collator = Collator(blank=encoder.blank_image(), bucket_tokens=16)
    batch = collator([encoder.encode(chats["none"])])
    filled = with_blanks(batch, frozenset({"images"}), collator)
    assert "images" in vision_kinds(filled)
    assert filled.model_inputs()["pixel_values"].shape[0] == 1
    assert filled.workload.tokens == batch.workload.tokens
    assert filled.workload.patches == 0
    start, shown = batch.workload.tokens, encoder.blank_image().input_ids_S
    assert torch.equal(filled.input_ids_1T[0, start : start + len(shown)], shown)


def test_an_encoder_travels_to_workers_and_keeps_what_it_measured(encoder_of, chats):
    encoder = encoder_of("llava_onevision")
    lengths = [encoder.measure(sample) for sample in chats.values()]
    there = pickle.loads(pickle.dumps(encoder))
    assert [there.measure(sample) for sample in chats.values()] == lengths
    assert there.fingerprint() == encoder.fingerprint()


def test_images_without_a_patch_size_are_refused_and_text_is_not(encoder_of, chats):
    encoder = Encoder(encoder_of("llava").processor)
    assert encoder.encode(chats["none"]).num_supervised
    with pytest.raises(ConfigError, match="How many patches the model's vision tower computes"):
        encoder.encode(chats["one"])


def _odd_tensor(processor):
    """A processor that gives a tensor of its own, whose numbers are those of all samples together."""

    class Odd(type(processor)):
        def __call__(self, images=None, text=None, **options):
            out = super().__call__(images=images, text=text, **options)
            return out | {"odd": torch.arange(len(out["pixel_values"])) * len(out["pixel_values"])}

    odd = copy.copy(processor)
    odd.__class__ = Odd
    return odd


def test_a_tensor_that_follows_no_rule_is_refused_by_name(encoder_of, chats):
    encoder = Encoder(_odd_tensor(encoder_of("llava").processor), patch_size=8)
    with pytest.raises(ConfigError, match=r"gives odd of shapes .* follows no rule by which Headway can pack it"):
        encoder.encode(chats["one"])


def test_a_size_is_measured_once_and_without_interpolation(encoder_of, chats, monkeypatch):
    processed = pickle.loads(pickle.dumps(encoder_of("internvl").media.processed))
    first = processed.lengths([(40, 52), (333, 21)])
    assert first.written == processed.lengths([(40, 52)]).written + processed.lengths([(333, 21)]).written
    monkeypatch.setattr(processed, "_run", lambda *_, **__: pytest.fail("it was measured again"))
    assert processed.lengths([(40, 52), (333, 21)]) == first


def test_an_index_is_the_one_that_training_measures(tmp_path, chats):
    folder = write_vlm(tmp_path / "model", "llava")
    source = open_source(tmp_path / "chats.jsonl")
    (index,) = build_indices([source], str(folder), {}, BadSamples("error"), cache=tmp_path / "cache", workers=0)
    encoder = Encoder(load_processor(folder), patch_size=patch_size_of(load_model_config(folder)))
    assert index.tokens.tolist() == [encoder.encode(sample).tokens for sample in chats.values()]
    assert index.patches.tolist() == [16, 48, 32, 0]
    assert index.path == index_folder(source, encoder, tmp_path / "cache") / "index.parquet"


def test_a_picture_that_the_processor_cannot_read_is_named(encoder_of, chats, monkeypatch):
    processed = encoder_of("gemma3").media.processed

    def divide(*_, **__):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(processed, "_run", divide)
    with pytest.raises(DataError, match="line 1: the model's processor refuses an image: division by zero"):
        encoder_of("gemma3").encode(chats["one"])


def test_a_tensor_beside_patches_and_grids_that_no_pack_carries_is_refused(chats, tmp_path):
    processor = load_processor(write_vlm(tmp_path / "model", "glm4v"))
    processor.image_processor.model_input_names = ["pixel_values", "image_grid_thw", "image_merge_sizes"]
    with pytest.raises(ConfigError, match=r"Glm4vProcessor hands the model image_merge_sizes with its images"):
        Encoder(processor).encode(chats["one"])
