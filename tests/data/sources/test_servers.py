"""Datasets behind servers and stores of others: all rows, or one bounded sentence, whatever is answered or raised."""

import http.server
import json
import re
import threading
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from headway import stores
from headway.data.samples import Media, SampleError
from headway.data.sources import open_source
from headway.data.sources.identity import identify, with_hashes
from headway.errors import DataError, StoreError

ROWS = b"".join(json.dumps({"text": f"text {number}"}).encode() + b"\n" for number in range(200))

# Answers to GET: status, length that is promised, headers, body; and what is said of them, None where all rows come.
ANSWERS = {
    "ok": ((200, len(ROWS), {}, ROWS), None),
    "no length": ((200, None, {}, ROWS), None),
    "ranges ignored": ((200, len(ROWS), {"Accept-Ranges": "bytes"}, ROWS), None),
    "500": ((500, 0, {}, b""), "500, message='Internal Server Error'"),
    "403": ((403, 0, {}, b""), "403, message='Forbidden'"),
    "404": ((404, 0, {}, b""), "404, message='Not Found'"),
    "reason of a stranger": ((500, 0, {"reason": "\x1b[31m" + "x" * 5000}, b""), r"message='bad \\x1b\[31mxxx"),
    "to a file here": ((302, 0, {"Location": "file:///etc/passwd"}, b""), "NonHttpUrlRedirectClientError"),
    "to itself": ((302, 0, {"Location": ""}, b""), "TooManyRedirects"),
    "cut": ((200, len(ROWS), {}, ROWS[:900]), "received 900 of"),
    "promises more": ((200, len(ROWS) + 5000, {}, ROWS), "Not enough data"),
    # What follows the promised length is refused if it arrives with the rest, and never read if it is late.
    "promises less": ((200, 100, {}, ROWS), "Data after|not valid JSON"),
    "negative length": ((200, -5, {}, b""), "Invalid character in Content-Length"),
    "length of words": ((200, "abc", {}, b""), "Invalid character in Content-Length"),
    "huge length": ((200, 10**18, {}, b""), "Not enough data"),
    "a part without end": ((206, None, {"Content-Range": "bytes 0-99/100"}, None), "more than the .* that were asked"),
    "a line without end": ((200, None, {}, None), "the most that a row may have"),
    "page to sign in": ((200, None, {"Content-Type": "text/html"}, b"<!DOCTYPE html>"), "it is a web page"),
    "stalls": ((200, len(ROWS), {}, "stall"), "its server was silent for 0.5 s"),
    "silent": ((None, 0, {}, b""), "its server was silent for 0.5 s"),
}


class Answering(http.server.BaseHTTPRequestHandler):
    """Answers as its path says."""

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        status, length, headers, _ = self._answer()
        if status == 206:  # so that parts are asked for
            status, length = 200, 100
        self._begin(status, length, headers)

    def do_GET(self):
        status, length, headers, body = self._answer()
        self._begin(status, length, headers)
        try:
            while body is None:
                self.wfile.write(b"a" * 2**16)
            self.wfile.write(ROWS[:100] if body == "stall" else body)
            if body == "stall":
                self.wfile.flush()
                self.server.ended.wait(30)
        except OSError:
            pass  # the reader has gone, as it should

    def _answer(self):
        return ANSWERS[self.path.split("/")[1].replace("%20", " ")][0]

    def _begin(self, status, length, headers):
        if status is None:
            self.server.ended.wait(30)
            return
        self.send_response(status, "bad " + reason if (reason := headers.get("reason")) else None)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            if name != "reason":
                self.send_header(name, value or self.path)
        self.end_headers()


@pytest.fixture(scope="module")
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.ended = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.ended.set()
    server.shutdown()
    server.server_close()


def contents(url):
    source = open_source(url)
    return [source[row].content for row in range(len(source))]


def is_sentence(message, url):
    """Whether a message is bounded and shows no control character."""
    return message.replace(url, "").isprintable() and len(message) < 1200


@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_of_a_server_gives_all_rows_or_one_sentence(server, name, monkeypatch):
    monkeypatch.setattr(stores, "SILENCE_S", 0.5)
    monkeypatch.setattr("headway.data.sources.reader.MOST_ROW_BYTES", 2**20)
    url, message = f"{server}/{name.replace(' ', '%20')}/rows.jsonl", ANSWERS[name][1]
    if message is None:
        assert contents(url) == [f"text {number}" for number in range(200)]
        return
    with pytest.raises(DataError, match=message) as caught:
        contents(url)
    assert is_sentence(str(caught.value), url)
    if name == "404":
        assert stores.size_of(Path(url)) is None
    elif not message.startswith(("the most", "it is a web", "Data after")):  # of rows, and not of an output of bytes
        with pytest.raises(StoreError, match=message) as caught:
            stores.read_bytes(Path(url))
        assert is_sentence(str(caught.value), url)


