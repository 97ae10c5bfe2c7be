"""JSON as it goes out: always UTF-8, and one line whatever a client takes for a line's end."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse

LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""Ends of lines to some clients, which JSON leaves as they are."""


def as_json(data: Any) -> str:
    """Half of a pair of surrogates, which a request may have held, becomes a question mark."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).translate(LINE_ENDS)
    return text.encode("utf-8", "replace").decode()


class Json(JSONResponse):
    """An answer of JSON."""

    def render(self, content: Any) -> bytes:
        return as_json(content).encode()
