"""Which conversation is the model's current one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgekv.session.continued import n_same

if TYPE_CHECKING:
    from edgekv import Llama


class OneConversation:
    """The model's own: a prompt that begins as it does reads only the rest."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm

    def use(
        self, tokens: Sequence[int], parts: Sequence[str] = (), cuts: Sequence[int] = ()
    ) -> tuple[list[int], int]:
        """Make the conversation current that `tokens` go on from.

        Returns the tokens to use, which may be the same text in other tokens, and how many of them
        need not be read: fewer than all.
        """
        llm = self._llm
        with llm._guard.use():
            llm._kv_parts = list(parts)
            tokens = llm._kv_prepare(list(tokens), True)
            n = min(n_same(tokens, llm.input_ids[: llm.n_tokens].tolist()), len(tokens) - 1)
            if n and llm._ctx.kv_cache_seq_rm(-1, n, -1):
                llm.n_tokens, llm._requires_eval = n, True
            else:
                llm.reset()
                n = 0
        return tokens, n

    def close(self) -> None:
        pass
