"""What Ollama's protocol asks of a server besides answers, for a server of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from edgekv.base.machine import rss_now
from edgekv.serve.encoding import Json
from edgekv.serve.errors import ApiError
from edgekv.serve.ollama.bodies import PullBody, ShowBody
from edgekv.serve.ollama.models import VERSION, Model, missing
from edgekv.version import __version__

router, everywhere, root = APIRouter(), APIRouter(), APIRouter()
"""everywhere: what a server of many models answers, too; root: GET / where there is no page."""

FOREVER = datetime(9999, 12, 31, tzinfo=timezone.utc).isoformat().replace("+00:00", "Z")
NOT_HERE = {
    "copy": "no model is copied here: a file's name is the model's",
    "create": "no model is made here: GGUF files are taken as they are, and --system of 'edgekv"
    " chat' or a system message says how to answer",
    "push": "no model is shared from here: 'hf upload USER/REPO FILE' does that",
    "delete": "no model is deleted here: delete its file, which 'edgekv models --json' names",
    "blobs/{digest}": "no file is taken here: put the GGUF file into a folder, and name the folder"
    " once with 'edgekv models FOLDER'",
}
"""Paths of Ollama's that change models, and what there is instead."""


@root.get("/", include_in_schema=False)
async def running() -> Response:
    """What clients look for before they use the protocol."""
    return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})


@everywhere.get("/api/version")
async def version() -> dict[str, str]:
    """Of the protocol; `edgekv` is this server's own."""
    return {"version": VERSION, "edgekv": __version__}


def _refusal(why: str) -> Any:
    async def refuse() -> Response:
        raise ApiError(501, why)

    return refuse


for _path, _why in NOT_HERE.items():
    everywhere.add_api_route(
        f"/api/{_path}", _refusal(_why), methods=["POST", "DELETE", "GET"], include_in_schema=False
    )


@dataclass(frozen=True)
class One:
    """The one model of a server. names: others that it has; template, parameters: of /api/show."""

    name: str
    names: Sequence[str]
    path: str
    n_ctx: int
    template: str = ""
    parameters: str = ""

    def is_named(self, name: str) -> bool:
        return name.removesuffix(":latest") in (self.name, *self.names)

    def listed(self) -> dict[str, Any]:
        return Model.of(self.path).listed(self.name)


def _one(http: HttpRequest) -> One:
    found: One = http.app.state.one
    return found


@router.get("/api/tags")
async def tags(http: HttpRequest) -> dict[str, Any]:
    """The one model."""
    return {"models": [_one(http).listed()]}


@router.get("/api/ps")
async def ps(http: HttpRequest) -> dict[str, Any]:
    """The one model, which stays; size: what the server takes in main memory now."""
    one = _one(http)
    running = {"size": rss_now(), "size_vram": 0, "expires_at": FOREVER}
    return {"models": [{**one.listed(), **running, "context_length": one.n_ctx}]}


@router.post("/api/show")
async def show(body: ShowBody, http: HttpRequest) -> Response:
    """What the model's file says of it, and how the server draws tokens."""
    one = _one(http)
    if not one.is_named(body.named):
        raise missing(body.named)
    return Json(Model.of(one.path).shown(one.template, one.parameters, bool(body.verbose)))


@router.post("/api/pull")
async def pull(body: PullBody, http: HttpRequest) -> Response:
    """Clients have a model pulled before they use it: the one that is there is there."""
    one = _one(http)
    if one.is_named(body.named):
        return Json({"status": "success"})
    raise ApiError(
        501,
        f"this server has the one model {one.name} and downloads none: 'edgekv pull USER/REPO'"
        " does that",
    )
