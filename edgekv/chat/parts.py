"""Messages whose content is a list of parts, and where a prompt may be cut between them.

A message that holds a document and a question can be compressed behind the document, so that
another question needs no second reading. As in llama.cpp, text parts become one text with line
breaks between them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from edgekv.errors import BadInput

Message = dict[str, Any]


def joined(messages: Iterable[Message]) -> tuple[list[Message], list[str]]:
    """Return the messages with text as their content, and the texts behind which to cut.

    A cut is behind each part but the last of a message. Raises BadInput for parts that are no text.
    """
    plain, cuts = [], []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            texts = [_text(part) for part in content]
            cuts += texts[:-1]
            message = {**message, "content": "\n".join(texts)}
        plain.append(message)
    return plain, cuts


def _text(part: Any) -> str:
    if not (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    ):
        raise BadInput('a part of a message is no text: write {"type": "text", "text": "..."}')
    return part["text"]


def positions(
    cuts: Sequence[str], tokens: Sequence[int], piece: Callable[[int], bytes]
) -> list[int]:
    """Return the numbers of tokens behind which a prompt is cut, ascending.

    piece: the text of one token. A token that holds the end of a part and more belongs to what
    follows. A part that is not found, because a template changed it, makes no cut.
    """
    if not cuts:
        return []
    texts = {token: piece(token) for token in set(tokens)}
    pieces = [texts[token] for token in tokens]
    ends = [0, *accumulate(map(len, pieces))]
    text, at, found = b"".join(pieces), 0, []
    for cut in cuts:
        words = cut.strip().encode()
        begin = text.find(words, at) if words else -1
        if begin < 0:
            continue
        at = begin + len(words)
        found.append(bisect_right(ends, at) - 1)
    return sorted({n for n in found if 0 < n < len(tokens)})
