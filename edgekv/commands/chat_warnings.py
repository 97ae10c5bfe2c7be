"""What a user may not expect of a model's chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from edgekv.commands.stream import trained_context
from edgekv.errors import BadInput

if TYPE_CHECKING:
    from edgekv import Llama

BASE = (
    "this model has no chat template (a base model): it continues text, it does not answer; take"
    " one whose name says instruct, chat or it, or continue a text with 'edgekv run --raw'"
)


def has_template(llm: Llama) -> bool:
    """Whether a model was made for chats. Raises BadInput if its template cannot be used."""
    if llm.template_error:
        raise BadInput(f"{llm.template_error}: 'edgekv run --raw' continues text without it")
    return not llm.chat_template.is_fallback


def warnings(llm: Llama, n_ctx: int) -> Iterator[str]:
    """Lines about what a user may not expect of this model. n_ctx: what was asked for, 0: nothing.

    Raises BadInput if its template is broken.
    """
    if not has_template(llm):
        yield BASE
    trained = trained_context(llm)
    if 0 < trained < n_ctx:
        yield (
            f"-c {n_ctx:,} is more than the {trained:,} tokens that this model was trained with: "
            "behind those it seldom makes sense"
        )
