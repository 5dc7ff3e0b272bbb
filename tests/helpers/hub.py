"""A stand-in for the Hugging Face Hub: what `huggingface_hub` asks of it when a model is sent there, over HTTP."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class StandInHub:
    """Repositories in memory; large files go through LFS as on the Hub.

    Attributes:
        url: its address.
        repos: of each repository, by OWNER/NAME, its visibility and its files.
        commits: messages of the commits, in order.
        stored: LFS objects by their SHA-256.
        tokens: the role of each token; an owner whom it may write for is "me" or "lab".
        failing: the answer to a part of the protocol, by its name: a status and a message.
    """

    def __init__(self):
        self.repos, self.commits, self.stored, self.failing = {}, [], {}, {}
        self.tokens = {"hf_writes": "write", "hf_reads": "read"}
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
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
            self.answer({"type": "user", "name": "me", "orgs": [{"name": "lab"}], "auth": role})
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
