"""A smaller model that guesses what a larger one writes next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import edgekv.llama_cpp as llama_cpp
from edgekv.base.beginnings import n_shared
from edgekv.chat.drafts import Costs
from edgekv.chat.guesses import likeliest
from edgekv.choice.choose import AUTO, UNPREPARED
from edgekv.choice.config import KVConfig
from edgekv.conversation.pool import Conversations
from edgekv.errors import BadInput
from edgekv.profiles import find

FIRST_TEXT = 5
"""llama.cpp compares the tokens' texts from this one on: those before are control tokens."""
MOST_MORE = 128
"""Tokens that one of two vocabularies may have more: room that models leave."""


OF_ITS_MODEL = "budget budget_mb memory profile archive recall".split()


def cache_of(config: KVConfig, path: str) -> KVConfig:
    """The options of a draft model's cache: it keeps the share that its model's cache keeps by
    `config`. What `config` says of that model alone, or in bytes, is left out; no profile is made.
    """
    is_prepared = config.method != AUTO or find(path, predicts=True)
    own: dict[str, Any] = {x.name: x.default for x in fields(KVConfig) if x.name in OF_ITS_MODEL}
    method = config.method if is_prepared else UNPREPARED
    return replace(config, method=method, checkpoints=False, **own)


def check_vocabulary(draft: Any, llm: Any) -> None:
    """Raises BadInput if two loaded models have not the same tokens, as llama.cpp compares them."""
    why = _difference(*(llama_cpp.llama_model_get_vocab(x.model) for x in (llm, draft)))
    if why:
        raise BadInput(
            f"{draft.model_path} cannot draft for {llm.model_path}: {why}; take a smaller model of"
            " the same family"
        )


def _difference(a: Any, b: Any) -> str:
    """What two llama_vocabs differ in, empty if they may be taken for the same."""
    if llama_cpp.llama_vocab_type(a) != llama_cpp.llama_vocab_type(b):
        return "their vocabularies are of different types"
    for name in ("bos", "eos"):
        adds = [bool(getattr(llama_cpp, f"llama_vocab_get_add_{name}")(x)) for x in (a, b)]
        tokens = [getattr(llama_cpp, f"llama_vocab_{name}")(x) for x in (a, b)]
        if adds[0] != adds[1] or (adds[0] and tokens[0] != tokens[1]):
            return f"their {name.upper()} tokens differ"
    n_a, n_b = (llama_cpp.llama_vocab_n_tokens(x) for x in (a, b))
    if abs(n_a - n_b) > MOST_MORE:
        return f"their vocabularies have {n_a:,} and {n_b:,} tokens"
    text = llama_cpp.llama_vocab_get_text
    for token in range(FIRST_TEXT, min(n_a, n_b)):
        if text(a, token) != text(b, token):
            return f"their token {token:,} differs"
    return ""


class DraftModel:
    """A loaded model as `edgekv.chat.guesses` uses it. Its cache follows the texts that are
    written: what was guessed wrong is taken back, and what is missing is read.

    llm: an `edgekv.Llama`. n_vocab: tokens of the model that it guesses for. costs: is told what
    guesses take.
    """

    def __init__(self, llm: Any, n_vocab: int, costs: Costs) -> None:
        self.llm, self._costs = llm, costs
        self._n_vocab = min(n_vocab, llm.n_vocab())
        self._user: object = None
        self._n_text = 0
        """Tokens of the user's text that were read last."""

    @property
    def n_bytes(self) -> int:
        """Of its cache, and of conversations that wait."""
        return self.llm.kv_stats().n_bytes + (self.llm.pool.n_bytes if self.llm.pool else 0)

    def set_n_threads(self, n_threads: int) -> None:
        """CPU threads that write from now on."""
        self.llm.set_n_threads(n_threads)

    def take_turns(self, cache_ram: int | None) -> None:
        """Conversations take turns from now on, in as much memory."""
        Conversations(self.llm, cache_ram)

    def n_missing(self, tokens: Sequence[int], user: object) -> int:
        """See `Guesser`."""
        n = self._n_text if user is self._user else n_shared(tokens, self.llm.tokens)
        return len(tokens) - n

    def follow(self, tokens: Sequence[int], user: object) -> int:
        """See `Guesser`."""
        begin, n = time.perf_counter(), self._go_back(tokens, user)
        self._user, self._n_text = None, 0  # until they are read
        rest = [int(token) for token in tokens[n:]]
        if rest:
            self.llm.eval(rest)
        self._user, self._n_text = user, len(tokens)
        ms = 1e3 * (time.perf_counter() - begin)
        if len(rest) > FIRST_TEXT:
            self._costs.was_read(len(rest), ms)
        elif rest:
            self._costs.guessed(ms)
        return self.llm.most_drafted() + 1

    def _go_back(self, tokens: Sequence[int], user: object) -> int:
        """Keep what the text has in common with the cache. Returns how many of its tokens."""
        llm = self.llm
        known = self._n_text if user is self._user else 0
        n = known + n_shared(tokens[known:], llm.input_ids[known : llm.n_tokens])
        if user is not self._user and llm.pool is not None and n < min(len(tokens), llm.n_tokens):
            return int(llm.pool.use(tokens, is_answer=True))
        if n == len(tokens) and not (n == llm.n_tokens and llm.has_logits):
            n -= 1
        if not llm.back_to(n):
            llm.reset()
            return 0
        return n

    def likeliest(self) -> tuple[int, float]:
        """See `Guesser`."""
        return likeliest(self.llm.logits()[: self._n_vocab])

    def take(self, token: int) -> None:
        """See `Guesser`."""
        begin = time.perf_counter()
        self.llm.eval([token])
        self._costs.guessed(1e3 * (time.perf_counter() - begin))
