"""What `measure` says from headers is what `encode` then gives, and both are what transformers' own processor gives."""

import pickle
import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from headway.data import Chat, Document, Encoder, Media, Message, Origin, TextPart
from headway.data.media.images import Picture
from headway.data.samples import ImagePart
from headway.errors import DataError
from headway.models import load_model, load_processor, rope_index
from headway.models.video import normalised
from helpers.cases import examples
from helpers.models import tiny_config

HERE = Origin("made", "made.jsonl", 0, "line 1")
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<|"), max_size=30)


def picture(height, width, form="PNG", orientation=1):
    rng = np.random.default_rng(height * 1000 + width)
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = BytesIO()
    image.save(file, form, exif=exif)
    return Media(data=file.getvalue())


def chat(*turns):
    return Chat(tuple(Message(role, tuple(parts)) for role, parts in turns), HERE)


PICTURES = st.builds(
    picture, st.integers(9, 150), st.integers(9, 150), st.sampled_from(["PNG", "JPEG", "WEBP"]), st.integers(1, 8)
)
PARTS = st.lists(st.one_of(st.builds(TextPart, TEXTS), st.builds(ImagePart, PICTURES)), max_size=4)


@st.composite
def chats(draw):
    turns = []
    for _ in range(draw(st.integers(1, 3))):
        turns += [("user", draw(PARTS)), ("assistant", [TextPart(draw(TEXTS) + ".")])]
    return chat(*turns)


@pytest.fixture(scope="module")
def mrope_encoder(processor):
    config = tiny_config("qwen3_vl", len(processor.tokenizer), {"image_token_id": processor.image_token_id})
    return Encoder(processor, rope_index(load_model(config, random_init=True)))


@given(sample=chats())
@settings(max_examples=examples(20, 40))
def test_sizes_from_headers_are_those_of_the_encoded_sample(mrope_encoder, sample):
    encoded = mrope_encoder.encode(sample)
    lengths = mrope_encoder.measure(sample)
    assert lengths == encoded.lengths
    assert lengths.size == encoded.size
    assert lengths.patches == sum(h * w for _, h, w in lengths.media.get("images", ()))
    targets = (encoded.labels_S[1:] != -100).nonzero().flatten() + 1
    assert (lengths.first_target, lengths.supervised) == (int(targets[0]), len(targets))
    assert lengths.media_end == max((encoded.token_types_S.nonzero().flatten() + 1).tolist(), default=0)


@given(sample=chats())
@settings(max_examples=40)
def test_tokens_and_grids_are_those_of_transformers_own_processor(mrope_encoder, processor, sample):
    text = mrope_encoder.template.views(sample)[0].text
    images = []
    for media in sample.images:
        with Picture(media, "here") as opened:
            images.append(opened.decode())
    expected = processor(text=[text], images=images or None, return_tensors="pt")
    encoded = mrope_encoder.encode(sample)
    assert torch.equal(encoded.input_ids_S, expected["input_ids"][0])
    assert torch.equal(encoded.token_types_S.long(), expected["mm_token_type_ids"][0])
    if images:
        assert torch.equal(encoded.media["images"].sizes, expected["image_grid_thw"])
        assert torch.allclose(
            normalised(encoded.media["images"].features, mrope_encoder.pixel_scale),
            expected["pixel_values"],
            rtol=0,
            atol=1e-6,
        )


@pytest.mark.parametrize("orientation", range(1, 9))
def test_measuring_decodes_no_pixel(encoder, monkeypatch, orientation):
    sample = chat(("user", [ImagePart(picture(40, 72, "JPEG", orientation))]), ("assistant", [TextPart("Two.")]))
    expected = encoder.encode(sample).lengths
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("pixels were decoded"))
    assert encoder.measure(sample) == expected


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def test_an_orientation_behind_the_pixels_of_a_png_is_seen():
    whole = picture(40, 72).data
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = whole[:-12] + chunk(b"eXIf", exif.tobytes()[6:]) + whole[-12:]
    bare = BytesIO()
    with Image.open(BytesIO(turned)) as image:
        image.load()
        assert image.getexif()[0x0112] == 6  # Pillow finds it too, once it has decoded
        image.save(bare, "PNG", pnginfo=PngImagePlugin.PngInfo())
    with Picture(Media(data=turned), "here") as opened:
        assert opened.size == (72, 40)
        assert opened.decode().size == (40, 72)


