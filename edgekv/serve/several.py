"""Several answers to one request, one after the other: those that share a prompt read it once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from edgekv.errors import BadInput
from edgekv.serve import sse, wording
from edgekv.serve.answers import Whole, frames, streamed, whole
from edgekv.serve.events import Done
from edgekv.serve.request import Request
from edgekv.serve.schemas import GenerationBody
from edgekv.serve.service import client_of, service_of
from edgekv.serve.wanted import unless_gone
from edgekv.serve.writer import Writer

MOST = 64
"""Answers to a request."""


def check(n_prompts: int, n: int) -> None:
    """Raises BadInput for too many answers, or none."""
    if not 0 < n_prompts * n <= MOST:
        raise BadInput(f"a request has 1 to {MOST} answers: give fewer prompts, or a smaller n")


def repeated(requests: Sequence[Request], n: int) -> list[Request]:
    """n answers to each prompt, with seeds that follow each other."""
    return [_again(one, i) for one in requests for i in range(n)]


def _again(request: Request, i: int) -> Request:
    if i == 0:
        return request
    seed = request.sampling.seed
    sampling = replace(request.sampling, seed=None if seed is None else seed + i)
    return replace(request, sampling=sampling, is_fresh=False)


async def wholes(http: HttpRequest, requests: Sequence[Request]) -> list[Whole]:
    """Raises ApiError if an answer fails."""
    service, client = service_of(http), client_of(http)

    async def all_of_them() -> list[Whole]:
        return [await whole(service, one, client) for one in requests]

    return await unless_gone(http, all_of_them())


async def streams(
    http: HttpRequest,
    requests: Sequence[Request],
    writers: Sequence[Writer],
    end: Callable[[Sequence[Done]], str] = lambda dones: "",
) -> Response:
    """The response of a stream. end: what comes behind the last answer, if none has failed."""
    service, client = service_of(http), client_of(http)

    async def pieces() -> AsyncGenerator[str, None]:
        dones = list[Done]()
        for one, writer in zip(requests, writers, strict=True):
            async with aclosing(frames(service, one, client, writer)) as coming:
                async for frame in coming:
                    yield frame
            if writer.done is None:  # it failed, and the writer has said so
                return
            dones.append(writer.done)
        if last := end(dones):
            yield last

    return await streamed(http, pieces())


def costs(dones: Sequence[Done], n: int) -> dict[str, Any]:
    """What answers took of which n each share a prompt: `usage`, and of one alone `timings`."""
    alone = {"timings": wording.timings(dones[0].progress)} if len(dones) == 1 else {}
    return {"usage": wording.usage(dones, n), **alone}


def end(head: dict[str, Any], body: GenerationBody, dones: Sequence[Done]) -> str:
    """The end of a stream of OpenAI's. head: what all its chunks have."""
    if body.stream_options is None or not body.stream_options.include_usage:
        return sse.DONE
    return sse.event({**head, "choices": [], **costs(dones, body.n_answers)}) + sse.DONE
