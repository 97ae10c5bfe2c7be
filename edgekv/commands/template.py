"""What a model's chat template wants: whether there is one, and what becomes of thinking blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from edgekv.commands.stream import trained_context
from edgekv.commands.thinking import CLOSE, OPEN, split
from edgekv.errors import BadInput

if TYPE_CHECKING:
    from edgekv import Llama

BASE = (
    "this model has no chat template (a base model): it continues text, it does not answer; take"
    " one whose name says instruct, chat or it, or continue a text with 'edgekv run --raw'"
)


class Template:
    """The template of one model; its text is empty if there is none."""

    def __init__(self, llm: Llama) -> None:
        self.text = llm.metadata.get("tokenizer.chat_template", "")
        self.error = llm.template_error
        self.opens_thought = OPEN in self.text and _end_of_prompt(self.text).endswith(OPEN)
        """Prompts end with the opening tag, so a reply begins in the middle of a thought."""

    def __bool__(self) -> bool:
        return bool(self.text)

    def check(self) -> None:
        """Raises BadInput if the template cannot be used."""
        if self.error:
            raise BadInput(
                f"this model's chat template is broken ({self.error}): "
                "'edgekv run --raw' continues text without it"
            )

    def given(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as the template gets it.

        A template that knows thoughts leaves those of earlier turns out, if it finds them: in
        'reasoning_content', or in front of a closing tag, which a reply that was stopped has not.
        """
        if message["role"] != "assistant" or OPEN not in message["content"]:
            return message
        thought, answer = split(message["content"])
        if thought and "reasoning_content" in self.text:
            return {**message, "content": answer, "reasoning_content": thought}
        if thought and CLOSE in self.text and CLOSE not in message["content"]:
            return {**message, "content": f"{message['content']}\n{CLOSE}\n\n"}
        return message


def warnings(llm: Llama, template: Template, n_ctx: int) -> Iterator[str]:
    """Lines about what a user may not expect of this model. n_ctx: what was asked for, 0: nothing.

    Raises BadInput if its template is broken.
    """
    template.check()
    if not template:
        yield BASE
    trained = trained_context(llm)
    if 0 < trained < n_ctx:
        yield (
            f"-c {n_ctx:,} is more than the {trained:,} tokens that this model was trained with: "
            "behind those it seldom makes sense"
        )


def _end_of_prompt(text: str) -> str:
    """How a prompt ends that this template makes; empty if it makes none."""
    from edgekv.llama_cpp.llama_chat_format import Jinja2ChatFormatter

    try:
        formatter = Jinja2ChatFormatter(text, eos_token="", bos_token="")
        return formatter(messages=[{"role": "user", "content": "?"}]).prompt.rstrip()
    except Exception:  # whatever a template does wrong, the first turn says it
        return ""
