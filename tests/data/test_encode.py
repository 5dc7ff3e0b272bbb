import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trl
from PIL import Image
from tokenizers import Tokenizer, models, processors, trainers
from transformers import PreTrainedTokenizerFast

from headway.data import Collator, Encoder, read_samples
from headway.data.samples import Document, Origin
from headway.errors import ConfigError, DataError
from headway.models.video import normalised

QUESTION = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Which digit?"}]


def chat(*messages):
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def supervised(encoder, sample):
    encoded = encoder.encode(sample)
    return encoder.tokenizer.decode(encoded.labels_S[encoded.labels_S != -100])


def test_only_assistant_turns_and_their_closing_tokens_are_supervised(write, encoder):
    turns = [
        ("system", "Be brief."),
        ("user", QUESTION),
        ("assistant", "Two."),
        ("user", "Sure?"),
        ("assistant", "Yes."),
    ]
    (sample,) = read_samples(write(chat(*turns), pictures={"a.png": (40, 24)}))
    assert supervised(encoder, sample) == "Two.<|im_end|>Yes.<|im_end|>"


def test_templates_that_do_not_mark_answers_give_the_same_labels(write, processor):
    turns = [("user", "Which digit?"), ("assistant", "Two."), ("user", "Sure?"), ("assistant", "Yes.")]
    (sample,) = read_samples(write(chat(*turns)))
    marked = Encoder(processor).encode(sample)
    bare = unmarked(processor)
    assert torch.equal(Encoder(bare).encode(sample).labels_S, marked.labels_S)


@pytest.mark.parametrize("marks", [True, False], ids=["marked", "plain"])
def test_a_turn_that_is_marked_is_shown_and_not_supervised(write, processor, marks):
    turns = [("user", "Which digit?"), ("assistant", "Two."), ("user", "Sure?"), ("assistant", "Yes.")]
    row = chat(*turns)
    (every,) = read_samples(write(row))
    row["messages"][1]["loss"] = False
    (last,) = read_samples(write(row))
    encoder = Encoder(processor if marks else unmarked(processor))
    assert supervised(encoder, every) == "Two.<|im_end|>Yes.<|im_end|>"
    assert supervised(encoder, last) == "Yes.<|im_end|>"
    assert torch.equal(encoder.encode(last).input_ids_S, encoder.encode(every).input_ids_S)
    row["messages"][1]["loss"], row["messages"][3]["loss"] = True, False
    (first,) = read_samples(write(row))
    assert supervised(encoder, first) == "Two.<|im_end|>"
    prompt = encoder.tokenizer.decode(encoder.encode_prompt(first).input_ids_S)
    assert "Which digit?" in prompt
    assert "Two." not in prompt


def test_a_chat_that_begins_with_an_answer_is_supervised_after_its_opening(write, processor):
    (sample,) = read_samples(write(chat(("assistant", "Hello!"), ("user", "Hi."))))
    assert supervised(Encoder(unmarked(processor)), sample) == "Hello!<|im_end|>"


def unmarked(processor, template=None):
    """The tiny tokenizer with a template that has no generation blocks."""
    plain = processor.chat_template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    tokenizer = type(processor.tokenizer).from_pretrained(processor.tokenizer.name_or_path)
    tokenizer.chat_template = template or plain
    return tokenizer


