from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from headway.data.encode import Encoder
from headway.data.index import build_index
from headway.data.index.store import KnownEncoder, stored_index
from headway.models import load_processor
from headway.synthetic.processor import write_processor

SETTINGS = {"max_characters": None}


@pytest.fixture
def folder(tmp_path):
    return write_processor(tmp_path / "model", ["Which digits"], patch_size=8)


def known(folder, cache, settings=SETTINGS):
    return KnownEncoder(str(folder), settings, cache).fingerprint


def test_an_encoder_is_known_once_its_fingerprint_was_kept(folder, tmp_path):
    assert known(folder, tmp_path) is None
    KnownEncoder(str(folder), SETTINGS, tmp_path).remember("f" * 64)

    assert known(folder, tmp_path) == "f" * 64
    assert known(folder, tmp_path, {"max_characters": 7}) is None
    assert known(tmp_path / "elsewhere", tmp_path) is None


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja", "preprocessor_config.json", "new.json"])
def test_a_changed_or_added_file_is_noticed_though_size_and_time_are_the_same(folder, tmp_path, file):
    path = folder / file
    first = KnownEncoder(str(folder), SETTINGS, tmp_path)
    first.remember("f" * 64)
    content = path.read_bytes() if path.exists() else b"{}"
    path.write_bytes(content.replace(b"}", b" ", 1) if path.exists() else content)

    assert known(folder, tmp_path) is None
    first.remember("0" * 64)  # of an encoder opened meanwhile: which of both files it read, nobody knows
    assert known(folder, tmp_path) is None


def test_another_version_of_a_library_is_noticed(folder, tmp_path, monkeypatch):
    KnownEncoder(str(folder), SETTINGS, tmp_path).remember("f" * 64)

    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} of tomorrow")

    assert known(folder, tmp_path) is None


def test_weights_are_not_read_and_adapters_are_never_known(folder, tmp_path):
    KnownEncoder(str(folder), SETTINGS, tmp_path).remember("f" * 64)
    (folder / "model.safetensors").write_bytes(b"weights")
    assert known(folder, tmp_path) == "f" * 64

    (folder / "adapter_config.json").write_text("{}")
    assert known(folder, tmp_path) is None


def test_a_stored_index_is_that_of_the_encoder(chats, folder, tmp_path):
    source, encoder = chats(10), Encoder(load_processor(folder))
    assert stored_index(source, encoder.fingerprint(), tmp_path) is None
    built = build_index(source, encoder, tmp_path, workers=0)

    found = stored_index(source, encoder.fingerprint(), tmp_path)

    assert found is not None
    assert (found.path, found.tokens.tolist()) == (built.path, built.tokens.tolist())
    assert stored_index(source, "f" * 64, tmp_path) is None


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A server that answers as the Hub does when it is asked for a file's commit, and a cache with one copy."""

    class Hub(BaseHTTPRequestHandler):
        commit = "a" * 40

        def do_HEAD(self):
            self.send_response(200)
            self.send_header("x-repo-commit", type(self).commit)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    copy = tmp_path / "hub" / "models--some--model"
    write_processor(copy / "snapshots" / Hub.commit, ["Which digits"], patch_size=8)
    (copy / "snapshots" / Hub.commit / "config.json").write_text("{}")
    (copy / "refs").mkdir()
    (copy / "refs" / "main").write_text(Hub.commit)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    from headway.hub import obstacle_to_hub

    obstacle_to_hub.cache_clear()
    yield Hub
    server.shutdown()
    server.server_close()
    obstacle_to_hub.cache_clear()


def test_a_copy_from_the_hub_is_known_as_long_as_it_is_the_newest(hub, tmp_path):
    KnownEncoder("some/model", SETTINGS, tmp_path).remember("f" * 64)
    assert known("some/model", tmp_path) == "f" * 64

    hub.commit = "b" * 40

    assert known("some/model", tmp_path) is None
