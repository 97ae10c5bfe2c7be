"""The paths of a server of many models: what it says of them, and requests that it hands on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import h11
from fastapi import APIRouter, FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from edgekv.errors import BadInput
from edgekv.models.found.found import Found
from edgekv.models.hub.models import download
from edgekv.serve import page
from edgekv.serve.app import bare
from edgekv.serve.encoding import Json, as_json
from edgekv.serve.errors import ApiError, is_ollama
from edgekv.serve.keep_alive import seconds
from edgekv.serve.ollama import paths
from edgekv.serve.ollama.bodies import ModelBody, PullBody, ShowBody
from edgekv.serve.ollama.models import Model, missing
from edgekv.serve.options import ServeOptions
from edgekv.serve.preparing import SMALL
from edgekv.serve.router.catalog import Catalog
from edgekv.serve.router.forward import Forwarded
from edgekv.serve.router.loaded import Loaded, Models
from edgekv.serve.router.options import RouterOptions
from edgekv.serve.wanted import unless_gone

router, others = APIRouter(), APIRouter()

METHODS = ["GET", "POST", "DELETE"]
FOREVER_S = 1e9
DYING_S = 10.0
"""Seconds in which a process that answers no more is gone, on a busy machine too."""
NO_PULL = (
    "this server downloads nothing for its clients: start it with --allow-pull, or run"
    " 'edgekv pull USER/REPO'"
)
NO_NAME = "which model? Name it as `model`: GET /v1/models lists what there is"


@dataclass
class Router:
    """What all handlers share. key: what children ask for."""

    options: RouterOptions
    models: Models
    catalog: Catalog
    key: str
    created: int

    async def named(self, name: str, path: str) -> Found:
        """Raises ApiError for a name that means no model."""
        if not name:
            there = await asyncio.to_thread(self.catalog.all)
            if len(there) != 1:
                raise ApiError(400, NO_NAME)
            return there[0]
        try:
            return await asyncio.to_thread(self.catalog.named, name)
        except BadInput as error:
            raise missing(name) if is_ollama(path) else ApiError(404, str(error)) from None


def create_router(options: ServeOptions, state: Router) -> FastAPI:
    """The application. `state.models.tend` has to run beside it."""
    app = bare(options)
    app.state.router = state
    root = page.router if options.page else paths.root
    for one in (router, paths.everywhere, root, others):
        app.include_router(one)
    return app


def _router(http: HttpRequest) -> Router:
    found: Router = http.app.state.router
    return found


# ---- which models there are


@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health() -> dict[str, str]:
    """Whether requests are handed on; a model's own: ?model=NAME at /slots."""
    return {"status": "ok"}


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(http: HttpRequest, reload: bool = False) -> dict[str, Any]:
    """All models, in OpenAI's form with llama-server's `status`."""
    state = _router(http)
    if reload:
        await asyncio.to_thread(state.catalog.refresh)
    there = await asyncio.to_thread(state.catalog.all)
    return {"object": "list", "data": [_entry(state, one) for one in there]}


@router.get("/v1/models/{name:path}")
async def model(name: str, http: HttpRequest) -> dict[str, Any]:
    state = _router(http)
    return _entry(state, await state.named(name, http.url.path))


def _entry(state: Router, model: Found) -> dict[str, Any]:
    one = state.models.get(model)
    value = "unloaded" if one is None or one.is_over else "loaded" if one.is_ready else "loading"
    said: dict[str, Any] = {"value": value}
    if one is not None and one.child.exit_code is not None:
        said |= {"failed": True, "exit_code": one.child.exit_code}
    head = {"id": model.name, "object": "model", "created": state.created, "owned_by": "edgekv"}
    return {**head, "path": model.path, "aliases": list(model.also), "status": said}


@router.post("/models/load")
async def load(body: ModelBody, http: HttpRequest) -> dict[str, bool]:
    """Have a model loaded. The answer does not wait for it: GET /models says how far it is."""
    state = _router(http)
    await state.models.load(await state.named(body.named, http.url.path))
    return {"success": True}


@router.post("/models/unload")
async def unload(body: ModelBody, http: HttpRequest) -> dict[str, bool]:
    """A model leaves, whatever it answers at the moment."""
    state = _router(http)
    model = await state.named(body.named, http.url.path)
    one = state.models.get(model)
    if one is None:
        raise ApiError(400, f"{model.name} is not loaded")
    await state.models.unload(one)
    return {"success": True}


@router.get("/props")
async def props(http: HttpRequest, model: str = "") -> Response:
    """What the router was started with; with ?model=NAME what a model was."""
    if model:
        return await hand_on(http, "props")
    options = _router(http).options
    said = {"role": "router", "max_instances": options.models_max}
    return Json({**said, "models_autoload": options.models_autoload})


# ---- the same in Ollama's words


@router.get("/api/tags")
async def tags(http: HttpRequest) -> dict[str, Any]:
    """All models."""
    state = _router(http)
    there = await asyncio.to_thread(state.catalog.all)
    return {"models": await asyncio.to_thread(lambda: [_listed(one) for one in there])}


def _listed(model: Found) -> dict[str, Any]:
    return Model.of(model.path).listed(model.name)


@router.get("/api/ps")
async def ps(http: HttpRequest) -> dict[str, Any]:
    """Models that are loaded. size: of files, or processes if more; size_vram is not known."""
    return {"models": [_running(one) for one in _router(http).models.all() if one.is_ready]}


