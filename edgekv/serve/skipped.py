"""What coding agents send besides, and this server cannot run: tools of other servers, and what
became of them. It is left out, with a line in the log, so that the rest is answered.
"""

from __future__ import annotations

import logging

log = logging.getLogger("edgekv.serve")


def tool(kind: str, name: str) -> None:
    """Note that a tool is left out."""
    log.info("the tool %.80r of the type %.80r is left out: it is no function", name, kind)


def item(kind: object) -> None:
    """Note that a part of a conversation is left out."""
    log.info("an item of the type %.80r is left out: it holds no text", kind)