def test_answers_are_learnt_as_they_are_asked_for_where_a_template_rewrites_earlier_turns(write, processor):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    encoder = Encoder(unmarked(processor, template))
    single, double = read_samples(
        write(
            chat(("user", "a"), ("assistant", "b")),
            chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")),
        )
    )
    assert supervised(encoder, single) == "<think></think>b<|im_end|>"
    # Two views: the second answer's shows the first one as an earlier turn, and nothing of it is learnt there.
    encoded, alone = encoder.encode(double), encoder.encode(single)
    assert encoder.measure(double) == encoded.lengths
    length = alone.tokens
    assert encoded.segments == (length, encoded.tokens - length)
    assert torch.equal(encoded.input_ids_S[:length], alone.input_ids_S)
    assert torch.equal(encoded.labels_S[:length], alone.labels_S)
    view = encoded.slice(length, encoded.tokens)
    shown = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
    text = encoder.tokenizer.decode(view.input_ids_S)
    assert text == shown + "<|im_start|>assistant\n<think></think>d<|im_end|>\n"
    assert encoder.tokenizer.decode(view.labels_S[view.labels_S != -100]) == "<think></think>d<|im_end|>"

    # In a pack the views are segments of their own, and positions begin anew; what the loss counts is that of both.
    pack = Collator()([encoded, alone])
    assert pack.cu_seqlens_N.tolist() == [0, length, encoded.tokens, encoded.tokens + length]
    assert pack.position_ids_R1T[0, 0, length] == 0
    assert pack.workload.segments.tolist() == [length, encoded.tokens - length, length]
    assert pack.sample_tokens == (encoded.tokens, length)
    assert pack.num_supervised == encoded.num_supervised + alone.num_supervised == int((pack.labels_1T != -100).sum())


def test_a_template_that_refuses_the_chat_is_a_clear_error(write, processor):
    encoder = Encoder(unmarked(processor, "{{ raise_exception('Roles must alternate.') }}"))
    (sample,) = read_samples(write(chat(("user", "a"), ("assistant", "b"))))
    with pytest.raises(DataError, match=r"line 1: .* refuses this chat: Roles must alternate"):
        encoder.encode(sample)


def test_a_chat_is_refused_by_a_tokenizer_without_a_template(write, processor):
    tokenizer = type(processor.tokenizer).from_pretrained(processor.tokenizer.name_or_path)
    tokenizer.chat_template = None
    (sample,) = read_samples(write(chat(("user", "a"), ("assistant", "b"))))
    with pytest.raises(ConfigError, match="has no chat template"):
        Encoder(tokenizer).encode(sample)


def test_placeholders_patches_and_grids_agree(write, encoder, processor):
    (sample,) = read_samples(write(chat(("user", QUESTION), ("assistant", "Two.")), pictures={"a.png": (56, 24)}))
    encoded = encoder.encode(sample)
    # 56 x 24 pixels are 3.5 x 1.5 tokens of 16 x 16, rounded to 4 x 2 (halves to even): 8 x 4 patches in 8 tokens.
    assert encoded.media["images"].sizes.tolist() == [[1, 8, 4]]
    assert encoded.patches == 32
    assert encoded.media["images"].features.shape == (32, 3 * 8 * 8)
    placeholders = encoded.input_ids_S == processor.image_token_id
    assert int(placeholders.sum()) == 8
    assert torch.equal(placeholders, encoded.token_types_S.bool())


def test_token_ids_are_those_of_transformers_own_chat_encoding(write, encoder, processor):
    turns = [("user", QUESTION), ("assistant", "Two."), ("user", "Sure?"), ("assistant", "Yes.")]
    (sample,) = read_samples(write(chat(*turns), pictures={"a.png": (56, 72)}))
    image = Image.open(sample.images[0].path)
    messages = chat(*turns)["messages"]
    messages[0]["content"] = [{"type": "image", "image": image}, QUESTION[1]]
    expected = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    encoded = encoder.encode(sample)
    assert torch.equal(encoded.input_ids_S, expected["input_ids"][0])
    assert encoded.media["images"].features.dtype == torch.uint8
    assert torch.allclose(
        normalised(encoded.media["images"].features, encoder.pixel_scale), expected["pixel_values"], rtol=0, atol=1e-6
    )
    assert torch.equal(encoded.media["images"].sizes, expected["image_grid_thw"])


