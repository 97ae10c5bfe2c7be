"""A model's chat template: from messages to a prompt, and to what its answer looks like."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from edgekv.base.beginnings import n_shared
from edgekv.chat import bare, messages, parts
from edgekv.chat.bounds import check_grammar, check_json
from edgekv.chat.messages import Message
from edgekv.chat.model import TextModel
from edgekv.chat.specials import Specials, encoded, without_marks
from edgekv.chat.tools import Choice, Tool
from edgekv.errors import BadInput
from edgekv.grammars import schemas
from edgekv.memory.limit import APPEND_MAX
from edgekv.model import words
from edgekv.native import chat as native
from edgekv.native import llama_cpp

log = logging.getLogger("edgekv.chat")

PREAMBLE = re.compile(r"^root ::= .*$", re.MULTILINE)
PIECES = re.compile(r'"(?:\\.|[^"\\])*"|[^"]+')
TEXT_RULE = re.compile(r"(?<![\w-])until-\d+\?? ")
REASONING = ("auto", "none", "deepseek", "deepseek-legacy")
TOO_LONG = "it takes too long"
"""What native/include/edgekv-jinja.h says of a template that might never end."""
SHOWN = ("<think>", "</think>", "<|python_tag|>", "<|tool_call|>")
"""Tokens that answers are read by, besides those that llama.cpp names."""
SETTINGS = (
    *("grammar", "grammar_lazy", "grammar_triggers", "generation_prompt"),
    *("thinking_start_tag", "thinking_end_tags"),
)
"""Of what llama.cpp says of an answer, the sampler's."""
HERMES = (
    "{% if tools %}<|im_start|>system\n<tools>\n{% for tool in tools %}{{ tool | tojson }}\n"
    '{% endfor %}</tools>\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% endif %}"
)
"""Reads the answers of models whose own templates know no tools."""
HERMES_THINKS = HERMES.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ message.content }}",
).replace("assistant\n{% endif %}", "assistant\n{% if opens %}<think>\n{% endif %}{% endif %}")
"""The same for those that think; opens: the prompt begins a thought."""


@dataclass(frozen=True)
class Chat:
    """A chat's request. schema: of the JSON that the answer has to be, None: any text; variables:
    of the template's own; parses_specials: control tokens in people's texts are tokens.
    """

    messages: Sequence[Message]
    choice: Choice = field(default_factory=Choice)
    schema: Any = None
    grammar: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning_format: str = ""
    parses_specials: bool = False
    adds_generation_prompt: bool = True


@dataclass(frozen=True)
class Syntax:
    """How an answer is written and read. parser: what reads it; settings: of the sampler, what
    constrains it; shown: control tokens whose text is written; names: of tools; is_one_call: a
    second call ends the answer, and is none of it.
    """

    parser: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    shown: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()
    is_one_call: bool = False


@dataclass(frozen=True)
class Prompt:
    """A chat's prompt, and where it may be cut.

    tokens: the prompt. parts: texts in it behind which it is compressed by itself, such as a
    document before a question. cuts: numbers of tokens at which another conversation may branch.
    """

    tokens: list[int]
    parts: list[str] = field(default_factory=list)
    cuts: tuple[int, ...] = ()
    syntax: Syntax = field(default_factory=Syntax)
    text: str = ""


