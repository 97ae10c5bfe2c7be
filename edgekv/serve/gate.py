"""Who may ask: API keys, hosts and origins, and how large a request may be.

A page of any web site can send requests to a server on the same machine, with the site's own name
as their host once its DNS entry has changed. So a server on a loopback address answers to that
address' names only, and no server answers pages of origins that were not named.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgekv.serve.encoding import Json
from edgekv.serve.errors import ApiError
from edgekv.serve.options import ServeOptions

PUBLIC = ("/", "/health", "/v1/health", "/models", "/v1/models")
"""Paths that need no key, as in llama-server."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class Gate:
    """An ASGI application in front of another one."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app, self._options = app, options
        self._hosts = (*LOCAL_NAMES, options.host) if is_loopback(options.host) else None

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
        await self._app(scope, self._limited(receive), send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raises ApiError."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._hosts is not None and _name(host) not in self._hosts:
            raise ApiError(
                403,
                f"this server answers to {', '.join(self._hosts)} only: start it with another"
                " --host for other names",
            )
        is_same = origin is not None and urlsplit(origin).netloc == host
        origins = self._options.cors_origins
        if origin is not None and not is_same and not {origin, "*"} & set(origins):
            raise ApiError(
                403, f"pages of {origin} may not ask: start the server with --cors-origin {origin}"
            )
        if scope["method"] != "OPTIONS" and scope["path"] not in PUBLIC:
            self._check_key(headers)
        size = headers.get("content-length", "0")
        if not size.isdecimal() or int(size) > self._options.max_request:
            raise self._too_large()

    def _check_key(self, headers: Headers) -> None:
        keys = self._options.api_keys + self._options.file_keys
        if not keys:
            return
        if not matches(given_key(headers), keys):
            raise ApiError(401, "Invalid API Key")

    def _too_large(self) -> ApiError:
        n = self._options.max_request
        return ApiError(413, f"a request may have {n:,} bytes at most: see --max-request")

    def _limited(self, receive: Receive) -> Receive:
        """A body without a length is counted as it comes."""
        n = 0

        async def counted() -> Message:
            nonlocal n
            message = await receive()
            n += len(message.get("body", b""))
            if n > self._options.max_request:
                raise HTTPException(413, self._too_large().message)  # FastAPI lets it pass
            return message

        return counted


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
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
