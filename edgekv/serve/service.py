"""What all handlers share, and the way of an answer from the worker's thread to a handler."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from edgekv.chat.reply import Part
from edgekv.serve import wording
from edgekv.serve.asker import Asker
from edgekv.serve.encoding import Json
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Counts, Done, Event, Failed, Progress, Written
from edgekv.serve.gate import given_key
from edgekv.serve.job import Job
from edgekv.serve.options import ServeOptions
from edgekv.serve.pattern import Pattern
from edgekv.serve.prompts import Prompts
from edgekv.serve.reply import Reply
from edgekv.serve.request import Request
from edgekv.serve.worker import Worker

if TYPE_CHECKING:
    from edgekv import Llama

Answer = TypeVar("Answer")
Result = TypeVar("Result")

BEAT_S = 10.0
"""Seconds between two comments in a stream, lest proxies close one that waits."""


class Service:
    """One model, its worker, and what the server was told."""

    def __init__(self, llm: Llama, worker: Worker, options: ServeOptions) -> None:
        self.llm, self.worker, self.options = llm, worker, options
        changing = None if options.ignore_prefix is None else Pattern(options.ignore_prefix)
        self.prompts = Prompts(llm, options.chat_template, changing)
        self.asker = Asker(llm, self.prompts, options)
        self.model = (options.names or [Path(llm.model_path).name])[0]
        """The model's name in answers."""
        self.created = int(time.time())


def service_of(http: HttpRequest) -> Service:
    service: Service = http.app.state.service
    return service


async def between_steps(service: Service, function: Callable[[], Result]) -> Result:
    """What a function that uses the model returns. It waits while a prompt is read."""
    result: Result = await asyncio.wrap_future(service.worker.call(function))
    return result


def client_of(http: HttpRequest) -> Hashable:
    """Whose request it is, for the order in which those that wait are answered. A key counts only
    where keys are asked for: anybody can invent one.
    """
    address = http.client.host if http.client else ""
    options = service_of(http).options
    has_keys = options.api_keys or options.file_keys
    return address, given_key(http.headers) if has_keys else ""


async def events(
    service: Service, request: Request, client: Hashable
) -> AsyncGenerator[Event | None, None]:
    """What becomes of a request; None every BEAT_S. Raises ApiError 503 if too many wait.

    The answer is stopped where nobody reads on.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Event | None] = asyncio.Queue()

    def emit(event: Event) -> None:
        try:
            loop.call_soon_threadsafe(queue.put_nowait, event)
        except RuntimeError:  # the loop has ended, and with it whoever waited
            pass

    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            queue.put_nowait(None)

    job = Job(request, emit, client)
    service.worker.submit(job)
    beating = asyncio.ensure_future(beat())
    try:
        while True:
            event = await queue.get()
            await asyncio.sleep(0)  # others' turn: one watches whether the client is gone
            if request.prompt.syntax.parser is not None:
                event = _joined(event, queue)
            yield event
            if isinstance(event, (Done, Failed)):
                return
    finally:
        beating.cancel()
        service.worker.cancel(job)


def _joined(event: Event | None, queue: asyncio.Queue[Event | None]) -> Event | None:
    """A text with those that have come since: a reply is read as a whole each time."""
    waiting: deque[Event | None] = queue._queue  # type: ignore[attr-defined]
    while isinstance(event, Written) and waiting and isinstance(waiting[0], Written):
        more = queue.get_nowait()
        assert isinstance(more, Written)
        event = Written(
            event.text + more.text,
            event.logprobs + more.logprobs,
            event.tokens + more.tokens,
            more.counts,
        )
    return event


async def whole(service: Service, request: Request, client: Hashable) -> Reply:
    """An answer to its end. Raises ApiError if it fails."""
    reply = Reply(request.prompt.syntax)
    async with aclosing(events(service, request, client)) as coming:
        async for event in coming:
            match event:
                case Written():
                    reply.feed(event)
                case Done():
                    reply.end(event)
                case Failed():
                    raise event.error
    return reply


async def unless_gone(http: HttpRequest, answer: Coroutine[Any, Any, Answer]) -> Answer:
    """Await the answer, or stop it where its client goes away.

    Raises ApiError then, which nobody reads.
    """
    working = asyncio.ensure_future(answer)
    watching = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(400, "the client has gone")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class Writer:
    """Writes one answer in a protocol's events. Every method returns what to send, maybe nothing.

    A protocol overrides those that it needs.
    """

    media_type = "text/event-stream"
    with_progress = False
    """The client asked for llama-server's events while the prompt is read."""
    with_timings = False
    """The client asked for the time that each piece took."""
    counts = Counts()
    done: Done | None = None
    """The end of the answer, once it is written."""

    @property
    def timings(self) -> dict[str, Any]:
        """`timings` by now, if the client asked for them."""
        return {"timings": wording.timings(self.counts)} if self.with_timings else {}

    def begin(self, progress: Progress) -> str:
        """The prompt is going to be read."""
        return ""

    def comment(self, text: str) -> str:
        """What clients leave out."""
        return f": {text}\n\n"

    def progress(self, progress: Progress) -> str:
        """A comment, and the event if there is one."""
        comment = self.comment(f"prompt {progress.n_done}/{progress.n_total}")
        if not self.with_progress:
            return comment
        said = {"prompt_progress": wording.progress(progress), **self.timings}
        return comment + self.progress_event(said)

    def progress_event(self, said: dict[str, Any]) -> str:
        """An event of the protocol with one more field."""
        return ""

    def written(self, written: Written) -> str:
        """Text has come; its parts follow."""
        return ""

    def part(self, part: Part) -> str:
        return ""

    def end(self, done: Done, has_calls: bool) -> str:
        return ""

    def failed(self, error: ApiError) -> str:
        return ""


