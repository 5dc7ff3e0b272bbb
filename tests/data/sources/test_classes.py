"""Rows of a class, media with words under other names, and folders that are named for their classes."""

import json
import pickle
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from headway.cache import cache_root
from headway.data.samples import Document
from headway.data.sources import open_source
from headway.data.sources.identity import identify, with_hashes
from headway.data.sources.opening import samples_of
from headway.errors import DataError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    for name in ("train/cat/1.png", "train/cat/2.png", "train/dog/1.png", "test/cat/3.png", "test/dog/3.png"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(data / name)
    return data


def asked_and_answered(sample):
    """Pictures by their names, the words beside them, and the answer."""
    user, assistant = sample.messages
    pictures = ["/".join(media.path.split("/")[-2:]) if media.path else "bytes" for media in sample.images]
    return (*pictures, user.text), assistant.text


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", "jsonl"])
def test_a_table_of_texts_and_classes_is_learnt_at_first_try(folder, ending):
    rows = [("Fine, really.", "good"), ("Bad.", "bad"), ("", "bad")]
    path = folder / f"reviews.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table({name: [row[n] for row in rows] for n, name in enumerate(("text", "label"))}), path)
    elif ending == "jsonl":
        path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    else:
        separator = {"csv": ",", "tsv": "\t"}[ending]
        path.write_text("".join(f'"{a}"{separator}{b}\n' for a, b in [("text", "label"), *rows]))
    source = open_source(path)
    assert [asked_and_answered(source[n]) for n in (0, 1)] == [(("Fine, really.",), "good"), (("Bad.",), "bad")]
    assert isinstance(source[2], Document)
    assert source[2].is_blank  # nothing to tell a class of: left out and counted, as empty documents are
    assert len(list(samples_of(source))) == 2


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"text": "Good.", "label": 1}, ("Good.",), "1"),
        ({"text": "Good.", "label": False}, ("Good.",), "false"),
        ({"question": "Is it?", "label": "yes"}, ("Is it?",), "yes"),
        ({"image": "train/cat/1.png", "label": "cat"}, ("cat/1.png", ""), "cat"),
        ({"image": "train/cat/1.png", "text": "Which?", "label": 3}, ("cat/1.png", "Which?"), "3"),
        ({"image": "train/cat/1.png", "question": "Which?", "label": "cat"}, ("cat/1.png", "Which?"), "cat"),
        ({"images": ["train/cat/1.png", "train/dog/1.png"], "label": "cat"}, ("cat/1.png", "dog/1.png", ""), "cat"),
        ({"image": "train/cat/1.png", "caption": "a cat"}, ("cat/1.png", ""), "a cat"),
    ],
)
def test_the_class_is_the_answer_to_what_the_row_holds(folder, row, question, answer):
    (folder / "rows.jsonl").write_text(json.dumps(row))
    assert asked_and_answered(open_source(folder / "rows.jsonl")[0]) == (question, answer)


def test_columns_of_other_names_are_mapped_to_text_and_label(folder):
    (folder / "rows.csv").write_text("review,sentiment,stars\nFine.,good,5\n")
    source = open_source(folder / "rows.csv", columns={"text": "review", "label": "sentiment"})
    assert asked_and_answered(source[0]) == (("Fine.",), "good")


@pytest.mark.parametrize("name", ["transcription", "sentence"])
def test_words_of_sounds_stand_under_the_names_of_their_corpora(folder, name):
    (folder / "a.wav").write_bytes(b"RIFF")
    (folder / "metadata.csv").write_text(f"file_name,{name}\na.wav,as spoken\n")
    source = open_source(folder / "metadata.csv")
    assert (source[0].answer, source.notes()) == ("as spoken", [])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "Good.", "label": None}, '"label" is null, and a class is a word or a number. Delete rows without'),
        ({"text": "Good.", "label": ""}, '"label" is "", and a class'),
        ({"text": "Good.", "label": [1, 2]}, "If there are several, columns={'label': 'label.0'} takes the first"),
        ({"premise": "a", "hypothesis": "b", "label": 1}, "with columns={'text': 'premise', 'label': 'label'}."),
        ({"question": "a", "text": "b", "label": 1}, "be read in 2 ways, by text and label or by question and label."),
        ({"prompt": "a", "completion": "b", "label": "good"}, '"label", "good": it is KTO'),
    ],
)
def test_a_class_that_cannot_be_learnt_is_named_with_the_way_out(folder, row, says):
    (folder / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError) as caught:
        open_source(folder / "rows.jsonl")[0]
    assert says in str(caught.value)


def test_a_folder_for_each_class_is_a_dataset(folder):
    (folder / "train" / "README.md").write_text("About")
    source = open_source(folder / "train")
    rows = [asked_and_answered(source[row]) for row in range(len(source))]
    assert rows == [(("cat/1.png", ""), "cat"), (("cat/2.png", ""), "cat"), (("dog/1.png", ""), "dog")]
    assert [sample for _, sample in source.shards[0].rows(1)] == [source[1], source[2]]
    assert str(source[2].origin) == f"{folder}/train, dog/1.png"
    assert (source.name, source.notes()) == ("train", [])
    assert asked_and_answered(pickle.loads(pickle.dumps(source))[2]) == rows[2]


def test_such_a_folder_is_the_same_data_without_the_cache_and_other_data_with_another_picture(folder):
    def identity():
        sources = [open_source(folder / "train")]
        return with_hashes(identify(sources), sources), sources[0].fingerprint()

    before = identity()
    shutil.rmtree(cache_root())
    assert identity() == before
    Image.new("RGB", (8, 8)).save(folder / "train" / "dog" / "2.png")
    after = identity()
    assert (after[0] != before[0], after[1] != before[1]) == (True, True)


def test_folders_whose_classes_cannot_be_told_are_refused(folder):
    with pytest.raises(DataError, match=r"holds the splits test, train. Give one of them, such as .*/data/train"):
        open_source(folder)
    with pytest.raises(DataError, match="or sort them into a folder for each class"):
        open_source(folder / "train" / "cat")
    (folder / "train" / "dog" / "more").mkdir()
    shutil.copy(folder / "train/dog/1.png", folder / "train/dog/more/2.png")
    with pytest.raises(DataError, match=r"named for its class, as cat/1.png; dog/more/2.png does not"):
        open_source(folder / "train")


def test_texts_beside_pictures_are_not_taken_for_all_there_is(folder):
    (folder / "train" / "cat" / "1.txt").write_text("a cat")
    with pytest.raises(DataError, match=r"holds texts, such as cat/1.txt, beside pictures.*such as cat/1.png"):
        open_source(folder / "train")
    assert open_source(f"{folder}/train/cat/*.txt")[0].content == "a cat"
