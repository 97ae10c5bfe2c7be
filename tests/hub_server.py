"""A server that answers huggingface_hub as Hugging Face does, on this computer only."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """files: bytes by (repository, name in it).

    token: who sends another one sees no repository; gated: the repositories whose terms nobody
    agreed to; budget: bytes of files that are sent before every line breaks, None for no limit;
    lies: whether the checksums are of other bytes. ranges: the Range of each request for a file,
    None where there was none.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[tuple[str, str], bytes] = {}
        self.token = ""
        self.gated: set[str] = set()
        self.budget: int | None = None
        self.lies = False
        self.ranges: list[str | None] = []
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.asked.append(f"{self.command} {path}")
        parts = path.split("/")
        if parts[0] == "lfs":
            return self._send_file(*self._by_digest(parts[1]))
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        names = [name for there, name in self.server.files if there == repo]
        authorised = f"Bearer {self.server.token}" == self.headers.get("Authorization")
        if not names or self.server.token and not authorised:
            return self._send(401, {"X-Error-Code": "RepoNotFound"}, b"{}")
        if repo in self.server.gated:
            return self._send(403, {"X-Error-Code": "GatedRepo"}, b"{}")
        if parts[0] == "api":
            siblings = [{"rfilename": name} for name in names]
            body = {"id": repo, "sha": COMMIT, "siblings": siblings}
            return self._send(200, {"Content-Type": "application/json"}, json.dumps(body).encode())
        return self._resolve(repo, "/".join(parts[4:]))

    def _resolve(self, repo: str, name: str) -> None:
        """Where the bytes of a file are, as for one in LFS: on another host, by its name."""
        data = self.server.files.get((repo, name))
        if data is None:
            return self._send(404, {"X-Error-Code": "EntryNotFound"}, b"")
        digest = hashlib.sha256(data).hexdigest()
        told = hashlib.sha256(data + b"!").hexdigest() if self.server.lies else digest
        head = {
            "X-Repo-Commit": COMMIT,
            "X-Linked-Etag": f'"{told}"',
            "X-Linked-Size": str(len(data)),
            "Location": f"http://localhost:{self.server.server_port}/lfs/{digest}",
        }
        return self._send(302, head, b"")

    def _by_digest(self, digest: str) -> tuple[bytes, str]:
        for data in self.server.files.values():
            if hashlib.sha256(data).hexdigest() == digest:
                return data, digest
        return b"", digest

    def _send_file(self, data: bytes, digest: str) -> None:
        wish = self.headers.get("Range")
        if self.command == "GET":
            self.server.ranges.append(wish)
        begin = int(wish.removeprefix("bytes=").partition("-")[0]) if wish else 0
        head = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if wish:
            head["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._send(206 if wish else 200, head, data[begin:], is_file=True)

    def _send(self, status: int, head: dict[str, str], body: bytes, is_file: bool = False) -> None:
        self.send_response(status)
        for name, value in {**head, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        budget = self.server.budget
        if is_file and budget is not None:
            self.server.budget = max(budget - len(body), 0)
            if len(body) > budget:
                body, self.close_connection = body[:budget], True
        self.wfile.write(body)


@contextmanager
def serving() -> Iterator[Hub]:
    """A server without files, until the end of the block."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
