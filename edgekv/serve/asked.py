"""From what a request says to a wish; what all protocols have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from edgekv.commands.load import end_tokens
from edgekv.errors import BadInput
from edgekv.serve import grammars
from edgekv.serve.errors import ApiError
from edgekv.serve.options import REASONING, ServeOptions
from edgekv.serve.reply import Reply
from edgekv.serve.sampling import Sampling, check_grammar
from edgekv.serve.template import ChatTemplate
from edgekv.serve.tools import Format, Tool
from edgekv.serve.wish import Prompt, Trigger, Wish

if TYPE_CHECKING:
    from edgekv import Llama

SHOWN = (
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
)
"""Tokens that a reply is read by, though some models hold them for control tokens."""


@dataclass(frozen=True)
class Choice:
    """Which tools may be called. name: this one has to be; is_forced: one of them has to be."""

    tools: tuple[Tool, ...] = ()
    is_forced: bool = False
    name: str | None = None
    parallel: bool = False


@dataclass(frozen=True)
class Chat:
    """A chat's request. schema: of the JSON that the answer has to be, None: any text."""

    messages: list[dict[str, Any]]
    choice: Choice = field(default_factory=Choice)
    schema: Any = None
    grammar: str = ""
    variables: dict[str, Any] = field(default_factory=dict)
    reasoning_format: str | None = None


@dataclass(frozen=True)
class Limits:
    """How an answer is written: see `Wish`. ignore_eos: no token that ends answers is drawn."""

    sampling: Sampling
    has_limit: bool = False
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    n_probs: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class Asked:
    """wish: what is written; `reply` reads it."""

    wish: Wish
    form: Format | None = None
    names: frozenset[str] = frozenset()
    splits_thoughts: bool = False

    def reply(self) -> Reply:
        return Reply(self.form, self.names, self.wish.prompt.opens_thought, self.splits_thoughts)


class Asker:
    """Makes wishes of requests. Uses no more of the model than its vocabulary, so any thread may
    ask.
    """

    def __init__(self, llm: Llama, template: ChatTemplate, options: ServeOptions) -> None:
        self.llm, self.template, self.options = llm, template, options
        self.n_ctx, self.n_vocab = llm.n_ctx(), llm.n_vocab()
        pairs = ((text, llm.tokenize(text.encode(), add_bos=False, special=True)) for text in SHOWN)
        self._shown = frozenset(tokens[0] for _, tokens in pairs if len(tokens) == 1)

    @cached_property
    def _no_end(self) -> dict[int, float]:
        """A bias that keeps the tokens away at which the model would stop."""
        return dict.fromkeys(end_tokens(self.llm), float("-inf"))

    def chat(self, chat: Chat, limits: Limits) -> Asked:
        """Raises BadInput and ApiError."""
        choice, form = chat.choice, self.template.format
        tools = [_as_openai(tool) for tool in choice.tools]
        prompt = self.template.prompt(chat.messages, tools, chat.variables)
        grammar, trigger = self._constraint(chat, prompt.opens_thought)
        wish = self._wish(prompt, limits, grammar, trigger, self._shown)
        names = frozenset(tool.name for tool in choice.tools)
        return Asked(wish, form if names else None, names, self._splits(chat.reasoning_format))

    def text(self, prompt: str | list[int], limits: Limits, schema: Any, grammar: str) -> Asked:
        """A text to go on with. Raises BadInput and ApiError."""
        if isinstance(prompt, str):
            tokens = self.template.tokens_of(prompt)
        else:
            tokens = prompt
            if not all(0 <= token < self.n_vocab for token in tokens):
                raise BadInput(f"a token is none of this model's {self.n_vocab:,}")
        if schema is not None:
            grammar = grammars.of_schema(schema, False)
        return Asked(self._wish(Prompt(tokens), limits, grammar, None, frozenset()))

    def count(self, chat: Chat) -> int:
        """Tokens of a chat's prompt."""
        tools = [_as_openai(tool) for tool in chat.choice.tools]
        return len(self.template.prompt(chat.messages, tools, chat.variables).tokens)

    def _wish(
        self,
        prompt: Prompt,
        limits: Limits,
        grammar: str,
        trigger: Trigger | None,
        shown: frozenset[int],
    ) -> Wish:
        n = len(prompt.tokens)
        if n == 0:
            raise BadInput("the prompt is empty: give some text")
        if n >= self.n_ctx:
            raise ApiError(
                400,
                f"the prompt has {n:,} tokens, but the context is {self.n_ctx:,}: give a shorter"
                " one, or start the server with a larger -c",
                "exceed_context_size_error",
                n_prompt_tokens=n,
                n_ctx=self.n_ctx,
            )
        if grammar:
            check_grammar(grammar)
        usual, sampling = self.options.max_tokens, limits.sampling
        if limits.ignore_eos:
            sampling = replace(sampling, logit_bias={**sampling.logit_bias, **self._no_end})
        return Wish(
            prompt,
            sampling,
            limits.max_tokens if limits.has_limit else usual,
            limits.stops,
            limits.n_probs,
            shown,
            grammar,
            trigger,
        )

    def _constraint(self, chat: Chat, opens_thought: bool) -> tuple[str, Trigger | None]:
        choice, form = chat.choice, self.template.format
        if chat.grammar and chat.schema is not None:
            raise BadInput("give a grammar or a JSON schema, not both")
        if choice.is_forced:
            if chat.grammar or chat.schema is not None:
                raise BadInput("an answer that has to call a tool takes no grammar: leave it out")
            tools = [tool for tool in choice.tools if choice.name in (None, tool.name)]
            if not tools:
                raise BadInput(f"tool_choice names no tool of this request: {choice.name}")
            return grammars.of_calls(form, tools, choice.parallel, opens_thought), None
        if chat.schema is not None:
            return grammars.of_schema(chat.schema, opens_thought), None
        if chat.grammar or not choice.tools or not form.close:
            return chat.grammar, None
        return "", Trigger(form.open, grammars.of_body(form, choice.tools), form.close)

    def _splits(self, asked: str | None) -> bool:
        wish = asked or self.options.reasoning_format
        if wish not in REASONING:
            raise BadInput(f"reasoning_format is one of: {', '.join(REASONING)}")
        return wish != "none"


def choice_of(tools: Sequence[Tool], wish: Any, parallel: bool) -> Choice:
    """OpenAI's tool_choice: 'auto', 'none', 'required' or the tool that has to be called.

    Raises BadInput for another one.
    """
    if wish == "none" or not tools:
        if wish not in (None, "none", "auto"):
            raise BadInput("tool_choice asks for a call, but there are no tools")
        return Choice()
    if wish in (None, "auto"):
        return Choice(tuple(tools), parallel=parallel)
    if wish == "required":
        return Choice(tuple(tools), is_forced=True, parallel=parallel)
    if isinstance(wish, dict):
        function = wish.get("function")
        name = function.get("name") if isinstance(function, dict) else wish.get("name")
        if isinstance(name, str):
            return Choice(tuple(tools), is_forced=True, name=name)
    raise BadInput("tool_choice is 'auto', 'none', 'required' or the name of a function")


def _as_openai(tool: Tool) -> dict[str, Any]:
    """As chat templates expect it."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}
