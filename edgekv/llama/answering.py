"""How answers are written: chats by llama.cpp's own templates, and one sampler for all of them.

A `chat_format` or a `chat_handler` that was given stays llama-cpp-python's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any
from weakref import proxy

import numpy as np
from numpy.typing import NDArray

from edgekv.chat import completion, parts
from edgekv.chat.drafts import NGRAMS, Drafts, First
from edgekv.chat.guesses import Guesses
from edgekv.chat.ngrams import Ngrams
from edgekv.chat.sampler import Sampler
from edgekv.chat.sampling import Sampling
from edgekv.chat.source import Words
from edgekv.chat.template import ChatTemplate, Prompt, Syntax
from edgekv.errors import BadInput
from edgekv.llama.evaluation import Evaluation
from edgekv.llama_cpp import llama_chat_format

N_BEFORE = 64
"""Tokens of a chat's prompt that penalties count."""
CHAT_WORDS = "tools tool_choice functions function_call response_format grammar".split()
"""Of the parent's arguments those that a chat's prompt is made of."""
DRAWN = """
    top_k top_p min_p typical_p repeat_penalty frequency_penalty presence_penalty mirostat_tau
    mirostat_eta
""".split()
"""Those that say how tokens are drawn, by the sampler's names."""
PASSED = [
    *DRAWN,
    *"temperature seed max_tokens mirostat_mode model logits_processor logit_bias".split(),
]
"""Those of a chat that a completion takes as they are."""


