"""Text and tokens: /tokenize, /detokenize, /apply-template, and why there are no embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from edgekv.chat.specials import encoded
from edgekv.chat.template import Chat
from edgekv.chat.tools import choice_of
from edgekv.errors import BadInput
from edgekv.llama.llama import Llama
from edgekv.serve.bounds import BoundedRoute
from edgekv.serve.chat import tools_of
from edgekv.serve.encoding import Json, as_json
from edgekv.serve.errors import ApiError
from edgekv.serve.preparing import prepared
from edgekv.serve.schemas import ApplyTemplateBody, DetokenizeBody, TokenizeBody
from edgekv.serve.service import Service, service_of

router = APIRouter(route_class=BoundedRoute)

TEXT_MOST = 8 << 20
"""Bytes of a text to cut into tokens."""
SLICE = 4096
"""Tokens that are written at a time."""


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, http: HttpRequest) -> Response:
    """A text's tokens; with_pieces: each with its text, or its bytes if they are no text."""
    llm = service_of(http).llm
    tokens = await prepared(http, _tokens, llm, body)
    written = _slices(llm, tokens, body.with_pieces)
    return StreamingResponse(written, media_type="application/json")


def _tokens(llm: Llama, body: TokenizeBody) -> list[int]:
    data = encoded(body.content)
    if len(data) > TEXT_MOST:
        raise BadInput(f"the text has more than {TEXT_MOST:,} bytes: send it in pieces")
    return llm.tokenize(data, body.add_special, body.parse_special)


async def _slices(llm: Llama, tokens: list[int], with_pieces: bool) -> AsyncGenerator[str, None]:
    """The JSON of an answer. It is written off the event loop, a slice at a time."""
    yield '{"tokens":['
    for i in range(0, len(tokens), SLICE):
        some = await asyncio.to_thread(_slice, llm, tokens[i : i + SLICE], with_pieces)
        yield ("," if i else "") + some
    yield "]}"


def _slice(llm: Llama, tokens: Sequence[int], with_pieces: bool) -> str:
    if not with_pieces:
        return as_json(tokens)[1:-1]
    pieces = [{"id": t, "piece": _piece(llm.detokenize([t], None, True))} for t in tokens]
    return as_json(pieces)[1:-1]


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, http: HttpRequest) -> Response:
    """The text of tokens."""
    return await prepared(http, _text, service_of(http), body.tokens)


def _text(service: Service, tokens: list[int]) -> Response:
    service.check_tokens(tokens)
    text = service.llm.detokenize(tokens, None, True)
    return Json({"content": text.decode("utf-8", "replace")})


@router.post("/apply-template")
async def apply_template(body: ApplyTemplateBody, http: HttpRequest) -> Response:
    """The prompt that a chat's messages become."""
    return await prepared(http, _prompt, service_of(http), body)


def _prompt(service: Service, body: ApplyTemplateBody) -> Response:
    chat = Chat(
        [message.model_dump(exclude_unset=True) for message in body.messages],
        choice_of(tools_of(body.tools), None),
        variables=body.chat_template_kwargs or {},
        adds_generation_prompt=body.add_generation_prompt is not False,
    )
    return Json({"prompt": service.text_of(chat)})


@router.post("/v1/embeddings")
@router.post("/embeddings", include_in_schema=False)
@router.post("/embedding", include_in_schema=False)
@router.post("/api/embed", include_in_schema=False)
@router.post("/api/embeddings", include_in_schema=False)
async def embeddings() -> Response:
    """Refused: a server gives either texts or embeddings."""
    raise ApiError(
        400,
        "this model gives no embeddings: serve an embedding model, or this one with --embedding",
        "not_supported_error",
    )
