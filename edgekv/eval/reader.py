"""A model that reads a text once and goes on from it under any method and ratio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.choose import AUTO, choose
from edgekv.reading import STEP, Reading, feed, say
from edgekv.methods import Preset
from edgekv.stats import KVStats


class Reader:
    """names: the methods that `compress` may be asked for. dense: the same model with the cache type that `auto` picks, in which it is asked then.

    Raises EdgeKVError for a method that this model cannot have.
    """

    def __init__(self, llm: Any, names: Sequence[str], dense: Any = None) -> None:
        self.llm = llm
        """The model whose cache is what was compressed last."""
        presets = {name: choose(name, llm.model_path, llm._kv_config.profile) for name in names}
        self._homes = [_Home(llm, {name: p for name, p in presets.items() if dense is None or name != AUTO})]
        if dense is not None and AUTO in presets:
            self._homes.append(_Home(dense, {AUTO: presets[AUTO]}))
        self._home, self._tokens = self._homes[0], list[int]()

    def read(self, tokens: Sequence[int]) -> None:
        """Read a text: the conversation from now on."""
        for home in self._homes:
            home.reading = None  # frees the last text's state before the next one's is made
        self._tokens = list(tokens)
        self._go(self._homes[0])

    def compress(self, name: str, ratio: float) -> KVStats:
        """The cache is what a method leaves of the text; what it holds then."""
        home = next(home for home in self._homes if name in home.presets)
        preset = home.presets[name]
        self._go(home).compress(preset, replace(home.llm._kv_settings, ratio=ratio, preset=preset))
        return self.llm.kv_stats()

    def _go(self, home: _Home) -> Reading:
        """Make `home` the one that is asked; it reads the text when it is asked first."""
        assert self._tokens, "read a text first"
        if home.reading is None:
            home.reading = Reading(home.llm, self._tokens, list(home.presets.values()))
        self._home, self.llm = home, home.llm
        return home.reading

    def answer(self, rest: Sequence[int], n_tokens: int, stop: str = "") -> str:
        """What the model says greedily behind the text and `rest`, once after each `compress`, up to n_tokens or the text `stop`."""
        return say(self.llm, feed(self.llm, rest) if rest else self.logits, n_tokens, stop)

    @property
    def logits(self) -> NDArray[np.float32]:
        """[n_vocab] Of the text's last token."""
        return self._go(self._home).logits

    def predict(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Feed tokens behind the text without compressing them; logits [up to STEP, n_vocab] after each of them, in order."""
        for i in range(0, len(tokens), STEP):
            yield feed(self.llm, tokens[i : i + STEP], every=True)


@dataclass
class _Home:
    """A model with one type of cache, and the methods that are asked in it."""

    llm: Any
    presets: dict[str, Preset]
    reading: Reading | None = None
