"""What the server says of itself: /health, /v1/models, /props, /slots, /metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from edgekv.conversations.losses import KINDS
from edgekv.serve import wording
from edgekv.serve.encoding import Json
from edgekv.serve.errors import ApiError
from edgekv.serve.service import Service, service_of
from edgekv.serve.settings import generation_settings, limit_settings, sampling_settings
from edgekv.serve.worker import Job

router = APIRouter()

SILENT_S, READING_S = 60, 600
"""Seconds after which a model counts as stuck: in a step, and in a part of a prompt."""


@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health(request: Request) -> Response:
    """Whether requests are answered: also whether the model's thread gives signs of life."""
    worker = service_of(request).worker
    if worker.silent_s <= (READING_S if worker.is_reading else SILENT_S):
        return Json({"status": "ok"})
    error = ApiError(503, f"the model has not answered for {worker.silent_s:.0f} s")
    return Json({"status": "error", **error.body(request.url.path)}, error.status, error.headers)


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(request: Request) -> dict[str, Any]:
    """The one model there is. A request may name any other: this one answers.

    `models` is the same in Ollama's form, as llama-server has it.
    """
    service = service_of(request)
    of_ollama = {"name": service.model, "model": service.model, "type": "model"}
    details = {"format": "gguf", "family": service.llm.metadata.get("general.architecture", "")}
    one = {**of_ollama, "capabilities": ["completion"], "details": details}
    return {"models": [one], "object": "list", "data": [_model(service)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    service = service_of(request)
    if name != service.model:
        raise ApiError(404, f"there is no model '{name}': this server has '{service.model}'")
    return _model(service)


def _model(service: Service) -> dict[str, Any]:
    llm = service.llm
    return {
        "id": service.model,
        "aliases": [service.model] if service.options.alias else [],
        "object": "model",
        "created": service.created,
        "owned_by": "edgekv",
        "meta": {
            "n_vocab": service.asker.n_vocab,
            "n_ctx": service.asker.n_ctx,
            "n_ctx_train": llm._model.n_ctx_train(),
            "n_embd": llm._model.n_embd(),
            "n_params": llm._model.n_params(),
            "size": llm._model.size(),
        },
    }


@router.get("/props")
async def props(request: Request) -> dict[str, Any]:
    """What the server was started with."""
    service = service_of(request)
    options = service.options
    params = sampling_settings(options.sampling) | limit_settings(options.max_tokens)
    return {
        "default_generation_settings": {
            **_slot(0, None, service.asker.n_ctx),
            "params": params,
        },
        "total_slots": options.parallel,
        "endpoint_slots": options.slots,
        "endpoint_metrics": options.metrics,
        "endpoint_props": False,
        "webui": True,
        "model_alias": service.model,
        "model_path": service.llm.model_path,
        "chat_template": service.prompts.template.text,
        "bos_token": service.prompts.template.bos,
        "eos_token": service.prompts.template.eos,
        "modalities": {"vision": False, "audio": False},
        "build_info": wording.FINGERPRINT,
    }


@router.get("/slots")
async def slots(request: Request, fail_on_no_slot: str = "") -> list[dict[str, Any]]:
    """The places for answers, and what is written in them. fail_on_no_slot: anything: status 503
    if none is free.
    """
    service = service_of(request)
    if not service.options.slots:
        raise ApiError(501, "this server does not show its slots: start it without --no-slots")
    jobs: list[Job | None] = [*service.worker.active()]
    if fail_on_no_slot and len(jobs) >= service.options.parallel:
        raise ApiError(503, "no slot available")
    jobs += [None] * (service.options.parallel - len(jobs))
    return [_slot(i, job, service.asker.n_ctx) for i, job in enumerate(jobs)]


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
    params, answer, most = generation_settings(job.wish), job.answer, job.wish.max_tokens
    if answer is None:
        return {**slot, "params": params}
    n_left = -1 if most is None else max(most - answer.n_written, 0)
    return {
        **slot,
        "params": params,
        "n_prompt_tokens": answer.n_prompt,
        "n_prompt_tokens_cache": answer.n_cached,
        "is_reading": not answer.has_read,
        "next_token": {
            "has_next_token": n_left != 0,
            "n_remain": n_left,
            "n_decoded": answer.n_written,
        },
    }


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Sums and states for Prometheus, under llama-server's names."""
    service = service_of(request)
    if not service.options.metrics:
        raise ApiError(501, "this server gives no metrics: start it with --metrics")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(service))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _Collector:
    def __init__(self, service: Service) -> None:
        self._worker = service.worker

    def collect(self) -> Iterator[Metric]:
        totals, active = self._worker.totals, self._worker.active()
        counters = {
            "prompt_tokens": ("Prompt tokens that were read.", totals.n_prompt),
            "prompt_cached_tokens": ("Prompt tokens that were there already.", totals.n_cached),
            "prompt_seconds": ("Time in which prompts were read.", totals.read_s),
            "tokens_predicted": ("Tokens that were written.", totals.n_written),
            "tokens_predicted_seconds": ("Time in which tokens were written.", totals.write_s),
            "answers": ("Answers that were written to their end.", totals.n_answers),
        }
        for name, (about, value) in counters.items():
            yield CounterMetricFamily(f"llamacpp:{name}", about, value)
        for kind, n in self._worker.conversations.losses.items():
            about = f"Conversations of which the log says why: {KINDS[kind]}."
            yield CounterMetricFamily(f"edgekv:conversations_{kind}", about, n)
        gauges = {
            "prompt_tokens_seconds": (
                "Prompt tokens read per second.",
                totals.n_prompt / totals.read_s if totals.read_s else 0.0,
            ),
            "predicted_tokens_seconds": (
                "Tokens written per second.",
                totals.n_written / totals.write_s if totals.write_s else 0.0,
            ),
            "n_tokens_max": ("Most tokens that a conversation had.", totals.n_most),
            "requests_processing": ("Requests that are answered.", len(active)),
            "requests_deferred": ("Requests that wait.", self._worker.n_waiting),
        }
        for name, (about, value) in gauges.items():
            yield GaugeMetricFamily(f"llamacpp:{name}", about, value)
        if totals.cache:
            about = "Bytes of the last conversation's cache"
            yield GaugeMetricFamily("edgekv:kv_bytes", f"{about}.", totals.cache.n_bytes)
            in_full = totals.cache.n_bytes_full
            yield GaugeMetricFamily("edgekv:kv_bytes_full", f"{about}, in full.", in_full)
