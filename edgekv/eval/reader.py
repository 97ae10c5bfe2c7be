"""A model that reads a text once and goes on from it under any method and ratio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv import native
from edgekv.choose import choose
from edgekv.eval.reading import STEP, Reading, feed
from edgekv.stats import KVStats


class Reader:
    """names: the methods that `compress` may be asked for. Raises EdgeKVError for one that this model cannot have."""

    def __init__(self, llm: Any, names: Sequence[str]) -> None:
        self.llm = llm
        self._presets = {name: choose(name, llm.model_path, llm._kv_profile) for name in names}
        self._reading: Reading | None = None

    def read(self, tokens: Sequence[int]) -> None:
        """Read a text: the conversation from now on."""
        self._reading = None  # frees the last text's state before the next one's is made
        self._reading = Reading(self.llm, tokens, list(self._presets.values()))

    def compress(self, name: str, ratio: float) -> KVStats:
        """The cache is what a method leaves of the text; what it holds then."""
        assert self._reading is not None, "read a text first"
        preset = self._presets[name]
        self._reading.compress(preset, replace(self.llm._kv_settings, ratio=ratio, preset=preset))
        return self.llm.kv_stats()

    def answer(self, rest: Sequence[int], n_tokens: int, stop: str = "") -> str:
        """What the model says greedily behind the text and `rest`, once after each `compress`, up to n_tokens or the text `stop`."""
        assert self._reading is not None, "read a text first"
        return say(self.llm, feed(self.llm, rest) if rest else self._reading.logits, n_tokens, stop)

    def predict(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Feed tokens behind the text without compressing them; logits [up to STEP, n_vocab] after each of them, in order."""
        for i in range(0, len(tokens), STEP):
            yield feed(self.llm, tokens[i : i + STEP], every=True)


def say(llm: Any, logits: NDArray[np.float32], n_tokens: int, stop: str = "") -> str:
    """The greedy continuation of the conversation in `llm`, whose next token has these logits, up to n_tokens or the text `stop`."""
    vocab, out, words = native.llama_cpp.llama_model_get_vocab(llm._model.model), [], ""
    while len(out) < n_tokens:
        token = int(logits.argmax())
        if native.llama_cpp.llama_vocab_is_eog(vocab, token):
            break
        out.append(token)
        words = llm.detokenize(out).decode(errors="replace")
        if stop and stop in words.lstrip("\n"):
            return words.lstrip("\n").split(stop)[0]
        if len(out) < n_tokens:
            logits = feed(llm, [token])
    return words
