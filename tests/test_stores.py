"""Outputs behind URLs go to the store that is named, whole, or are refused in one sentence; never to a folder `s3:`."""

import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from headway import stores
from headway.cli.app import app
from headway.errors import ConfigError, StoreError, UsageError
from headway.files import is_taken, new_folder, open_output, write_output
from headway.log.sinks import open_sink
from helpers import runs

digits = runs.digits


@pytest.fixture(params=["memory", "file"])
def root(request, tmp_path, monkeypatch):
    """A place in a store, as the command line makes a path of its URL."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    url = f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path / 'store'}"
    yield Path(url)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(":")]


def content(path):
    with fsspec.open(stores.url_of(path), "rb") as file:
        return file.read()


def test_a_file_is_one_object(root):
    write_output(root / "a/page.html", "text", option="-o", new=True)
    assert content(root / "a/page.html") == b"text"
    assert is_taken(root / "a/page.html")
    with pytest.raises(UsageError, match=r"-o .*://.*page\.html exists already"):
        write_output(root / "a/page.html", "other", option="-o", new=True)
    write_output(root / "a/page.html", "other")
    with open_output(root / "lines.jsonl", option="--output") as file:
        file.write("1\n2\n")
    assert (content(root / "a/page.html"), content(root / "lines.jsonl")) == (b"other", b"1\n2\n")
    with pytest.raises(UsageError, match="exists already"), open_output(root / "lines.jsonl"):
        pass


def test_a_folder_is_there_once_its_last_file_is(root, monkeypatch):
    """A store has no renaming: a folder that was cut off lacks the file by which it is known."""
    order = []
    put = type(stores.open_system(root)[0]).put_file

    def fail_third(system, source, target, **options):
        order.append(Path(target).name)
        if len(order) == 3:
            raise ConnectionError("reset by peer")
        return put(system, source, target, **options)

    def write():
        with new_folder(root / "model", last="config.json") as folder:
            for name in ("config.json", "a.safetensors", "words/b.json"):
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(name)

    with monkeypatch.context() as patched:
        patched.setattr(type(stores.open_system(root)[0]), "put_file", fail_third)
        with pytest.raises(Exception, match=r"cannot write the model folder .*://.*model: .*reset by peer"):
            write()
    assert order == ["a.safetensors", "b.json", "config.json"]
    assert not stores.exists(root / "model/config.json")
    stores.remove(root / "model")
    write()
    assert content(root / "model/words/b.json") == b"words/b.json"
    with pytest.raises(UsageError, match="exists already"):
        write()
    assert (stores.fetch(root / "model") / "config.json").read_text() == "config.json"
    assert [path.name for path in stores.folders_in(root)] == ["model"]


def test_a_path_of_this_machine_is_no_url(tmp_path):
    for path in (tmp_path, Path("runs/a"), Path("./s3"), Path("C:/x"), tmp_path / "s3:/bucket"):
        assert stores.url_of(path) is None
    assert stores.url_of(Path("gs://b/a//c")) == "gs://b/a/c"
    assert stores.url_of(Path("S3://b/a")) == "s3://b/a"
    assert stores.url_of(Path("simplecache::s3://b/a")) == "simplecache::s3://b/a"
    assert stores.place(stores.spool(Path("s3://bucket/run/x"))) == Path("s3://bucket/run/x")
    assert stores.shown(stores.spool(Path("s3://bucket/run"))) == "s3://bucket/run"


REFUSED = [
    (
        "init --model MODEL --data DATA -o nosuch://bucket/t.yaml",
        "nosuch://bucket/t.yaml cannot be written or read: Protocol not known",
    ),
    ("new-model nosuch://bucket/m --data DATA --size 1M", "nosuch://bucket/m"),
    ("demo data --folder nosuch://bucket/d", "--folder is nosuch://bucket/d"),
    ("index DATA --model MODEL --cache nosuch://bucket/c", "--cache is nosuch://bucket/c"),
]


@pytest.mark.parametrize(("line", "names"), REFUSED, ids=[line.split()[0] for line, _ in REFUSED])
def test_a_url_that_nothing_here_writes_is_refused_in_one_sentence(line, names, digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    words = {"MODEL": digits / "model", "DATA": digits / "data/eval.jsonl"}
    arguments = [str(words.get(word, word)) for word in line.split()]
    with pytest.raises(UsageError) as caught:
        app(arguments, standalone_mode=False)
    assert names in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) in (["cache"], [])


@pytest.mark.parametrize(
    "spec", ["jsonl:s3://bucket/m.jsonl", "tensorboard:gs://bucket/tb", Path("s3://bucket/m.jsonl")]
)
def test_records_that_are_appended_are_refused_to_a_url(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"appends records line by line, but (s3|gs)://bucket/\S+ cannot be appended to"
    ):
        open_sink(spec)
    assert list(tmp_path.iterdir()) == []


def test_what_a_store_says_is_one_sentence(monkeypatch, tmp_path):
    class Broken(fsspec.AbstractFileSystem):
        protocol = "broken"

        def _open(self, *_, **__):
            raise PermissionError("Access Denied\nrequest id 1")

    fsspec.register_implementation("broken", Broken, clobber=True)
    with pytest.raises(UsageError, match=r"^-o broken://b/x cannot be written: Access Denied\. Give another place\.$"):
        write_output(Path("broken://b/x"), "text", option="-o")
    with pytest.raises(StoreError, match=r"^broken://b/x cannot be read: Access Denied\.$"):
        stores.read_bytes(Path("broken://b/x"))


def test_counting_loads_no_file_system():
    script = "import sys, headway.files, headway.cli.app; assert not {'fsspec', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
