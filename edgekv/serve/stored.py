"""GET /conversations, DELETE /conversations/ID, GET /kept: what the server keeps."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from edgekv.serve.encoding import Json
from edgekv.serve.kept import shown
from edgekv.serve.preparing import prepared
from edgekv.serve.service import between_steps, service_of

router = APIRouter()


@router.get("/conversations")
async def conversations(http: HttpRequest) -> Response:
    """The conversations that wait in memory or on disk, the one used last first."""
    service = service_of(http)
    found = await between_steps(service, service.worker.conversations.list)
    return Json({"object": "list", "data": [asdict(one) for one in found]})


@router.get("/kept")
async def kept(conversation: str, http: HttpRequest, layer: int | None = None) -> Response:
    """The text of a conversation, each token with the number of KV heads that keep it: of all
    layers, or of one. conversation: as the field `kv` of an answer names it.
    """
    service = service_of(http)
    conversations = service.worker.conversations
    found = await between_steps(service, lambda: conversations.kept(conversation, layer))
    head = {"conversation": conversation, "layer": layer}
    return await prepared(http, lambda: Json({**head, **shown(service.llm, found)}))


@router.delete("/conversations/{id}")
async def erase(id: str, http: HttpRequest) -> dict[str, Any]:
    """Forget a conversation, in memory and on disk."""
    service = service_of(http)
    await between_steps(service, lambda: service.worker.conversations.erase(id))
    return {"id": id, "deleted": True}
