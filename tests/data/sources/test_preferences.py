"""Rows of preferences in the layouts of the tools that learn from them, and rows of which nothing can be learnt."""

import base64
import json
import tracemalloc

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from trl.data_utils import extract_prompt

from headway.data import Chat, Document, ImagePart, Preference, TextPart
from headway.data.samples import Origin, best_answered, supervised
from headway.data.sources import open_source, references
from headway.data.sources.layouts import LAYOUTS, reading_of
from headway.data.sources.preferences import MOST_ANSWERS
from headway.data.sources.reader import ParsedRow
from headway.data.sources.references import MediaRules
from headway.data.sources.schemas import Normaliser
from headway.errors import ConfigError, DataError
from helpers.cases import examples

PIXEL = "data:image/png;base64,iVBORw0KGgo="
OTHER = "data:image/png;base64,iVBORw0KGAo="


def user(words):
    return {"role": "user", "content": words}


def says(words):
    return {"role": "assistant", "content": words}


def human(words):
    return {"from": "human", "value": words}


def gpt(words):
    return {"from": "gpt", "value": words}


def read(row, schema="auto", columns=None, folder="."):
    normaliser = Normaliser(schema, str(folder), MediaRules(), columns or {})
    return normaliser.sample(ParsedRow(row), Origin("pairs", "pairs.jsonl", 0, "line 1"))


def words(messages):
    """Each turn as the first letter of its role and its words, a picture as an asterisk."""
    return [
        f"{turn.role[0]}: " + "".join(part.text if isinstance(part, TextPart) else "*" for part in turn.parts)
        for turn in messages
    ]


def laid_out(sample):
    """Words of the prompt, and of each answer."""
    assert isinstance(sample, Preference), sample
    return words(sample.prompt), [words(answer) for answer in sample.answers]


SHORT = (["u: Name a fruit."], [["a: A pear."], ["a: A chair."]])
LONG = (["u: Hi", "a: Ho", "u: Name a fruit."], SHORT[1])
SYSTEM = (["s: Be brief.", *SHORT[0]], SHORT[1])
SHOWN = (["u: *Name a fruit."], SHORT[1])
ASK, GOOD, BAD = "Name a fruit.", "A pear.", "A chair."
SPOKEN = "\n\nHuman: Hi\n\nAssistant: Ho\n\nHuman: Name a fruit.\n\nAssistant: "
JUDGED = [{"Helpfulness": {"Rating": mark, "Rationale": "-"}, "Visual Faithfulness": {"Rating": "4"}} for mark in "25"]