def test_the_prompt_ends_where_the_last_answer_begins(write, encoder):
    turns = [("user", QUESTION), ("assistant", "Two."), ("user", "Sure?"), ("assistant", "Yes.")]
    (sample,) = read_samples(write(chat(*turns), pictures={"a.png": (40, 24)}))
    whole, prompt = encoder.encode(sample), encoder.encode_prompt(sample)
    last = (
        int((whole.labels_S == -100).nonzero()[-2]) + 1
    )  # the last unsupervised token is the line end after the answer
    assert torch.equal(prompt.input_ids_S, whole.input_ids_S[:last])
    assert torch.equal(prompt.media["images"].features, whole.media["images"].features)
    assert encoder.tokenizer.decode(prompt.input_ids_S).endswith("<|im_start|>assistant\n")


def test_positions_come_from_the_models_own_rule(write, processor):
    def rule(input_ids, mm_token_type_ids, image_grid_thw):
        assert mm_token_type_ids.shape == input_ids.shape
        assert image_grid_thw.shape == (1, 3)
        return torch.stack([input_ids * 0 + row for row in range(3)]), torch.zeros(1, 1)

    seen, text = read_samples(
        write(
            chat(("user", QUESTION), ("assistant", "Two.")),
            chat(("user", "Hi"), ("assistant", "Hi.")),
            pictures={"a.png": (40, 24)},
        )
    )
    encoder = Encoder(processor, rule)
    assert encoder.encode(seen).position_ids_RS[:, 0].tolist() == [0, 1, 2]
    encoded = encoder.encode(text)
    assert torch.equal(encoded.position_ids_RS, torch.arange(encoded.tokens).repeat(3, 1))


def test_a_first_token_is_never_a_target(write, encoder):
    (sample,) = read_samples(write(chat(("user", "a"), ("assistant", "b"))))
    encoded = encoder.encode(sample)
    assert replace(encoded, labels_S=encoded.input_ids_S).num_supervised == encoded.tokens - 1


@pytest.mark.parametrize("keep", [0, 20, 0.7])
def test_a_truncated_image_is_named_with_its_line(write, encoder, keep):
    file = write(
        chat(("user", "x"), ("assistant", "y")),
        chat(("user", QUESTION), ("assistant", "z")),
        pictures={"a.png": (64, 64)},
    )
    image = file.parent / "a.png"
    content = image.read_bytes()
    image.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    with pytest.raises(DataError) as caught:
        encoder.encode(read_samples(file)[1])
    assert str(caught.value).startswith(f"{file}, line 2: the image {image}")
    assert "cannot be read" in str(caught.value)


def test_an_image_deleted_after_reading_is_named_with_its_line(write, encoder):
    file = write(chat(("user", QUESTION), ("assistant", "z")), pictures={"a.png": (16, 16)})
    (sample,) = read_samples(file)
    (file.parent / "a.png").unlink()
    with pytest.raises(DataError, match=r"line 1: the image .*a\.png \(missing\) cannot be read"):
        encoder.encode(sample)


def test_a_file_that_is_no_picture_is_named_with_its_line(write, encoder):
    file = write(chat(("user", QUESTION), ("assistant", "z")), pictures={"a.png": (16, 16)})
    shutil.copy(file, file.parent / "a.png")
    with pytest.raises(DataError, match=r"line 1: the image .* it is no picture in a format that is read"):
        encoder.encode(read_samples(file)[0])


def test_a_chat_without_an_answer_cannot_be_trained_on_but_can_be_answered(write, encoder):
    (sample,) = read_samples(write(chat(("user", "Which digit?"))))
    with pytest.raises(DataError, match="line 1: the chat has no assistant turn"):
        encoder.encode(sample)
    assert encoder.encode_prompt(sample).num_supervised == 0


def test_images_for_a_text_model_are_refused(write, text_encoder):
    (sample,) = read_samples(write(chat(("user", QUESTION), ("assistant", "z")), pictures={"a.png": (16, 16)}))
    with pytest.raises(DataError, match="holds 1 images, but the model reads text alone"):
        text_encoder.encode(sample)


