"""A model that is served: what all handlers share, and how they make requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from edgekv.chat.sampling import SAMPLERS, Sampling
from edgekv.chat.specials import encoded, end_tokens
from edgekv.chat.template import Chat
from edgekv.conversation import by_text
from edgekv.errors import BadInput
from edgekv.llama.llama import Llama
from edgekv.serve.errors import prompt_too_long
from edgekv.serve.gate import given_key
from edgekv.serve.options import ServeOptions
from edgekv.serve.pattern import Pattern
from edgekv.serve.prompts import Prompts
from edgekv.serve.request import Prompt, Request
from edgekv.serve.schemas import GenerationBody, SamplingBody
from edgekv.serve.texts import Pieces
from edgekv.serve.worker import Worker

Result = TypeVar("Result")


class Service:
    """One model, its worker, and what the server was told.

    Makes requests of what protocols say. That uses no more of the model than its vocabulary, so any
    thread may ask.
    """

    def __init__(self, llm: Llama, worker: Worker, options: ServeOptions) -> None:
        self.llm, self.worker, self.options = llm, worker, options
        changing = None if options.ignore_prefix is None else Pattern(options.ignore_prefix)
        self.prompts = Prompts(llm, options.chat_template, changing)
        self.n_ctx, self.n_vocab = llm.n_ctx(), llm.n_vocab()
        self.model = (options.names or [Path(llm.model_path).name])[0]
        """The model's name in answers."""
        self.created = int(time.time())

    @cached_property
    def _no_end(self) -> dict[int, float]:
        """A bias that keeps the tokens away at which the model would stop."""
        return dict.fromkeys(end_tokens(self.llm), float("-inf"))

    def sampling(self, body: SamplingBody) -> Sampling:
        """How tokens are drawn. Raises BadInput for samplers that there are not."""
        unknown = set(body.samplers or ()) - set(SAMPLERS)
        if unknown:
            raise BadInput(f"there is no sampler {min(unknown)!r:.60}: {', '.join(SAMPLERS)}")
        found = body.sampling(self.options.sampling, self._tokens_named)
        if not body.ignore_eos:
            return found
        return replace(found, logit_bias={**found.logit_bias, **self._no_end})

    def limit(self, is_named: bool, n: int | None) -> int | None:
        """Tokens that are written at most. is_named: the protocol says n."""
        return n if is_named else self.options.max_tokens

    def request(self, body: GenerationBody, n_probs: int | None, *names: str) -> Request:
        """A request without its prompt. names: of a number of tokens, besides the usual ones.
        Raises BadInput for what this server cannot do.
        """
        body.check()
        return Request(
            sampling=self.sampling(body),
            max_tokens=self.limit(*body.limit(*names)),
            stops=body.stops(),
            n_probs=n_probs,
            probs_drawn=bool(body.post_sampling_probs),
            reasoning_budget=body.reasoning_budget_tokens,
            is_fresh=body.is_fresh(self.options.parallel),
        )

    def _tokens_named(self, name: str) -> list[int]:
        """The token of a number, or those of a text."""
        if not name.isdecimal():
            return self.llm.tokenize(encoded(name), add_bos=False, special=True)
        # Python reads no number of thousands of digits
        is_one = len(name) <= len(str(self.n_vocab)) and int(name) < self.n_vocab
        return [int(name)] if is_one else []

    def ask_chat(self, chat: Chat, request: Request) -> Request:
        """The request with its prompt. Raises BadInput and ApiError."""
        prompt = self.prompts.of(self._with_usual(chat))
        stops = (*request.stops, *prompt.syntax.stops)
        return self._with_prompt(replace(request, stops=stops), prompt)

    def ask_text(self, prompt: Pieces, request: Request, schema: Any, grammar: str) -> Request:
        """The same, for a text to go on with. Raises BadInput and ApiError."""
        tokens = list[int]()
        for i, piece in enumerate(prompt):
            if isinstance(piece, str):
                tokens += self.prompts.template.tokens_of(piece, is_first=i == 0)
            else:
                self.check_tokens([piece])
                tokens.append(piece)
        syntax = self.prompts.template.plain_syntax(schema, grammar)
        return self._with_prompt(request, Prompt(tokens, syntax=syntax))

    def behind(self, tokens: Sequence[int], request: Request) -> Request:
        """The request with tokens in front of its prompt. Raises BadInput and ApiError."""
        self.check_tokens(tokens)
        prompt, bos = request.prompt, self.llm.token_bos()
        own = prompt.tokens[1:] if prompt.tokens[:1] == [bos] else prompt.tokens
        return self._with_prompt(request, Prompt([*tokens, *own], syntax=prompt.syntax))

    def check_tokens(self, tokens: Iterable[int]) -> None:
        """Raises BadInput if one is none of the model's."""
        if not all(0 <= token < self.n_vocab for token in tokens):
            raise BadInput(f"a token is none of this model's {self.n_vocab:,}")

    def count(self, chat: Chat) -> int:
        """Tokens of a chat's prompt."""
        return len(self.prompts.of(self._with_usual(chat)).tokens)

    def text_of(self, chat: Chat) -> str:
        """A chat's prompt."""
        return self.prompts.template.text_of(self._with_usual(chat))

    def _with_usual(self, chat: Chat) -> Chat:
        """With the server's own options where the request says nothing."""
        usual = {"enable_thinking": False} if self.options.reasoning == "off" else {}
        return replace(
            chat,
            variables={**usual, **chat.variables},
            reasoning_format=chat.reasoning_format or self.options.reasoning_format,
        )

    def _with_prompt(self, request: Request, prompt: Prompt) -> Request:
        n = len(prompt.tokens)
        if n == 0:
            raise BadInput("the prompt is empty: give some text")
        if n >= self.n_ctx:
            raise prompt_too_long(n, self.n_ctx)
        if self.llm.engine is not None:
            by_text.learn(self.llm, prompt.tokens)  # the worker is going to compare them
        return replace(request, prompt=prompt)


def service_of(http: HttpRequest) -> Service:
    service: Service = http.app.state.service
    return service


async def between_steps(service: Service, function: Callable[[], Result]) -> Result:
    """What a function that uses the model returns. It waits while a prompt is read."""
    result: Result = await asyncio.wrap_future(service.worker.call(function))
    return result


def client_of(http: HttpRequest) -> Hashable:
    """Whose request it is, for the order in which those that wait are answered. A key counts only
    where keys are asked for: anybody can invent one.
    """
    address = http.client.host if http.client else ""
    options = service_of(http).options
    has_keys = options.api_keys or options.file_keys
    return address, given_key(http.headers) if has_keys else ""
