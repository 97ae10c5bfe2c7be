"""The way of an answer from the worker's thread to its client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from edgekv.chat.reply import Reply
from edgekv.serve.encoding import Json
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Done, Event, Progress, Written
from edgekv.serve.job import Job
from edgekv.serve.request import Request
from edgekv.serve.service import Service, client_of, service_of
from edgekv.serve.wanted import unless_gone
from edgekv.serve.writer import Writer

Whole = tuple[Reply, Done]
"""What an answer says, and how it ended."""

BEAT_S = 10.0
"""Seconds between two comments in a stream, lest proxies close one that waits."""


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
            if isinstance(event, (Done, ApiError)):
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
            more.progress,
        )
    return event


async def whole(service: Service, request: Request, client: Hashable) -> Whole:
    """An answer to its end. Raises ApiError if it fails."""
    reply = Reply(request.prompt.syntax)
    async with aclosing(events(service, request, client)) as coming:
        async for event in coming:
            match event:
                case Written():
                    reply.feed(event.text, event.logprobs)
                case Done():
                    reply.end()
                    return reply, event
                case ApiError():
                    raise event
    raise AssertionError("an answer has an end")


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
                    writer.now = event
                    frame = "" if has_begun else writer.begin(event)
                    frame += writer.progress(event)
                    has_begun = True
                case Written():
                    writer.now = event.progress
                    parts = reply.feed(event.text, event.logprobs)
                    frame = writer.written(event) + "".join(map(writer.part, parts))
                case Done():
                    writer.now, writer.done = event.progress, event
                    frame = "".join(map(writer.part, reply.end()))
                    frame += writer.end(event, bool(reply.message.calls))
                case ApiError():
                    if not has_said:
                        raise event
                    frame = writer.failed(event)
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
    http: HttpRequest, request: Request, writer: Writer | None, said: Callable[[Reply, Done], Any]
) -> Response:
    """The response for one answer, by a stream's `writer`; None: whole, as `said` makes it."""
    service, client = service_of(http), client_of(http)
    if writer:
        pieces = frames(service, request, client, writer)
        return await streamed(http, pieces, writer.media_type)
    return Json(said(*await unless_gone(http, whole(service, request, client))))