class ChatTemplate:
    """Makes prompts of chats, by the model's template and llama.cpp's library.

    text: a template in the place of the model's; check: called with a prompt before it is cut
    into tokens, may raise. Raises BadInput for a template that is broken.
    """

    def __init__(
        self, llm: TextModel, text: str = "", check: Callable[[bytes], None] = lambda data: None
    ) -> None:
        self._llm, self._check_size = llm, check
        try:
            self._native = native.Template(llm.model, text)
        except BadInput as error:
            raise BadInput(
                f"this {'' if text else 'model' + chr(39) + 's '}chat template is broken ({error})"
            ) from None
        model = llm.model
        self.is_fallback = not text and not llama_cpp.llama_model_chat_template(model, None)
        """The model has none: chats are written as ChatML."""
        about = self._native.about()
        self.text, self.can = str(about["source"]), about["caps"]
        self.specials = Specials(llm)
        bos, eos = llm.token_bos(), llm.token_eos()
        self.bos, self.eos = (
            "" if token < 0 else words.name(llm.model, token) for token in (bos, eos)
        )

    @cached_property
    def _hermes(self) -> native.Template:
        start = self._native.apply({"messages": [{"role": "user", "content": "?"}]})
        thinks = start["thinking_start_tag"] == "<think>"
        return native.Template(None, HERMES_THINKS if thinks else HERMES)

    # ---- text

    def text_of(self, chat: Chat) -> str:
        """The prompt as text. Raises BadInput for messages that the template does not take."""
        return without_marks(str(self._applied(self._given(chat)[0])["prompt"]))

    def tokens_of(self, text: str, is_first: bool = True) -> list[int]:
        """Tokens of a text that is no chat, control tokens too. is_first: it begins the prompt."""
        data = encoded(text)
        self._check_size(data)
        return self._llm.tokenize(data, add_bos=is_first, special=True)

    def _given(self, chat: Chat) -> tuple[Chat, list[str]]:
        """The chat as llama.cpp takes it, and its texts that are compressed by themselves."""
        plain, texts = parts.joined(messages.given(chat.messages))
        if not chat.parses_specials:
            plain = self.specials.marked(plain)
        for tool in chat.choice.tools:
            check_json(tool.parameters, f"the schema of the tool {tool.name}")
        return replace(chat, messages=plain), texts

    @property
    def _takes_tools(self) -> bool:
        return bool(self.can["supports_tools"])

    def _applied(self, chat: Chat, **more: Any) -> dict[str, Any]:
        """What llama.cpp makes of a chat, with tools as the template has them."""
        tools = chat.choice.tools
        if tools and not self._takes_tools:
            emulated = messages.with_instructions(chat.messages, tools)
            chat, tools = replace(chat, messages=emulated, choice=Choice()), ()
        request = self._request(chat, [tool.as_openai() for tool in tools], **more)
        # some templates take one system message only, and of some llama.cpp finds no format
        once = {"messages": messages.folded(chat.messages)}
        errors: list[BadInput] = []
        for other in ({}, once, {"plain": True}, {**once, "plain": True}):
            try:
                return self._native.apply({**request, **other})
            except BadInput as error:
                errors.append(error)
                if TOO_LONG in str(error):
                    break
        raise BadInput(f"the chat template does not take these messages: {errors[0]}")

    def _request(self, chat: Chat, tools: list[Message], **more: Any) -> dict[str, Any]:
        variables = dict(chat.variables)
        check_json(variables, "chat_template_kwargs")
        thinks = variables.get("enable_thinking", True)
        if not isinstance(thinks, bool):
            raise BadInput("enable_thinking is true or false")
        if chat.reasoning_format not in ("", *REASONING):
            raise BadInput(f"reasoning_format is one of: {', '.join(REASONING)}")
        choice, goes_on = chat.choice, _goes_on(chat.messages)
        parallel = self.can["supports_parallel_tool_calls"]
        return {
            "messages": list(chat.messages),
            "tools": tools or None,
            "tool_choice": choice.wish,
            "parallel_tool_calls": parallel if choice.parallel is None else choice.parallel,
            "reasoning_format": chat.reasoning_format or "auto",
            "enable_thinking": thinks,
            "chat_template_kwargs": variables,
            "add_generation_prompt": chat.adds_generation_prompt and not goes_on,
            "continue_final_message": goes_on and chat.adds_generation_prompt,
            **more,
        }

    # ---- the whole prompt

    def prompt(self, chat: Chat) -> Prompt:
        """The prompt as tokens, and how its answer is written. Raises BadInput for messages that
        cannot be used, and for tools and schemas that cannot.
        """
        chat, texts = self._given(chat)
        made = self._applied(chat)
        self._check_size(encoded(made["prompt"]))
        tokens = self.specials.tokens_of(made["prompt"])
        return Prompt(
            tokens,
            texts,
            self._cuts(chat, tokens),
            self._syntax(chat, made),
            without_marks(made["prompt"]),
        )

    def _cuts(self, chat: Chat, tokens: list[int]) -> tuple[int, ...]:
        """Where another conversation may go on; see `_boundaries`."""
        cuts = dict[int, int]()
        for n in sorted(_boundaries(chat.messages)):
            before = replace(chat, messages=chat.messages[:n], adds_generation_prompt=False)
            try:
                text = self._applied(before, plain=True)["prompt"]
            except BadInput:
                continue  # a template that does not take a part of a conversation
            cuts[n] = n_shared(self.specials.tokens_of(text), tokens)
        called, end = _called(chat.messages), cuts.get(len(chat.messages), 0)
        if end and 0 < end - cuts.get(called, end) <= APPEND_MAX:
            del cuts[called]  # the next turn goes on behind the results
        return tuple(sorted({n for n in cuts.values() if 0 < n < len(tokens)}))

    # ---- the answer

    def _syntax(self, chat: Chat, made: dict[str, Any]) -> Syntax:
        """Raises BadInput for tools, schemas and grammars that cannot be used."""
        start, begun = made["thinking_start_tag"], made["generation_prompt"].rstrip()
        opens = bool(start) and begun.endswith(start)
        constrained = self._constrained(chat, made, opens)
        settings = {name: constrained[name] for name in SETTINGS}
        settings["prefills_grammar"] = not chat.grammar
        words = [*SHOWN, *made["preserved_tokens"], *constrained["preserved_tokens"]]
        words += [start, *made["thinking_end_tags"]]
        return Syntax(
            constrained["parser"],
            settings,
            tuple(made["additional_stops"]),
            self._single(words),
            frozenset(tool.name for tool in chat.choice.tools if chat.choice.may_call),
            chat.choice.may_call and chat.choice.parallel is False,
        )

    def plain_syntax(self, schema: Any, grammar: str) -> Syntax:
        """Of a text, JSON of a schema, or what a grammar allows. Raises BadInput."""
        if schema is not None:
            prepared = _exactly(schema)
            grammar = schemas.finished(native.grammar_of(prepared.schema), prepared.rules)
        if grammar:
            self.check(grammar)
        return Syntax(settings={"grammar": grammar} if grammar else {})

    def _single(self, words: Sequence[str]) -> frozenset[int]:
        """The tokens of texts that are one token."""
        found = (
            self._llm.tokenize(word.encode(), add_bos=False, special=True)
            for word in dict.fromkeys(words)
            if word
        )
        return frozenset(tokens[0] for tokens in found if len(tokens) == 1)

    def _constrained(self, chat: Chat, made: dict[str, Any], opens: bool) -> dict[str, Any]:
        """What llama.cpp says of the answer: with its grammar, if it has one, and its parser."""
        choice = chat.choice
        if chat.grammar and chat.schema is not None:
            raise BadInput("give a grammar or a JSON schema, not both")
        if chat.grammar and choice.may_call:
            raise BadInput("an answer that may call tools takes no grammar: leave one of them out")
        if chat.schema is not None and choice.is_forced:
            raise BadInput("an answer that has to call a tool takes no JSON schema: leave it out")
        if chat.grammar:
            self.check(chat.grammar)
            return {**made, "grammar": chat.grammar, "grammar_lazy": False}
        if chat.schema is not None:
            return self._with_schema(replace(chat, choice=Choice()))
        if not choice.may_call:
            return made
        if choice.is_forced:
            return self._with_tools(chat, choice.allowed(), opens)
        try:
            return self._with_tools(chat, choice.tools, opens)
        except BadInput:
            usable = [self._usable(chat, tool, opens) for tool in choice.tools]
            return self._with_tools(chat, usable, opens)

    def _with_schema(self, chat: Chat) -> dict[str, Any]:
        prepared = _exactly(chat.schema)
        made = self._applied(chat, json_schema=prepared.schema)
        made["grammar"] = schemas.finished(made["grammar"], prepared.rules)
        self.check(made["grammar"])
        return made

    def _with_tools(self, chat: Chat, tools: Sequence[Tool], opens: bool) -> dict[str, Any]:
        """Raises BadInput for a tool whose schema cannot be used where it has to be called."""
        rules: dict[str, str] = {}
        usable: list[Tool] = []
        for tool in tools:
            prepared = schemas.prepared(tool.parameters, f"{len(rules)}-{len(usable)}")
            if prepared.lost and chat.choice.is_forced:
                raise BadInput(schemas.refusal(prepared.lost, f"the tool {tool.name}"))
            for path, keyword, why in prepared.lost:
                log.info("the tool %s: %s at %s is left out: %s", tool.name, keyword, path, why)
            rules |= prepared.rules
            usable.append(replace(tool, parameters=prepared.schema))
        made = self._with_format(chat, usable, opens)
        if made["grammar"]:
            made["grammar"] = schemas.finished(made["grammar"], rules)
            if chat.choice.is_forced:
                made["grammar"] = PREAMBLE.sub(_without_text, made["grammar"])
            try:
                self.check(made["grammar"])
            except BadInput as error:
                names = ", ".join(tool.name for tool in tools)
                raise BadInput(f"these tools cannot be used ({names}): {error}") from None
        return made

    def _with_format(self, chat: Chat, tools: Sequence[Tool], opens: bool) -> dict[str, Any]:
        """As the template's models write calls, or where it teaches none, as Hermes' do."""
        choice = replace(chat.choice, tools=tuple(tools))
        if not self._takes_tools:
            request = self._request(replace(chat, choice=choice), [x.as_openai() for x in tools])
            request["messages"] = [{"role": "user", "content": "?"}]
            request |= {"add_generation_prompt": True, "continue_final_message": False}
            request["chat_template_kwargs"] = {"opens": opens}
            return self._hermes.apply(request)
        made = self._applied(replace(chat, choice=choice))
        if choice.is_forced and not made["grammar"]:
            return self._applied(
                replace(chat, choice=Choice()), json_schema=bare.schema_of(tools, self.text)
            )
        return made

    def _usable(self, chat: Chat, tool: Tool, opens: bool) -> Tool:
        """The tool, with any arguments if those of its schema cannot be a grammar."""
        try:
            self._with_tools(chat, [tool], opens)
        except BadInput as error:
            log.warning("the tool %s takes any arguments: %s", tool.name, error)
            return replace(tool, parameters={"type": "object"})
        return tool

    def check(self, grammar: str) -> None:
        """Raises BadInput for a grammar that llama.cpp cannot read."""
        check_grammar(grammar)
        try:
            native.check_grammar(self._llm.model, grammar)
        except BadInput as error:
            raise BadInput(f"this grammar cannot be used: {error}") from None


