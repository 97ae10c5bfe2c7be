"""The HTTP application: its paths, and what becomes of errors."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from edgekv.errors import EdgeKVError
from edgekv.serve import (
    anthropic,
    chat,
    completions,
    extract,
    native,
    page,
    responses,
    slots,
    status,
    stored,
    tokens,
)
from edgekv.serve.encoding import Json
from edgekv.serve.errors import ApiError
from edgekv.serve.gate import LOCAL_ORIGIN, Gate, refusal
from edgekv.serve.ollama import asking, paths
from edgekv.serve.options import ServeOptions
from edgekv.serve.preparing import Preparing
from edgekv.serve.service import Service
from edgekv.version import __version__

log = logging.getLogger("edgekv.serve")


def create_app(service: Service) -> FastAPI:
    """The application of one model. Its worker has to be started."""
    options = service.options
    app = bare(options)
    app.state.service = service
    app.state.one = _one(service)
    app.state.preparing = Preparing(options.parallel + options.max_queue)
    parts = (chat, completions, responses, anthropic, native, status, slots, stored, tokens)
    routers = [part.router for part in (*parts, extract, asking, paths)]
    for router in (*routers, paths.everywhere, page.router if options.page else paths.root):
        app.include_router(router)
    return app


def _one(service: Service) -> paths.One:
    usual = service.options.sampling
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
    parameters = "\n".join(f"{name:30} {getattr(usual, name)}" for name in names)
    template = service.prompts.template.text
    path, n_ctx = service.llm.model_path, service.n_ctx
    return paths.One(service.model, service.options.names, path, n_ctx, template, parameters)


def bare(options: ServeOptions) -> FastAPI:
    """An application without a path: who may ask, and what errors become."""
    # FastAPI's own pages of documentation load scripts from elsewhere
    app = FastAPI(
        title="edgekv",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        default_response_class=Json,
    )
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(EdgeKVError, _user_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _fault)
    app.add_middleware(Gate, options=options)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_origin_regex=LOCAL_ORIGIN if "localhost" in options.cors_origins else None,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    return app


async def _api_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal(error, http.url.path)


async def _user_error(http: HttpRequest, error: Exception) -> Response:
    return refusal(ApiError(400, str(error)), http.url.path)


async def _invalid(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return refusal(ApiError(400, _one_line(error)), http.url.path)


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: f"there is no {http.url.path} here", 405: "this path wants another method"}
    message = messages.get(error.status_code, str(error.detail))
    return refusal(ApiError(error.status_code, message), http.url.path)


async def _fault(http: HttpRequest, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return refusal(ApiError(500, "the server has a fault: see its log"), http.url.path)


def _one_line(error: RequestValidationError) -> str:
    """The first thing that is wrong with a request."""
    first: dict[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"the request is no JSON: {first.get('ctx', {}).get('error', first['msg'])}"
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    return f"{place or 'the request'}: {first['msg']}"
