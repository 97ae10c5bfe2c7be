"""The messages of a chat in the note of its file: written, distrusted when read, shown in short."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgekv.base.text import printable
from edgekv.errors import BadInput

if TYPE_CHECKING:
    from edgekv import Llama
    from edgekv.choice.config import KVConfig

OPEN, CLOSE = "<think>", "</think>"
LIMITS = "memory", "prefill_memory"
"""Options that say what a machine has room for."""
SHOWN = 200
"""Characters of a message that are shown."""


def note_of(messages: list[dict[str, Any]], llm: Llama) -> dict[str, Any]:
    """Return the note of a chat with `llm`, which `messages_of` and `cache_of` read."""
    from edgekv.llama.pack import name_of, said

    return {"messages": messages, "cache": said(llm.kv_config()), "model": name_of(llm)}


def cache_of(note: Any, mine: KVConfig) -> KVConfig:
    """Return `mine` with the options that a chat was saved with, where the note says them: files
    of earlier versions do not. A limit that this machine was given stays.

    Raises BadInput for options that cannot be.
    """
    from edgekv.llama.pack import config_of, said, taken_over

    its = note.get("cache", {}) if isinstance(note, dict) else {}
    try:
        now = taken_over(mine, said(config_of(its))) if its != {} else mine
        limits: dict[str, Any] = {name: _least(name, mine, now) for name in LIMITS}
        return replace(now, **limits)
    except (TypeError, ValueError):
        raise BadInput("this file says no options of a cache; save the chat again") from None


def _least(name: str, *configs: KVConfig) -> int | None:
    """The smallest value of a limit that is one."""
    given = [value for one in configs if (value := getattr(one, name)) is not None]
    return min(given, default=None)


def messages_of(note: Any) -> list[dict[str, Any]]:
    """Return the messages in a note.

    Raises BadInput unless they are a chat's: perhaps a system message, then questions and replies,
    each of them text or, with a document in front, a list of text parts.
    """
    messages = note.get("messages") if isinstance(note, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise BadInput("this file holds no messages of a chat; save one with /save in a chat")
    roles = [m["role"] for m in messages]
    turns = roles[roles[:1] == ["system"] :]
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise BadInput("the messages in this file are no chat; save one with /save in a chat")
    return [_with_thought_apart(message) for message in messages]


def _with_thought_apart(message: dict[str, Any]) -> dict[str, Any]:
    """A message of an earlier version, whose text began with its thought."""
    content = message["content"]
    if message["role"] != "assistant" or not content.lstrip().startswith(OPEN):
        return message
    thought, _, answer = content.lstrip().removeprefix(OPEN).partition(CLOSE)
    return {**message, "content": answer.lstrip(), "reasoning_content": thought.strip()}


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and set(message) - {"reasoning_content"} == {"role", "content"}
        and _is_text(message.get("reasoning_content", ""))
        and isinstance(message["role"], str)
        and all(_is_text(text) for text in _texts(message["content"]))
    )


def _texts(content: Any) -> list[Any]:
    """The texts of a message's content; None for what is no text part."""
    if not isinstance(content, list) or not content:
        return [content]
    return [_text_in(part) for part in content]


def _text_in(part: Any) -> Any:
    is_text = isinstance(part, dict) and set(part) == {"type", "text"} and part["type"] == "text"
    return part["text"] if is_text else None


def _is_text(text: Any) -> bool:
    """Whether this is text that a tokenizer and a terminal can take."""
    try:
        return isinstance(text, str) and bool(text.encode() or True)
    except UnicodeEncodeError:
        return False


def last_turn(messages: list[dict[str, Any]]) -> str:
    """The last question and its reply, shortened, a line each; empty if there is none."""
    turns = [m for m in messages if m["role"] != "system"][-2:]
    if not turns:
        return ""
    question, reply = (" ".join(printable(_texts(m["content"])[-1]).split()) for m in turns)
    if len(question) > SHOWN:  # a document may stand before it
        question = f"... {question[-SHOWN:]}"
    return f"> {question}\n{reply[:SHOWN]}{' ...' * (len(reply) > SHOWN)}"
