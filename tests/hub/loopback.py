"""A small server that speaks the Hub endpoints which `huggingface_hub` needs to push and load models."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


class Repositories:
    """What the server holds: repository -> its commits, each a mapping of path to content, oldest first."""

    def __init__(self) -> None:
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.requests: list[str] = []

    def create(self, repo: str) -> None:
        self.commits.setdefault(repo, [{}])

    def commit(self, repo: str, lines: list[dict]) -> str:
        files = dict(self.commits[repo][-1])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        self.commits[repo].append(files)
        return self.sha(repo, len(self.commits[repo]) - 1)

    @staticmethod
    def sha(repo: str, index: int) -> str:
        return hashlib.sha1(f"{repo}:{index}".encode()).hexdigest()

    def index(self, repo: str, revision: str) -> int | None:
        """The commit that a revision names: a branch called main, or a commit."""
        count = len(self.commits[repo])
        if revision == "main":
            return count - 1
        return next((i for i in range(count) if self.sha(repo, i) == revision), None)

    def put(self, repo: str, files: dict[str, Any]) -> None:
        """Place files without going through the client."""
        self.create(repo)
        content = {name: (v if isinstance(v, str) else json.dumps(v)).encode() for name, v in files.items()}
        self.commits[repo].append({**self.commits[repo][-1], **content})


class _Handler(BaseHTTPRequestHandler):
    held: Repositories
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None: ...

    def do_POST(self) -> None:
        body = self._body()
        self.held.requests.append(f"POST {self.path}")
        if self.path == "/api/repos/create":
            request = json.loads(body)
            repo = f"{request.get('organization') or 'someone'}/{request['name']}"
            self.held.create(repo)
            return self._json({"url": f"{self._root}/{repo}", "name": repo})
        if self.path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/([^/?]+).*", self.path)
        if match is None or match[1] not in self.held.commits:
            return self._missing("RepoNotFound")
        if match[2] == "preupload":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        sha = self.held.commit(match[1], [json.loads(line) for line in body.splitlines() if line.strip()])
        address = f"{self._root}/{match[1]}/commit/{sha}"
        return self._json({"success": True, "commitOid": sha, "commitUrl": address, "pullRequestUrl": None})

    def do_GET(self) -> None:
        self.held.requests.append(f"{self.command} {self.path}")
        if self.path.startswith("/api/whoami-v2"):
            return self._json({"name": "someone", "type": "user", "orgs": [], "auth": {}})
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/([^/?]+))?(?:\?.*)?", self.path)
        if match:
            return self._info(match[1], unquote(match[2] or "main"))
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)(?:\?.*)?", self.path)
        if match:
            return self._file(match[1], unquote(match[2]), unquote(match[3]))
        return self._missing("EntryNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _info(self, repo: str, revision: str) -> None:
        index = self._find(repo, revision)
        if index is None:
            return
        files = [{"rfilename": name} for name in self.held.commits[repo][index]]
        content = {"_id": "0", "id": repo, "modelId": repo, "sha": self.held.sha(repo, index), "siblings": files}
        self._json({**content, "private": False, "tags": [], "downloads": 0, "likes": 0})

    def _file(self, repo: str, revision: str, name: str) -> None:
        index = self._find(repo, revision)
        if index is None:
            return
        files, sha = self.held.commits[repo][index], self.held.sha(repo, index)
        if name not in files:
            self._missing("EntryNotFound", {"X-Repo-Commit": sha})
            return
        etag = hashlib.sha1(files[name]).hexdigest()
        self._send(200, files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": sha, "Content-Type": "text/plain"})

    def _find(self, repo: str, revision: str) -> int | None:
        if repo not in self.held.commits:
            self._missing("RepoNotFound")
            return None
        index = self.held.index(repo, revision)
        if index is None:
            self._missing("RevisionNotFound")
        return index

    @property
    def _root(self) -> str:
        return f"http://{self.headers['Host']}"

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _missing(self, code: str, headers: dict[str, str] | None = None) -> None:
        message = {"RepoNotFound": "Repository not found", "RevisionNotFound": "Invalid rev id"}.get(code, "Not found")
        self._send(404, b"{}", {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def hub_server() -> Iterator[tuple[str, Repositories]]:
    """Run the server while the block runs; yield its address and what it holds."""
    held = Repositories()
    handler = type("Handler", (_Handler,), {"held": held})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", held
    finally:
        server.shutdown()
        server.server_close()
