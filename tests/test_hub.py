import socket

import pytest

from headway import hub
from headway.errors import UnknownModelError


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """No network: the address of the Hub is a port at which nobody listens; its cache is empty."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    hub.obstacle_to_hub.cache_clear()
    yield tmp_path / "hub"
    hub.obstacle_to_hub.cache_clear()


def test_a_folder_or_file_is_itself(tmp_path, unreachable):
    assert hub.located(tmp_path) == str(tmp_path)


def test_without_network_a_name_is_refused_in_one_paragraph(unreachable):
    with pytest.raises(
        UnknownModelError, match=r"'some/model' is no folder .* 127.0.0.1 cannot be reached \(.*refused"
    ):
        hub.located("some/model")
    with pytest.raises(UnknownModelError, match=r"'no such name' is no folder"):
        hub.located("no such name")


def test_without_network_a_copy_in_the_cache_is_taken(unreachable):
    copy = unreachable / "models--some--model" / "snapshots" / ("a" * 40)
    copy.mkdir(parents=True)
    (copy / "config.json").write_text("{}")
    (copy.parents[1] / "refs").mkdir()
    (copy.parents[1] / "refs" / "main").write_text("a" * 40)

    assert hub.located("some/model") == str(copy)


def test_a_name_is_left_to_transformers_where_the_hub_answers(unreachable, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub.located("some/model") == "some/model"


def test_a_proxy_is_asked_in_place_of_the_hub(unreachable, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.invalid")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        assert hub.obstacle_to_hub() is None


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        (["export/step-000017/adapter_config.json"], r"step-000017 holds adapters alone.* --merge-lora`"),
        (["export/README"], r"`headway export .* MODEL` writes its last checkpoint"),
        (
            ["export/step-000005/config.json", "checkpoints/step-000009/meta"],
            r"went on to step-000009 after",
        ),
    ],
)
def test_the_folder_of_a_run_without_its_newest_model_is_refused_with_the_way_to_one(tmp_path, files, advice):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("{}")
    with pytest.raises(UnknownModelError, match=f"is a training run and no model.*{advice}"):
        hub.located(tmp_path)


def test_the_folder_of_a_run_stands_for_its_newest_model(tmp_path):
    for file in ("export/step-999999/config.json", "export/step-1000000/config.json", "checkpoints/step-000900/meta"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("{}")
    assert hub.located(tmp_path) == str(tmp_path / "export" / "step-1000000")
