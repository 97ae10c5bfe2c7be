"""A request handed on to a child, and its answer handed back as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

import h11

from edgekv.serve.router.child import HOST

Headers = list[tuple[bytes, bytes]]
ONE_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"}
ONE_HOP |= {b"transfer-encoding", b"content-length"}
OWN = {b"host", b"origin", b"authorization", b"x-api-key", b"x-forwarded-for", b"expect"}
"""Headers of a request that a child does not get: what they say was looked at."""
PIECE = 1 << 16


class Forwarded:
    """One request to a child, on a connection of its own. Raises OSError, or
    h11.RemoteProtocolError, where the child ends meanwhile.
    """

    status: int
    headers: Headers

    def __init__(self, port: int, key: str) -> None:
        self._port, self._key = port, key
        self._connection = h11.Connection(h11.CLIENT)
        self._writer: asyncio.StreamWriter | None = None

    async def send(
        self,
        method: str,
        target: bytes,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes,
        client: str,
    ) -> None:
        """Returns when `status` and `headers` have come. client: the request's address."""
        self._reader, self._writer = await asyncio.open_connection(HOST, self._port)
        kept = [(k, v) for k, v in headers if k.lower() not in ONE_HOP | OWN]
        kept += [(b"host", f"{HOST}:{self._port}".encode()), (b"connection", b"close")]
        kept += [(b"authorization", b"Bearer " + self._key.encode())]
        kept += [(b"x-forwarded-for", client.encode())]  # uvicorn takes it from this machine
        kept += [(b"content-length", str(len(body)).encode())]
        request = h11.Request(method=method, target=target, headers=kept)
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            self._writer.write(self._connection.send(event) or b"")
        await self._writer.drain()
        answer = await self._next()
        while not isinstance(answer, h11.Response):  # status 100 and the like
            answer = await self._next()
        self.status = answer.status_code
        self.headers = [(k, v) for k, v in answer.headers if k.lower() not in ONE_HOP]

    async def _next(self) -> h11.Event | type[h11.PAUSED]:
        while (event := self._connection.next_event()) is h11.NEED_DATA:
            self._connection.receive_data(await self._reader.read(PIECE))
        assert not isinstance(event, type) or event is h11.PAUSED
        return event

    async def body(self) -> AsyncIterator[bytes]:
        """The rest of the answer."""
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    def close(self) -> None:
        """The child sees that nobody reads on."""
        if self._writer is not None:
            with suppress(OSError, RuntimeError):
                self._writer.close()