ROWS = {
    # TRL: dataset formats, preference; explicit and implicit prompt, plain and conversational.
    "trl plain": ({"prompt": ASK, "chosen": GOOD, "rejected": BAD}, SHORT),
    "trl implicit": (
        {"chosen": f"{ASK} Pear.", "rejected": f"{ASK} Chair."},
        (SHORT[0], [["a:  Pear."], ["a:  Chair."]]),
    ),
    "trl chat": ({"prompt": [user(ASK)], "chosen": [says(GOOD)], "rejected": [says(BAD)]}, SHORT),
    "trl implicit chat": ({"chosen": [user(ASK), says(GOOD)], "rejected": [user(ASK), says(BAD)]}, SHORT),
    "trl images": (
        {"prompt": [user(ASK)], "chosen": [says(GOOD)], "rejected": [says(BAD)], "images": [PIXEL]},
        SHOWN,
    ),
    "trl parts": (
        {
            "images": [PIXEL],
            "chosen": [
                user([{"type": "image"}, {"type": "text", "text": ASK}]),
                says([{"type": "text", "text": GOOD}]),
            ],
            "rejected": [
                user([{"type": "image"}, {"type": "text", "text": ASK}]),
                says([{"type": "text", "text": BAD}]),
            ],
        },
        SHOWN,
    ),
    # UltraFeedback, binarised: the prompt and the chosen chat once more, and scores.
    "ultrafeedback": (
        {
            "prompt": ASK,
            "prompt_id": "07",
            "chosen": [user(ASK), says(GOOD)],
            "rejected": [user(ASK), says(BAD)],
            "messages": [user(ASK), says(GOOD)],
            "score_chosen": 8.0,
            "score_rejected": 3.5,
        },
        SHORT,
    ),
    "hh-rlhf": ({"chosen": SPOKEN + GOOD, "rejected": SPOKEN + BAD}, LONG),
    "hh-rlhf in columns": ({"prompt": SPOKEN.rstrip(), "response": GOOD, "chosen": GOOD, "rejected": BAD}, LONG),
    # LLaMA-Factory: data/README.md, alpaca's and sharegpt's preference datasets.
    "alpaca": (
        {"instruction": "Name", "input": "a fruit.", "chosen": GOOD, "rejected": BAD},
        (["u: Name\na fruit."], SHORT[1]),
    ),
    "sharegpt": (
        {"conversations": [human("Hi"), gpt("Ho"), human(ASK)], "chosen": gpt(GOOD), "rejected": gpt(BAD)},
        LONG,
    ),
    "sharegpt images": (
        {"conversations": [human(f"<image>{ASK}")], "chosen": gpt(GOOD), "rejected": gpt(BAD), "images": [PIXEL]},
        SHOWN,
    ),
    # ms-swift: custom dataset, DPO.
    "swift": ({"messages": [user("Hi"), says("Ho"), user(ASK), says(GOOD)], "rejected_response": BAD}, LONG),
    "swift query": ({"system": "Be brief.", "query": ASK, "response": GOOD, "rejected_response": BAD}, SYSTEM),
    "swift turns": ({"messages": [user(ASK), says(GOOD)], "rejected_response": [says(BAD)]}, SHORT),
    "swift messages": (
        {
            "messages": [user(f"<image>{ASK}"), says(GOOD)],
            "images": [PIXEL],
            "rejected_messages": [user(f"<image>{ASK}"), says(BAD)],
            "rejected_images": [PIXEL],
        },
        SHOWN,
    ),
    "swift rounds": (
        {
            "conversation": [{"human": "Hi", "assistant": "Ho"}, {"human": ASK, "assistant": GOOD}],
            "rejected_response": BAD,
        },
        LONG,
    ),
    # axolotl: rlhf.qmd.
    "argilla": ({"system": "Be brief.", "instruction": ASK, "chosen_response": GOOD, "rejected_response": BAD}, SYSTEM),
    "icr": ({"system": "Be brief.", "input": ASK, "chosen": GOOD, "rejected": BAD}, SYSTEM),
    "intel": ({"system": "Be brief.", "question": ASK, "chosen": GOOD, "rejected": BAD}, SYSTEM),
    "chat_template.default": (
        {
            "messages": [{"role": "system", "content": "Be brief."}, user(ASK)],
            "chosen": says(GOOD),
            "rejected": says(BAD),
        },
        SYSTEM,
    ),
    "messages and words": ({"messages": ASK, "chosen": GOOD, "rejected": BAD}, SHORT),
    # LLaVA-RLHF: the last turn is replaced, and speakers are called by their models.
    "llava-rlhf": (
        {
            "image": PIXEL,
            "conversations": [human(f"<image>\n{ASK}"), gpt("of another model")],
            "output_1": {"from": "llava", "value": BAD},
            "output_2": {"from": "llava", "value": GOOD},
            "preference": 2,
        },
        (["u: *\nName a fruit."], SHORT[1]),
    ),
    "alpacafarm": ({"instruction": ASK, "input": "", "output_1": GOOD, "output_2": BAD, "preference": 1}, SHORT),
    "pku": ({"prompt": ASK, "response_0": BAD, "response_1": GOOD, "better_response_id": 1}, SHORT),
    "stack exchange": ({"question": ASK, "response_j": GOOD, "response_k": BAD}, SHORT),
    # How much better is the size of HelpSteer3's mark, and which its sign; SHP's is 1 where the first is better.
    "helpsteer3": (
        {"context": [user("Hi"), says("Ho"), user(ASK)], "response1": BAD, "response2": GOOD, "overall_preference": 3},
        LONG,
    ),
    "helpsteer3, first": (
        {"context": [user(ASK)], "response1": GOOD, "response2": BAD, "overall_preference": -1},
        SHORT,
    ),
    "openai": (
        {"input": {"messages": [user(ASK)]}, "preferred_output": [says(GOOD)], "non_preferred_output": [says(BAD)]},
        SHORT,
    ),
    "shp": ({"history": ASK, "human_ref_A": GOOD, "human_ref_B": BAD, "labels": 1}, SHORT),
    "shp, second": ({"history": ASK, "human_ref_A": BAD, "human_ref_B": GOOD, "labels": 0}, SHORT),
    "arena": (
        {
            "winner": "model_b",
            "conversation_a": [user(ASK), says(BAD)],
            "conversation_b": [user(ASK), says(GOOD)],
        },
        SHORT,
    ),
    "judged": ({"prompt": ASK, "response_a": GOOD, "response_b": BAD, "winner": "model_a"}, SHORT),
    "context": (
        {"question": ASK, "context": "On a plate.", "chosen": GOOD, "rejected": BAD},
        (["u: On a plate.\nName a fruit."], SHORT[1]),
    ),
    "context of an instruction": (
        {"instruction": ASK, "context": "On a plate.", "output_1": GOOD, "output_2": BAD, "preference": 1},
        (["u: Name a fruit.\nOn a plate."], SHORT[1]),
    ),
    # RLHF-V and RLAIF-V.
    "rlhf-v": (
        {
            "ds_name": "v",
            "image": {"bytes": b"a", "path": "a.jpg"},
            "text": json.dumps({"question": ASK, "chosen": GOOD, "rejected": BAD}),
            "image_path": "a.jpg",
        },
        SHOWN,
    ),
    "rlaif-v": ({"image": {"bytes": b"a", "path": None}, "question": ASK, "chosen": GOOD, "rejected": BAD}, SHOWN),
    # Ranked lists: VLFeedback as tables have it, UltraFeedback, Nectar, and lists side by side.
    "vlfeedback": (
        {
            "prompt": ASK,
            "models": ["m", "n"],
            "img_path": PIXEL,
            "completions": {"annotations": JUDGED, "model": ["m", "n"], "response": [BAD, GOOD]},
        },
        SHOWN,
    ),
    "ultrafeedback list": (
        {
            "instruction": ASK,
            "completions": [{"response": BAD, "overall_score": 2.0}, {"response": GOOD, "overall_score": 7.5}],
        },
        SHORT,
    ),
    "nectar": (
        {
            "prompt": f"\n\nHuman: {ASK}\n\nAssistant: ",
            "answers": [{"answer": BAD, "rank": 2.0}, {"answer": GOOD, "rank": 1.0}],
        },
        SHORT,
    ),
    "lists": ({"query": ASK, "responses": [BAD, GOOD], "scores": [-1.5, 0.25]}, SHORT),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_as_the_tools_document_them(name):
    row, expected = ROWS[name]
    assert laid_out(read(row)) == expected


def test_every_layout_is_read_in_the_test_above():
    others = {"rejected_videos", "rejected_audios"}
    for layout in LAYOUTS:
        if layout.makes == "preference" and not others & dict(layout.columns).keys():
            rows = [row for row, _ in ROWS.values() if dict(layout.columns).keys() <= row.keys()]
            assert layout.schema in [reading_of(row).layout.schema for row in rows], layout


WORDS = st.text(alphabet="abc xyz", min_size=1, max_size=12).filter(lambda text: text.strip() == text)


@settings(max_examples=examples(60, 300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(WORDS, min_size=1, max_size=5).filter(lambda turns: len(turns) % 2), WORDS, WORDS, st.booleans())
def test_a_pair_is_the_same_in_whichever_layout(turns, good, bad, has_image):
    if good == bad:
        return
    media = {"images": [PIXEL]} if has_image else {}
    asked = [(user, says)[place % 2](text) for place, text in enumerate(turns)]
    spoken = [{"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(turns)]
    spoken[0]["value"] = "<image>" * has_image + spoken[0]["value"]
    rows = [
        {"prompt": asked, "chosen": [says(good)], "rejected": [says(bad)]},
        {"prompt": json.dumps(asked), "chosen": json.dumps([says(good)]), "rejected": says(bad)},
        {"chosen": [*asked, says(good)], "rejected": [*asked, says(bad)]},
        {"conversations": spoken, "chosen": gpt(good), "rejected": gpt(bad)},
        {"conversations": spoken, "chosen": good, "rejected": says(bad)},
        {"messages": [*asked, says(good)], "rejected_response": bad},
        {"messages": [*asked, says(good)], "rejected_messages": [*asked, says(bad)]},
        {"messages": asked, "output_1": bad, "output_2": good, "preference": 2},
        {"messages": asked, "completions": [{"response": bad, "rating": 1}, {"response": good, "rating": "2"}]},
    ]
    first, *others = [read(row | media) for row in rows]
    assert first.prompt[-1].text == turns[-1]
    assert [answer[-1].text for answer in first.answers] == [good, bad]
    assert all(other == first for other in others)


@settings(max_examples=examples(60, 300))
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3), WORDS, WORDS)
def test_an_implicit_prompt_is_the_one_that_trl_extracts(rounds, good, bad):
    if good == bad:
        return
    asked = [turn for question, answer in rounds for turn in (user(question), says(answer))][:-1]
    row = {"chosen": [*asked, says(good)], "rejected": [*asked, says(bad)]}
    theirs, ours = extract_prompt(row), read(row)
    assert [turn.text for turn in ours.prompt] == [turn["content"] for turn in theirs["prompt"]]
    assert ours.answers[0][0].text == theirs["chosen"][0]["content"]


@pytest.mark.parametrize(("good", "bad"), [("blue.", "green."), ("very blue.", "very green."), ("blue\tnow", "red")])
def test_texts_are_cut_where_trl_cuts_them(good, bad):
    row = {"chosen": f"The sky is {good}", "rejected": f"The sky is {bad}"}
    theirs, ours = extract_prompt(row), read(row)
    assert ours.prompt[0].text == theirs["prompt"]
    assert [answer[0].text for answer in ours.answers] == [theirs["chosen"], theirs["rejected"]]


def test_words_that_begin_alike_are_not_cut_within():
    ours = read({"chosen": "The sky is blue.", "rejected": "The sky is black."})  # of which TRL makes "The sky is bl"
    assert laid_out(ours) == (["u: The sky is"], [["a:  blue."], ["a:  black."]])


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}


def test_answers_of_several_turns():
    told = [CALL, {"role": "tool", "content": "1"}]
    explicit = read({"prompt": [user("Hi")], "chosen": [*told, says("1")], "rejected": [*told, says("2")]})
    assert (len(explicit.prompt), [len(answer) for answer in explicit.answers]) == (1, [3, 3])  # as the row says
    implicit = read({"chosen": [user("Hi"), *told, says("1")], "rejected": [user("Hi"), *told, says("2")]})
    assert (len(implicit.prompt), [len(answer) for answer in implicit.answers]) == (3, [1, 1])  # what they share
    other = [CALL, {"role": "tool", "content": "2"}]
    called = read({"chosen": [user("Hi"), *told, says("1")], "rejected": [user("Hi"), *other, says("1")]})
    assert [len(answer) for answer in called.answers] == [3, 3]
    swift = read({"messages": [user("Hi"), *told, says("1")], "rejected_response": [says("2")]})
    assert [words(answer) for answer in swift.answers] == [["a: ", "t: 1", "a: 1"], ["a: 2"]]
    paths = read(
        {
            "chosen": [user("A"), says("b"), user("C"), says("d")],
            "rejected": [user("A"), says("x"), user("C"), says("y")],
        }
    )
    assert laid_out(paths) == (["u: A"], [["a: b", "u: C", "a: d"], ["a: x", "u: C", "a: y"]])


def test_each_answer_is_a_chat_that_is_learnt_alone():
    row = ROWS["sharegpt"][0] | {"tools": [{"name": "f"}], "chat_template_kwargs": {"enable_thinking": False}}
    sample = read(row)
    for chat, answer in zip(sample.chats, ("A pear.", "A chair."), strict=True):
        assert [turn.text for turn in chat.messages] == ["Hi", "Ho", ASK, answer]
        assert chat.answers == [3]
        assert (chat.tools, chat.template_kwargs, chat.origin) == (
            ({"name": "f"},),
            {"enable_thinking": False},
            sample.origin,
        )


def test_other_pictures_make_whole_chats():
    turns = [user("<image>Hi"), says("Ho"), user("What?"), says("A pear.")]
    sample = read({"messages": turns, "images": [PIXEL], "rejected_images": [OTHER]})
    assert sample.prompt == ()
    assert [words(answer) for answer in sample.answers] == [["u: *Hi", "a: Ho", "u: What?", "a: A pear."]] * 2
    first, second = (chat.images[0].data for chat in sample.chats)
    assert first != second
    assert [chat.answers for chat in sample.chats] == [[3], [3]]
    both = read({"messages": turns, "images": [PIXEL], "rejected_images": [OTHER], "rejected_response": "A chair."})
    assert both.answers[1][-1].text == "A chair."
    assert both.answers[1][0] == sample.answers[1][0]


def test_videos_and_sounds_of_rejected_answers(tmp_path):
    for name in ("a.mp4", "b.mp4", "a.wav", "b.wav"):
        (tmp_path / name).write_bytes(b"a")
    row = {"messages": [user("<video><audio>What?"), says("Rain.")], "videos": ["a.mp4"], "audios": ["a.wav"]}
    for key, value in (("rejected_videos", "b.mp4"), ("rejected_audios", "b.wav")):
        sample = read(row | {key: [value]}, folder=tmp_path)
        kind = key.removeprefix("rejected_").removesuffix("s")
        assert [chat.media(kind)[0].path for chat in sample.chats] == [str(tmp_path / f"{c}{value[1:]}") for c in "ab"]


def test_media_within_the_row_are_decoded_once(monkeypatch):
    times, decode = [], references.inline_bytes
    monkeypatch.setattr(
        references, "inline_bytes", lambda *words, **settings: times.append(words[0]) or decode(*words, **settings)
    )
    answers = [{"answer": str(number), "rank": number} for number in range(MOST_ANSWERS)]
    sample = read({"prompt": "Which?", "images": [PIXEL], "answers": answers})
    assert len(sample.answers) == MOST_ANSWERS
    assert times == ["image"]
    assert len({id(chat.images[0].data) for chat in sample.chats}) == 1


def test_a_long_prompt_is_held_once():
    tracemalloc.start()
    try:
        answers = [{"answer": f"{number} ", "rank": number} for number in range(MOST_ANSWERS)]
        row = {"instruction": "a" * 2**20, "input": "b" * 2**20, "answers": answers}
        tracemalloc.reset_peak()
        sample = read(row)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(sample.answers) == MOST_ANSWERS
    assert peak < 16 * 2**20  # the row itself, its prompt and one more at a time, instead of 64


def test_equal_pictures_of_a_row_are_two_pictures():
    sample = read({"question": "<image><image>Same?", "answer": "Yes", "images": [PIXEL, PIXEL]})
    assert sample.images[0] == sample.images[1]


RANKED = [("d", 1), ("a", 4), ("b", 4), ("c", 3), ("e", "N/A"), ("f", 1), ("c", 2)]


@pytest.mark.parametrize("key", ["rating", "overall_score", "score", "annotations", "rank"])
def test_of_a_ranked_list_ties_with_the_best_and_unrated_answers_are_left_out(key):
    def marks(mark):
        if key == "annotations":
            return {key: {"Helpfulness": {"Rating": str(mark)}, "Honesty": {"Rating": mark}}}
        return {key: 10 - mark if key == "rank" and mark != "N/A" else mark}

    answers = [{"response": text, **marks(mark)} for text, mark in RANKED]
    sample = read({"prompt": "Which?", "completions": answers})
    assert [answer[0].text for answer in sample.answers] == ["a", "c", "d", "f"]  # those below keep the row's order


def test_answers_that_are_left_out_are_counted_in_a_note(tmp_path):
    answers = [{"response": text, "rating": mark} for text, mark in RANKED]
    rows = [{"prompt": "Which?", "completions": answers}, {"prompt": "Which?", "completions": answers[:2]}]
    (tmp_path / "ranked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (note,) = open_source(tmp_path / "ranked.jsonl").notes()
    assert note.startswith(f"{tmp_path}/ranked.jsonl: 3 answers of its first rows are left out, as good as the best")


def test_a_dim_picture_of_a_preference_is_told_of(tmp_path):
    Image.fromarray(np.array([[0, 4095]], np.uint16)).save(tmp_path / "ray.png")
    row = {"question": "Ill?", "chosen": "No.", "rejected": "Yes.", "image": "ray.png"}
    (tmp_path / "rays.jsonl").write_text(json.dumps(row))
    (note,) = open_source(tmp_path / "rays.jsonl").notes()
    assert "no pixel of the 16-bit grey image" in note


def test_grades_of_kto():
    rows = [
        {"prompt": "Hi", "completion": "Ho", "label": True},  # TRL
        {"prompt": [user("Hi")], "completion": [says("Ho")], "label": False},
        {"messages": [user("Hi"), says("Ho")], "label": False},  # ms-swift
        {"conversations": [human("Hi"), gpt("Ho")], "kto_tag": True},  # LLaMA-Factory
        {"instruction": "Hi", "completion": "Ho", "label": True},  # axolotl
        {"question": "Hi", "completion": "Ho", "label": False},
        {"completion": [user("Hi"), says("Ho")], "label": True},
        {"question": "Hi", "answer": "Ho"},
    ]
    chats = [read(row) for row in rows]
    assert [chat.desirable for chat in chats] == [True, False, False, True, True, False, True, None]
    assert [words(chat.messages) for chat in chats] == [["u: Hi", "a: Ho"]] * len(rows)


def test_a_grade_is_of_the_last_answer():
    turns = [user("Hi"), says("Ho"), user("What?"), says("Rain.")]
    assert read({"messages": turns, "label": True}).answers == [3]
    assert read({"messages": turns}).answers == [1, 3]


PAIR = {"prompt": "Hi", "chosen": "Ho", "rejected": "Hu"}
CHATTED = {"messages": [user("Hi"), says("Ho")]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (PAIR | {"rejected": "Ho "}, 'the answers 1 and 2 are the same, so none is better: "Ho "'),
        (PAIR | {"rejected": ""}, "an answer is empty"),
        (PAIR | {"chosen": [says("  ")]}, "an answer is empty"),
        (PAIR | {"chosen": None}, 'the row has the column "rejected", "Hu": it is of a preference'),
        (PAIR | {"chosen": 3, "rejected": [user("Hi"), says("3")]}, "one answer is a whole chat and another an answer"),
        (PAIR | {"prompt": []}, 'the list "prompt" is empty'),
        (PAIR | {"prompt": [user("Hi"), says("He")]}, '"prompt" ends with an answer, "He"'),
        (PAIR | {"score_chosen": 2, "score_rejected": 3}, '"score_chosen" is 2 and "score_rejected" is 3'),
        (PAIR | {"margin": 0.5}, 'the row has the column "margin", 0.5'),
        ({"chosen": "Blue.", "rejected": "Green."}, "do not begin alike, and the row has no prompt"),
        ({"chosen": [says("Ho")], "rejected": [says("Hu")]}, "the row has no prompt: none of the columns messages"),
        ({"chosen": [user("Hi"), says("Ho")], "rejected": [user("He"), says("Hu")]}, 'turn 1 reads "Hi" and "He"'),
        ({"chosen": [user("Hi"), says("Ho")], "rejected": [user("Hi"), user("Hu")]}, "turn 2 reads"),
        (
            {"prompt": [user("A")], "chosen": [user("B"), says("C")], "rejected": [user("B"), says("D")]},
            'an answer begins with a turn of its own that is not of "prompt"',
        ),
        ({"question": "Hi", "chosen": [CALL, says("a")], "rejected": "b"}, 'beside "question" an answer is [{"role"'),
        (CHATTED | {"rejected_response": "Ho"}, "the answers 1 and 2 are the same"),
        (CHATTED | {"rejected_response": ""}, "an answer is empty"),
        (
            CHATTED | {"rejected_response": 3, "rejected_tools": [{"name": "f"}]},
            '"rejected_tools" are others than "tools"',
        ),
        ({"rejected_response": "Ho", "question": "Hi"}, "the row has no other answer that is better"),
        ({"messages": [user("Hi")], "rejected_response": "Ho"}, "an answer is empty, or ends with a turn"),
        (CHATTED | {"images": [PIXEL], "rejected_images": [PIXEL]}, "the answers 1 and 2 are the same"),
        (
            {"prompt": "Hi", "output_1": "a", "output_2": "b", "preference": 0},
            '"preference" is 0, but it names the better',
        ),
        ({"prompt": "Hi", "output_1": "a", "output_2": "b", "preference": True}, '"preference" is true'),
        (
            {"prompt": "Hi", "response_0": "a", "response_1": "b", "better_response_id": 2},
            "the better answer: 0 for response_0, 1",
        ),
        (
            {"context": [user("Hi")], "response1": "a", "response2": "b", "overall_preference": 0},
            "but its sign names the better answer: -1 for response1, 1 for response2. Leave rows out",
        ),
        ({"prompt": "Hi", "response_a": "a", "response_b": "b", "winner": "tie"}, '"winner" is "tie", but it names'),
        (
            {"id": "7", "prompt": "Hi", "answer_0": "a", "answer_1": "b", "liked": 1},
            "with columns={'chosen': 'answer_0', 'rejected': 'answer_1'} where answer_0 is the better answer",
        ),
        (
            {"prompt": "Hi", "answers": [{"answer": "a", "rank": 1}, {"answer": "b", "rank": 1}]},
            "none is better than an",
        ),
        ({"prompt": "Hi", "answers": [{"answer": "a", "rank": 1}, {"answer": "b"}]}, "2 answers, 1 of them rated"),
        (
            {"prompt": "Hi", "answers": [{"answer": ["a"], "rank": 1}, {"answer": "b", "rank": 2}]},
            "whose answer is not words",
        ),
        ({"prompt": "Hi", "answers": [{"answer": "a", "rank": 1}] * 65}, "65 answers, but at most 64 are read"),
        ({"text": "Words.", "rejected_response": "Ho"}, "the row has no other answer that is better"),
        ({"text": "Words.", "rejected_images": [PIXEL]}, "rejected_images, of a preference, beside a document"),
        (CHATTED | {"kto_tag": None}, '"kto_tag" is null, but it says whether the answer is a good one'),
        (CHATTED | {"kto_tag": True, "label": False}, '"label" and "kto_tag" differ'),
        (CHATTED | {"label": 1}, 'the row has the column "label", 1: it is '),
        (PAIR | {"images": [PIXEL], "prompt": "<image><image>Hi"}, "its messages hold more <image> markers"),
    ],
)
def test_rows_of_which_nothing_can_be_learnt_say_why(row, reason):
    with pytest.raises(DataError) as caught:
        read(row)
    assert reason in str(caught.value)


def test_columns_of_other_names_and_a_schema_that_is_named():
    row = {"frage": "Hi", "gut": "Ho", "schlecht": "Hu"}
    mapped = {"question": "frage", "chosen": "gut", "rejected": "schlecht"}
    assert laid_out(read(row, columns=mapped)) == (["u: Hi"], [["a: Ho"], ["a: Hu"]])
    assert laid_out(read(PAIR | {"chosen_response": "x"}, schema="pair")) == (["u: Hi"], [["a: Ho"], ["a: Hu"]])
    assert read(PAIR | {"text": "Words."}, schema="text", columns={"text": "text"}) == Document(
        "Words.", Origin("pairs", "pairs.jsonl", 0, "line 1")
    )
    with pytest.raises(DataError, match=r"needs the columns of a schema: completions \(ranked\)"):
        read(PAIR, schema="ranked")
    with pytest.raises(ConfigError, match="Did you mean 'chosen'"):
        read(row, columns={"choosen": "gut"})


def test_the_chosen_answers_alone_are_learnt_where_columns_say_so():
    assert read(PAIR, columns={"prompt": "prompt", "completion": "chosen"}).answer == "Ho"
    assert read(CHATTED | {"rejected_response": "Hu"}, columns={"messages": "messages"}).answer == "Ho"
    chats = {"chosen": [user("Hi"), says("Ho")], "rejected": [user("Hi"), says("Hu")]}
    assert read(chats, columns={"messages": "chosen"}).answer == "Ho"


def test_training_on_answers_refuses_what_is_not_all_good_and_says_the_way_out():
    with pytest.raises(DataError, match=r"pairs.jsonl, line 1: the row holds 2 answers of which .*completion: chosen"):
        supervised(read(PAIR))
    with pytest.raises(DataError, match="graded as a bad one"):
        supervised(read(CHATTED | {"label": False}))
    good = read(CHATTED | {"label": True})
    assert supervised(good) is good
    assert best_answered(read(PAIR)) == read(PAIR).chats[0]


@pytest.mark.parametrize("name", ROWS)
def test_no_column_of_a_known_layout_is_told_as_not_looked_at(name, tmp_path):
    row = {key: value for key, value in ROWS[name][0].items() if not isinstance(value, dict) or "bytes" not in value}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert open_source(tmp_path / "rows.jsonl").notes() == []


def test_tables_of_datasets_with_pictures_and_nested_lists(tmp_path):
    """VLFeedback's features: a sequence of structs is stored as a struct of lists, a picture as bytes and path."""
    judged = {"Rating": datasets.Value("string"), "Rationale": datasets.Value("string")}
    answers = {
        "annotations": {"Helpfulness": judged},
        "model": datasets.Value("string"),
        "response": datasets.Value("string"),
    }
    marks = [{"Helpfulness": {"Rating": mark, "Rationale": "-"}} for mark in ("2", "5", "N/A")]
    listed = [{"annotations": a, "model": "m", "response": text} for a, text in zip(marks, "xyz", strict=True)]
    picture = Image.new("RGB", (8, 8))
    for form, value in (
        (datasets.Sequence(answers), {key: [item[key] for item in listed] for key in listed[0]}),
        (datasets.List(answers), listed),
    ):
        features = datasets.Features(
            {"prompt": datasets.Value("string"), "image": datasets.Image(), "completions": form}
        )
        rows = Dataset.from_dict({"prompt": ["Which?"], "image": [picture], "completions": [value]}, features=features)
        rows.to_parquet(tmp_path / "rows.parquet")
        assert pq.read_schema(tmp_path / "rows.parquet").field("image").type.num_fields == 2
        sample = open_source(tmp_path / "rows.parquet")[0]
        assert laid_out(sample) == (["u: *Which?"], [["a: y"], ["a: x"]])
        assert isinstance(sample.prompt[0].parts[0], ImagePart)
        assert sample.prompt[0].parts[0].media.data.startswith(b"\x89PNG")


def test_pairs_in_a_table_of_text(tmp_path):
    (tmp_path / "pairs.csv").write_text(
        'prompt,chosen,rejected\nHi,Ho,Hu\n"[{""role"": ""user"", ""content"": ""A""}]",1,2\n'
    )
    samples = [sample for _, sample in open_source(tmp_path / "pairs.csv").shards[0].rows()]
    assert [laid_out(sample) for sample in samples] == [
        (["u: Hi"], [["a: Ho"], ["a: Hu"]]),
        (["u: A"], [["a: 1"], ["a: 2"]]),
    ]


COLUMNS = sorted({name for layout in LAYOUTS for name, _ in layout.columns} | {
    "prompt", "question", "messages", "conversations", "images", "img_path", "score_chosen", "scores", "label",
    "kto_tag",
})  # fmt: skip
INNER = [
    "role",
    "content",
    "from",
    "value",
    "rank",
    "rating",
    "response",
    "answer",
    "annotations",
    "Rating",
    "question",
]
KEYS = st.sampled_from([*COLUMNS, *INNER])
LEAVES = st.sampled_from(
    ["user", "assistant", "gpt", "<image>", PIXEL, SPOKEN, "[", '[{"role": "user"}]', '{"rejected":1}', "N/A", "1", "",
     0, 1, 1e400, float("nan"), 10**400, True, None, b"a"]
)  # fmt: skip
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=14
)


@settings(max_examples=examples(300, 2000))
@given(
    st.dictionaries(st.sampled_from(COLUMNS), VALUES, min_size=2, max_size=5),
    st.sampled_from(["auto", "pair", "ranked"]),
)
def test_any_row_is_a_sample_or_a_data_error(row, schema):
    try:
        sample = read(row, schema)
    except DataError:
        return
    assert isinstance(sample, Chat | Document | Preference)
    if isinstance(sample, Preference):
        assert len(sample.answers) >= 2
        assert all(chat.answers and chat.messages[-1].role == "assistant" for chat in sample.chats)


def test_a_text_that_only_looks_like_a_pair_is_a_document():
    for text in ('{"rejected": 1}', '{"question": "a", "chosen": "b", "rejected"', "[" * 100_000 + '"rejected"'):
        assert read({"text": text}).content == text


def test_base64_beside_a_path_of_the_same_letters_is_another_picture():
    letters = base64.b64encode(b"abc").decode()
    parts = [{"type": "image", "image": {"base64": letters}}, {"type": "image", "image": letters}]
    with pytest.raises(DataError, match="does not exist in the folder"):
        read({"messages": [user(parts), says("Ho")]})
