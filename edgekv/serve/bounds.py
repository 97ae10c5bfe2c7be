"""How much a request may hold. It is looked at before anything is done with it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from itertools import product
from typing import Any

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from edgekv.errors import BadInput
from edgekv.serve.errors import ApiError
from edgekv.serve.preparing import SMALL, prepared

VALUES_MOST = 1 << 19
"""Values of a request's JSON. Python reads so many within a tenth of a second."""
ITEMS_MOST = 10_000
"""Messages, and texts in all of them together."""
TOOLS_MOST = 1024
STOPS_MOST, STOP_LETTERS_MOST = 256, 16_384
"""Texts at which an answer stops, and their letters together: each token is compared with them."""
LISTS = {"messages": ITEMS_MOST, "input": ITEMS_MOST, "system": ITEMS_MOST, "tools": TOOLS_MOST}
STOPS = ("stop", "stop_sequences")


class BoundedRoute(APIRoute):
    """A path whose requests are bounded, and read off the event loop where they are large."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(http: HttpRequest) -> Response:
            return await handler(_Bounded(http.scope, http.receive))

        return handle


class _Bounded(HttpRequest):
    async def json(self) -> Any:
        data = await self.body()
        try:
            if len(data) <= SMALL:
                return parsed(data)
            return await prepared(self, parsed, data)
        except ApiError as error:
            raise HTTPException(error.status, error.message) from None
        except BadInput as error:
            raise HTTPException(400, str(error)) from None


def parsed(data: bytes) -> Any:
    """A request's JSON. Raises BadInput for one that holds too much, ValueError for none."""
    if sum(data.count(x) for x in (b",", b"[", b"{")) > VALUES_MOST:
        _check_values(data)
    said = json.loads(data, parse_float=_finite, parse_constant=_finite)
    if isinstance(said, dict):
        _check_lists(said)
    return said


def _finite(text: str) -> float:
    """A number that an answer may repeat: JSON has no other. Raises BadInput."""
    value = float(text)
    if not math.isfinite(value):
        raise BadInput(f"{text[:20]} is no number that JSON can hold")
    return value


def _check_values(data: bytes) -> None:
    """Raises BadInput for too many values; what stands inside of texts is none."""
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    n = bare.count(b'"') // 2
    if n <= VALUES_MOST:
        outside = b"".join(bare.split(b'"')[::2])
        n += sum(outside.count(x) for x in (b",", b"[", b"{"))
    if n > VALUES_MOST:
        raise BadInput(f"a request may hold {VALUES_MOST:,} values at most: send less at a time")


def _check_lists(said: dict[str, Any]) -> None:
    for name, most in LISTS.items():
        _check(name, said.get(name), most)
    options = said.get("options")  # Ollama's
    places = (said, options if isinstance(options, dict) else {})
    for name, place in product(STOPS, places):
        stops = place.get(name)
        _check(name, stops, STOPS_MOST)
        letters = stops if isinstance(stops, str) else "".join(_texts(stops))
        if len(letters) > STOP_LETTERS_MOST:
            raise BadInput(f"{name} may have {STOP_LETTERS_MOST:,} letters at most")
    parts = [_content(item) for name in ("messages", "input") for item in _list(said.get(name))]
    _check("content", [x for some in parts for x in some], ITEMS_MOST)


def _check(name: str, found: Any, most: int) -> None:
    if isinstance(found, list) and len(found) > most:
        raise BadInput(f"{name} may have {most:,} items at most: send fewer")


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _texts(found: Any) -> list[str]:
    return [x for x in _list(found) if isinstance(x, str)]


def _content(item: Any) -> list[Any]:
    return _list(item.get("content")) if isinstance(item, dict) else []