def _running(one: Loaded) -> dict[str, Any]:
    until = datetime.now(timezone.utc) + timedelta(seconds=min(one.left_s, FOREVER_S))
    more = {"size": one.size, "size_vram": 0, "expires_at": until.isoformat()}
    return {**_listed(one.model), **more}


@router.post("/api/show")
async def show(body: ShowBody, http: HttpRequest) -> Response:
    """What a model's file says."""
    model = await _router(http).named(body.named, http.url.path)
    found = await asyncio.to_thread(Model.of, model.path)
    return Json(found.shown(verbose=bool(body.verbose)))


@router.post("/api/pull")
async def pull(body: PullBody, http: HttpRequest) -> Response:
    """Download a model of Hugging Face's, where that is allowed; one that is here is here."""
    state = _router(http)
    with suppress(ApiError):
        await state.named(body.named, http.url.path)
        return Json({"status": "success"})
    if not state.options.allow_pull:
        raise ApiError(403, NO_PULL)
    lines = _pulled(state, body.named)
    if body.stream is False:
        said = [json.loads(line) async for line in lines]
        if "error" in said[-1]:
            raise ApiError(400, said[-1]["error"])
        return Json(said[-1])
    return StreamingResponse(lines, media_type="application/x-ndjson")


async def _pulled(state: Router, name: str) -> AsyncGenerator[str, None]:
    """What a download says, as lines of JSON."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[dict[str, str] | None]()

    def tell(said: dict[str, str] | None) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, said)

    def fetch() -> None:
        try:
            download(name, lambda line: tell({"status": line}))
            state.catalog.refresh()
            tell({"status": "success"})
        except BadInput as error:
            tell({"error": str(error)})
        finally:
            tell(None)

    working = asyncio.ensure_future(asyncio.to_thread(fetch))
    yield as_json({"status": "pulling manifest"}) + "\n"
    while (said := await queue.get()) is not None:
        yield as_json(said) + "\n"
    await working


# ---- what is handed on


@others.api_route("/{path:path}", methods=METHODS, include_in_schema=False)
async def hand_on(http: HttpRequest, path: str) -> Response:
    """Any other request goes to the model that it names: `model` of its body, or of its query."""
    state = _router(http)
    body = await http.body()
    said = await asyncio.to_thread(_json, body) if len(body) > SMALL else _json(body)
    name = said.get("model") or said.get("name") or http.query_params.get("model") or ""
    model = await state.named(str(name), http.url.path)
    asks = http.url.path in ("/api/chat", "/api/generate")
    wish = said.get("keep_alive") if asks else None
    keep_s = None if wish is None else seconds(wish)
    if keep_s == 0 and not (said.get("messages") or said.get("prompt")):
        return await _let_go(state, model, http.url.path)
    return await unless_gone(http, _answer(http, state, model, keep_s, body))


def _json(body: bytes) -> dict[str, Any]:
    """A request's JSON, as far as it has some: its model says what is wrong with it."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


async def _let_go(state: Router, model: Found, path: str) -> Response:
    """The answer to nothing, with which Ollama's clients have a model unloaded."""
    one = state.models.get(model)
    if one is not None:
        one.keep_s = 0
    now = datetime.now(timezone.utc).isoformat()
    form = {"response": ""} if path == "/api/generate" else {"message": {"role": "assistant"}}
    head = {"model": model.name, "created_at": now, **form}
    return Json({**head, "done": True, "done_reason": "unload"})


async def _answer(
    http: HttpRequest, state: Router, model: Found, keep_s: float | None, body: bytes
) -> Response:
    """The answer of a model's own server, as it comes. One that crashes before its answer begins is
    loaded again and asked once more.
    """
    target = http.scope["raw_path"]
    if http.url.query:
        target += b"?" + http.url.query.encode()
    client = http.client.host if http.client else ""
    for may_repeat in (True, False):
        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(state.models.using(model, keep_s))
            asked = Forwarded(one.child.ready.result(), state.key)
            stack.callback(asked.close)
            try:
                await asked.send(http.method, target, http.headers.raw, body, client)
            except (OSError, h11.RemoteProtocolError):
                is_told = one.is_leaving or not may_repeat
                if is_told or not await asyncio.to_thread(one.child.ends_within, DYING_S):
                    raise _ended(model) from None
                continue
            response = _HandedOn(_pieces(asked, model, http.url.path), asked.status)
            response.raw_headers, response.stack = asked.headers, stack.pop_all()
            return response
    raise AssertionError


class _HandedOn(StreamingResponse):
    """A model's answer as the router sends it on.

    stack: what ends with the answer, also where it never begins.
    """

    stack: AsyncExitStack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.stack:
            await super().__call__(scope, receive, send)


async def _pieces(asked: Forwarded, model: Found, path: str) -> AsyncIterator[bytes]:
    try:
        async for piece in asked.body():
            yield piece
    except (OSError, h11.RemoteProtocolError):
        said = as_json(_ended(model).body(path))
        yield (f"{said}\n" if is_ollama(path) else f"data: {said}\n\n").encode()


def _ended(model: Found) -> ApiError:
    return ApiError(500, f"{model.name} has ended meanwhile: the next request loads it again")


def new_state(options: RouterOptions, models: Models, key: str) -> Router:
    return Router(options, models, Catalog(options.models_dir), key, int(time.time()))
