"""Which files a path names, in which format, and when two sources are the same."""

import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headway.data.sources import FORMATS, open_source
from headway.data.sources.files import find_files
from headway.errors import ConfigError, DataError


@pytest.fixture
def folder(tmp_path):
    for number in range(3):
        (tmp_path / f"part-{number}.jsonl").write_text(json.dumps({"text": f"text {number}"}))
    return tmp_path


def test_a_folder_and_a_glob_stand_for_their_files(folder):
    (folder / "README.md").write_text("About")
    (folder / ".hidden.jsonl").write_text("{")
    (folder / "_SUCCESS").write_text("")
    for path in (folder, f"{folder}/*.jsonl", f"{folder}/part-[0-2].jsonl"):
        source = open_source(path)
        assert [source[row].content for row in range(len(source))] == ["text 0", "text 1", "text 2"]
    assert len(open_source(folder / "part-[12].jsonl")) == 2


def test_a_name_with_brackets_is_a_name_first(tmp_path):
    (tmp_path / "a[1].jsonl").write_text('{"text": "a"}')
    assert open_source(tmp_path / "a[1].jsonl")[0].content == "a"


def test_a_dataset_is_called_by_its_path_or_a_given_name(folder):
    assert open_source(folder / "part-0.jsonl").name == "part-0"
    assert open_source(f"{folder}/").name == folder.name
    source = open_source(folder, name="mine")
    assert (source.name, source[0].origin.source) == ("mine", "mine")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none.jsonl", r"none\.jsonl cannot be read: No such file"),
        ("none-*.jsonl", r"none-\*\.jsonl cannot be read: No such file"),
        ("nothing", "nothing is a folder without files"),
    ],
)
def test_a_missing_dataset_is_named(folder, name, says):
    (folder / "nothing").mkdir()
    with pytest.raises(DataError, match=says):
        open_source(folder / name)


@pytest.mark.parametrize(("extension", "mark"), [(".gz", b"\x1f\x8b\x08\x00"), (".zst", b"\x28\xb5\x2f\xfd\x04")])
def test_a_compressed_file_under_a_plain_name_is_told_its_extension(tmp_path, extension, mark):
    (tmp_path / "a.jsonl").write_bytes(mark + b"\xff\n")
    ((_, error),) = open_source(tmp_path / "a.jsonl").shards[0].rows()
    assert f"it is compressed, though its name does not say so. Add {extension} to the file's name" in str(error)


def test_an_unknown_protocol_is_named():
    with pytest.raises(DataError, match="The dataset nowhere://a cannot be read: Protocol not known: nowhere"):
        open_source("nowhere://a")


@pytest.mark.parametrize("name", ["a.data", "a", "a.parquet.gz", "a.gz"])
def test_an_unknown_format_names_those_that_are_known(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match=rf"{name} is not known by its extension\. Known are \.jsonl, .*, tokens\."):
        open_source(tmp_path / name)
    with pytest.raises(ConfigError, match=f"Unknown format 'xlsx'. Allowed: auto, {', '.join(FORMATS)}"):
        open_source(tmp_path / name, format="xlsx")


def test_a_folder_of_several_formats_is_not_guessed_at(folder):
    (folder / "notes.txt").write_text("a")
    with pytest.raises(DataError, match=r"several formats, jsonl, text.*such as .*/\*\.(jsonl|txt), or one file"):
        open_source(folder)


