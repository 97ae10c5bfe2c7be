"""POST /v1/completions: a text goes on."""

from __future__ import annotations

import codecs
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from edgekv.chat.reply import Part, Reply, Text
from edgekv.errors import BadInput
from edgekv.serve import several, sse, wording
from edgekv.serve.bounds import BoundedRoute
from edgekv.serve.encoding import Json
from edgekv.serve.events import Done, TokenLogprob
from edgekv.serve.preparing import prepared
from edgekv.serve.request import Request
from edgekv.serve.schemas import CompletionBody
from edgekv.serve.service import Service, service_of
from edgekv.serve.texts import prompts_in
from edgekv.serve.writer import Writer

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/completions")
async def completions(body: CompletionBody, http: HttpRequest) -> Response:
    """The text that follows each prompt."""
    service = service_of(http)
    requests, befores = await prepared(http, _prepared, service, body)
    n = body.n_answers
    head = wording.head("cmpl", "text_completion", service.model)
    if body.stream:
        writers = [_Writer(head, i, befores[i // n], body) for i in range(len(requests))]
        return await several.streams(http, requests, writers, partial(several.end, head, body))
    answers = await several.wholes(http, requests)
    choices = [
        _choice(i, *answer, befores[i // n], bool(body.echo)) for i, answer in enumerate(answers)
    ]
    costs = several.costs([done for _, done in answers], n)
    return Json({**head, "choices": choices, **costs})


def _prepared(service: Service, body: CompletionBody) -> tuple[list[Request], list[str]]:
    """Requests, and the texts of prompts."""
    requests = ask(service, body)
    prompts = [one.prompt.tokens for one in requests[:: body.n_answers]]
    return requests, [wording.text(service.llm.detokenize(tokens)) for tokens in prompts]


def ask(service: Service, body: CompletionBody) -> list[Request]:
    """n requests for each prompt. Raises BadInput and ApiError."""
    n = body.n_answers
    if body.suffix:
        raise BadInput("this server does not fill a gap in front of a suffix: leave it out")
    if body.best_of not in (None, n):
        raise BadInput("answers are not written to be dropped: leave best_of out, or give n")
    if body.echo and body.logprobs is not None:
        raise BadInput("logprobs of the prompt itself are not given: leave echo or logprobs out")
    request = service.request(body, body.logprobs)
    prompts = prompts_in(body.prompt)
    several.check(len(prompts), n)
    requests = [
        service.ask_text(one, request, body.json_schema, body.grammar or "") for one in prompts
    ]
    return several.repeated(requests, n)


def _choice(index: int, reply: Reply, done: Done, before: str, is_echoed: bool) -> dict[str, Any]:
    return {
        "index": index,
        "text": (before if is_echoed else "") + reply.message.text,
        "logprobs": _Offsets(len(before)).logprobs(reply.logprobs),
        "finish_reason": done.finish,
    }


class _Offsets:
    """Where tokens begin, in characters. n_before: characters of the prompt."""

    def __init__(self, n_before: int) -> None:
        self._n = n_before
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
        """A choice's `logprobs`, of the tokens that come next."""
        if not logprobs:
            return None
        offsets = []
        for one in logprobs:
            offsets.append(self._n)
            self._n += len(self._decoder.decode(one.data))
        return {
            "tokens": [wording.text(one.data) for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [
                {wording.text(data): value for _, data, value in one.top} for one in logprobs
            ],
            "text_offset": offsets,
        }


class _Writer(Writer):
    """Chunks of one answer's text. before: the prompt's."""

    def __init__(self, head: dict[str, Any], index: int, before: str, body: CompletionBody) -> None:
        super().__init__(body)
        self._head, self._index = head, index
        self._offsets = _Offsets(len(before))
        self._echo = before if body.echo else ""

    def _chunk(
        self, text: str, finish: str | None = None, logprobs: Any = None, **more: Any
    ) -> str:
        text, self._echo = self._echo + text, ""
        choice = {"index": self._index, "text": text, "logprobs": logprobs}
        return sse.event({**self._head, "choices": [{**choice, "finish_reason": finish}], **more})

    def progress_event(self, said: dict[str, Any]) -> str:
        return self._chunk("", **said)

    def part(self, part: Part) -> str:
        assert isinstance(part, Text)  # texts have neither thoughts nor tools
        logprobs = self._offsets.logprobs(part.logprobs)
        return self._chunk(part.text, logprobs=logprobs, **self.timings)

    def end(self, done: Done, has_calls: bool) -> str:
        return self._chunk("", done.finish, timings=wording.timings(done.progress))
