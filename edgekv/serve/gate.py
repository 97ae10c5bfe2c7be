"""Who may ask: API keys, hosts and origins, and how large a request may be.

A page of any web site can send requests to a server that its reader's machine reaches, with the
site's own name as their host once its DNS entry has changed. So a server on a loopback address
answers to that address' names only. An open one that asks for no key also answers to addresses,
and to names that no web site has. No server answers pages of origins that were not named.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgekv.serve.encoding import Json
from edgekv.serve.errors import ApiError
from edgekv.serve.options import ServeOptions

PUBLIC = ("/", "/health", "/v1/health", "/models", "/v1/models")
"""Paths that need no key, as in llama-server."""
N_BODIES = 4
"""As many of the largest bodies may be there at once."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
"""Origins that `localhost` stands for, as in llama-server."""


class Gate:
    """An ASGI application in front of another one."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app, self._options = app, options
        self._bodies = _Bodies(options.max_request)
        self._keys = options.api_keys + options.file_keys
        names = (*LOCAL_NAMES, options.host, socket.gethostname(), *options.allow_hosts)
        self._hosts = {name.lower() for name in names if name}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check(scope, headers)
        except ApiError as error:
            await refusal(error, scope["path"])(scope, receive, send)
            return
        if scope["method"] == "POST":  # as in llama-server, a body is JSON whatever it says it is
            kept = [(k, v) for k, v in scope["headers"] if k != b"content-type"]
            scope = {**scope, "headers": [*kept, (b"content-type", b"application/json")]}
        if scope["method"] == "HEAD":  # the server leaves the body out
            scope = {**scope, "method": "GET"}
        body = _Body(self._bodies, receive, send)
        try:
            await self._app(scope, body.receive, body.send)
        finally:
            body.release()

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raises ApiError."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._answers_to(_name(host)):
            raise ApiError(
                403,
                f"this server answers to {', '.join(sorted(self._hosts))} only: start it with"
                " --allow-host NAME for another name",
            )
        is_same = origin == f"{scope['scheme']}://{host}"
        if origin is not None and not is_same and not self._may_ask(origin):
            raise ApiError(
                403, f"pages of {origin} may not ask: start the server with --cors-origin {origin}"
            )
        if scope["method"] != "OPTIONS" and scope["path"] not in PUBLIC:
            self._check_key(headers)
        size = headers.get("content-length", "0")
        if not size.isdecimal() or int(size) > self._options.max_request:
            raise self._bodies.too_large()

    def _may_ask(self, origin: str) -> bool:
        """Whether pages of another origin are answered."""
        named = self._options.cors_origins
        is_local = "localhost" in named and re.fullmatch(LOCAL_ORIGIN, origin) is not None
        return is_local or origin in named or "*" in named

    def _answers_to(self, name: str) -> bool:
        if name in self._hosts or "*" in self._hosts:
            return True
        return not is_loopback(self._options.host) and bool(self._keys or _is_no_site(name))

    def _check_key(self, headers: Headers) -> None:
        if self._keys and not matches(given_key(headers), self._keys):
            raise ApiError(401, "Invalid API Key")


class _Bodies:
    """The bodies that are there. n_most: bytes of one."""

    def __init__(self, n_most: int) -> None:
        self.n_most, self.n_held = n_most, 0

    def too_large(self) -> ApiError:
        return ApiError(413, f"a request may have {self.n_most:,} bytes at most: see --max-request")

    def check(self, n: int) -> None:
        """Raises HTTPException, which FastAPI lets pass; n: bytes of one of them."""
        if n > self.n_most:
            raise HTTPException(413, self.too_large().message)
        if self.n_held > N_BODIES * self.n_most:
            raise HTTPException(503, "other requests are too large at the moment: try again later")


class _Body:
    """A request's body, which is counted as it comes, until its answer begins."""

    def __init__(self, all: _Bodies, receive: Receive, send: Send) -> None:
        self._all, self._receive, self._send = all, receive, send
        self._n = 0

    async def receive(self) -> Message:
        message = await self._receive()
        n_new = len(message.get("body", b""))
        self._n += n_new
        self._all.n_held += n_new
        self._all.check(self._n)
        return message

    async def send(self, message: Message) -> None:
        self.release()
        await self._send(message)

    def release(self) -> None:
        self._all.n_held -= self._n
        self._n = 0


def given_key(headers: Headers) -> str:
    """The key that a request names."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def matches(given: str, keys: Sequence[str]) -> bool:
    """Whether it is one of the keys, in a time that does not depend on how much of one it is."""
    found = False
    for key in keys:
        found |= hmac.compare_digest(given.encode(), key.encode())
    return found


def refusal(error: ApiError, path: str) -> Json:
    """The answer that an error is."""
    return Json(error.body(path), error.status, error.headers)


def is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _is_no_site(name: str) -> bool:
    """Whether no web site can have this name: an address, or one word."""
    return "." not in name or _address(name) is not None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
