"""Prompts that are no chats: texts, tokens, or both, and several of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgekv.errors import BadInput

Pieces = Sequence[str | int]
"""A prompt: texts and tokens that follow each other."""

FORMS = "a text, tokens, a list of both, or a list of such prompts"


def prompts_in(said: Any) -> list[Pieces]:
    """The prompts of a request, in all the forms that llama-server takes. Raises BadInput.

    A list in which a number stands is one prompt.
    """
    if isinstance(said, list) and not any(isinstance(one, (int, float)) for one in said):
        return [_prompt(one) for one in said]
    return [_prompt(said)]


def _prompt(said: Any) -> Pieces:
    if isinstance(said, dict):
        if said.get("multimodal_data"):
            raise BadInput("this server reads no pictures and no sounds: leave multimodal_data out")
        said = said.get("prompt_string")
    if isinstance(said, str):
        return [said]
    if not isinstance(said, list) or not all(type(one) in (str, int) for one in said):
        raise BadInput(f"a prompt is {FORMS}")
    return said
