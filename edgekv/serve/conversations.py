"""Which conversation is the model's current one: `edgekv.Conversations`, as answers need it."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from edgekv.conversation.pool import Conversations
from edgekv.conversation.talk import Talk
from edgekv.errors import BadInput
from edgekv.llama import pack as packs
from edgekv.llama.instead import renewed
from edgekv.serve.errors import ApiError
from edgekv.serve.front import settled
from edgekv.serve.kept import Kept, look
from edgekv.serve.request import Prompt

if TYPE_CHECKING:
    from edgekv import Llama


RENEWED = "this model's preparation is done, and prompts are compressed by it now"


class Turns:
    """Conversations that take turns. Arguments are those of `Conversations`."""

    def __init__(
        self,
        llm: Llama,
        cache_ram: int | None = None,
        cache_disk: str | None = None,
        cache_disk_size: int | None = None,
    ) -> None:
        self._llm, self._secret = llm, secrets.token_bytes()
        self._pool = Conversations(llm, cache_ram, cache_disk, cache_disk_size)
        if llm.draft is not None:  # whose conversations take turns, too
            Conversations(llm.draft.llm, cache_ram)
        self._has_packs = False

    def open_packs(self, paths: Sequence[str]) -> None:
        """Have the documents of packs as conversations, which stay whatever goes on from them.

        Raises BadInput for a file that is no pack of this model and cache, and where not all of
        them fit.
        """
        self._has_packs = bool(paths)
        ids = [self._open_pack(path) for path in paths]
        known = {talk.id for talk in self._pool.list()}
        for path, id in zip(paths, ids):
            if id not in known:
                raise BadInput(
                    f"'{path}' does not fit beside the other packs: give a larger --cache-ram, or a"
                    " --cache-disk"
                )

    def _open_pack(self, path: str) -> str:
        return self._pool.open_file(path, lambda note: packs.pack_of(note, path), is_kept=True).id

    def use(
        self,
        tokens: Sequence[int],
        parts: Sequence[str] = (),
        cuts: Sequence[int] = (),
        is_fresh: bool = False,
    ) -> int:
        """Make the conversation current that `tokens` go on from.

        Returns how many of them need not be read. parts: texts in the prompt behind which it is
        compressed by itself; cuts: numbers of tokens behind which another prompt may go on
        differently; is_fresh: the current one is a new one, whatever there is.
        """
        ends = self._ends(parts, tokens)
        n = self._pool.use(tokens, cuts={*cuts, *ends}, is_fresh=is_fresh)
        self._pool.hold()
        self._cut(n, ends)
        return n

    def go_on(self, id: str, tokens: Sequence[int], prompt: Prompt) -> int:
        """Make the conversation current again to which an answer of a prompt belongs. Returns how
        many of its tokens need not be read. If it is gone, the prompt is cut as it was.
        """
        n = self._pool.resume(id, tokens, prompt.cuts)
        if n is None:
            n = self._pool.use(tokens, cuts=prompt.cuts, is_answer=True)
        self._pool.hold()
        ends: Sequence[int] = []
        if n < len(prompt.tokens):
            self._pool.read_behind(n, len(prompt.tokens))
            ends = self._ends(prompt.parts, prompt.tokens)
        self._cut(n, ends)
        return n

    def together(self, ids: Sequence[str]) -> list[str]:
        """Of these conversations those that `step` can give a token now."""
        return self._pool.together(ids)

    def step(self, tokens: Mapping[str, int]) -> None:
        """Give each of these a token in one pass; see `edgekv.Conversations.step`."""
        self._pool.step(tokens)

    def end_answer(self, id: str) -> None:
        """The answer of a conversation is complete; it is the current one then."""
        self._pool.make_current(id)
        self._pool.end_answer()

    def give_up(self, id: str) -> None:
        """The answer of a conversation is stopped, if it is not complete."""
        self._pool.give_up(id)

    def _ends(self, parts: Sequence[str], tokens: Sequence[int]) -> list[int]:
        """Numbers of tokens behind which texts end."""
        return (
            self._llm.positions(list(parts), list(tokens)) if self._llm.engine is not None else []
        )

    def _cut(self, n: int, ends: Sequence[int]) -> None:
        """Behind n tokens that are there, the prompt is read in parts."""
        # the same text may be cut into other tokens there
        self._llm.turn.cuts = [end - n + self._llm.n_tokens for end in ends if end > n]

    def settled(self, prompt: Prompt) -> Prompt:
        """The prompt, or one that differs only in text that is not compared; see `Front`."""
        return settled(self._llm, self._pool, prompt)

    @property
    def current(self) -> str:
        """The id of the conversation that the model goes on with."""
        return self._pool.current_id

    @property
    def handle(self) -> str:
        """A name of the current conversation that nobody can guess, and `list` does not have."""
        return self._handle(self.current)

    def _handle(self, id: str) -> str:
        return hmac.new(self._secret, id.encode(), "sha256").hexdigest()[:32]

    def kept(self, handle: str, layer: int | None) -> Kept:
        """What the conversation of this handle keeps, in all layers or in one.

        Raises ApiError if there is none, and BadInput if nothing of it is chosen.
        """
        wanted = handle.encode()
        handles = {x.id: self._handle(x.id).encode() for x in self._pool.list()}
        same = (id for id, x in handles.items() if hmac.compare_digest(x, wanted))
        id = next(same, None)
        if id is None:
            raise ApiError(404, "there is no such conversation any more")
        return self._pool.look(id, lambda tokens: look(self._llm, tokens.tolist(), layer))

    def can_wait(self) -> bool:
        """Whether the prompt that is being read can wait for others, see `meanwhile`."""
        return self._pool.can_wait()

    def is_short(self, prompt: Prompt, is_fresh: bool = False) -> bool:
        """Whether at most one ubatch of a prompt has to be read. Not while another one is read,
        unless that one waits.
        """
        n_ubatch, n = self._llm.context_params.n_ubatch, len(prompt.tokens)
        if n > n_ubatch and not is_fresh:
            tokens = self.settled(prompt).tokens
            n = len(tokens) - self._pool.reachable(tokens)
        return n <= n_ubatch

    def meanwhile(self) -> AbstractContextManager[None]:
        """A `with` block inside of `kv_progress`: the prompt waits half read, and `use` takes other
        conversations.
        """
        return self._pool.meanwhile()

    def list(self) -> Sequence[Talk]:
        """All conversations, the one used last first."""
        return self._pool.list()

    def save(self, id: str, path: str) -> int:
        """Write a conversation to a file. Returns how many tokens it has. Raises BadInput."""
        return self._pool.save_as(id, path)

    def restore(self, path: str) -> int:
        """Make the conversation of such a file the current one. Returns how many tokens it has.
        Raises BadInput.
        """
        try:
            return self._pool.open_file(path).n_tokens
        except BadInput as error:
            self._pool.losses.refuse(path, str(error))
            raise

    def renew(self) -> None:
        """Go by what a start of the server would find now: a profile that was made meanwhile.
        Raises EdgeKVError if that cannot be had; all is then as before.
        """
        if self._has_packs:
            raise BadInput("packs are open, which were read without it")
        self._pool.renew(renewed(self._llm), RENEWED)

    def erase(self, id: str) -> None:
        """Forget a conversation. Raises BadInput if there is none of this id."""
        self._pool.erase(id)

    @property
    def n_bytes_archive(self) -> int:
        """Of the archives of conversations that wait."""
        return self._pool.n_bytes_archive

    @property
    def losses(self) -> dict[str, int]:
        """How many conversations were dropped, are not on disk, or were read again."""
        return dict(self._pool.losses.counts)

    def close(self) -> None:
        """Write conversations to the folder, if there is one, and give their memory back."""
        self._pool.close()
