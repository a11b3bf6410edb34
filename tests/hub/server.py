"""A hub for tests: the part of Hugging Face's API that downloads of models need, with faults.

Large files are on another host, to which the hub redirects, as on the real one. Both are servers in
threads, so that clients of any kind reach them.
"""

from __future__ import annotations

import hashlib
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import attrs

#: Larger files are kept outside of Git.
LARGE = 1024


@attrs.define
class Asked:
    """A request as it came."""

    host: str  # "hub" or "cdn"
    method: str
    path: str
    headers: dict[str, str]


@attrs.define
class Hub:
    """What the hub has, and how it misbehaves. All of it may be changed while it runs."""

    repos: dict[str, dict[str, bytes]] = attrs.field(factory=dict)
    commits: dict[str, str] = attrs.field(factory=dict)
    gated: dict[str, str] = attrs.field(factory=dict)  # repositories, with the token for each
    asked: list[Asked] = attrs.field(factory=list)
    page_size: int = 1000  # of a list of files
    n_cuts: int = 0  # contents that are cut off, of those that come next
    cut_after: int = 0  # bytes of each
    n_wrong: int = 0  # contents in which a byte is flipped, of those that come next
    excess: bytes = b""  # that contents have at their ends
    has_etags: bool = True
    has_ranges: bool = True
    #: Answers that the hub, and the other host, give to what comes next.
    failures: list[tuple[int, dict[str, str]]] = attrs.field(factory=list)
    cdn_failures: list[tuple[int, dict[str, str]]] = attrs.field(factory=list)
    hold_after: int | None = None  # bytes of each contents, after which it waits for `go_on`
    holding: threading.Event = attrs.field(factory=threading.Event)
    go_on: threading.Event = attrs.field(factory=threading.Event)
    url: str = ""
    cdn_url: str = ""
    lock: Any = attrs.field(factory=threading.Lock)

    def add(self, repo: str, files: dict[str, bytes], commit: str = "a" * 40) -> None:
        """Make a repository, or a newer commit of it."""
        self.repos[repo] = files
        self.commits[repo] = commit

    def downloads(self, method: str = "GET") -> list[Asked]:
        """The requests for contents of large files."""
        return [one for one in self.asked if one.host == "cdn" and one.method == method]

    def take(self, name: str) -> bool:
        """Whether a fault with a count happens now."""
        with self.lock:
            count = getattr(self, name)
            setattr(self, name, max(count - 1, 0))
        return count > 0


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running_hub(security: ssl.SSLContext | None = None) -> Iterator[Hub]:
    """Run a hub; its `url` is for ``HF_ENDPOINT``. With `security`, it speaks HTTPS."""
    hub = Hub()
    scheme = "http" if security is None else "https"
    servers = [_Server(("127.0.0.1", 0), _Handler) for _ in range(2)]
    for server, name in zip(servers, ("hub", "cdn"), strict=True):
        server.hub, server.name = hub, name
        if security is not None:
            server.socket = security.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    hub.url, hub.cdn_url = (f"{scheme}://127.0.0.1:{one.server_port}" for one in servers)
    try:
        yield hub
    finally:
        hub.go_on.set()
        for server in servers:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    hub: Hub
    name: str

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients of these tests leave."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        hub.asked.append(Asked(self.server.name, self.command, path, dict(self.headers)))
        failures = hub.failures if self.server.name == "hub" else hub.cdn_failures
        if failures:
            status, headers = failures.pop(0)
            return self.answer(status, b"", headers)
        if self.server.name == "cdn":
            return self.send_content(path)
        if path == "/api/models":
            return self.send_found(parse_qs(urlsplit(self.path).query))
        words = path.strip("/").split("/")
        repo = "/".join(words[2:4] if words[0] == "api" else words[:2])
        if repo not in hub.repos:
            code = {"X-Error-Code": "RepoNotFound"}
            return self.answer(404 if "Authorization" in self.headers else 401, b"{}", code)
        if words[0] == "api":
            return self.send_api(repo, words[4:])
        return self.send_file(repo, "/".join(words[4:]))

    def send_api(self, repo: str, words: list[str]) -> None:
        hub = self.server.hub
        commit, files = hub.commits[repo], hub.repos[repo]
        if words == ["refs"]:
            self.answer_json({"branches": [{"name": "main", "targetCommit": commit}]})
        elif words[:1] == ["tree"]:
            entries = [_entry(path, content) for path, content in files.items()]
            start = int(urlsplit(self.path).query.partition("cursor=")[2] or 0)
            end = start + hub.page_size
            link = f'<{hub.url}{urlsplit(self.path).path}?cursor={end}>; rel="next"'
            self.answer_json(entries[start:end], {"Link": link} if end < len(entries) else {})
        else:
            siblings = [{"rfilename": path} for path in files]
            self.answer_json({"id": repo, "sha": commit, "siblings": siblings})

    def send_found(self, query: dict[str, list[str]]) -> None:
        """List the repositories with a word in their names."""
        (word,) = query["search"]
        repos = [repo for repo in self.server.hub.repos if word in repo]
        self.answer_json([{"id": repo, "downloads": 7, "tags": []} for repo in repos])

    def send_file(self, repo: str, path: str) -> None:
        hub = self.server.hub
        if hub.gated.get(repo, "") not in self.headers.get("Authorization", ""):
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        content = hub.repos[repo].get(path)
        headers = {"X-Repo-Commit": hub.commits[repo]}
        if content is None:
            return self.answer(404, b"{}", headers | {"X-Error-Code": "EntryNotFound"})
        if len(content) <= LARGE:
            return self.answer(200, content, headers | {"ETag": f'"{git_sha1(content)}"'})
        headers |= {
            "X-Linked-Etag": f'"{sha256(content)}"',
            "X-Linked-Size": str(len(content)),
            "Location": f"{hub.cdn_url}/{repo}/{path}?signature=x%2Fy",
        }
        return self.answer(302, b"", headers)

    def send_content(self, path: str) -> None:
        hub = self.server.hub
        _, user, name, rest = path.split("/", 3)
        content = hub.repos.get(f"{user}/{name}", {}).get(rest)
        if content is None:
            return self.answer(404, b"")
        content += hub.excess
        headers = {"Accept-Ranges": "bytes"}
        if hub.has_etags:
            headers["ETag"] = f'"{sha256(content)[:32]}"'
        asked = self.headers.get("Range") if hub.has_ranges else None
        start, _, last = (asked or "bytes=0-")[6:].partition("-")
        end = min(int(last or len(content)) + 1, len(content))
        if int(start) >= len(content):
            return self.answer(416, b"")
        if asked:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        if hub.take("n_wrong"):
            content = content[:-1] + bytes([content[-1] ^ 1])
        return self.answer(206 if asked else 200, content[int(start) : end], headers)

    def answer_json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        self.answer(200, json.dumps(value).encode(), headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        hub = self.server.hub
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.server.name == "cdn" and status < 300:
            if hub.take("n_cuts"):
                body = body[: hub.cut_after]
                self.close_connection = True
            if hub.hold_after is not None:
                self.wfile.write(body[: hub.hold_after])
                hub.holding.set()
                hub.go_on.wait(30)
                body = body[hub.hold_after :]
        self.wfile.write(body)


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
    entry["oid"] = git_sha1(content)
    if len(content) > LARGE:
        entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 135}
    return entry
