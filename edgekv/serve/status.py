"""What the server says of itself: /health, /v1/models, /props, /slots, /metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from edgekv.conversation.losses import KINDS
from edgekv.native import llama_cpp
from edgekv.serve import wording
from edgekv.serve.encoding import Json
from edgekv.serve.errors import ApiError
from edgekv.serve.job import Job, State
from edgekv.serve.service import Service, service_of
from edgekv.serve.settings import generation_settings, limit_settings, sampling_settings

router = APIRouter()

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
SILENT_S, READING_S = 60, 600
"""Seconds after which a model counts as stuck: in a step, and in a part of a prompt."""


@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health(http: HttpRequest) -> Response:
    """Whether requests are answered: also whether the model's thread gives signs of life."""
    worker = service_of(http).worker
    if worker.silent_s <= (READING_S if worker.is_reading else SILENT_S):
        return Json({"status": "ok"})
    error = ApiError(503, f"the model has not answered for {worker.silent_s:.0f} s")
    return Json({"status": "error", **error.body(http.url.path)}, error.status, error.headers)


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(http: HttpRequest) -> dict[str, Any]:
    """The one model there is. A request may name any other: this one answers.

    `models` is the same in Ollama's form, as llama-server has it.
    """
    service = service_of(http)
    of_ollama = {"name": service.model, "model": service.model, "type": "model"}
    details = {"format": "gguf", "family": service.llm.metadata.get("general.architecture", "")}
    one = {**of_ollama, "capabilities": ["completion"], "details": details}
    return {"models": [one], "object": "list", "data": [_model(service)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, http: HttpRequest) -> dict[str, Any]:
    service = service_of(http)
    if name not in (service.model, *service.options.names):
        raise ApiError(404, f"there is no model '{name}': this server has '{service.model}'")
    return _model(service)


def _model(service: Service) -> dict[str, Any]:
    llm = service.llm
    return {
        "id": service.model,
        "aliases": service.options.names,
        "tags": service.options.tag_words,
        "object": "model",
        "created": service.created,
        "owned_by": "edgekv",
        "meta": {
            "n_vocab": service.n_vocab,
            "n_ctx": service.n_ctx,
            "n_ctx_train": llama_cpp.llama_model_n_ctx_train(llm.model),
            "n_embd": llama_cpp.llama_model_n_embd(llm.model),
            "n_params": llama_cpp.llama_model_n_params(llm.model),
            "size": llama_cpp.llama_model_size(llm.model),
        },
    }


@router.get("/props")
async def props(http: HttpRequest) -> dict[str, Any]:
    """What the server was started with."""
    service = service_of(http)
    options = service.options
    params = sampling_settings(options.sampling) | limit_settings(options.max_tokens)
    return {
        "default_generation_settings": {**_slot(0, None, service.n_ctx), "params": params},
        "total_slots": options.parallel,
        "endpoint_slots": options.slots,
        "endpoint_metrics": options.metrics,
        "endpoint_props": False,
        "webui": options.page,
        "model_alias": service.model,
        "model_path": service.llm.model_path,
        "chat_template": service.prompts.template.text,
        "chat_template_caps": service.prompts.template.can,
        "bos_token": service.prompts.template.bos,
        "eos_token": service.prompts.template.eos,
        "modalities": {"vision": False, "audio": False},
        "build_info": wording.FINGERPRINT,
        "is_sleeping": False,
    }


@router.get("/slots")
async def slots(http: HttpRequest, fail_on_no_slot: str = "") -> list[dict[str, Any]]:
    """The places for answers, and what is in them. fail_on_no_slot: status 503 if none is free."""
    service = service_of(http)
    if not service.options.slots:
        raise ApiError(501, "this server does not show its slots: start it without --no-slots")
    jobs: list[Job | None] = [*service.worker.active()]
    if fail_on_no_slot and len(jobs) >= service.options.parallel:
        raise ApiError(503, "no slot available")
    jobs += [None] * (service.options.parallel - len(jobs))
    return [_slot(i, job, service.n_ctx) for i, job in enumerate(jobs)]


def _slot(index: int, job: Job | None, n_ctx: int) -> dict[str, Any]:
    slot = {
        "id": index,
        "id_task": -1 if job is None else job.id,
        "n_ctx": n_ctx,
        "speculative": False,
        "is_processing": job is not None,
    }
    if job is None:
        return slot
    params, most = generation_settings(job.request), job.request.max_tokens
    if job.state is State.WAITING:
        return {**slot, "params": params}
    now = job.progress
    n_left = -1 if most is None else max(most - now.n_written, 0)
    return {
        **slot,
        "params": params,
        "n_prompt_tokens": now.n_prompt,
        "n_prompt_tokens_processed": now.n_prompt - now.n_cached,
        "n_prompt_tokens_cache": now.n_cached,
        "is_reading": not job.has_read,
        "next_token": [
            {"has_next_token": n_left != 0, "n_remain": n_left, "n_decoded": now.n_written}
        ],
    }


@router.get("/metrics")
async def metrics(http: HttpRequest) -> Response:
    """Sums and states for Prometheus, under llama-server's names."""
    service = service_of(http)
    if not service.options.metrics:
        raise ApiError(501, "this server gives no metrics: start it with --metrics")
    lines = [
        f"# HELP {name} {about}\n# TYPE {name} {kind}\n{name} {float(value)}\n"
        for name, kind, about, value in _metrics(service)
    ]
    headers = {"Process-Start-Time-Unix": str(service.created)}
    return Response("".join(lines), media_type=PROMETHEUS, headers=headers)


def _metrics(service: Service) -> Iterator[tuple[str, str, str, float]]:
    """Names, kinds, what they are, and values."""
    worker = service.worker
    totals, n_active = worker.totals, len(worker.active())
    counters = {
        "prompt_tokens_total": ("Prompt tokens that were read.", totals.n_prompt),
        "prompt_tokens_cached_total": ("Prompt tokens that were there already.", totals.n_cached),
        "prompt_seconds_total": ("Time in which prompts were read.", totals.read_s),
        "tokens_predicted_total": ("Tokens that were written.", totals.n_written),
        "tokens_predicted_seconds_total": ("Time in which tokens were written.", totals.write_s),
        "n_decode_total": ("Calls of llama_decode.", totals.n_decodes),
        "n_tokens_max": ("Most tokens that a conversation had.", totals.n_most),
        "spec_decode_num_draft_tokens_total": ("Tokens of drafts.", totals.n_drafted),
        "spec_decode_num_accepted_tokens_total": ("Those that were right.", totals.n_right),
        "spec_decode_num_drafts_total": ("Drafts that were checked.", totals.n_drafts),
    }
    for name, (about, value) in counters.items():
        yield f"llamacpp:{name}", "counter", about, value
    gauges = {
        "prompt_tokens_seconds": (
            "Prompt tokens read per second.",
            totals.n_prompt / totals.read_s if totals.read_s else 0.0,
        ),
        "predicted_tokens_seconds": (
            "Tokens written per second.",
            totals.n_written / totals.write_s if totals.write_s else 0.0,
        ),
        "requests_processing": ("Requests that are answered.", n_active),
        "requests_deferred": ("Requests that wait.", worker.n_waiting),
        "n_busy_slots_per_decode": (
            "Answers in a call of llama_decode: they take turns.",
            1 if totals.n_decodes else 0,
        ),
    }
    for name, (about, value) in gauges.items():
        yield f"llamacpp:{name}", "gauge", about, value
    about = "Answers that were written to their end."
    yield "edgekv:answers_total", "counter", about, totals.n_answers
    for kind, n in worker.conversations.losses.counts.items():
        about = f"How often a conversation {KINDS[kind]}."
        yield f"edgekv:conversations_{kind}_total", "counter", about, n
    if last := totals.last:
        about = "Bytes of the last conversation's cache"
        yield "edgekv:kv_bytes", "gauge", f"{about}.", last.stats.n_bytes_used
        yield "edgekv:kv_bytes_full", "gauge", f"{about}, in full.", last.stats.n_bytes_full
        about = "Bytes of all conversations' archives, on disk."
        yield "edgekv:archive_bytes", "gauge", about, last.n_bytes_archives