def test_a_format_may_be_named(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match="for one per line, name the format jsonl"):
        open_source(tmp_path / "a.json")[0]
    assert open_source(tmp_path / "a.json", format="jsonl")[0].content == "a"
    (tmp_path / "a.data").write_text("one\ntwo")
    assert open_source(tmp_path / "a.data", format="text", sample_by="line")[1].content == "two"


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("a.jsonl", {"sample_by": "line"}, "sample_by is 'line', but no file of .* takes it"),
        ("a.txt", {"end_token": 3}, "end_token is 3, but no file"),
        ("a.txt", {"sample_by": "word"}, "cannot be read by 'word'. Allowed for sample_by: paragraph, line, document"),
        ("a.bin", {"end_token": 3}, "were given the dtype None"),
        ("a.bin", {"token_dtype": "uint16"}, "Name the id that ends a document"),
        ("a.bin", {"token_dtype": "float32", "end_token": 3}, "dtype float32"),
        ("a.npy", {"token_dtype": "uint16"}, "A NumPy file tells its own"),
    ],
)
def test_a_setting_that_cannot_take_effect_is_refused(tmp_path, name, settings, says):
    (tmp_path / name).write_text('{"text": "a"}')
    with pytest.raises(ConfigError, match=says):
        open_source(tmp_path / name, **settings)


def test_the_fingerprint_changes_with_content_and_settings(folder, memory):
    before = open_source(folder).fingerprint()
    assert open_source(folder).fingerprint() == before
    assert open_source(folder, schema="text").fingerprint() != before
    (folder / "part-1.jsonl").write_text('{"text": "text 9"}')  # as long as before, but later
    changed = open_source(folder).fingerprint()
    assert changed != before
    (folder / "part-3.jsonl").write_text('{"text": "more"}')
    assert open_source(folder).fingerprint() not in (before, changed)

    memory.pipe_file("/a.jsonl", b'{"text": "a"}')
    remote = open_source("memory://a.jsonl").fingerprint()
    assert open_source("memory://a.jsonl").fingerprint() == remote
    memory.pipe_file("/a.jsonl", b'{"text": "b"}')
    assert open_source("memory://a.jsonl").fingerprint() != remote

    (folder / "a.txt").write_text("a\n\nb")
    by = {how: open_source(folder / "a.txt", sample_by=how).fingerprint() for how in ("line", "paragraph")}
    assert len(set(by.values())) == 2


def test_a_changed_file_is_read_anew(tmp_path):
    for words in (["a"], ["b", "c"]):
        pq.write_table(pa.table({"text": words}), tmp_path / "a.parquet")
        source = open_source(tmp_path / "a.parquet")
        assert [source[row].content for row in range(len(source))] == words


@pytest.mark.parametrize("pattern", ["*", "**", "**/*.jsonl", "*/*.jsonl", "a/**/c.jsonl", "?/[bc]*", "**/b/**", ".*"])
def test_a_glob_names_the_files_that_fsspec_names(tmp_path, pattern):
    for name in ("a.jsonl", "a/b.jsonl", "a/b/c.jsonl", "a/.hidden/c.jsonl", "b/c.jsonl", ".d.jsonl", "b/x[1].jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text('{"text": "a"}')
    (tmp_path / "link").symlink_to(tmp_path / "a")  # to a folder: through none, so that there is no circle
    (tmp_path / "e.jsonl").symlink_to(tmp_path / "a.jsonl")
    system = fsspec.filesystem("file")
    names = [name for name in sorted(system.glob(f"{tmp_path}/{pattern}")) if system.isfile(name)]
    if not pattern.startswith("."):
        names = [name for name in names if not Path(name).name.startswith(".")]
    files, _ = find_files(f"{tmp_path}/{pattern}")
    assert [file.url for file in files] == names != []
    if "**/" in pattern:
        assert [file.url for file in find_files(f"{tmp_path}/{pattern.replace('**/', '**/**/**/')}")[0]] == names


@pytest.mark.parametrize("path", ["{}", "{}/**/*.jsonl", "{}/*/*.jsonl"])
def test_a_glob_or_folder_without_end_is_refused(tmp_path, path, monkeypatch):
    monkeypatch.setattr("headway.data.sources.files._MOST_PATHS", 20)
    for number in range(30):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "a"}')
    with pytest.raises(DataError, match=r"lie more than 20 files and folders.* Name a folder further down"):
        open_source(path.format(tmp_path))
    with pytest.raises(DataError, match="would follow all links of its server"):
        open_source("http://127.0.0.1:9/**/a.jsonl")
