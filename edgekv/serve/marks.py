"""Anthropic's `cache_control`: how much of a prompt a request marks to be kept.

All of a prompt is kept here, marked or not. The marks decide what `usage` calls written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgekv.base.beginnings import n_shared
from edgekv.chat.template import ChatTemplate, Prompt
from edgekv.serve.schemas import CountBody


def n_marked(body: CountBody, prompt: Prompt, template: ChatTemplate) -> int:
    """The prompt's tokens up to the last mark. Tools stand in front of the first message."""
    if body.cache_control:
        return len(prompt.tokens)
    whole, at, end = prompt.text, 0, 0
    if any(tool.cache_control for tool in body.tools or ()):
        first = next(_blocks(body.messages[0].content), {})
        end = max(whole.find(_text(first)), 0)
    for content in (body.system, *(message.content for message in body.messages)):
        for block in _blocks(content):
            found = whole.find(_text(block), at)
            at = max(at, found + len(_text(block)))
            if block.get("cache_control"):
                end = max(end, at)
    return n_shared(template.tokens_of(whole[:end]), prompt.tokens) if end else 0


def _blocks(content: str | list[dict[str, Any]] | None) -> Iterator[dict[str, Any]]:
    yield from [{"text": content}] if isinstance(content, str) else content or ()


def _text(block: dict[str, Any]) -> str:
    """A block's text as it stands in the prompt; of a call, and of some results, nothing."""
    source = block.get("source")
    said = source.get("data") if isinstance(source, dict) else None
    text = said or block.get("text") or block.get("content")
    return text.strip() if isinstance(text, str) else ""
