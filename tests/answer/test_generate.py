"""Whatever transformers generates with: other families by their own processors, videos as in training."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from headway.answer.answers import GenerationEval
from headway.answer.generate import Decoding, Generator
from headway.answer.model_folder import find_model, open_model
from headway.data import Chat, Collator, Encoder, ImagePart, Media, Message, Origin, TextPart, VideoPart, read_samples
from headway.errors import DataError
from headway.models.load import load_model, load_processor, rope_index
from headway.models.parallel.ranks import Ranks
from headway.packing.budget import Budget
from helpers.data import video
from helpers.folders import QUESTIONS, picture, picture_reader, text_model

CPU = torch.device("cpu")
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {% for part in message.content %}"
    "{{ '<image> ' if part.type == 'image' else part.text }}{% endfor %} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A LLaVA of a few thousand random weights, as transformers itself saves it."""
    folder = tmp_path_factory.mktemp("llava")
    special = ["<pad>", "<unk>", "<image>", "<user>", "<assistant>", "<end>"]
    words = {word: place for place, word in enumerate([*special, *(f"w{i}" for i in range(40))])}
    bare = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare, pad_token="<pad>", unk_token="<unk>", additional_special_tokens=special[2:]
    )
    size = {"shortest_edge": 32}
    images = CLIPImageProcessor(size=size, crop_size={"height": 32, "width": 32})
    LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=32, patch_size=8, **small),
        text_config=LlamaConfig(vocab_size=len(tokenizer), **small),
        image_token_index=words["<image>"],
    )
    torch.manual_seed(6)
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # so that answers differ between prompts
    model.save_pretrained(folder)
    return folder


def generator(folder):
    return Generator(open_model(find_model(str(folder)), dtype=torch.float32, device=CPU, for_generation=True), CPU)


def asked(number, text, *media):
    return Chat((Message("user", (*media, TextPart(text))),), Origin("test", "prompts", number, f"line {number}"))


def test_a_family_whose_images_have_no_grids_answers_by_its_own_processor(llava, tmp_path):
    red, blue = (ImagePart(Media(str(picture(tmp_path / f"{color}.png", color=color)))) for color in ("red", "blue"))
    prompts = [asked(1, "w1 w2", red), asked(2, "w3 w4 w5 w6", blue, red), asked(3, "w7"), asked(4, "w1 w2", blue)]
    model, decoding = generator(llava), Decoding(max_new_tokens=6)
    together = list(model.answer(prompts, decoding, batch=4))
    alone = [answer for prompt in prompts for answer in model.answer([prompt], decoding)]
    assert together == alone
    assert [answer.prompt_tokens for answer in alone] == [1 + 16 + 2 + 2, 1 + 32 + 4 + 2, 1 + 1 + 2, 1 + 16 + 2 + 2]
    assert len({answer.text for answer in alone}) > 1


def test_a_video_is_shown_as_in_training(tmp_path):
    folder = picture_reader(tmp_path / "reader")
    shown = [{"type": "video", "video": "a.mp4"}, {"type": "text", "text": QUESTIONS[0]}]
    (tmp_path / "a.mp4").write_bytes(video(num_frames=8).read())
    row = {"messages": [{"role": "user", "content": shown}, {"role": "assistant", "content": "two"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    samples = read_samples(tmp_path / "rows.jsonl")
    trained = load_model(folder)
    encoder = Encoder(load_processor(folder), rope_index(trained))
    collator = Collator(pixel_scale=encoder.pixel_scale)
    known = GenerationEval(
        samples, encoder, Budget(4096), collator, Ranks(0, 1), count=1, max_new_tokens=5
    )  # the packed way
    (expected,) = known.answer(trained, CPU)
    question = asked(1, QUESTIONS[0], VideoPart(Media(str(tmp_path / "a.mp4"))))
    (answer,) = generator(folder).answer([question], Decoding(max_new_tokens=5))
    assert answer.text == expected.answer != ""


def test_media_that_the_model_does_not_take_are_an_error(tmp_path):
    folder = text_model(tmp_path / "writer")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    question = asked(1, "w1", ImagePart(Media(str(picture(tmp_path / "a.png")))))
    with pytest.raises(DataError, match=r"prompts, line 1: the model .* reads text alone"):
        list(generator(folder).answer([question], Decoding()))
