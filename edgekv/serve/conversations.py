"""Which conversation is the model's current one: `edgekv.conversations`, as answers need it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from edgekv.conversations import Conversations, Talk

if TYPE_CHECKING:
    from edgekv import Llama


class Turns:
    """Conversations that take turns. Arguments are those of `Conversations`."""

    def __init__(
        self,
        llm: Llama,
        cache_ram: int | None = None,
        cache_disk: str | None = None,
        cache_disk_size: int | None = None,
    ) -> None:
        self._llm = llm
        self._pool = Conversations(llm, cache_ram, cache_disk, cache_disk_size)

    def use(
        self, tokens: Sequence[int], parts: Sequence[str] = (), cuts: Sequence[int] = ()
    ) -> int:
        """Make the conversation current that `tokens` go on from.

        Returns how many of them need not be read. parts: texts in the prompt behind which it is
        compressed by itself; cuts: numbers of tokens behind which another prompt may go on
        differently.
        """
        llm = self._llm
        ends = llm._kv_positions(list(parts), list(tokens)) if llm._kv is not None else []
        n = self._pool.use(tokens, cuts={*cuts, *ends})
        # the same text may be cut into other tokens there
        llm._kv_cuts = [end - n + llm.n_tokens for end in ends if end > n]
        return n

    def lend(self) -> AbstractContextManager[None]:
        """A `with` block while a prompt is read, in which others use the model."""
        return self._pool.lend()

    def is_short(self, tokens: Sequence[int]) -> bool:
        """Whether the model reads what is new of a prompt in one step, while another one waits half
        read. In llama.cpp's own cache none can wait.
        """
        n_most = self._llm.context_params.n_ubatch
        return self._pool.can_lend and self._pool.n_unread(tokens) <= n_most

    def list(self) -> Sequence[Talk]:
        """All conversations, the one used last first."""
        return self._pool.list()

    def erase(self, id: str) -> None:
        """Forget a conversation. Raises BadInput if there is none of this id."""
        self._pool.erase(id)

    def close(self) -> None:
        """Write conversations to the folder, if there is one, and give their memory back."""
        self._pool.close()
