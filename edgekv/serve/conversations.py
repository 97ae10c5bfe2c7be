"""The conversations of a server: `edgekv.Conversations`, as answers need them."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence

from edgekv.conversation.pool import Conversations
from edgekv.errors import BadInput
from edgekv.llama import pack as packs
from edgekv.llama.instead import renewed
from edgekv.llama.llama import Llama
from edgekv.serve.errors import ApiError
from edgekv.serve.front import settled
from edgekv.serve.kept import Kept, look
from edgekv.serve.request import Prompt

RENEWED = "this model's preparation is done, and prompts are compressed by it now"


class ServerConversations(Conversations):
    """Conversations whose answers are written in turns. Arguments are those of `Conversations`."""

    _llm: Llama

    def __init__(
        self,
        llm: Llama,
        cache_ram: int | None = None,
        cache_disk: str | None = None,
        cache_disk_size: int | None = None,
    ) -> None:
        super().__init__(llm, cache_ram, cache_disk, cache_disk_size)
        if llm.draft is not None:  # whose conversations take turns, too
            llm.draft.take_turns(cache_ram)
        self._secret, self._has_packs = secrets.token_bytes(), False

    def open_packs(self, paths: Sequence[str]) -> None:
        """Have the documents of packs as conversations, which stay whatever goes on from them.

        Raises BadInput for a file that is no pack of this model and cache, and where not all of
        them fit.
        """
        self._has_packs = bool(paths)
        ids = [self._open_pack(path) for path in paths]
        known = {talk.id for talk in self.list()}
        for path, id in zip(paths, ids):
            if id not in known:
                raise BadInput(
                    f"'{path}' does not fit beside the other packs: give a larger --cache-ram, or a"
                    " --cache-disk"
                )

    def _open_pack(self, path: str) -> str:
        return self.open_file(path, lambda note: packs.pack_of(note, path), is_kept=True).id

    def begin_answer(self, prompt: Prompt, is_fresh: bool = False) -> int:
        """Make the conversation current that a prompt goes on from. Returns how many of its tokens
        need not be read. is_fresh: it is a new one, whatever there is.
        """
        ends = self._ends(prompt)
        n = self.use(prompt.tokens, cuts={*prompt.cuts, *ends}, is_fresh=is_fresh)
        self.hold()
        self._read_in_parts(n, ends)
        return n

    def resume_answer(self, id: str, tokens: Sequence[int], prompt: Prompt) -> int:
        """Make the conversation current again to which an answer of a prompt belongs. Returns how
        many of its tokens need not be read. If it is gone, the prompt is cut as it was.
        """
        n = self.resume(id, tokens, prompt.cuts)
        if n is None:
            n = self.use(tokens, cuts=prompt.cuts, is_answer=True)
        self.hold()
        ends: Sequence[int] = []
        if n < len(prompt.tokens):
            self.read_behind(n, len(prompt.tokens))
            ends = self._ends(prompt)
        self._read_in_parts(n, ends)
        return n

    def _ends(self, prompt: Prompt) -> Sequence[int]:
        """Numbers of tokens behind which a prompt is compressed by itself."""
        if self._llm.engine is None:
            return []
        return self._llm.positions(list(prompt.parts), list(prompt.tokens))

    def _read_in_parts(self, n: int, ends: Sequence[int]) -> None:
        """Behind n tokens that are there, the prompt is read in parts."""
        # the same text may be cut into other tokens there
        self._llm.turn.cuts = [end - n + self._llm.n_tokens for end in ends if end > n]

    def settled(self, prompt: Prompt) -> Prompt:
        """The prompt, or one that differs only in text that is not compared; see `Front`."""
        return settled(self._llm, self, prompt)

    @property
    def handle(self) -> str:
        """A name of the current conversation that nobody can guess, and `list` does not have."""
        return self._handle(self.current_id)

    def _handle(self, id: str) -> str:
        return hmac.new(self._secret, id.encode(), "sha256").hexdigest()[:32]

    def kept(self, handle: str, layer: int | None) -> Kept:
        """What the conversation of this handle keeps, in all layers or in one.

        Raises ApiError if there is none, and BadInput if nothing of it is chosen.
        """
        wanted = handle.encode()
        handles = {x.id: self._handle(x.id).encode() for x in self.list()}
        same = (id for id, x in handles.items() if hmac.compare_digest(x, wanted))
        id = next(same, None)
        if id is None:
            raise ApiError(404, "there is no such conversation any more")
        return self.look(id, lambda tokens: look(self._llm, tokens.tolist(), layer))

    def is_short(self, prompt: Prompt, is_fresh: bool = False) -> bool:
        """Whether a prompt has one ubatch to read at most; none may be read then, but wait."""
        n_ubatch, n = self._llm.context_params.n_ubatch, len(prompt.tokens)
        if n > n_ubatch and not is_fresh:
            tokens = self.settled(prompt).tokens
            n = len(tokens) - self.reachable(tokens)
        return n <= n_ubatch

    def restore(self, path: str) -> int:
        """Make the conversation of a file the current one. Returns its tokens. Raises BadInput."""
        try:
            return self.open_file(path).n_tokens
        except BadInput as error:
            self.losses.refuse(path, str(error))
            raise

    def renew_profile(self) -> None:
        """Go by what a start of the server would find now: a profile that was made meanwhile.
        Raises EdgeKVError if that cannot be had; all is then as before.
        """
        if self._has_packs:
            raise BadInput("packs are open, which were read without it")
        self.renew(renewed(self._llm), RENEWED)
