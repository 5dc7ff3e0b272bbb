import errno
import json
import subprocess
import sys

import pytest

from headway.errors import ConfigError, LogError
from headway.log.jsonl import LineFile, read_jsonl


def append(path, *records):
    file = LineFile(path)
    for record in records:
        file.append(record)
    file.close()


def test_lines_are_appended_and_read_back(tmp_path):
    path = tmp_path / "deep" / "er" / "a.jsonl"
    append(path, {"step": 1})
    append(path, {"step": 2, "text": "line\nbreak"})
    assert path.read_text().count("\n") == 2
    assert read_jsonl(path) == [{"step": 1}, {"step": 2, "text": "line\nbreak"}]


@pytest.mark.parametrize("fragment", [b'{"step": 2, "mf', b"\0\0\0\0", b"\xff\xfe{", b"3"])
def test_a_torn_last_line_is_passed_over_and_removed_when_the_file_goes_on(tmp_path, fragment):
    path = tmp_path / "a.jsonl"
    append(path, {"step": 1})
    with path.open("ab") as file:
        file.write(fragment)
    assert read_jsonl(path) == [{"step": 1}]
    append(path, {"step": 2})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_whole_last_line_that_lacks_its_newline_is_kept(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}')
    assert read_jsonl(path) == [{"step": 1}]
    append(path, {"step": 2})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_fragment_longer_than_a_chunk_is_found_to_its_start(tmp_path):
    path = tmp_path / "a.jsonl"
    append(path, {"step": 1})
    with path.open("ab") as file:
        file.write(b'{"x": "' + b"y" * 300_000)
    append(path, {"step": 2})
    assert [record["step"] for record in read_jsonl(path)] == [1, 2]


@pytest.mark.parametrize("content", [b"My notes.\nOn two lines", b"one line of notes", b"step,mfu\n1,0.4\n"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="does not begin with a JSON object"):
        LineFile(path)
    assert path.read_bytes() == content


def test_a_damaged_line_inside_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\noops\n{"step": 3}\n')
    with pytest.raises(LogError, match="line 2 is not a JSON object"):
        read_jsonl(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(LogError, match=r"none\.jsonl cannot be read: No such file"):
        read_jsonl(tmp_path / "none.jsonl")


def test_a_path_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be opened for appending: File exists"):
        LineFile(tmp_path / "file" / "a.jsonl")


def test_a_second_process_is_refused_an_exclusive_file(tmp_path):
    path = tmp_path / "a.jsonl"
    held = LineFile(path, exclusive=True)
    code = (
        "import sys, pathlib; from headway.log.jsonl import LineFile; "
        "LineFile(pathlib.Path(sys.argv[1]), exclusive=True)"
    )
    refused = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert "is open for writing already, in another process" in refused.stderr
    held.close()
    subprocess.run([sys.executable, "-c", code, path], check=True)


def test_a_line_that_a_full_disk_cut_off_is_taken_back(tmp_path):
    path = tmp_path / "a.jsonl"
    # A limit on the file's size is the full disk that a test can have: the write stops at 40 bytes.
    code = """
import json, pathlib, resource, signal, sys
from headway.log.jsonl import LineFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = LineFile(pathlib.Path(sys.argv[1]))
file.append({"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
try:
    file.append({"step": 2, "text": "x" * 100})
except OSError as error:
    print(error.errno)
"""
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert int(done.stdout) == errno.ENOSPC
    assert path.read_bytes() == json.dumps({"step": 1}).encode() + b"\n"