def test_placeholder_words_inside_a_text_are_refused(write, encoder):
    (sample,) = read_samples(write(chat(("user", "<|image_pad|>"), ("assistant", "z"))))
    with pytest.raises(DataError, match=r"line 1: .* image"):
        encoder.encode(sample)


@pytest.mark.parametrize(
    "turns",
    [
        [("user", "Hi."), ("assistant", "Ho."), ("user", QUESTION)],
        [("assistant", "Two."), ("user", QUESTION)],
        [("user", "Hi."), ("assistant", "Ho."), ("assistant", QUESTION), ("user", "Why?")],
        [("user", "Hi."), ("assistant", "Ho."), ("tool", QUESTION)],
    ],
)
def test_an_image_that_the_model_is_never_shown_is_refused(write, encoder, turns):
    row = chat(*turns)
    row["messages"] = [
        turn | ({"loss": False} if turn["content"] is QUESTION and turn["role"] == "assistant" else {})
        for turn in row["messages"]
    ]
    (sample,) = read_samples(write(row, pictures={"a.png": (40, 24)}))
    for read in (encoder.measure, encoder.encode):
        with pytest.raises(DataError, match=r"the image .*a\.png stands behind the last answer that is learnt"):
            read(sample)


TEMPLATES = Path(trl.__file__).parent / "chat_templates"
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)  # of Mistral-7B-Instruct-v0.3, without tools


@pytest.mark.parametrize("adds_end", [False, True])
@pytest.mark.parametrize("name", ["llama3", "llama3_1", "gemma", "gemma3", "deepseekv3", "cohere", "lfm2", "mistral"])
def test_a_document_that_a_template_has_rendered_has_the_tokens_that_transformers_gives_the_chat(name, adds_end):
    source = MISTRAL if name == "mistral" else (TEMPLATES / f"{name}.jinja").read_text()
    words = Tokenizer(models.BPE())
    words.add_special_tokens(["<s>", "</s>"])
    end = " </s>" * adds_end
    words.train_from_iterator(
        [source], trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=list(map(chr, range(32, 127))))
    )
    words.post_processor = processors.TemplateProcessing(
        single=f"<s> $A{end}", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", chat_template=source)
    turns = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes?"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    expected = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
    assert (text[:3], expected[:2].count(0)) == ("<s>", 1)
    closed = [*expected, *[1] * (expected[-1] != 1)]
    for content in (text, text.removeprefix("<s>"), text.removesuffix("</s>") + "</s>"):
        assert Encoder(tokenizer).encode(Document(content, Origin("", "", 0, ""))).input_ids_S.tolist() == closed


def test_an_image_too_narrow_to_resize_is_refused(write, encoder):
    (sample,) = read_samples(write(chat(("user", QUESTION), ("assistant", "z")), pictures={"a.png": (1, 300)}))
    with pytest.raises(DataError, match=r"line 1: .*aspect ratio"):
        encoder.encode(sample)


def test_truncating_cuts_text_but_never_an_image(write, encoder):
    (sample,) = read_samples(
        write(chat(("user", QUESTION), ("assistant", "Two, I am sure.")), pictures={"a.png": (40, 24)})
    )
    encoded = encoder.encode(sample)
    last_image = int(encoded.token_types_S.nonzero()[-1])
    first_answer = int((encoded.labels_S != -100).nonzero()[0])
    cut = encoded.truncated(first_answer + 2)
    assert cut.tokens == cut.position_ids_RS.shape[1] == cut.labels_S.shape[0] == first_answer + 2
    assert cut.num_supervised == 2
    assert torch.equal(cut.media["images"].features, encoded.media["images"].features)
    assert encoded.truncated(first_answer) is None  # nothing left to learn
    assert encoded.truncated(last_image) is None  # cuts the image
