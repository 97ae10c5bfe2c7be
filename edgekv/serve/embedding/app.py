"""The paths of a model that gives embeddings, or ranks documents."""

from __future__ import annotations

import time
from base64 import b64encode
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, FastAPI
from fastapi import Request as HttpRequest
from numpy.typing import NDArray
from pydantic import Field
from starlette.responses import Response

from edgekv.errors import BadInput
from edgekv.serve.app import bare
from edgekv.serve.bounds import ITEMS_MOST
from edgekv.serve.embedding.embedder import Embedder, Tokens, normalized
from edgekv.serve.encoding import Json
from edgekv.serve.errors import ApiError
from edgekv.serve.ollama import paths
from edgekv.serve.ollama.bodies import ModelBody, Options
from edgekv.serve.ollama.paths import One
from edgekv.serve.options import ServeOptions
from edgekv.serve.schemas import Body
from edgekv.serve.texts import prompts_in
from edgekv.serve.wanted import unless_gone

router = APIRouter()

NO_TEXT = "this model writes no text: it gives embeddings, at /v1/embeddings and /api/embed"
NO_RANK = "this model ranks no documents: start the server with a reranker, or with --reranking"
RANKS = "this model ranks documents, at /v1/rerank: it gives no embeddings"


def create_embedding_app(embedder: Embedder, one: One, options: ServeOptions) -> FastAPI:
    """The application of one model."""
    app = bare(options)
    app.state.embedder, app.state.one, app.state.created = embedder, one, int(time.time())
    for part in (router, paths.router, paths.everywhere, paths.root):
        app.include_router(part)
    return app


def _embedder(http: HttpRequest) -> Embedder:
    found: Embedder = http.app.state.embedder
    return found


# ---- embeddings


class EmbeddingsBody(Body):
    input: Any
    """Texts, tokens, or a list of such."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class EmbedBody(ModelBody):
    input: str | list[str] = Field(default_factory=list)
    prompt: str | None = None
    """In the place of `input`, of Ollama's older path."""
    truncate: bool | None = None
    dimensions: int | None = None
    options: Options | None = None
    keep_alive: float | str | None = None


async def _vectors(
    http: HttpRequest, texts: list[Tokens], dimensions: int | None
) -> NDArray[np.float32]:
    embedder = _embedder(http)
    if embedder.ranks:
        raise BadInput(RANKS)
    if len(texts) > ITEMS_MOST:
        raise BadInput(f"a request may have {ITEMS_MOST:,} texts at most: send fewer")
    return normalized(await unless_gone(http, embedder.vectors(texts)), dimensions)


@router.post("/v1/embeddings")
@router.post("/embeddings", include_in_schema=False)
async def embeddings(body: EmbeddingsBody, http: HttpRequest) -> Response:
    """A vector of length 1 for each text."""
    embedder, texts = _embedder(http), list[Tokens]()
    for prompt in prompts_in(body.input):
        if len(prompt) == 1 and isinstance(prompt[0], str):
            texts.append(embedder.tokens_of(prompt[0]))
        else:
            texts.append(embedder.checked(prompt))
    found = await _vectors(http, texts, body.dimensions)
    is_binary = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": i,
            "embedding": b64encode(one.astype("<f4")).decode() if is_binary else one.tolist(),
        }
        for i, one in enumerate(found)
    ]
    head = {"object": "list", "data": data, "model": http.app.state.one.name}
    return Json({**head, "usage": _usage(texts)})


def _usage(texts: list[Tokens]) -> dict[str, int]:
    n = sum(map(len, texts))
    return {"prompt_tokens": n, "total_tokens": n}


@router.post("/api/embed")
async def embed(body: EmbedBody, http: HttpRequest) -> Response:
    """The same in Ollama's form. What does not fit is left out unless `truncate` is false."""
    begin, embedder = time.perf_counter_ns(), _embedder(http)
    said = [body.input] if isinstance(body.input, str) else body.input
    texts = [embedder.tokens_of(text, body.truncate is not False) for text in said]
    found = await _vectors(http, texts, body.dimensions)
    costs = {"total_duration": time.perf_counter_ns() - begin, "load_duration": 0}
    head = {"model": http.app.state.one.name, "embeddings": found.tolist()}
    return Json({**head, **costs, "prompt_eval_count": sum(map(len, texts))})


@router.post("/api/embeddings")
async def one_embedding(body: EmbedBody, http: HttpRequest) -> Response:
    """Ollama's older path, for one text."""
    texts = [_embedder(http).tokens_of(body.prompt, True)] if body.prompt else []
    found = await _vectors(http, texts, None)
    return Json({"embedding": found[0].tolist() if texts else []})


# ---- ranks


class RerankBody(Body):
    query: str
    documents: list[str | dict[str, Any]] | None = Field(None, max_length=ITEMS_MOST)
    texts: list[str] | None = Field(None, max_length=ITEMS_MOST)
    """In the place of `documents`, in the form of text-embeddings-inference."""
    top_n: int | None = Field(None, ge=1)
    return_text: bool = False


@router.post("/v1/rerank")
@router.post("/rerank", include_in_schema=False)
@router.post("/v1/reranking", include_in_schema=False)
@router.post("/reranking", include_in_schema=False)
async def rerank(body: RerankBody, http: HttpRequest) -> Response:
    """Documents by how well they answer a query, the best first."""
    embedder = _embedder(http)
    if not embedder.ranks:
        raise ApiError(501, NO_RANK)
    documents = [_text(one) for one in (body.documents or body.texts or ())]
    if not documents:
        raise BadInput("there are no documents: give a list of texts")
    pairs = [embedder.pair(body.query, one) for one in documents]
    found = await unless_gone(http, embedder.vectors(pairs))
    order = np.argsort(-found[:, 0], kind="stable")[: body.top_n].tolist()
    if body.texts is not None:
        more = [{"text": documents[i]} if body.return_text else {} for i in order]
        scores = [{"index": i, "score": float(found[i, 0])} for i in order]
        return Json([{**one, **text} for one, text in zip(scores, more, strict=True)])
    results = [{"index": i, "relevance_score": float(found[i, 0])} for i in order]
    head = {"model": http.app.state.one.name, "object": "list", "usage": _usage(pairs)}
    return Json({**head, "results": results})


def _text(document: str | dict[str, Any]) -> str:
    found = document if isinstance(document, str) else document.get("text")
    if not isinstance(found, str):
        raise BadInput("a document is a text, or has one as `text`")
    return found


# ---- what the server says of itself


@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(http: HttpRequest) -> dict[str, Any]:
    """The one model."""
    state, embedder = http.app.state, _embedder(http)
    meta = {"n_ctx": embedder.n_ctx, "n_embd": embedder.n_out}
    head = {"id": state.one.name, "object": "model", "created": state.created}
    return {"object": "list", "data": [{**head, "owned_by": "edgekv", "meta": meta}]}


async def _no_text() -> Response:
    raise ApiError(501, NO_TEXT)


for _path in (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/completion", "/api/chat", "/api/generate"),
):
    router.add_api_route(_path, _no_text, methods=["POST"], include_in_schema=False)
