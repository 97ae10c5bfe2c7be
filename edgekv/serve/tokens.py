"""Text and tokens: /tokenize, /detokenize, /apply-template, and why there are no embeddings."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from edgekv.chat.specials import encoded
from edgekv.chat.template import Chat
from edgekv.chat.tools import choice_of
from edgekv.errors import BadInput
from edgekv.serve.chat import tool_of
from edgekv.serve.errors import ApiError
from edgekv.serve.schemas import ApplyTemplateBody, DetokenizeBody, TokenizeBody
from edgekv.serve.service import service_of

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
    """A text's tokens; with_pieces: each with its text, or its bytes if they are no text."""
    llm = service_of(request).llm
    tokens = await asyncio.to_thread(
        llm.tokenize, encoded(body.content), body.add_special, body.parse_special
    )
    if not body.with_pieces:
        return {"tokens": tokens}
    return {"tokens": [{"id": t, "piece": _piece(llm.detokenize([t], None, True))} for t in tokens]}


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, str]:
    """The text of tokens."""
    service = service_of(request)
    if not all(0 <= token < service.asker.n_vocab for token in body.tokens):
        raise BadInput(f"a token is none of this model's {service.asker.n_vocab:,}")
    text = await asyncio.to_thread(service.llm.detokenize, body.tokens, None, True)
    return {"content": text.decode("utf-8", "replace")}


@router.post("/apply-template")
async def apply_template(body: ApplyTemplateBody, request: Request) -> dict[str, str]:
    """The prompt that a chat's messages become."""
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    chat = Chat(
        messages,
        choice_of([tool_of(tool) for tool in body.tools or ()], None),
        variables=body.chat_template_kwargs or {},
    )
    template = service_of(request).prompts.template
    return {"prompt": await asyncio.to_thread(template.text_of, chat)}


@router.post("/v1/embeddings")
@router.post("/embeddings", include_in_schema=False)
@router.post("/embedding", include_in_schema=False)
async def embeddings() -> Response:
    """Refused: a compressed cache gives none."""
    raise ApiError(
        400,
        "this server gives no embeddings: run llama-server --embedding with an embedding model",
        "not_supported_error",
    )
