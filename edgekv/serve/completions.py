"""POST /v1/completions: a text goes on."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from edgekv.errors import BadInput
from edgekv.serve import sse, wording
from edgekv.serve.asked import Asked, Asker, Limits
from edgekv.serve.bounds import BoundedRoute
from edgekv.serve.chat import one_answer
from edgekv.serve.encoding import Json
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Done, TokenLogprob
from edgekv.serve.preparing import prepared
from edgekv.serve.reply import Part, Text
from edgekv.serve.schemas import CompletionBody
from edgekv.serve.service import (
    Service,
    Whole,
    Writer,
    client_of,
    frames,
    service_of,
    streamed,
    unless_gone,
    whole,
)

router = APIRouter(route_class=BoundedRoute)

PROMPTS_MOST = 64


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """The text that follows each prompt."""
    service = service_of(request)
    asked = await prepared(request, ask, service.asker, body)
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.model,
    }
    if body.stream:
        return await streamed(request, _all_frames(service, asked, request, head, body))
    answers = await unless_gone(request, _all(service, asked, request))
    choices = [
        _choice(i, answer, _echoed(service, body, one))
        for i, (answer, one) in enumerate(zip(answers, asked, strict=True))
    ]
    return Json({**head, "choices": choices, **_costs(answers)})


def ask(asker: Asker, body: CompletionBody) -> list[Asked]:
    """One wish for each prompt. Raises BadInput and ApiError."""
    one_answer(body.n)
    if body.suffix:
        raise BadInput("this server does not fill a gap in front of a suffix: leave it out")
    if body.echo and body.logprobs is not None:
        raise BadInput("logprobs of the prompt itself are not given: leave echo or logprobs out")
    has_limit, limit = body.limit()
    limits = Limits(
        asker.sampling(body),
        has_limit,
        limit,
        body.stops(),
        body.logprobs,
        bool(body.ignore_eos),
        body.is_fresh(asker.options.parallel),
    )
    prompts = _prompts(body.prompt)
    if not 0 < len(prompts) <= PROMPTS_MOST:
        raise BadInput(f"give 1 to {PROMPTS_MOST} prompts in a request")
    return [asker.text(prompt, limits, body.json_schema, body.grammar or "") for prompt in prompts]


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [one for one in prompt if not isinstance(one, int)]


async def _all(service: Service, asked: list[Asked], request: Request) -> list[Whole]:
    return [await whole(service, one, client_of(request)) for one in asked]


async def _all_frames(
    service: Service,
    asked: list[Asked],
    request: Request,
    head: dict[str, Any],
    body: CompletionBody,
) -> AsyncGenerator[str, None]:
    dones = list[Done]()
    for i, one in enumerate(asked):
        before = _echoed(service, body, one)
        writer = _Writer(head, i, before, dones, bool(body.return_progress))
        async with aclosing(frames(service, one, client_of(request), writer)) as coming:
            async for frame in coming:
                yield frame
        if len(dones) <= i:  # it failed, and the writer has said so
            return
    if body.stream_options is not None and body.stream_options.include_usage:
        yield sse.event({**head, "choices": [], "usage": _sum(dones)})
    yield sse.DONE


def _echoed(service: Service, body: CompletionBody, asked: Asked) -> str:
    if not body.echo:
        return ""
    return wording.text(service.llm.detokenize(asked.wish.prompt.tokens))


def _choice(index: int, answer: Whole, before: str) -> dict[str, Any]:
    return {
        "index": index,
        "text": before + answer.message.text,
        "logprobs": _logprobs(answer.logprobs, 0),
        "finish_reason": answer.done.finish,
    }


def _costs(answers: list[Whole]) -> dict[str, Any]:
    costs: dict[str, Any] = {"usage": _sum([answer.done for answer in answers])}
    if len(answers) == 1:
        costs["timings"] = wording.timings(answers[0].done)
    return costs


def _sum(dones: list[Done]) -> dict[str, Any]:
    usages = [wording.usage(done) for done in dones]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return {
        **{name: sum(usage[name] for usage in usages) for name in names},
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _logprobs(logprobs: list[TokenLogprob], begin: int) -> dict[str, Any] | None:
    """A choice's `logprobs`; begin: characters of the answer before them."""
    if not logprobs:
        return None
    tokens = [wording.text(one.data) for one in logprobs]
    offsets = [begin + sum(map(len, tokens[:i])) for i in range(len(tokens))]
    top = [{wording.text(data): value for _, data, value in one.top} for one in logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": [one.logprob for one in logprobs],
        "top_logprobs": top,
        "text_offset": offsets,
    }


class _Writer(Writer):
    """Chunks of one prompt's text. dones: takes what it cost."""

    def __init__(
        self,
        head: dict[str, Any],
        index: int,
        before: str,
        dones: list[Done],
        with_progress: bool,
    ) -> None:
        self.with_progress = with_progress
        self._head, self._index, self._before, self._dones = head, index, before, dones
        self._n = 0

    def _chunk(
        self, text: str, finish: str | None = None, logprobs: Any = None, **more: Any
    ) -> str:
        choice = {"index": self._index, "text": text, "logprobs": logprobs}
        return sse.event({**self._head, "choices": [{**choice, "finish_reason": finish}], **more})

    def progress_event(self, said: dict[str, Any]) -> str:
        return self._chunk("", **said)

    def part(self, part: Part) -> str:
        assert isinstance(part, Text)  # texts have neither thoughts nor tools
        text, self._before = self._before + part.text, ""
        begin, self._n = self._n, self._n + len(text)
        return self._chunk(text, logprobs=_logprobs(part.logprobs, begin))

    def end(self, done: Done, has_calls: bool) -> str:
        self._dones.append(done)
        text, self._before = self._before, ""
        return self._chunk(text, done.finish, timings=wording.timings(done))

    def failed(self, error: ApiError) -> str:
        return sse.event(error.body("/v1/completions"))
