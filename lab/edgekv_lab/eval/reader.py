"""A model that reads a text once and goes on from it under any method and ratio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.base.stats import KVStats
from edgekv.choice.choose import AUTO, choose
from edgekv.learn.cache_type import kind_of, store_as
from edgekv.learn.reading import Reading, predict
from edgekv.methods import Preset
from edgekv.profiles.winners import RATIOS
from edgekv_lab.eval.greedy import feed, say
from edgekv_lab.eval.prompt import template
from edgekv_lab.eval.sample import Row


class Reader:
    """Reads a text once, and compresses copies of it by each method.

    names: the methods that `compress` may be asked for, in the cache type that `llm` has; or by
    cache type.

    Weights are there once: for another cache type the model gets another context, and reads the
    text again. Raises EdgeKVError for a method that this model cannot have.
    """

    def __init__(self, llm: Any, names: Sequence[str] | Mapping[str, Sequence[str]]) -> None:
        self.llm = llm
        """The model whose cache is what was compressed last."""
        self._kind = kind_of(llm)
        self._plain = False
        """Whether keys are stored as llama.cpp's cache stores them, and edgekv would not."""
        by_kind = names if isinstance(names, Mapping) else {self._kind: names}
        self._presets = {
            kind: {name: list(self._meant(name, kind)) for name in names}
            for kind, names in by_kind.items()
        }
        """What a name means in a cache type, at one ratio or another."""
        self._tokens: list[int] = []
        self._reading: Reading | None = None

    def _choose(self, name: str, kind: str, ratio: float | None) -> Preset:
        k, _, v = kind.partition("/")
        llm = self.llm
        return choose(name, llm.model_path, llm.kv_config().profile, ratio, (k, v or k))

    def _meant(self, name: str, kind: str) -> Iterator[Preset]:
        """What `name` may mean: `auto` follows the model's contest, which differs by ratio."""
        found = [self._choose(name, kind, ratio) for ratio in (None, *RATIOS)]
        yield from {one.name: one for one in (found if name == AUTO else found[:1])}.values()

    def read(self, tokens: Sequence[int]) -> None:
        """Read a text: the conversation from now on."""
        self._tokens, self._reading = list(tokens), None

    def compress(self, name: str, ratio: float, kind: str | None = None) -> KVStats:
        """Make the cache what a method leaves of the text; return what it holds then. kind: None
        for the present one. The full cache is llama.cpp's, with the bias of quantised keys: where
        edgekv would store them without it, the text is read for it alone.
        """
        kind = self._kind if kind is None else kind
        wanted = self._choose(name, kind, ratio).name
        preset = next(one for one in self._presets[kind][name] if one.name == wanted)
        if kind != self._kind or self._other_rows(preset.keeps_all):
            self._reading = None  # frees the text's state before the next one's is made
            self._kind, self._plain = kind, store_as(self.llm, kind, plain=preset.keeps_all)
        self._read_once().compress(preset, replace(self.llm.settings, ratio=ratio, preset=preset))
        return self.llm.kv_stats()

    def _other_rows(self, plain: bool) -> bool:
        """Whether the context's rows are not those of the full cache, or of a compressed one."""
        own = self.llm.engine is not None and not self.llm.engine.store.plain
        return plain != self._plain and (self._plain or own)

    def _read_once(self) -> Reading:
        """The text, read in the present cache type."""
        assert self._tokens, "read a text first"
        if self._reading is None:
            presets = [one for some in self._presets[self._kind].values() for one in some]
            by_name = {one.name: one for one in presets if one.keeps_all or not self._plain}
            self._reading = Reading(self.llm, self._tokens, list(by_name.values()))
        return self._reading

    def answer(self, rest: Sequence[int], n_tokens: int, stop: str = "") -> str:
        """What the model says greedily behind the text and `rest`, once after each `compress`, up
        to n_tokens or the text `stop`."""
        return say(self.llm, feed(self.llm, rest) if rest else self.logits, n_tokens, stop)

    def ask(self, message: str, full: Row, n_tokens: int = 48) -> str:
        """What the model answers with a full cache to a message of a chat."""
        words = template(self.llm, [{"role": "user", "content": message}])
        self.read(self.llm.tokenize(words.encode(), add_bos=True, special=True))
        self.compress(*full)
        return self.answer([], n_tokens)

    @property
    def logits(self) -> NDArray[np.float32]:
        """[n_vocab] Of the text's last token."""
        return self._read_once().logits

    def predict(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """`edgekv.learn.reading.predict` behind the text."""
        return predict(self.llm, tokens)
