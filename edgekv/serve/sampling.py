"""How the next token is drawn: llama.cpp's samplers in llama.cpp's order, and a grammar.

A grammar is asked about the token that was drawn, and only where it refuses is it applied to all
tokens, as llama.cpp's own sampling does: a vocabulary of 150,000 tokens takes milliseconds.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BadInput, EdgeKVError

if TYPE_CHECKING:
    from edgekv import Llama

GRAMMAR_MOST = 2**18
"""Bytes of a grammar. llama.cpp's parser goes as deep as a grammar's rules do."""
RULES_MOST, DEPTH_MOST = 4096, 256


@dataclass(frozen=True)
class Sampling:
    """Names, defaults and meaning are llama.cpp's. seed: None, another one each time."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)


class Sampler:
    """Draws the tokens of one answer. Close it afterwards."""

    def __init__(self, llm: Llama, sampling: Sampling, before: Iterable[int]) -> None:
        """before: the prompt's last tokens, which penalties count too."""
        from edgekv.llama_cpp._internals import LlamaSampler
        from edgekv.native import llama_cpp

        self._native, self._llm = llama_cpp, llm
        self._n_vocab = llm.n_vocab()
        self._grammar: Any = None
        self._all = np.zeros(self._n_vocab, [("id", "i4"), ("logit", "f4"), ("p", "f4")])
        self._chain = chain = LlamaSampler()
        if sampling.logit_bias:
            chain.add_logit_bias(self._n_vocab, sampling.logit_bias)
        chain.add_penalties(
            self._n_vocab,
            min(sampling.repeat_last_n, llm.n_ctx()),
            sampling.repeat_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        if sampling.temperature <= 0:
            chain.add_greedy()
        else:
            chain.add_top_k(sampling.top_k)
            chain.add_typical(sampling.typical_p)
            chain.add_top_p(sampling.top_p)
            chain.add_min_p(sampling.min_p)
            chain.add_temp(sampling.temperature)
            seed = sampling.seed
            chain.add_dist(random.getrandbits(32) if seed is None else seed % 2**32)
        for token in before:
            chain.accept(token)

    def close(self) -> None:
        self.constrain("")
        self._chain.close()

    def constrain(self, grammar: str) -> None:
        """Let the grammar decide from the next token on; an empty one lets everything through.

        Raises BadInput for a grammar that llama.cpp cannot read.
        """
        if self._grammar is not None:
            self._native.llama_sampler_free(self._grammar)
            self._grammar = None
        if not grammar:
            return
        check_grammar(grammar)
        vocab = self._llm._model.vocab
        self._grammar = (
            self._native.llama_sampler_init_grammar(
                vocab, grammar.encode("utf-8", "replace"), b"root"
            )
            or None
        )
        if self._grammar is None:
            raise BadInput("this grammar cannot be read: see llama.cpp's grammars/README.md")

    def logits(self) -> NDArray[np.float32]:
        """Those of the last token, [n_vocab]; they change with the next token that is read."""
        return np.ctypeslib.as_array(self._llm._ctx.get_logits_ith(-1), shape=(self._n_vocab,))

    def draw(self) -> int:
        """The next token. Raises EdgeKVError if the grammar lets none through.

        It is the model's end where the grammar lets only that through, whatever a bias says.
        """
        token = self._choose(None)
        if self._grammar is None:
            self._chain.accept(token)
            return token
        if not self._is_allowed(token):
            token = self._choose(self._grammar)
        if not self._is_allowed(token):  # a bias keeps away all that the grammar lets through
            token = self._llm.token_eos()
            if token < 0 or not self._is_allowed(token):
                raise EdgeKVError("the grammar lets no token through: change it, or logit_bias")
        self._chain.accept(token)
        self._native.llama_sampler_accept(self._grammar, token)
        return token

    def _choose(self, grammar: Any) -> int:
        """A token of all, or of those that a grammar lets through if there are any."""
        self._all["id"] = np.arange(self._n_vocab)
        self._all["logit"] = self.logits()
        some = self._array(self._all)
        if grammar is not None:
            self._native.llama_sampler_apply(grammar, ctypes.byref(some))
        self._native.llama_sampler_apply(self._chain.sampler, ctypes.byref(some))
        return int(some.data[some.selected].id) if some.selected >= 0 else self._llm.token_eos()

    def _is_allowed(self, token: int) -> bool:
        """Accepting a token that the grammar refuses would end the process."""
        one = np.array([(token, 1.0, 0.0)], self._all.dtype)
        some = self._array(one)
        self._native.llama_sampler_apply(self._grammar, ctypes.byref(some))
        return bool(np.isfinite(one["logit"][0]))

    def _array(self, data: NDArray[Any]) -> Any:
        pointer = data.ctypes.data_as(ctypes.POINTER(self._native.llama_token_data))
        return self._native.llama_token_data_array(pointer, len(data), -1, False)


def check_grammar(grammar: str) -> None:
    """Raises BadInput for what would take llama.cpp's parser deeper than its stack."""
    depth = deepest = 0
    for letter in grammar:
        depth += (letter == "(") - (letter == ")")
        deepest = max(deepest, depth)
    if (
        len(grammar) > GRAMMAR_MOST
        or grammar.count("::=") > RULES_MOST
        or deepest > DEPTH_MOST
        or "\0" in grammar
    ):
        raise BadInput("this grammar is too large: make it shorter, with fewer rules and brackets")