async def frames(
    service: Service, request: Request, client: Hashable, writer: Writer
) -> AsyncGenerator[str, None]:
    """A streamed answer, as server-sent events. Raises ApiError before the first one."""
    reply, has_begun, has_said = Reply(request.prompt.syntax), False, False
    async with aclosing(events(service, request, client)) as coming:
        async for event in coming:
            match event:
                case None:
                    frame = writer.comment("waiting")
                case Progress():
                    writer.counts = event.counts
                    frame = "" if has_begun else writer.begin(event)
                    frame += writer.progress(event)
                    has_begun = True
                case Written():
                    writer.counts = event.counts
                    frame = writer.written(event)
                    frame += "".join(map(writer.part, reply.feed(event)))
                case Done():
                    writer.counts, writer.done = event.counts, event
                    frame = "".join(map(writer.part, reply.end(event)))
                    frame += writer.end(event, bool(reply.message.calls))
                case Failed():
                    if not has_said:
                        raise event.error
                    frame = writer.failed(event.error)
            if frame:
                has_said = True
                yield frame


async def streamed(
    http: HttpRequest, pieces: AsyncGenerator[str, None], media_type: str = Writer.media_type
) -> Response:
    """The response of a stream that has begun: what refuses a request is an error status still."""
    first = await unless_gone(http, _first(pieces))

    async def all_of_it() -> AsyncGenerator[str, None]:
        async with aclosing(pieces):
            yield first
            async for piece in pieces:
                yield piece

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(all_of_it(), media_type=media_type, headers=headers)


async def _first(pieces: AsyncGenerator[str, None]) -> str:
    return await anext(pieces)


async def respond(
    http: HttpRequest, request: Request, writer: Writer | None, said: Callable[[Reply], Any]
) -> Response:
    """The response to a request for one answer. writer: writes it as a stream; None: it is sent
    whole, as what `said` makes of it.
    """
    service, client = service_of(http), client_of(http)
    if writer:
        pieces = frames(service, request, client, writer)
        return await streamed(http, pieces, writer.media_type)
    return Json(said(await unless_gone(http, whole(service, request, client))))
