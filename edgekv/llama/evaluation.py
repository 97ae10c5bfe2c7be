"""Where tokens go: a prompt is read layer by layer into the ragged store, a few tokens are appended
to its recent buffer, which is compressed in turn when it grows too long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

import edgekv.llama_cpp as llama_cpp
from edgekv import native
from edgekv.chat.drafts import MOST
from edgekv.conversation import state
from edgekv.conversation.hidden import HiddenStates
from edgekv.conversation.state import has_recurrent_layers
from edgekv.engine.engine import Engine
from edgekv.errors import ContextFull, EdgeKVError, StepFailed
from edgekv.llama.loaded import LoadedModel
from edgekv.native.mtp import WINDOW, hidden

AS_BEFORE = "the conversation is as before"


class Evaluation(LoadedModel):
    """What `edgekv.Llama` does with tokens."""

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens behind the conversation, as the parent; logits are the last one's."""
        with self.guard.use():
            self._kv_stop_if_cancelled()
            is_check, self._kv_is_check = self._kv_is_check, False
            tokens = list(tokens)
            if not tokens:
                return
            self._requires_eval = True  # until the bookkeeping is done: Ctrl-C may come in between
            begin, clock = time.perf_counter(), self.engine and self.engine.turn.clock
            again = self._kv_rewind()
            self.n_evaluated += len(again)
            if again and not is_check and len(tokens) > 1:  # these have rules of their own
                self._kv_step(again, self._logits_all)
                again = []
            if is_check and len(tokens) > 1:
                self._kv_check(again, tokens)
            elif again:
                self._kv_step([*again, *tokens], self._logits_all)
            elif self.engine is None:
                n_before = self.n_tokens
                tokens = self._kv_with_missing(tokens)
                self._kv_eval_whole(tokens, n_before)
            else:
                self._kv_eval(self.engine, tokens)
            self.n_evaluated += len(tokens)
            self.turn.checkpoints.has_read(self)
            if len(tokens) > 1 and not is_check:
                llama_cpp.llama_synchronize(self.ctx)  # a device may still be at it
                self.turn.prefill_ms = 1e3 * (time.perf_counter() - begin)
                # a short turn may be appended as it is
                self.turn.stage_ms = (
                    self.engine.turn.clock.ms
                    if self.engine and self.engine.turn.clock is not clock
                    else {}
                )

    def check(self, token: int, draft: Sequence[int]) -> None:
        """Evaluate the token that was written last, and a draft of those that may follow: logits
        have the indices -len(draft) - 1 to -1. What of it turns out wrong is taken back with
        `back_to`. The draft has `most_drafted` tokens at most.
        """
        self._kv_is_check = len(draft) > 0
        self.eval([token, *draft])

    def most_drafted(self) -> int:
        """Tokens of a draft that can be checked now, with the one before them."""
        params, n_left = self.context_params, self._n_ctx - self.n_tokens
        n_again = len(self._kv_unread())
        most = min(MOST + 1, params.n_ubatch, self.n_batch, n_left + n_again) - n_again
        if self.engine is not None:
            most = min(most, self.engine.n_alike())
        return max(most - 1, 0)

    def _kv_check(self, again: list[int], tokens: list[int]) -> None:
        """again: tokens that have to be read once more before them."""
        if not again:
            if not native.take_back(self.ctx, self.n_tokens):
                raise EdgeKVError("this conversation cannot be taken back: reset it")
            if self.engine is not None:
                self._kv_make_way(self.engine, 1)
        kept = self._kv_kept(again)
        try:
            self._kv_step([*again, *tokens], logits_all=True)
        except StepFailed:
            self._kv_stop_if_cancelled()  # the step ended for that
            raise
        self.turn.kept = kept

    # ---- back from a draft, with recurrent layers

    def _kv_kept(self, again: list[int]) -> tuple[int, Any] | None:
        """The state of recurrent layers before a draft; again: since it was kept the last time."""
        if not has_recurrent_layers(self):
            return None
        if self.engine is None:
            return self.n_tokens, state.take_recurrent(self)
        if not again:
            self.engine.store.keep_state()
        return self.n_tokens, None

    def _kv_unread(self) -> list[int]:
        """Tokens to read once more: those since the last draft, of which some were wrong."""
        kept = self.turn.kept
        if kept is None or state.n_cached(self) <= self.n_tokens:
            return []
        return list(self.input_ids[kept[0] : self.n_tokens].tolist())

    def _kv_rewind(self) -> list[int]:
        """Go back to before the last draft, if some of it was wrong. Returns the tokens since."""
        again, kept = self._kv_unread(), self.turn.kept
        self.turn.kept = None
        if not again or kept is None:
            return []
        self.n_tokens = kept[0]
        state.take_back(self, *kept)
        if state.n_cached(self) != self.n_tokens:
            self.reset()
            raise EdgeKVError("this conversation cannot be taken back, and is lost: ask again")
        return again

    def settle(self) -> None:
        """Read the tokens again that follow the last draft, if some of it was wrong."""
        again = self._kv_rewind()
        if again:
            self.n_evaluated += len(again)
            self._kv_step(again, self._logits_all)

    def back_to(self, n_tokens: int) -> bool:
        """See `Face.back_to`. Recurrent layers leave a draft with the next step."""
        kept = self.turn.kept
        if kept is None or not kept[0] < n_tokens < self.n_tokens:
            return super().back_to(n_tokens)
        self.n_tokens, self._requires_eval = n_tokens, True
        return True

    def _kv_eval_whole(self, tokens: list[int], n_before: int) -> None:
        """The parent's eval in batches, with progress; stopped in between it leaves a conversation
        of n_before tokens, of which those that the cache has not are read again next time.
        """
        begin, recurrent = self.n_tokens, None
        step = self.context_params.n_ubatch  # llama.cpp computes as much at once anyway
        cuts = [n - self.n_tokens for n in self.turn.checkpoints.at]
        starts = {*range(0, len(tokens), step), *(n for n in cuts if 0 < n < len(tokens))}
        if len(tokens) > 1:
            recurrent = state.take_recurrent(self)
        try:
            for i, end in pairwise([*sorted(starts), len(tokens)]):
                if len(tokens) > 1:
                    self._kv_report(i, len(tokens))
                with _told_why(), self._kv_timed(end - i):
                    super().eval(tokens[i:end])
                n_last = (end - i - 1) % self.n_batch + 1  # of the parent's last step
                self._kv_keep_hidden(self.n_tokens - n_last, n_last)
                self.turn.checkpoints.reached(self)
            if len(tokens) > 1:
                self._kv_report(len(tokens), len(tokens))
        except BaseException:
            self.n_tokens = n_before
            self._requires_eval = True
            state.take_back(self, begin, recurrent)
            self._kv_stop_if_cancelled()  # the step ended for that
            raise

    def _kv_with_missing(self, tokens: list[int]) -> list[int]:
        """`tokens`, or the whole conversation with them where the cache has not what they need.

        Recurrent layers cannot be taken back, neither by the parent nor where a step failed. Of
        sliding windows a saved conversation has the last only; llama.cpp goes on from an earlier
        place without a word.
        """
        model = self._model.model
        can_go_back = self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1)
        if not can_go_back or state.n_cached(self) < self.n_tokens:
            self._ctx.kv_cache_clear()
            return self._kv_from_beginning(tokens)
        n_swa = llama_cpp.llama_model_n_swa(model)
        if not n_swa or not self.n_tokens or llama_cpp.llama_model_is_hybrid(model):
            return tokens  # recurrent layers hold the last token only
        first = llama_cpp.llama_memory_seq_pos_min(llama_cpp.llama_get_memory(self.ctx), 0)
        if 0 <= first <= max(self.n_tokens - n_swa + 1, 0):
            return tokens
        return self._kv_from_beginning(tokens)

    def _kv_from_beginning(self, tokens: list[int]) -> list[int]:
        before, self.n_tokens = self.tokens.tolist(), 0
        return [*before, *tokens]

    def _kv_eval(self, kv: Engine, tokens: list[int]) -> None:
        if not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
            raise EdgeKVError(
                "a compressed conversation cannot be taken back to the middle of its prompt:"
                " reset it"
            )
        if self.n_tokens + len(tokens) > self._n_ctx:
            raise ContextFull(
                f"{len(tokens):,} more tokens do not fit: {self.n_tokens:,} of {self._n_ctx:,} are"
                " used",
                "use a larger n_ctx or reset",
            )
        cuts = sorted({*self.turn.cuts, *self.turn.checkpoints.at})
        several = _cut(tokens, [n - self.n_tokens for n in cuts])
        self.turn.cuts = []
        before = state.take(self) if len(several) > 1 and self.n_tokens else None
        done = 0
        try:
            for part in several:
                self._kv_read(kv, part, done, len(tokens))
                done += len(part)
                self.turn.checkpoints.reached(self)
        except BaseException:
            if done:
                if before is None:
                    self.reset()
                else:
                    state.put(self, before)
            if state.n_cached(self) < self.n_tokens:
                self.reset()
            raise

    def _kv_with_window(self, kv: Engine, tokens: list[int]) -> list[int]:
        """`tokens` of a prompt; with an archive behind so many before them that the queries of a
        whole window choose what stays, as where a text is read anew. The conversation is taken back
        by those.
        """
        info, n_more = kv.store.memory(), kv.settings.window - len(tokens)
        if not info.has_archive or info.fixed or n_more <= 0 or self.n_tokens < 2:
            return tokens
        n = max(self.n_tokens - n_more, 1)
        before = self.input_ids[n : self.n_tokens].tolist()
        self._ctx.kv_cache_seq_rm(-1, n, -1)
        self.n_tokens = n
        self.n_evaluated += len(before)
        return [*before, *tokens]

    def _kv_read(self, kv: Engine, tokens: list[int], n_before: int, n_all: int) -> None:
        """Read a part of a prompt. n_before, n_all: its tokens that are done, and all."""
        if len(tokens) > self.n_batch or kv.is_prompt(len(tokens)):
            self.turn.checkpoints.save(self)
            share = len(tokens) / n_all
            tokens = self._kv_with_window(kv, tokens)
            kv.prefill(
                tokens,
                lambda done, total: self._kv_report(n_before + share * n_all * done / total, n_all),
            )
            rows, kv.turn.hidden_states = kv.turn.hidden_states, None
            if rows is not None and len(rows):
                self._kv_hidden().add(self.n_tokens + len(tokens) - len(rows), rows)
            self._kv_accept(tokens, n_logits=1)
            return
        self._kv_make_way(kv, len(tokens))
        self._kv_step(tokens, self._logits_all)

    def _kv_make_way(self, kv: Engine, n_more: int) -> None:
        """Compress the recent buffer if so many tokens would make it too long."""
        if kv.recent_is_full(n_more, self.turn.checkpoints.n_bytes):
            self.turn.checkpoints.save(self)
            kv.compress_recent(self.input_ids[: self.n_tokens])
        elif n_more > 1:
            kv.store.mark()  # a turn begins: its answer may be wanted again
        kv.mark_recent(n_more)

    def _kv_step(self, tokens: list[int], logits_all: bool) -> None:
        self._batch.set_batch(batch=tokens, n_past=self.n_tokens, logits_all=logits_all)
        with _told_why(self._kv_outcome), self._kv_timed(len(tokens)):
            self._ctx.decode(self._batch)
        self._kv_keep_hidden(self.n_tokens, len(tokens))
        self._kv_accept(tokens, n_logits=len(tokens) if logits_all else 1)

    def _kv_hidden(self) -> HiddenStates:
        if self.turn.hidden is None:
            self.turn.hidden = HiddenStates()
        return self.turn.hidden

    def _kv_keep_hidden(self, begin: int, n_tokens: int) -> None:
        """Keep what heads want of the last step, whose tokens stand at `begin` and behind it."""
        if self.has_mtp:
            rows = hidden(self.ctx, n_tokens, WINDOW)
            self._kv_hidden().add(begin + n_tokens - len(rows), rows)

    @contextmanager
    def _kv_timed(self, n_tokens: int) -> Iterator[None]:
        """A `with` block that decodes: where drafts are made, its time says what a pass takes."""
        begin = time.perf_counter()
        yield
        if self.is_drafting and n_tokens <= native.OUTPUTS:
            llama_cpp.llama_synchronize(self.ctx)  # a device may still be at it
            self.costs.took(n_tokens, 1e3 * (time.perf_counter() - begin))

    def _kv_outcome(self) -> str:
        """What a step that failed has left; the bookkeeping follows the cache."""
        native.take_back(self.ctx, self.n_tokens)
        if state.n_cached(self) == self.n_tokens:
            return AS_BEFORE
        self.reset()  # recurrent layers had gone on already, and know no way back
        return "the conversation is lost"

    def _kv_accept(self, tokens: list[int], n_logits: int) -> None:
        end = self.n_tokens + len(tokens)
        self.input_ids[self.n_tokens : end] = tokens
        if self._logits_all:
            logits = np.ctypeslib.as_array(self._ctx.get_logits(), shape=(n_logits, self._n_vocab))
            self.scores[end - n_logits : end] = logits
            self.scores[self.n_tokens : end - n_logits] = (
                0  # the parent takes the logarithm of every row
            )
        self.n_tokens = end
        self._requires_eval = False


@contextmanager
def _told_why(outcome: Callable[[], str] = lambda: AS_BEFORE) -> Iterator[None]:
    """A `with` block that decodes: a failure becomes a StepFailed, with why and what it left."""
    try:
        yield
    except RuntimeError as error:
        why = native.context_error() or error
        raise StepFailed(f"{why}; {outcome()}") from error


def _cut(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    """`tokens` in parts that end at `cuts`, those that lie within."""
    ends = [*(n for n in cuts if 0 < n < len(tokens)), len(tokens)]
    return [tokens[begin:end] for begin, end in zip([0, *ends], ends)]
