"""From a sample to tokens: chat template, where the question begins, texts that are too long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgekv.errors import BadInput, Unsupported
from edgekv.model import words
from edgekv_lab.eval.sample import Sample


@dataclass(frozen=True)
class EvalPrompt:
    """A prompt in two parts: what is compressed, and what is fed behind it.

    text: tokens that are compressed; rest: tokens that come after (none if the question is among
    the first).
    """

    text: tuple[int, ...]
    rest: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        return len(self.text) + len(self.rest)


def messages(sample: Sample) -> list[dict[str, str]]:
    """The sample as a user would type it."""
    return [{"role": "user", "content": f"{sample.context}\n\n{sample.question}"}]


def prompt(llm: Any, sample: Sample, aware: bool, cuts: bool) -> EvalPrompt:
    """The sample's tokens. aware: the question is in the text that is compressed.

    cuts: a text that leaves no room for question and answer in the context loses its middle, as in
    LongBench. Else raises BadInput. Raises Unsupported for a chat template that does not leave the
    question as it is.
    """
    words = template(llm, messages(sample)) if sample.chat else messages(sample)[0]["content"]
    at = words.rfind(sample.question.strip())
    if at < 0:
        raise Unsupported(
            "this model's chat template changes what is put into it, so the question cannot be told"
            " from the text"
        )
    text = tuple(llm.tokenize(words[:at].encode(), add_bos=True, special=True))
    ending = words[at:] + sample.begin
    rest = tuple(llm.tokenize(ending.encode(), add_bos=False, special=True))
    excess = len(text) + len(rest) + sample.max_tokens - llm.n_ctx()
    if excess > 0:
        text = _cut(text, excess, sample, cuts, llm.n_ctx())
        return EvalPrompt(text + rest, ()) if aware else EvalPrompt(text, rest)
    if aware:  # tokenised at once, as in a chat
        return EvalPrompt(
            tuple(llm.tokenize((words + sample.begin).encode(), add_bos=True, special=True)), ()
        )
    return EvalPrompt(text, rest)


def _cut(
    text: tuple[int, ...], excess: int, sample: Sample, cuts: bool, n_ctx: int
) -> tuple[int, ...]:
    room = len(text) - excess
    if cuts and room >= 2:
        return text[: room // 2] + text[len(text) - (room - room // 2) :]
    raise BadInput(
        f"the sample {sample.id} needs {n_ctx + excess} tokens, which do not fit the context of"
        f" {n_ctx}; give shorter --lengths or a larger --ctx-size"
    )


def template(llm: Any, messages: list[dict[str, str]]) -> str:
    """The messages in the model's own chat template, ready for the answer; without one, as plain
    text.
    """
    from edgekv.llama_cpp.llama_chat_format import Jinja2ChatFormatter

    text = llm.metadata.get("tokenizer.chat_template")
    if text is None:
        return "\n\n".join(m["content"] for m in messages) + "\n\n"
    eos = words.name(llm.model, llm.token_eos())
    return Jinja2ChatFormatter(template=text, eos_token=eos, bos_token="")(messages=messages).prompt