def test_a_copy_of_the_encoder_from_another_process_encodes_the_same(mrope_encoder):
    copied = pickle.loads(pickle.dumps(mrope_encoder))
    sample = chat(("user", [ImagePart(picture(40, 72))]), ("assistant", [TextPart("Two.")]))
    ours, theirs = mrope_encoder.encode(sample), copied.encode(sample)
    assert torch.equal(ours.position_ids_RS, theirs.position_ids_RS)
    assert torch.equal(ours.media["images"].features, theirs.media["images"].features)
    assert len(pickle.dumps(mrope_encoder)) < 1_000_000  # no weights
    assert copied.fingerprint() == mrope_encoder.fingerprint()


def test_the_fingerprint_changes_with_what_lengths_depend_on(processor, tmp_path):
    folder = tmp_path / "copy"
    processor.save_pretrained(folder)

    def fingerprint(change=lambda _: None, **options):
        opened = load_processor(folder)
        change(opened)
        return Encoder(opened, **options).fingerprint()

    def another_template(opened):
        opened.chat_template += " "

    def another_size(opened):
        opened.image_processor.size = {"shortest_edge": 256, "longest_edge": 99_999}

    def another_word(opened):
        opened.tokenizer.add_tokens(["Wörter"])

    def other_frames(opened):
        opened.video_processor.settings["fps"] = 7

    same = fingerprint()
    assert same == Encoder(processor).fingerprint()  # wherever the folder lies
    changes = [another_template, another_size, another_word, other_frames]
    others = [fingerprint(change) for change in changes] + [fingerprint(max_image_pixels=10_000)]
    assert len({same, *others}) == 1 + len(others)


@pytest.mark.parametrize("which", ["encoder", "text_encoder"])
def test_every_token_of_a_document_is_learnt(which, request):
    encoder = request.getfixturevalue(which)
    encoded = encoder.encode(Document("Which digits?", HERE))
    words = encoder.tokenizer("Which digits?")["input_ids"]
    assert encoded.input_ids_S.tolist() == [*words, encoder.tokenizer.eos_token_id]
    assert torch.equal(encoded.labels_S, encoded.input_ids_S)
    lengths = encoder.measure(Document("Which digits?", HERE))
    assert lengths == encoded.lengths
    assert (lengths.supervised, lengths.first_target, lengths.media_end) == (len(words), 1, 0)


def test_token_ids_of_a_document_are_taken_as_they_are(encoder):
    assert encoder.encode(Document((105, 9, 300), HERE)).input_ids_S.tolist() == [105, 9, 300]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((105, -2), "token id -2"),
        ("a <|image_pad|> b", "placeholder of an image"),
    ],
)
def test_documents_that_cannot_be_learnt_are_refused(encoder, content, message):
    with pytest.raises(DataError, match=message) as caught:
        encoder.measure(Document(content, HERE))
    assert str(caught.value).startswith("made.jsonl, line 1: ")


@pytest.mark.parametrize("content", [(), "", " \n"])
def test_a_document_without_words_has_no_tokens_and_is_no_error(encoder, content):
    assert encoder.measure(Document(content, HERE)).tokens == 0


@pytest.mark.parametrize("content", ["", " \n\t\u3000", (), (105,)])
def test_documents_of_which_nothing_is_learnt_have_no_tokens_and_are_not_encoded(encoder, content):
    assert encoder.measure(Document(content, HERE)).tokens == 0
    with pytest.raises(DataError, match=r"made\.jsonl, line 1: the document is empty or a single token"):
        encoder.encode(Document(content, HERE))


def test_an_image_inside_an_answer_is_not_a_target(encoder):
    sample = chat(("user", [TextPart("Draw.")]), ("assistant", [ImagePart(picture(40, 72)), TextPart("Done.")]))
    encoded = encoder.encode(sample)
    assert bool((encoded.labels_S[encoded.token_types_S == 1] == -100).all())
    assert "Done.<|im_end|>" in encoder.tokenizer.decode(encoded.labels_S[encoded.labels_S != -100])