def _without_text(root: re.Match[str]) -> str:
    """A grammar's root without text before a call that has to be made: some write for ever."""
    kept, depth = "", 0
    for piece in PIECES.findall(root.group()):
        if not piece.startswith('"'):
            depth += piece.count("(") - piece.count(")")
            piece = piece if depth else TEXT_RULE.sub("", piece)
        kept += piece
    return kept


def _exactly(schema: Any) -> schemas.Prepared:
    """Raises BadInput for a schema of which something would be left out."""
    check_json(schema, "the JSON schema")
    prepared = schemas.prepared(schema)
    if prepared.lost:
        raise BadInput(schemas.refusal(prepared.lost, "the JSON schema"))
    return prepared


def _goes_on(given: Sequence[Message]) -> bool:
    """Whether the last message is the beginning of the answer."""
    last = given[-1]
    return len(given) > 1 and last["role"] == "assistant" and not last.get("tool_calls")


def _boundaries(given: Sequence[Message]) -> set[int]:
    """Numbers of messages behind which another prompt may go on: the system message's, those before
    the last question, those before the last results of tools, and all. Clients give a call back
    with other blanks than the model wrote.
    """
    n_system = next((i for i, m in enumerate(given) if m["role"] != "system"), len(given))
    last = max((i for i, m in enumerate(given) if m["role"] == "user"), default=0)
    return {n for n in (n_system, last, _called(given), len(given)) if n > 0}


def _called(given: Sequence[Message]) -> int:
    """The number of messages before the last results of tools."""
    return max((i + 1 for i, m in enumerate(given) if m["role"] != "tool"), default=0)
