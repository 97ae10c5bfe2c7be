"""How the next token is drawn: llama.cpp's samplers in llama.cpp's order, and a grammar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.chat.model import TextModel
from edgekv.chat.sampling import Sampling
from edgekv.native import chat as native


class Sampler:
    """Draws the tokens of one answer. Close it afterwards.

    before: the prompt's last tokens, which penalties count too; constraint: of the answer, see
    `Syntax.settings`. Raises BadInput for settings or a grammar that cannot be used.
    """

    def __init__(
        self,
        llm: TextModel,
        sampling: Sampling,
        before: Iterable[int] = (),
        constraint: Mapping[str, Any] | None = None,
    ) -> None:
        self._llm = llm
        settings = {**sampling.settings(llm.n_ctx()), **(constraint or {})}
        self._native = native.SamplerHandle(llm.model, settings, llm.stop_flag)
        for token in before:
            self._native.accept(token)

    def close(self) -> None:
        self._native.close()

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """Those of a token, [n_vocab], usually the last one; they change when one is read."""
        return self._llm.logits(index)

    def draw(self, logits: NDArray[np.float32] | None = None) -> int:
        """The next token. Raises EdgeKVError if the grammar lets none through or takes longer than
        a second, and Cancelled where `llm` was told to stop meanwhile.

        logits: others than the last token's.
        """
        return self._native.draw(self.logits() if logits is None else logits)

    def candidates(self, n: int) -> list[tuple[int, float]]:
        """The n likeliest tokens that the last draw chose among, n at most, with probabilities."""
        return [(token, p) for token, p in self._native.candidates(n) if p > 0]
