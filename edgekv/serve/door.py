"""What is answered while there is no model yet."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from edgekv.serve.encoding import Json
from edgekv.serve.errors import ApiError
from edgekv.serve.gate import Gate
from edgekv.serve.options import ServeOptions

LOADING = ApiError(503, "Loading model")


class Door:
    """An ASGI application in front of another one, which there is once the model is loaded."""

    def __init__(self, options: ServeOptions) -> None:
        self.app: ASGIApp | None = None
        self._loading = Gate(_loading, options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.app or self._loading)(scope, receive, send)


async def _loading(scope: Scope, receive: Receive, send: Send) -> None:
    """As llama-server's answer, in the words of both its older and its newer versions."""
    said = {"status": "loading model", **LOADING.body(scope["path"])}
    await Json(said, LOADING.status, LOADING.headers)(scope, receive, send)