class Answering(Evaluation):
    """What `edgekv.Llama` does with messages and with logits."""

    # what comes back depends on `stream`, of which the parent's types say nothing
    if TYPE_CHECKING:

        def create_completion(self, *args: Any, **kwargs: Any) -> Any: ...

        __call__ = create_completion

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's. Raises BadInput if it is broken."""
        return ChatTemplate(proxy(self))  # which holds this object no longer than others do

    @property
    def template_error(self) -> str:
        """Why the model's chat template cannot be used, one line; empty if it can."""
        try:
            return "" if self.chat_template else ""
        except BadInput as error:
            return str(error)

    def create_chat_completion(
        self,
        messages: list[dict[str, Any]],
        *args: Any,
        chat_template_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the parent's, with llama.cpp's own templates, tool calls, thoughts and schemas. A
        message may be a list of text parts, as in OpenAI's API.

        With a compressed cache each part but the last of a message is compressed by itself: a
        document in the first part and a question in the second. Another question about the same
        document, or the same one asked anew, then reads only the question.

        Thoughts come as `reasoning_content`. chat_template_kwargs: variables of the template's own.
        Raises BadInput for messages, tools, schemas and grammars that cannot be used.
        """
        if self._kv_has_format:
            if chat_template_kwargs is not None:
                raise BadInput(
                    "chat_template_kwargs are of the model's own template: leave chat_format and"
                    " chat_handler out"
                )
            return self._by_format(messages, *args, **kwargs)
        given = _bound(super().create_chat_completion, (messages, *args), kwargs)
        words = {name: given[name] for name in ("messages", *CHAT_WORDS)}
        chat = completion.chat_of(**words, variables=chat_template_kwargs)
        prompt = self.chat_template.prompt(chat)
        stops = [given["stop"]] if isinstance(given["stop"], str) else given["stop"] or []
        arguments = {
            **{name: given[name] for name in PASSED},
            "stop": [*stops, *prompt.syntax.stops],
            "logprobs": given["top_logprobs"] if given["logprobs"] else None,
        }
        if given["stream"]:
            return self._chunks(prompt, arguments)
        with self._written_as(prompt):
            done = self.create_completion(prompt.tokens, **arguments)
        return completion.whole(prompt, done, _chat_logprobs)

    def _by_format(self, messages: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
        """By the chat_format or chat_handler that was given, as the parent does."""
        wanted = self.engine is not None or self._kv_on_prompt is not None
        if wanted and self.chat_handler is None:
            messages, self.turn.parts = parts.joined(messages)
        return super().create_chat_completion(messages, *args, **kwargs)

    def _chunks(self, prompt: Prompt, arguments: dict[str, Any]) -> Iterator[Any]:
        with self._written_as(prompt):
            pieces = self.create_completion(prompt.tokens, stream=True, **arguments)
            try:
                yield from completion.chunks(prompt, pieces, _chat_logprobs)
            finally:
                pieces.close()

    @contextmanager
    def _written_as(self, prompt: Prompt) -> Iterator[None]:
        """A `with` block in which the next answer is written as this prompt's."""
        wanted = self.engine is not None or self._kv_on_prompt is not None
        self.turn.parts, self.turn.prompt = prompt.parts if wanted else [], prompt
        try:
            yield
        finally:
            if self.turn.prompt is prompt:
                self.turn.prompt = None

    @property
    def _syntax(self) -> Syntax:
        return self.turn.prompt.syntax if self.turn.prompt else Syntax()

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        """As the parent's. An answer's text has those control tokens by which it is read."""
        shown = self._syntax.shown
        if special or shown.isdisjoint(tokens):
            return super().detokenize(tokens, prev_tokens, special)
        pieces = (super(Answering, self).detokenize([t], None, t in shown) for t in tokens)
        return b"".join(pieces)

    # ---- tokens

    @property
    def draft_model(self) -> Any:
        """What the parent asks for drafts; None: for none."""
        return self._kv_draft if self.is_drafting else None

    @draft_model.setter
    def draft_model(self, given: Any) -> None:
        self._kv_given_drafts = given

    @cached_property
    def words(self) -> Words:
        """What its tokens spell."""
        llm = proxy(self)
        return Words(
            lambda token: llm.tokenizer_.detokenize([token]),
            lambda text: llm.tokenizer_.tokenize(text, False, False),
        )

    def drafts(self) -> Drafts:
        """Those of an answer that begins."""
        drafting, kinds = self._kv_drafting, list[Drafts]()
        if drafting.is_auto or not set(NGRAMS).isdisjoint(drafting.types):
            kinds.append(Ngrams(drafting, self.costs, self.words))
        if self.draft is not None:
            kinds.append(Guesses(drafting, self.costs, self.draft))
        return First(kinds)

    def _kv_draft(self, tokens: NDArray[np.intc]) -> NDArray[np.intc]:
        """The tokens that may follow, as many as can be checked."""
        most = self.most_drafted()
        if self._kv_given_drafts is not None:
            draft = self._kv_given_drafts(tokens).astype(np.intc)[:most]
        else:
            draft = np.array(self.turn.drafts.next(tokens, most), np.intc)
        self._kv_is_check = len(draft) > 0
        return draft

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's arguments for edgekv's sampler. Raises BadInput for a grammar that cannot
        be read, which would end the process otherwise.
        """
        given = _bound(super()._init_sampler, args, kwargs)
        constraint = dict(self._syntax.settings)
        if given["grammar"] is not None:
            self.chat_template.check(given["grammar"]._grammar)
            constraint = {"grammar": given["grammar"]._grammar}
        sampling = Sampling(
            temperature=given["temp"],
            repeat_last_n=self.last_n_tokens_size,
            mirostat=given["mirostat_mode"],
            min_keep=1,
            seed=self._seed,
            **{name: given[name] for name in DRAWN},
        )
        before = self.turn.prompt.tokens[-N_BEFORE:] if self.turn.prompt else []
        sampler = Sampler(proxy(self), sampling, before, constraint)
        return _Sampler(self, sampler, given["logits_processor"])


class _Sampler:
    """A sampler as the parent calls it."""

    custom_samplers: tuple[()] = ()

    def __init__(self, llm: Answering, sampler: Sampler, processors: Any) -> None:
        self._llm, self._sampler, self._processors = proxy(llm), sampler, processors or ()

    def sample(self, ctx: Any, index: int) -> int:
        """A token of the logits at an index, which the processors have changed."""
        logits = self._sampler.logits(index)
        if self._processors:
            logits = logits.copy()
            tokens = self._llm._input_ids[: self._llm.n_tokens + 1 + index]  # a draft is not read
            for processor in self._processors:
                logits[:] = processor(tokens, logits)
        return self._sampler.draw(logits)

    def close(self) -> None:
        self._sampler.close()


def _bound(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """What a call gives a function, by name, with defaults. Raises TypeError as the call does."""
    given = signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def _chat_logprobs(found: Any) -> Any:
    return llama_chat_format._convert_text_completion_logprobs_to_chat(found)