@pytest.mark.slow  # it answers for longer than silence may last
def test_a_slow_server_is_waited_for(server, monkeypatch):
    monkeypatch.setattr(stores, "SILENCE_S", 1.0)

    def drip(self):
        self._begin(200, len(ROWS), {})
        for start in range(0, len(ROWS), 200):
            self.wfile.write(ROWS[start : start + 200])
            self.wfile.flush()
            time.sleep(0.1)

    monkeypatch.setattr(Answering, "do_GET", drip)
    assert len(contents(f"{server}/ok/slow.jsonl")) == 200


class ForeignError(Exception):
    """An error of a store's library, which has no base that Python knows."""


class Foreign(MemoryFileSystem):
    """A store whose library raises errors of its own at one of its calls."""

    protocol = "foreign"
    cachable = False
    fails_at = ""
    store, pseudo_dirs = {}, [""]

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("foreign://").strip("/")

    def _fail(self, call):
        if self.fails_at == call:
            raise ForeignError("SlowDown: \x1b[31m" + "reduce your rate " * 500)

    def info(self, path, **kwargs):
        self._fail("info")
        return super().info(path, **kwargs)

    def find(self, path, **kwargs):
        self._fail("find")
        return super().find(path, **kwargs)

    def _open(self, path, *args, **kwargs):
        self._fail("open")
        file = super()._open(path, *args, **kwargs)
        if self.fails_at in ("read", "close", "short"):
            file = ForeignFile(file, self)
        return file


class ForeignFile:
    def __init__(self, file, system):
        self._file, self._system, self.size = file, system, len(file.getvalue()) + 10 * (system.fails_at == "short")

    def read(self, num_bytes=-1):
        if self._file.tell() >= 100:
            self._system._fail("read")
        return self._file.read(min(num_bytes, 100))

    def close(self):
        self._system._fail("close")

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.fixture
def store(monkeypatch):
    fsspec.register_implementation("foreign", Foreign, clobber=True)
    monkeypatch.setattr(Foreign, "store", {})
    Foreign().pipe_file("/data/rows.jsonl", ROWS)
    return "foreign://data/rows.jsonl"


@pytest.mark.parametrize("call", ["info", "open", "read", "close", "short"])
def test_whatever_a_stores_library_raises_is_an_error_of_the_source(store, monkeypatch, call):
    monkeypatch.setattr(Foreign, "fails_at", call)
    words = (
        re.escape(r"ForeignError: SlowDown: \x1b[31mreduce") if call != "short" else "bytes that its server promised"
    )
    with pytest.raises(DataError, match=words) as caught:
        contents(store)
    assert is_sentence(str(caught.value), store)
    if call == "info":
        return
    monkeypatch.setattr(Foreign, "fails_at", "")
    source = open_source(store)
    monkeypatch.setattr(Foreign, "fails_at", call)
    with pytest.raises(DataError, match=words):  # its hash, and a medium that lies there
        with_hashes(identify([source]), [source])
    with pytest.raises(OSError, match="ForeignError" if call != "short" else words):
        Media(store).read()
    for read in (stores.read_bytes, stores.fetch):  # what a run or a command left there
        with pytest.raises(StoreError, match=words) as caught:
            read(Path(store))
        assert is_sentence(str(caught.value), store)


def test_a_glob_in_a_store_that_fails_is_an_error_of_the_source(store, monkeypatch):
    monkeypatch.setattr(Foreign, "fails_at", "find")
    with pytest.raises(DataError, match="ForeignError"):
        open_source("foreign://data/*.jsonl")


def test_a_stream_ends_with_the_row_that_says_so(store, monkeypatch):
    monkeypatch.setattr(Foreign, "fails_at", "read")
    (shard,) = open_source(store).shards
    *before, last = [sample for _, sample in shard.rows()]
    assert [sample.content for sample in before] == ["text 0", "text 1", "text 2", "text 3", "text 4"][: len(before)]
    assert isinstance(last, SampleError)
    assert "ForeignError" in str(last)
