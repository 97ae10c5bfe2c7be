"""GET /: a page to chat with the model. One answer, which loads nothing from elsewhere."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from edgekv.kept.look_page import colours
from edgekv.serve.ollama.paths import running

router = APIRouter()

SCRIPTS = ("base", "markdown", "chats", "files", "kept", "talk", "page")


@cache
def _page() -> tuple[str, str]:
    """The page, and which scripts and addresses it may use: its own."""
    text = _file("page.html")
    text = text.replace("/* the style */", _file("page.css") + colours())
    text = text.replace("/* the scripts */", "\n".join(_file(f"{name}.js") for name in SCRIPTS))
    script, style = (
        b64encode(sha256(found.encode()).digest()).decode()
        for tag in ("script", "style")
        for found in re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    )
    policy = (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}';"
        " img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
    return text, policy


def _file(name: str) -> str:
    return (Path(__file__).parent / "web" / name).read_text(encoding="utf-8")


@router.get("/", include_in_schema=False)
async def page(http: HttpRequest) -> Response:
    """The page for browsers; other programs see whether Ollama's protocol is spoken here."""
    if "text/html" not in http.headers.get("accept", ""):
        return await running()
    text, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Vary": "Accept",
    }
    return HTMLResponse(text, headers=headers)
