"""Files are known again by name, size, time and hash, here and behind URLs."""

import json
import os
import tarfile

from PIL import Image

from headway.data.sources import open_source
from headway.data.sources.identity import UNASKED_BYTES, changes, identify, is_small, with_hashes


def test_names_stand_below_the_root_and_several_sources_are_told_apart(tmp_path):
    for place in ("a/x/one.jsonl", "a/y/one.jsonl", "b/one.jsonl"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("{}\n")
    sources = [open_source(tmp_path / "a", name="a"), open_source(tmp_path / "b/*.jsonl", name="b")]
    files = identify(sources)
    assert [[file.name for file in of] for of in files.values()] == [["x/one.jsonl", "y/one.jsonl"], ["one.jsonl"]]
    (tmp_path / "a/y/one.jsonl").write_text("{}\n" * 2)
    later = identify([open_source(tmp_path / "a", name="a"), sources[1]])
    (clause,) = changes(files, later, "size")
    assert clause.startswith("y/one.jsonl of the source a has ")


def test_a_remote_file_is_known_by_its_size_and_by_what_its_store_says_or_by_its_hash(memory):
    def described():
        source = open_source("memory://a.jsonl", name="a")
        return with_hashes(identify([source]), [source])

    memory.pipe_file("/a.jsonl", b'{"text": "a"}')
    before = described()
    assert not is_small([open_source("memory://a.jsonl")])  # nothing is downloaded unasked
    memory.pipe_file("/a.jsonl", b'{"text": "a"}')
    assert changes(before, described(), "hash") == []
    memory.pipe_file("/a.jsonl", b'{"text": "b"}')
    (clause,) = changes(before, described(), "hash")
    assert clause.startswith("a.jsonl of the source a has other content")


def test_much_data_are_hashed_when_asked_only(tmp_path):
    path = tmp_path / "a.bin"
    with path.open("wb") as file:
        file.truncate(UNASKED_BYTES + 2)  # a sparse file takes no room
    assert not is_small([open_source(path, token_dtype="uint16", end_token=0)])
    os.truncate(path, 64)
    assert is_small([open_source(path, token_dtype="uint16", end_token=0)])


def test_media_that_rows_name_are_not_compared_but_those_within_files_are(tmp_path):
    """As docs/data.md says: the size of a tar shard's picture is part of the shard, a picture beside rows is not."""
    row = {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    files = {}
    for colour in ("red", "blue"):
        Image.new("RGB", (8, 8), colour).save(tmp_path / "a.png")
        with tarfile.open(tmp_path / "shard.tar", "w") as tar:
            tar.add(tmp_path / "a.png", "0.png")
        sources = [open_source(tmp_path / name) for name in ("rows.jsonl", "shard.tar")]
        files[colour] = with_hashes(identify(sources), sources)
    assert [clause.split()[0] for clause in changes(files["red"], files["blue"], "hash")] == ["shard.tar"]


def test_a_digest_in_the_cache_that_was_cut_short_is_made_anew(tmp_path, cache):
    (tmp_path / "a.jsonl").write_text("{}\n")
    sources = [open_source(tmp_path / "a.jsonl")]
    whole = with_hashes(identify(sources), sources)
    (known,) = (cache / "hashes").iterdir()
    known.write_text("12")
    assert with_hashes(identify(sources), sources) == whole
