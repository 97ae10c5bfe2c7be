"""GET /conversations, DELETE /conversations/ID: those that the server keeps."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from edgekv.serve.encoding import Json
from edgekv.serve.service import between_steps, service_of

router = APIRouter()


@router.get("/conversations")
async def conversations(request: Request) -> Response:
    """The conversations that wait in memory or on disk, the one used last first."""
    service = service_of(request)
    found = await between_steps(service, service.worker.conversations.list)
    return Json({"object": "list", "data": [asdict(one) for one in found]})


@router.delete("/conversations/{id}")
async def erase(id: str, request: Request) -> dict[str, Any]:
    """Forget a conversation, in memory and on disk."""
    service = service_of(request)
    await between_steps(service, lambda: service.worker.conversations.erase(id))
    return {"id": id, "deleted": True}
