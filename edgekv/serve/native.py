"""POST /completion: llama-server's own protocol, for a text that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from edgekv.chat.reply import Reply
from edgekv.serve import several, sse, wording
from edgekv.serve.bounds import BoundedRoute
from edgekv.serve.completions import ask
from edgekv.serve.encoding import Json
from edgekv.serve.events import Done, TokenLogprob, Written
from edgekv.serve.preparing import prepared
from edgekv.serve.request import Request
from edgekv.serve.schemas import NativeBody
from edgekv.serve.service import Service, service_of
from edgekv.serve.settings import generation_settings
from edgekv.serve.writer import Writer

router = APIRouter(route_class=BoundedRoute)


@router.post("/completion")
@router.post("/completions", include_in_schema=False)
async def completion(body: NativeBody, http: HttpRequest) -> Response:
    """The text that follows each prompt."""
    service = service_of(http)
    body.logprobs = body.n_probs or None
    found = await prepared(http, _ask, service, body)
    writers = [_Writer(service, body, i, one, text) for i, (one, text) in enumerate(found)]
    requests = [one for one, _ in found]
    if body.stream:
        return await several.streams(http, requests, writers)
    answers = await several.wholes(http, requests)
    whole = [writer.whole(*answer) for writer, answer in zip(writers, answers, strict=True)]
    return Json(whole[0] if len(whole) == 1 else whole)


def _ask(service: Service, body: NativeBody) -> list[tuple[Request, str]]:
    """Requests, each with the text of its prompt. Raises BadInput and ApiError."""
    requests, n = ask(service, body), body.n_answers
    prompts = [one.prompt.tokens for one in requests[::n]]
    texts = [wording.text(service.llm.detokenize(tokens, None, True)) for tokens in prompts]
    return [(one, texts[i // n]) for i, one in enumerate(requests)]


def _probabilities(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    if not logprobs:
        return {}
    return {"completion_probabilities": [wording.with_rivals(one) for one in logprobs]}


class _Writer(Writer):
    """Pieces of the text, each an event, or the whole answer. prompt: its text."""

    def __init__(
        self, service: Service, body: NativeBody, index: int, request: Request, prompt: str
    ) -> None:
        super().__init__(body)
        self._service, self._body, self._request, self._prompt = service, body, request, prompt
        self._place = {"index": index, "id_slot": -1 if body.id_slot is None else body.id_slot}
        self._text = ""

    def progress_event(self, said: dict[str, Any]) -> str:
        return self._piece(Written(""), said)

    def written(self, written: Written) -> str:
        self._text += written.text
        return self._piece(written, _probabilities(written.logprobs))

    def _piece(self, written: Written, more: dict[str, Any]) -> str:
        return sse.event(
            {
                **self._place,
                "content": written.text,
                "tokens": written.tokens,
                "stop": False,
                "tokens_predicted": self.now.n_written,
                "tokens_evaluated": self.now.n_read,
                **self.timings,
                **more,
            }
        )

    def end(self, done: Done, has_calls: bool) -> str:
        return sse.event(self._wanted(self._end(done, self._text)))

    def whole(self, reply: Reply, done: Done) -> dict[str, Any]:
        text = reply.message.text
        tokens = list(done.tokens) if self._body.return_tokens else []
        more = {"content": text, "tokens": tokens, **_probabilities(reply.logprobs)}
        return self._wanted({**self._end(done, text), **more})

    def _end(self, done: Done, text: str) -> dict[str, Any]:
        """What stands at the end of an answer; a stream has sent text and tokens."""
        now = done.progress
        kind = "limit" if done.finish == "length" else "eos" if done.stop_text is None else "word"
        return {
            **self._place,
            "content": "",
            "tokens": [],
            "stop": True,
            "stop_type": kind,
            "stopping_word": done.stop_text or "",
            "model": self._service.model,
            "generation_settings": {
                **generation_settings(self._request),
                "ignore_eos": bool(self._body.ignore_eos),
                "stream": bool(self._body.stream),
                "timings_per_token": self.with_timings,
            },
            "prompt": self._prompt,
            "has_new_line": "\n" in text,
            "tokens_predicted": now.n_written,
            "tokens_evaluated": now.n_prompt,
            "tokens_cached": now.n_cached,
            "truncated": now.n_prompt + now.n_written >= self._service.n_ctx,
            "timings": wording.timings(now),
            "kv": wording.cache(done),
        }

    def _wanted(self, said: dict[str, Any]) -> dict[str, Any]:
        """In the fields that the request names."""
        wanted = self._body.response_fields
        return _nested(said, wanted) if wanted else said


def _nested(said: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The values at some paths, such as generation_settings/n_predict, as far as there are any."""
    found = dict[str, Any]()
    for path in paths:
        value: Any = said
        for name in path.split("/"):
            value = value.get(name, _nested) if isinstance(value, dict) else _nested
        if value is not _nested:
            found[path] = value
    return found
