"""`headway export --push-to-hub`, through huggingface_hub's own client, against a stand-in for the Hub."""

import base64
import json
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from safetensors import safe_open

from headway import hub as our_hub
from headway.cli.app import main
from headway.config import parse_config
from headway.train.run import train

# how huggingface_hub hands a file to httpx
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


class StandInHub:
    """Repositories in memory; large files go through LFS as on the Hub.

    Attributes:
        url: its address.
        repos: of each repository, by OWNER/NAME, its visibility and its files.
        commits: messages of the commits, in order.
        stored: LFS objects by their SHA-256.
        tokens: the role of each token; an owner whom it may write for is "me" or "lab".
        failing: the answer to a part of the protocol, by its name: a status and a message.
        account: the answer to who asks, in place of its own; "silence" for none.
        ended: set when it stops.
    """

    def __init__(self):
        self.repos, self.commits, self.stored, self.failing = {}, [], {}, {}
        self.account, self.ended = None, threading.Event()
        self.tokens = {"hf_writes": "write", "hf_reads": "read"}
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Say nothing."""

    def answer(self, content, status=200, **headers):
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, message, code=""):
        self.answer({"error": message}, status, X_Error_Message=message, **({"X_Error_Code": code} if code else {}))

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def passes(self, part):
        """Whether a part of the protocol works, and the token is known; the answer is given where not."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if part != "object" and token not in self.hub.tokens:
            self.refuse(401, "Invalid username or password.")
            return False
        if part in self.hub.failing:
            self.refuse(*self.hub.failing[part])
            return False
        return True

    def do_GET(self):
        if self.path == "/api/whoami-v2" and self.passes("whoami"):
            token = self.headers["Authorization"].removeprefix("Bearer ")
            role = {"accessToken": {"role": self.hub.tokens[token], "displayName": "a token"}}
            if self.hub.account == "silence":
                self.hub.ended.wait(60)
                return
            user = {"type": "user", "name": "me", "orgs": [{"name": "lab"}], "auth": role}
            self.answer(user if self.hub.account is None else self.hub.account)
        elif self.path.startswith("/api/models/") and self.passes("info"):
            repo_id = "/".join(self.path.partition("?")[0].split("/")[3:5])
            if repo_id in self.hub.repos:
                self.answer({"id": repo_id, "modelId": repo_id, "sha": "0" * 40, "private": False, "siblings": [],
                             "tags": [], "downloads": 0, "likes": 0})  # fmt: skip
            else:
                self.refuse(404, "Repository not found", "RepoNotFound")

    def do_POST(self):
        body = self.body()
        parts = self.path.partition("?")[0].strip("/").split("/")
        if self.path == "/api/repos/create" and self.passes("create"):
            asked = json.loads(body)
            repo_id = f"{asked['organization'] or 'me'}/{asked['name']}"
            if asked["organization"] not in (None, "me", "lab"):
                self.refuse(403, "You don't have the rights to create a model under this namespace")
            elif repo_id in self.hub.repos:
                self.refuse(409, "You already created this model repo")
            else:
                is_private = asked.get("visibility") == "private" or asked.get("private") is True
                self.hub.repos[repo_id] = {"private": is_private, "files": {}}
                self.answer({"url": f"{self.hub.url}/{repo_id}", "name": repo_id})
        elif self.path == "/api/validate-yaml" and self.passes("card"):
            self.answer({"errors": [], "warnings": []})
        elif parts[4:5] == ["preupload"] and self.passes("preupload"):
            # as .gitattributes of a new model repository says: weights and what is large
            modes = {
                file["path"]: "lfs" if file["path"].endswith(".safetensors") or file["size"] > 10**7 else "regular"
                for file in json.loads(body)["files"]
            }
            self.answer({"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False}
                                   for path, mode in modes.items()]})  # fmt: skip
        elif self.path.endswith(".git/info/lfs/objects/batch") and self.passes("batch"):
            asked = json.loads(body)["objects"]
            places = {file["oid"]: {"upload": {"href": f"{self.hub.url}/objects/{file['oid']}"}} for file in asked}
            self.answer({"transfer": "basic", "objects": [{**file, "actions": places[file["oid"]]} for file in asked]},
                        Content_Type="application/vnd.git-lfs+json")  # fmt: skip
        elif parts[4:5] == ["commit"] and self.passes("commit"):
            self.commit("/".join(parts[2:4]), [json.loads(line) for line in body.splitlines()])

    def do_PUT(self):
        content = self.body()
        if self.passes("object"):
            self.hub.stored[self.path.rpartition("/")[2]] = content
            self.answer({})

    def commit(self, repo_id, lines):
        files = self.hub.repos[repo_id]["files"]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.hub.commits.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
        oid = f"{len(self.hub.commits):040d}"
        self.answer({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}"})


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """The folder of a run without an export."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    raw = {
        "model": {"path": str(digits / "model"), "random_init": True},
        "data": {"train": [{"path": str(digits / "data/train.jsonl")}], "tokens_per_pack": 160},
        "optim": {"steps": 2, "lr": 2e-3},
        "checkpoint": {"export": "never"},
        "run": {"folder": str(folder), "device": "cpu", "threads": 1},
    }
    raw["data"] |= {"workers": 0, "prefetch_bytes": 0}
    train(parse_config(raw))
    return folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub on this machine, which the client asks, with a token in the environment."""
    with StandInHub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", "hf_writes")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        our_hub.obstacle_to_hub.cache_clear()
        yield hub
    our_hub.obstacle_to_hub.cache_clear()


@pytest.fixture
def export(monkeypatch, capsys):
    """Run `headway export` in this process; its exit code, what it printed, and its error on one line."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["headway", "export", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, " ".join(said.err.split())

    return run


def test_a_run_is_exported_and_sent_with_its_card(trained, hub, export, tmp_path):
    folder = tmp_path / "model"
    code, out, err = export(trained, folder, "--push-to-hub", "lab/digits", "--private", "--json")
    assert code == 0, err
    record = json.loads(out)
    assert (record["folder"], record["url"]) == (str(folder), f"{hub.url}/lab/digits")
    repo = hub.repos["lab/digits"]
    assert repo["private"]
    # all files as they are here, the weights by way of LFS
    assert repo["files"] == {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    assert repo["files"]["model.safetensors"] in hub.stored.values()
    assert len(hub.stored) == 1
    (tmp_path / "back.safetensors").write_bytes(repo["files"]["model.safetensors"])
    with safe_open(tmp_path / "back.safetensors", "pt") as file:
        assert "model.language_model.embed_tokens.weight" in file.keys()  # noqa: SIM118 - no mapping
    # the card tells what was trained, on which data, with how many FLOPs; nothing names this machine's folders
    card = repo["files"]["README.md"].decode()
    for fact in ("Qwen3VLForConditionalGeneration", "`train.jsonl`", "| FLOPs |", "| MFU |", "tags:\n- headway"):
        assert fact in card
    named = [name for name, content in repo["files"].items() if str(trained.parent).encode() in content]
    assert named == []
    assert set(hub.commits) == {"Headway: the model after step 2"}


def test_a_name_alone_is_the_users_and_public_as_the_hub_has_it(trained, hub, export, tmp_path):
    code, out, err = export(trained, tmp_path / "model", "--push-to-hub", "digits")
    assert code == 0, err
    assert f"on the Hub: {hub.url}/me/digits" in out
    assert not hub.repos["me/digits"]["private"]


def test_an_update_is_another_commit(trained, hub, export, tmp_path):
    hub.repos["me/digits"] = {"private": False, "files": {"old.txt": b"stays"}}
    code, _, err = export(trained, tmp_path / "model", "--push-to-hub", "me/digits", "--update")
    assert code == 0, err
    assert hub.repos["me/digits"]["files"].keys() > {"old.txt", "config.json"}


REFUSED = {  # arguments, what is changed about the hub and the environment, exit code, what the error says
    "no name": (["--push-to-hub", "a/b/c"], {}, 2, "--push-to-hub a/b/c is no name on the Hub"),
    "a space": (["--push-to-hub", "my model"], {}, 2, "is no name on the Hub"),
    "no token": (["--push-to-hub", "me/digits"], {"token": None}, 2, "needs a token that may write, but there"),
    "a strange token": (["--push-to-hub", "me/digits"], {"token": "hf_x"}, 1, "does not know the token"),
    "a reading token": (["--push-to-hub", "me/digits"], {"token": "hf_reads"}, 1, "the token of me may only read"),
    "taken": (["--push-to-hub", "me/old"], {}, 2, "me/old exists already. Give another name, or --update"),
    "nothing to update": (["--push-to-hub", "me/digits", "--update"], {}, 2, "no repository me/digits to update"),
    "private too late": (["--push-to-hub", "me/old", "--update", "--private"], {}, 2, "--private has no effect, b"),
    "no Hub": (["--push-to-hub", "me/digits", "--private"], {"gone": True}, 1, "127.0.0.1 cannot be reached"),
    "offline": (["--push-to-hub", "me/digits"], {"offline": True}, 1, "HF_HUB_OFFLINE is set"),
    "private alone": (["--private"], {}, 2, "--private needs --push-to-hub OWNER/NAME"),
    "update alone": (["--update"], {}, 2, "--update needs --push-to-hub OWNER/NAME"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sent_is_refused_before_anything_is_made(trained, hub, export, tmp_path, monkeypatch, case):
    arguments, changes, wanted_code, message = REFUSED[case]
    hub.repos["me/old"] = {"private": False, "files": {}}
    if "token" in changes:
        monkeypatch.delenv("HF_TOKEN") if changes["token"] is None else monkeypatch.setenv("HF_TOKEN", changes["token"])
    if "gone" in changes:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    if "offline" in changes:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    our_hub.obstacle_to_hub.cache_clear()
    code, out, err = export(trained, tmp_path / "model", *arguments)
    assert (code, out) == (wanted_code, "")
    assert message in err
    assert not (tmp_path / "model").exists()
    assert hub.repos == {"me/old": {"private": False, "files": {}}}


@pytest.mark.parametrize(
    ("part", "answer", "message", "more"),
    [
        (
            "create",
            (403, "You have too many private repositories"),
            "may not write to me/digits (You have too many",
            "",
        ),
        ("create", (409, "You already created this model repo"), "me/digits is taken by now", ""),
        (
            "preupload",
            (403, "Storage limit reached"),
            "may not write to me/digits (Storage limit reached)",
            " --update",
        ),
        ("batch", (400, "No room"), "the Hub answered 400", " --update"),
        ("object", (403, "Expired"), "may not write to me/digits", " --update"),
        ("commit", (403, "No pushes today"), "No pushes today", " --update"),
    ],
)
def test_a_model_that_the_hub_refuses_stays_and_is_sent_again(
    trained, hub, export, tmp_path, part, answer, message, more
):
    folder = tmp_path / "model"
    hub.failing[part] = answer
    code, _, err = export(trained, folder, "--push-to-hub", "me/digits")
    assert code == 1
    assert message in err
    assert (
        f"complete and stays there. Send the model again with `headway export {folder} --push-to-hub me/digits{more}`"
        in err
    )
    hub.failing.clear()
    code, out, err = export(folder, "--push-to-hub", "me/digits", *more.split())
    assert code == 0, err
    assert f"on the Hub: {hub.url}/me/digits" in out
    assert "model.safetensors" in hub.repos["me/digits"]["files"]


def test_only_what_an_export_writes_is_sent_and_links_are_refused(trained, hub, export, tmp_path):
    folder = tmp_path / "model"
    assert export(trained, folder)[0] == 0
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    for name in (".env", "optimizer.pt", "sub/data.jsonl", "sub/config.json", "aws_config.json", ".git/config"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("SECRET=1")
    (folder / "link.txt").symlink_to("/etc/hostname")
    code, out, err = export(folder, "--push-to-hub", "me/digits")
    assert code == 0, err
    assert hub.repos["me/digits"]["files"].keys() == written
    assert f"sent: {', '.join(sorted(written))}" in out
    assert (
        "not sent: .env, .git/config, aws_config.json, link.txt, optimizer.pt, sub/config.json, sub/data.jsonl" in out
    )
    (folder / "config.json").rename(tmp_path / "elsewhere.json")
    (folder / "config.json").symlink_to(tmp_path / "elsewhere.json")
    code, _, err = export(folder, "--push-to-hub", "me/other")
    assert (code, list(hub.repos)) == (2, ["me/digits"])
    assert "holds a link, config.json, but links are not sent" in err


@pytest.mark.parametrize("answer", [[1], {"x": 1}, "silence"], ids=["list", "no name", "silence"])
def test_a_server_that_is_no_hub_or_says_nothing_is_one_paragraph(trained, hub, export, tmp_path, monkeypatch, answer):
    monkeypatch.setattr("headway.checkpoint.push._hub_errors.__wrapped__.__defaults__", (0.2,))
    hub.account = answer
    code, out, err = export(trained, tmp_path / "model", "--push-to-hub", "me/digits")
    assert (code, out, hub.repos) == (1, "", {})
    assert ("timed out" if answer == "silence" else "answers without an account") in err
    assert "Nothing was made or sent." in err
    assert not (tmp_path / "model").exists()


def test_a_namespace_of_others_is_refused(trained, hub, export, tmp_path):
    code, _, err = export(trained, tmp_path / "model", "--push-to-hub", "others/digits")
    assert code == 1
    assert "may not write to others/digits (You don't have the rights" in err


def test_adapters_of_a_model_that_nobody_else_has_are_refused(trained, hub, export, tmp_path):
    folder = tmp_path / "adapters"
    shutil.copytree(trained / "checkpoints/step-000002/model", folder)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    code, _, err = export(folder, "--push-to-hub", "me/adapters")
    assert code == 2
    assert "a folder of this machine, so others cannot use the adapters" in err
    assert "--merge-lora" in err
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}))
    assert export(folder, "--push-to-hub", "me/adapters")[0] == 0


def test_a_folder_is_wanted_of_a_run_and_options_of_an_export_have_none_on_a_folder(trained, hub, export, digits):
    code, _, err = export(trained)
    assert (code, "FOLDER is missing" in err) == (2, True)
    code, _, err = export(trained, "--push-to-hub", "me/digits")
    assert code == 2
    assert f"such as headway export {trained} model/ --push-to-hub me/digits" in err
    code, _, err = export(digits / "model", "--push-to-hub", "me/digits", "--dtype", "bfloat16")
    assert code == 2
    assert "--dtype cannot take effect" in err
    assert hub.repos == {}
