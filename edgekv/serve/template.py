"""From messages to a prompt, by the model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from edgekv.errors import BadInput
from edgekv.model import parts
from edgekv.serve.front import text_of
from edgekv.serve.pattern import CHARACTERS, Pattern
from edgekv.serve.tools import Format, format_of, instructions
from edgekv.serve.wish import Front, Prompt
from edgekv.session.continued import n_same

if TYPE_CHECKING:
    from edgekv import Llama

Message = dict[str, Any]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' +"
    " message['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""For a model without a template, as in llama-server."""
OPEN = "<think>"
N_AROUND = 64
"""Characters behind a changing text by which its place in the prompt is found."""


class ChatTemplate:
    """text: a template in the place of the model's; changing: what is not compared of the first
    message. Raises BadInput for a template that is broken.
    """

    def __init__(self, llm: Llama, text: str = "", changing: Pattern | None = None) -> None:
        from edgekv.llama_cpp.llama_chat_format import Jinja2ChatFormatter

        self._llm, self._changing = llm, changing
        model = llm._model
        if llm.template_error and not text:
            raise BadInput(
                f"this model's chat template is broken ({llm.template_error}): give another one"
                " with --chat-template-file"
            )
        own = llm.metadata.get("tokenizer.chat_template", "")
        self.text = text or own or CHATML
        self.is_fallback = not text and not own
        self.format: Format = format_of(self.text)
        """How this template's models write tool calls."""
        bos, eos = llm.token_bos(), llm.token_eos()
        self.bos = model.token_get_text(bos) if bos != -1 else ""
        self.eos = model.token_get_text(eos) if eos != -1 else ""
        try:
            self._render = Jinja2ChatFormatter(self.text, self.eos, self.bos)
            self._render_past = Jinja2ChatFormatter(
                self.text, self.eos, self.bos, add_generation_prompt=False
            )
        except Exception as error:  # of jinja's, or of Python's where it nests too deeply
            reason = " ".join(str(error).split())
            raise BadInput(f"this chat template is broken: {reason}") from None

    def text_of(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        variables: dict[str, Any] | None = None,
        is_past: bool = False,
    ) -> str:
        """The prompt's text. is_past: without the beginning of an answer.

        variables: of the template's own. Raises BadInput for messages that it does not take.
        """
        messages = [_given(message) for message in messages]
        if tools and "tools" not in self.text:
            messages, tools = _with_instructions(messages, list(tools)), ()
        more = {k: v for k, v in (variables or {}).items() if k not in ("messages", "tools")}
        render = self._render_past if is_past else self._render
        try:
            try:
                shown = render(messages=messages, tools=list(tools) or None, **more)
            except TypeError:  # some templates put arguments of calls into text as they are
                spelled = [_with_texts(message) for message in messages]
                shown = render(messages=spelled, tools=list(tools) or None, **more)
        except Exception as error:  # whatever a template does with messages that it does not know
            reason = " ".join(str(error).split()) or type(error).__name__
            raise BadInput(f"the chat template does not take these messages: {reason}") from None
        return str(shown.prompt)

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        variables: dict[str, Any] | None = None,
    ) -> Prompt:
        """The prompt as tokens. Raises BadInput for messages that cannot be used."""
        plain, texts = parts.joined(messages)
        plain, begun = _without_begun(plain)
        whole = self.text_of(plain, tools, variables) + begun
        tokens = self.tokens_of(whole)
        cuts = set()
        for n in _boundaries(plain):
            try:
                before = self.text_of(plain[:n], tools, variables, is_past=True)
            except BadInput:
                continue  # a template that does not take a part of a conversation
            cuts.add(n_same(self.tokens_of(before), tokens))
        return Prompt(
            tokens,
            texts,
            tuple(sorted(n for n in cuts if 0 < n < len(tokens))),
            whole.rstrip().endswith(OPEN),
            self._front(
                messages[0],
                whole,
                tokens,
                lambda first: self.prompt([first, *messages[1:]], tools, variables),
            ),
        )

    def _front(
        self, first: Message, whole: str, tokens: list[int], again: Callable[[Message], Prompt]
    ) -> Front | None:
        """What changes at the beginning of the first message, if the template has it as it is."""
        said = _first_text(first)
        text = self._changing.at_front(said) if self._changing else ""
        at = whole.find(said[: len(text) + N_AROUND].rstrip()) if text.strip() else -1
        if at < 0 or self._changing is None:
            return None
        n = n_same(self.tokens_of(whole[:at]), tokens)
        there = text_of(self._llm, tokens[n : n + CHARACTERS])
        before, found, _ = there.partition(text)
        if not found:
            return None

        def with_other(other: str) -> Prompt:
            return again(_with_first_text(first, other + said[len(text) :]))

        return Front(self._changing, text, n, before, with_other)

    def tokens_of(self, text: str) -> list[int]:
        """Tokens of a prompt; a beginning-of-text token that the template writes is not doubled."""
        if self.bos and self._llm._model.add_bos_token():
            text = text.removeprefix(self.bos)
        return self._llm.tokenize(encoded(text), add_bos=True, special=True)


def encoded(text: str) -> bytes:
    """UTF-8; half of a pair of surrogates, which JSON can hold, becomes a replacement mark."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()


def _without_begun(messages: list[Message]) -> tuple[list[Message], str]:
    """The messages, and the beginning of the answer: an assistant's message that comes last."""
    last = messages[-1]
    if len(messages) < 2 or last["role"] != "assistant" or last.get("tool_calls"):
        return messages, ""
    return messages[:-1], last.get("content") or ""


def _first_text(message: Message) -> str:
    """A message's text, or of several the first."""
    content = message.get("content")
    if isinstance(content, list):
        content = content[0].get("text") if content else ""
    return content if isinstance(content, str) else ""


def _with_first_text(message: Message, text: str) -> Message:
    content: Any = message["content"]
    if isinstance(content, list):
        return {**message, "content": [{**content[0], "text": text}, *content[1:]]}
    return {**message, "content": text}


def _boundaries(messages: Sequence[Message]) -> set[int]:
    """Numbers of messages behind which another conversation may go on: the system message's, and
    those before the last question.
    """
    n_system = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)
    return {n for n in (n_system, last) if 0 < n < len(messages)}


def _given(message: Message) -> Message:
    """A message as templates expect it: with text, and with arguments of calls as objects."""
    message = dict(message)
    if message["role"] == "developer":
        message["role"] = "system"
    if message.get("content") is None:
        message["content"] = ""
    if message.get("tool_calls"):
        message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return message


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    if not isinstance(function, dict):
        raise BadInput("a tool call has no function: give its name and its arguments")
    function = {"arguments": {}, **function}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise BadInput("the arguments of a tool call are no JSON") from None
    return {**call, "function": function}


def _with_texts(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"].get("arguments"), ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _with_instructions(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """Tools in the system message, and calls and their results as text."""
    text = instructions(tools)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        rest = messages[1:]
    else:
        first, rest = {"role": "system", "content": text}, messages
    return [first, *map(_as_text, rest)]


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    if not message.get("tool_calls"):
        return message
    calls = "\n".join(
        "<tool_call>\n"
        + json.dumps(
            {"name": call["function"].get("name"), "arguments": call["function"]["arguments"]},
            ensure_ascii=False,
        )
        + "\n</tool_call>"
        for call in message["tool_calls"]
    )
    return {"role": "assistant", "content": f"{message['content']}\n{calls}".strip()}
