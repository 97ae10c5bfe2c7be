"""What a client is told when a request cannot be answered, in the form of its protocol."""

from __future__ import annotations

from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
"""Status -> llama-server's name of the error."""

ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 501: "api_error"}
ANTHROPIC_TYPES |= {503: "overloaded_error", 405: "invalid_request_error"}


class ApiError(Exception):
    """An answer with an error status. kind: the error's type, where it is not the status' own."""

    def __init__(self, status: int, message: str, kind: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.status, self.message, self.details = status, message, details
        self.kind = kind or TYPES.get(status, "server_error")

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": "1"} if self.status == 503 else {}

    def body(self, path: str) -> dict[str, Any]:
        """The JSON of the answer; its form is that of the protocol at `path`."""
        if is_anthropic(path):
            kind = ANTHROPIC_TYPES.get(self.status, TYPES.get(self.status, self.kind))
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        if is_ollama(path):
            return {"error": self.message}
        error = {"code": self.status, "message": self.message, "type": self.kind}
        return {"error": {**error, **self.details}}


def too_long(message: str, n: int, n_ctx: int) -> ApiError:
    """What a client is told whose text of n tokens or more a context of n_ctx has no room for."""
    kind, advice = "exceed_context_size_error", "or start the server with a larger -c"
    return ApiError(400, f"{message}, {advice}", kind, n_prompt_tokens=n, n_ctx=n_ctx)


def prompt_too_long(n: int, n_ctx: int, has_more: bool = False) -> ApiError:
    """The same of a prompt. has_more: it may have more than n tokens."""
    has = f"the prompt has {n:,} tokens{' at least' * has_more}"
    size = f"exceeds the available context size of {n_ctx:,}: give a shorter one"
    return too_long(f"{has} and {size}", n, n_ctx)


def is_anthropic(path: str) -> bool:
    return path.startswith("/v1/messages")


def is_ollama(path: str) -> bool:
    return path.startswith("/api/")
