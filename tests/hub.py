"""What huggingface_hub asks of an endpoint, on loopback: repositories with files, parts of them,
and what goes wrong on the way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

COMMIT = "c" * 40


@dataclass
class Hub:
    """files: 'USER/REPO' -> name -> bytes; small: names that Git holds itself; cut: bytes of a
    file after which answers break off; refuse: status of every answer from then on; heals: the
    next answer is whole instead; lie: names whose checksum is another one's; token: the one that
    must be shown.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    small: set[str] = field(default_factory=set)
    cut: int | None = None
    refuse: int | None = None
    heals: bool = False
    lie: set[str] = field(default_factory=set)
    token: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(path, Range) of what was asked for."""
    url: str = ""

    def info(self, repo: str) -> dict[str, object]:
        return {
            "id": repo,
            "sha": COMMIT,
            "siblings": [self._sibling(*pair) for pair in self.files[repo].items()],
        }

    def _sibling(self, name: str, data: bytes) -> dict[str, object]:
        n, shown = len(data), data + b"?" * (name in self.lie)
        git = hashlib.sha1(b"blob %d\0" % n + shown).hexdigest()
        found: dict[str, object] = {"rfilename": name, "size": n, "blobId": git}
        if name not in self.small:
            sha256 = hashlib.sha256(shown).hexdigest()
            found["lfs"] = {"sha256": sha256, "size": n, "pointerSize": 134}
        return found

    @property
    def ranges(self) -> list[str]:
        """Of the files that were asked for."""
        return [range_ for path, range_ in self.asked if "/resolve/" in path]


@contextmanager
def served(hub: Hub) -> Iterator[Hub]:
    """A `with` block in which `hub` answers at hub.url."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            hub.asked.append((path, self.headers.get("Range", "")))
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.say(401, b"")
            parts = path.strip("/").split("/")
            for kind in ("models", "datasets"):
                if parts[:2] == ["api", kind] and "/".join(parts[2:4]) in hub.files:
                    info = json.dumps(hub.info("/".join(parts[2:4]))).encode()
                    return self.say(200, info)
            data = hub.files.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
            if data is None or parts[2:4] != ["resolve", COMMIT]:
                return self.say(404, b"")
            if hub.refuse:
                return self.say(hub.refuse, b"")
            self.send(data)

        def send(self, data: bytes) -> None:
            begin = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
            rest = data[begin:]
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(len(rest)))
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if hub.cut is not None and begin + len(rest) > hub.cut:
                rest = data[begin : hub.cut]
                hub.cut, hub.refuse = (None, None) if hub.heals else (hub.cut, 503)
            self.wfile.write(rest)
            self.close_connection = True

        def say(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
