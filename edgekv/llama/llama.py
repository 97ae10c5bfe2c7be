"""`Llama`: llama_cpp.Llama with a compressed KV cache.

Everything of the parent works as there; what differs is where tokens go (`edgekv.llama.evaluation`)
and how answers are written (`edgekv.llama.answering`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from edgekv import native
from edgekv.base.beginnings import n_shared
from edgekv.base.pace import Pace
from edgekv.base.stats import KVStats
from edgekv.chat import parts
from edgekv.choice.config import AUTO, KVConfig
from edgekv.conversation import session, statistics
from edgekv.conversation.continued import continued
from edgekv.conversation.guard import Closed
from edgekv.conversation.pool import Conversations
from edgekv.conversation.state import is_finite
from edgekv.engine.engine import Engine
from edgekv.errors import BadInput, ContextFull, DamagedState, EdgeKVError
from edgekv.llama.answering import Answering
from edgekv.llama.instead import instead


class Llama(Answering):
    """A drop-in subclass of llama_cpp.Llama.

    kv_NAME: the options of `edgekv.KVConfig`, one by one; kv: all of them in one object, which
    single ones override. With kv_ratio at 1 (default) and no other limit everything is left to the
    parent, bit for bit. Where neither type_k nor type_v is given, kv_method 'auto' stores what came
    nearest to the full cache when the model was prepared, else q8_0.
    Without a profile of the model 'auto' takes a method that needs none and takes more than twice
    as long to read a prompt: `edgekv.make_profile(model_path)` makes the profile once.
    kv_progress(done, total): called while a prompt is read; it must not use the model.

    override_tensor, cpu_moe, n_cpu_moe, rpc_servers, repack: as the options of `edgekv chat`; the
    first and the fourth may be lists. repack None: if the whole model fits into free memory.
    lora_path, lora_scale: one LoRA adapter or a list of them, and by how much of each the weights
    change. A profile is one of the model alone, whatever its adapters.
    spec_type, spec_ngram_size_n, spec_ngram_size_m: drafts by n-grams, as --spec-... of
    `edgekv chat` (docs/drafts.md). spec_draft_model, spec_draft_n_max, spec_draft_n_min,
    spec_draft_p_min: the file of a draft model, and its options, which are those of the model's own
    heads, too (spec_type "draft-mtp"). draft_model: a source of your own, as the parent's.
    n_seq_max: sequences of a step of the context; with one more than there are conversations these
    may write together (`edgekv.native.Place.step`).
    kv_overrides: as the parent's; a value of another type than in the model's file is refused.

    One thread at a time may use the model; another one gets an EdgeKVError. Use the model in a
    `with` block, or call `close`, to give its memory back at a place of your choice.

    Raises the EdgeKVError family (one line that says what to do) for user mistakes.
    """

    pace: Pace | None = None
    """Chooses the threads that write; None: those that the model was loaded with. Only a compressed
    cache's answers do not depend on their number, so others keep it.
    """

    # ---- from the beginning to the end

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give weights, cache and arrays back. Whoever uses the model afterwards gets an
        EdgeKVError.

        Raises EdgeKVError while another thread uses the model.
        """
        if self.guard.is_closed:
            return
        self.guard.why_not = ""
        with self.guard.use():
            try:
                if self.pool is not None:
                    self.pool.close()
            finally:
                self._kv_close()

    def _kv_close(self) -> None:
        self.guard.is_closed = True
        self._kv_free_sampler()
        super().close()
        self.engine = None
        self.turn.checkpoints.clear()
        self.scores = np.empty((0, 0), np.single)
        self.input_ids = np.empty(0, np.intc)
        self.n_tokens = 0
        self._model = self._ctx = self._batch = self.tokenizer_ = self._candidates = Closed()
        native.trim_heap()

    def reset(self) -> None:
        """Forget the conversation."""
        with self.guard.use():
            super().reset()
            self.turn.checkpoints.clear()
            self.turn.kept = self.turn.hidden = None
            if self.engine is not None:
                self._ctx.kv_cache_clear()
                self.engine.forget()

    def __getstate__(self) -> dict[str, Any]:
        type_k, type_v = self._kv_types
        kept = {"kv": self._kv_config, "type_k": type_k, "type_v": type_v, **self._kv_places}
        kept["rpc_servers"] = self._kv_servers
        kept["draft_model"] = self._kv_given_drafts
        kept |= {"n_seq_max": self.context_params.n_seq_max, **self._kv_drafting.arguments()}
        return {**super().__getstate__(), **kept}

    # ---- text

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Iterator[int]:
        """As the parent's. A compressed conversation goes on where the text does, even if it comes
        in other tokens: see `edgekv.conversation.continued`.

        Raises Cancelled after `kv_cancel`, and EdgeKVError if another prompt was given meanwhile.
        """
        answer, inner, reply, n_sure = object(), None, None, None
        try:
            with self.guard.use():
                self.guard.begin_answer()
                self.turn.answer, self.turn.drafts = answer, self.drafts()
                self._kv_stop_if_cancelled()
                tokens = self._kv_prepare(list(tokens), kwargs.get("reset", True))
                inner = super().generate(tokens, *args, **kwargs)
            while True:
                with self.guard.use():
                    if self.turn.answer is not answer:
                        raise EdgeKVError(
                            "another prompt was given to this model before this answer was complete"
                        )
                    self.guard.step()
                    if self.pace is not None and self.engine is not None:
                        self.pace.keep(self.set_n_threads)
                    try:
                        token = inner.send(reply)
                    except StopIteration:
                        return
                    # of those that were read; behind them may lie what is left of a draft
                    n_sure = self.n_tokens if n_sure is None else n_sure + 1 + len(reply or ())
                reply = yield token
        finally:
            if inner is not None:
                inner.close()
            if self.turn.answer is answer:
                if n_sure is not None and n_sure < self.n_tokens:
                    with self.guard.use():
                        self.back_to(n_sure)
                self.turn.answer = self.turn.drafts = None
                self._kv_free_sampler()
                self.turn.cuts = []
                self._kv_stop.value = False
                self.guard.end_answer()

    def _kv_prepare(self, tokens: list[int], may_reset: bool) -> list[int]:
        """Where a compressed conversation goes on with a prompt, and is cut. Returns its tokens."""
        self.settle()
        cuts, self.turn.parts, self.turn.cuts = self.turn.parts, [], []
        if self._kv_on_prompt is not None and may_reset:
            self._kv_on_prompt(tokens, self.positions(cuts, tokens))
        if self.engine is None:
            return tokens
        have = self.tokens.tolist()
        if have and may_reset:
            tokens = continued(
                tokens,
                have,
                self.engine.store.memory().fixed,
                lambda some: self.detokenize(some, special=True),
                lambda text: self.tokenize(text, add_bos=False, special=True),
            )
            is_answered = have == tokens and not self._requires_eval
            # the last token of a prompt is always evaluated: the answer begins with its logits
            same = min(n_shared(tokens, have), len(tokens) - 1)
            if (
                not is_answered
                and same < self.engine.store.memory().fixed
                and not self._kv_back_to_mark(self.engine, same)
            ):
                self.turn.checkpoints.restore(self, tokens)
        self.turn.checkpoints.begin_turn(n_shared(tokens, self.tokens), len(tokens))
        self.turn.cuts = self.positions(cuts, tokens)
        return tokens

    def positions(self, cuts: list[str], tokens: list[int]) -> list[int]:
        """Numbers of tokens behind which the texts `cuts` end."""
        return parts.positions(cuts, tokens, lambda token: self.detokenize([token], special=True))

    def stop_answer(self) -> None:
        """End an answer that is under way. Raises EdgeKVError if it is another thread's."""
        self.guard.begin_answer()
        self.turn.answer = None
        self._kv_free_sampler()
        self.turn.cuts = []
        self.guard.end_answer()

    def _kv_back_to_mark(self, kv: Engine, same: int) -> bool:
        """Take a conversation with recurrent layers back to where its last turn began, if it shares
        as many tokens with the prompt. Whether it was done.
        """
        info = kv.store.memory()
        if not max(info.boundary, 1) <= info.n_mark <= same:
            return False
        return self.back_to(info.n_mark)

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if self.engine is not None and kwargs.get("echo") and kwargs.get("logprobs") is not None:
            raise BadInput(
                "logprobs of the prompt itself need an uncompressed cache: set kv_ratio to 1 or"
                " echo to False"
            )
        try:
            yield from super()._create_completion(*args, **kwargs)
        except ValueError as error:
            if "exceed context window" not in str(error):
                raise
            n, most = re.findall(r"\d+", str(error))[:2]
            what = f"the prompt has {int(n):,} tokens, and the context {int(most):,}"
            raise ContextFull(what, "use a larger n_ctx or a shorter prompt") from error

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """As the parent's."""
        with self.guard.use():
            return super().sample(*args, **kwargs)

    def set_n_threads(self, n_threads: int) -> None:
        """CPU threads that write tokens from now on; a prompt is read by as many as before."""
        with self.guard.use():
            n_batch = self.context_params.n_threads_batch
            native.llama_cpp.llama_set_n_threads(self.ctx, n_threads, n_batch)
            if self.draft is not None:
                self.draft.set_n_threads(n_threads)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As the parent's."""
        with self.guard.use():
            return super().embed(*args, **kwargs)

    def save_state(self) -> Any:
        """As the parent's; `kv_save` writes a file instead."""
        with self.guard.use():
            return super().save_state()

    def load_state(self, state: Any) -> None:
        """As the parent's."""
        with self.guard.use():
            try:
                super().load_state(state)
                fits = self.engine is not None or is_finite(self)
            except RuntimeError:
                fits = False
            if not fits:
                self._ctx.kv_cache_clear()
                self.reset()
                raise DamagedState(
                    "this state is damaged or of another model; the conversation begins anew"
                )
            self.turn.hidden = None
            if self.engine is not None:
                self.engine.forget()

    # ---- several conversations

    @property
    def conversations(self) -> Conversations:
        """The conversations that take turns on this model."""
        return self.pool or Conversations(self)

    @contextmanager
    def conversation(self, name: str | None = None) -> Iterator[Conversations]:
        """A `with` block whose prompts go on from the conversation that shares most with them.

        Whatever else was asked meanwhile, a conversation's earlier turns are not read again, nor
        is a document that it shares with another one. name: as of `Conversations.use`. Yields the
        model's conversations; for a limit or a folder make `edgekv.Conversations` before.
        """
        pool, before = self.conversations, self._kv_on_prompt
        self._kv_on_prompt = lambda tokens, cuts: pool.go_on(tokens, name, cuts)
        try:
            yield pool
        finally:
            self._kv_on_prompt = before

    # ---- the cache

    def kv_config(self) -> KVConfig:
        """The options of the cache as they are now; of `kv_recall="auto"` what was decided."""
        config = self._kv_config
        return config if config.recall != AUTO else replace(config, recall=self.settings.recall)

    def kv_cancel(self, cancel: bool = True) -> None:
        """Stop the call that is under way, or else the next one, with Cancelled.

        A prompt that is read leaves the conversation as it was before the turn. May be called from
        any thread and from a signal handler. cancel: False takes an earlier wish back.
        """
        self._kv_stop.value = cancel

    def kv_set(
        self,
        ratio: float | None = None,
        budget: Any = None,
        method: str | None = None,
        budget_mb: float | None = None,
        memory: int | str | None = None,
    ) -> None:
        """Change what the next prompt is compressed to. From an uncompressed conversation the cache
        starts anew.
        """
        with self.guard.use():
            limits = dict(ratio=ratio, budget=budget, budget_mb=budget_mb, memory=memory)
            wishes = {**limits, "method": method}
            given = {name: value for name, value in wishes.items() if value is not None}
            # takes the place of an earlier budget, but a limit for the cache stands
            if ratio is not None:
                given = {"budget": None, "budget_mb": None, **given}
            config = replace(self._kv_config, **given)
            fresh = self._kv_resolve(config, self.model_path)
            self._kv_check_wish(fresh)
            self._kv_check_memory(fresh)
            self._kv_config, self.settings = config, fresh
            if self.engine is not None:
                self.engine.settings = self.settings
            elif self.settings.stores and not self._kv_note:
                self.renew_context()

    def kv_stats(self) -> KVStats:
        """What the cache holds and costs; see KVStats."""
        with self.guard.use():
            n_bytes_draft = self.draft.n_bytes if self.draft else 0
            stats = self._kv_own_stats()
            gain = None if self._kv_asks_for_drafts else stats.recall_gain
            return replace(stats, n_bytes_draft=n_bytes_draft, recall_gain=gain)

    def _kv_own_stats(self) -> KVStats:
        turn = self.turn
        if self.engine is None:
            return statistics.uncompressed(self, self._kv_note, turn.prefill_ms)
        took, saved = (turn.prefill_ms, turn.stage_ms), turn.checkpoints.n_bytes
        return statistics.compressed(self, self.engine, self.settings, *took, saved)

    def kv_save(self, path: str, note: Any = None) -> None:
        """Save the conversation (tokens, cache, what its next compression needs) to a file.

        note: any JSON value that belongs to it, such as its messages; `kv_load` returns it.
        Raises BadInput if something stands at `path` that is no saved conversation, or if it cannot
        be written; the file is then as before.
        """
        with self.guard.use():
            session.save(self, path, note)

    def kv_load(
        self,
        path: str,
        check: Callable[[Any], object] | None = None,
        taken_over: Callable[[Any], KVConfig] | None = None,
    ) -> Any:
        """Load a conversation saved by `kv_save` with the same model and cache types.

        Returns its note. check: called with the note before anything changes; an EdgeKVError that
        it raises refuses the file. taken_over: called with the note, returns the options that the
        conversation was saved with; it then brings them and its cache types along, unless several
        conversations take turns here. Raises BadInput for any other file; the conversation is then
        as before.
        """
        with self.guard.use(), ExitStack() as stack:
            if taken_over is not None and self.pool is None:
                cache, note = session.cache_of(path, self)
                stack.enter_context(instead(self, taken_over(note), cache))
            note = session.load(self, path, check)
            self.turn.checkpoints.clear()
            return note
