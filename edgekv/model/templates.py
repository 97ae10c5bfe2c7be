"""Chat templates: whether one can be used at all."""

from __future__ import annotations

from edgekv.llama_cpp.llama_chat_format import Jinja2ChatFormatter


def error(text: str) -> str:
    """Why a chat template cannot be parsed, one line; empty if it can."""
    try:
        Jinja2ChatFormatter(text, eos_token="", bos_token="")
    except Exception as problem:  # of jinja's, or of Python's where it nests too deeply
        return " ".join(str(problem).split()) or type(problem).__name__
    return ""
