"""`Llama`: llama_cpp.Llama with a compressed KV cache.

Everything of the parent works as there. What differs is where tokens go: a prompt is read layer by
layer into a ragged store, a few tokens are appended to its tail, and the tail is compressed in turn
when it grows too long.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import numpy as np

import edgekv.llama_cpp as llama_cpp
from edgekv import native
from edgekv.budget.memory import APPEND_MAX, reserve, rows_within
from edgekv.config import KVConfig
from edgekv.engine import Engine
from edgekv.errors import BadInput, Cancelled, ContextFull, EdgeKVError, UnknownArgument
from edgekv.library import logged_error
from edgekv.llama_cpp import _internals as internals
from edgekv.memory.dense import DENSE, picks
from edgekv.memory.room import check_whole_cache
from edgekv.memory.sizes import size_text
from edgekv.model import facts, parts, templates
from edgekv.session import session, state
from edgekv.session.checkpoints import Checkpoints
from edgekv.session.continued import continued, n_same
from edgekv.session.guard import Closed, Guard
from edgekv.session.state import is_finite
from edgekv.settings import Settings, resolve
from edgekv.stats import KVStats

CANCELLED = "cancelled: the conversation is as before this turn"
EMBEDDINGS = "embeddings come from the whole prompt at once: leave kv_ratio at 1 for them"
EMBEDDERS = ("llama-embed", "t5encoder")
"""Architectures that give no logits although they have a cache."""


class Llama(llama_cpp.Llama):
    """A drop-in subclass of llama_cpp.Llama.

    kv_NAME: the options of `edgekv.KVConfig`, one by one; kv: all of them in one object, which
    single ones override. With kv_ratio at 1 (default) and no other limit everything is left to the
    parent, bit for bit. Where neither type_k nor type_v is given, kv_method 'auto' stores q8_0.
    Without a profile of the model 'auto' takes a method that needs none and takes more than twice
    as long to read a prompt: `edgekv.make_profile(model_path)` makes the profile once.
    kv_progress(done, total): called while a prompt is read; it must not use the model.

    One thread at a time may use the model; another one gets an EdgeKVError. Use the model in a
    `with` block, or call `close`, to give its memory back at a place of your choice.

    Raises the EdgeKVError family (one line that says what to do) for user mistakes.
    """

    # The parent's, until `close` puts `Closed` in their place.
    _model: Any
    _ctx: Any
    _batch: Any
    _candidates: Any
    tokenizer_: Any

    def __init__(
        self,
        model_path: str,
        *,
        kv: KVConfig | None = None,
        kv_progress: Callable[[int, int], None] | None = None,
        flash_attn: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self._stack = ExitStack()  # the parent's, which it closes even if it never began
        self._guard = Guard()
        self._kv: Engine | None = None
        self._kv_prefill_ms = 0.0
        # of that, what compressing took; empty if nothing was compressed
        self._kv_stage_ms: dict[str, float] = {}
        self._kv_note = ""
        self._kv_cancel = threading.Event()
        self._sampler = None  # the parent's
        self._kv_answer: object = None  # of the answer under way, to tell it from an older one
        self._kv_parts: list[str] = []  # texts of the next prompt behind which it is cut
        self._kv_cuts: list[int] = []  # the same as numbers of tokens
        self._checkpoints = Checkpoints(False)
        self.n_evaluated = 0
        """Tokens that went through the model since it was loaded, of prompts and of replies."""
        self.kv_progress = kv_progress
        _check_names(kwargs)
        facts.check_gguf(str(model_path))
        self._kv_has_format = bool(kwargs.get("chat_format") or kwargs.get("chat_handler"))
        own = {
            name.removeprefix("kv_"): kwargs.pop(name)
            for name in KVConfig.names()
            if name in kwargs
        }
        self._kv_config = replace(kv or KVConfig(), **own)
        self._kv_settings = resolve(self._kv_config, str(model_path))
        self._checkpoints.are_on = self._kv_config.checkpoints
        compress = self._kv_settings.compresses
        self._kv_types = kwargs.get("type_k"), kwargs.get("type_v")
        if self._kv_pick_types(str(model_path)):
            kwargs["type_k"] = kwargs["type_v"] = facts.cache_types[DENSE][0]
        if compress and kwargs.get("embedding"):
            raise BadInput(EMBEDDINGS)
        quantised = kwargs.get("type_v") not in (
            None,
            *(facts.cache_types[t][0] for t in ("f16", "bf16")),
            0,
        )
        if flash_attn is False and (compress or quantised):
            raise BadInput(
                f"a {'compressed' if compress else 'quantised V'} cache needs flash attention:"
                " leave flash_attn out"
            )
        if flash_attn is None:
            flash_attn = compress or quantised
        if kwargs.get("n_ctx"):  # llama.cpp pads the context, the parent's arrays must be as long
            kwargs["n_ctx"] = -(-kwargs["n_ctx"] // 256) * 256
        check_whole_cache(
            str(model_path),
            kwargs.get("n_ctx", 512),
            kwargs.get("type_k"),
            kwargs.get("type_v"),
            compress,
            kwargs.get("n_gpu_layers") or 0,
        )
        self._kv_few_outputs = (
            compress and not kwargs.get("logits_all") and kwargs.get("draft_model") is None
        )
        native.next_context(compress)
        logged_error()  # an older one explains nothing
        try:
            super().__init__(str(model_path), flash_attn=flash_attn, **kwargs)
        except ValueError as error:
            raise BadInput(
                f"{model_path}: {native.context_error() or logged_error() or error}"
            ) from error
        finally:
            native.next_context(False)
        try:
            self._kv_check_kind(bool(kwargs.get("embedding")))
            self._kv_attach(compress)
            self._kv_check_memory(self._kv_settings)
        except BadInput:
            self.close()
            raise

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
        if self._guard.is_closed:
            return
        with self._guard.use():
            self._guard.is_closed = True
            self._kv_free_sampler()
            super().close()
            self._kv = None
            self._checkpoints.clear()
            self.scores = np.empty((0, 0), np.single)
            self.input_ids = np.empty(0, np.intc)
            self.n_tokens = 0
            self._model = self._ctx = self._batch = self.tokenizer_ = self._candidates = Closed()
            native.trim_heap()

    def reset(self) -> None:
        """Forget the conversation."""
        with self._guard.use():
            super().reset()
            self._checkpoints.clear()
            if self._kv is not None:
                self._ctx.kv_cache_clear()
                self._kv.forget()

    def __getstate__(self) -> dict[str, Any]:
        type_k, type_v = self._kv_types
        return {**super().__getstate__(), "kv": self._kv_config, "type_k": type_k, "type_v": type_v}

    # ---- tokens

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens behind the conversation (as in the parent; the logits of all but the last
        are not kept).
        """
        with self._guard.use():
            self._kv_stop_if_cancelled()
            tokens = list(tokens)
            if not tokens:
                return
            self._requires_eval = True  # until the bookkeeping is done: Ctrl-C may come in between
            begin, clock = time.perf_counter(), self._kv and self._kv.clock
            if self._kv is None:
                tokens = self._kv_with_window(tokens)
                self._kv_eval_whole(tokens)
            else:
                self._kv_eval(self._kv, tokens)
            self.n_evaluated += len(tokens)
            if len(tokens) > 1:
                llama_cpp.llama_synchronize(self.ctx)  # a device may still be at it
                self._kv_prefill_ms = 1e3 * (time.perf_counter() - begin)
                self._kv_stage_ms = (
                    self._kv.clock.ms if self._kv and self._kv.clock is not clock else {}
                )  # a short turn may be appended as it is

    def _kv_eval_whole(self, tokens: list[int]) -> None:
        """The parent's eval in batches, with progress; stopped in between it leaves the
        conversation as before.
        """
        before = self.n_tokens
        step = self.context_params.n_ubatch  # llama.cpp computes as much at once anyway
        try:
            for i in range(0, len(tokens), step):
                if len(tokens) > 1:
                    self._kv_report(i, len(tokens))
                with _told_why():
                    super().eval(tokens[i : i + step])
            if len(tokens) > 1:
                self._kv_report(len(tokens), len(tokens))
        except BaseException:
            self.n_tokens = before
            self._requires_eval = True
            if not self._ctx.kv_cache_seq_rm(-1, before, -1):
                self.reset()  # recurrent layers cannot go back
            raise

    def _kv_with_window(self, tokens: list[int]) -> list[int]:
        """`tokens`, or the whole conversation with them where entries of sliding windows are
        missing.

        A saved conversation has the last window only; llama.cpp goes on from an earlier place
        without a word.
        """
        model = self._model.model
        n_swa = llama_cpp.llama_model_n_swa(model)
        if not n_swa or not self.n_tokens or llama_cpp.llama_model_is_hybrid(model):
            return tokens  # recurrent layers hold the last token only
        first = llama_cpp.llama_memory_seq_pos_min(llama_cpp.llama_get_memory(self.ctx), 0)
        if 0 <= first <= max(self.n_tokens - n_swa + 1, 0):
            return tokens
        before, self.n_tokens = self.input_ids[: self.n_tokens].tolist(), 0
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
        several = _cut(tokens, [n - self.n_tokens for n in self._kv_cuts])
        self._kv_cuts = []
        before = state.take(self) if len(several) > 1 and self.n_tokens else None
        done = 0
        try:
            for part in several:
                self._kv_read(kv, part, done, len(tokens))
                done += len(part)
        except BaseException:
            if done:
                if before is None:
                    self.reset()
                else:
                    state.put(self, before)
            raise

    def _kv_read(self, kv: Engine, tokens: list[int], n_before: int, n_all: int) -> None:
        """Read a part of a prompt, or the whole of it. n_before, n_all: tokens of the prompt that
        are done, and all.
        """
        if len(tokens) > min(APPEND_MAX, self.n_batch):
            self._checkpoints.save(self)
            share = len(tokens) / n_all
            kv.prefill(
                tokens,
                lambda done, total: self._kv_report(n_before + share * n_all * done / total, n_all),
            )
            self._kv_accept(tokens, n_logits=1)
            return
        if kv.tail_is_full(len(tokens)):
            self._checkpoints.save(self)
            kv.bound_tail(self.input_ids[: self.n_tokens])
        elif len(tokens) > 1:
            kv.store.mark()  # a turn begins: its answer may be wanted again
        kv.mark_tail(len(tokens))
        self._batch.set_batch(batch=tokens, n_past=self.n_tokens, logits_all=self._logits_all)
        try:
            with _told_why():
                self._ctx.decode(self._batch)
        except EdgeKVError as error:
            if kv.store.memory().n_past == self.n_tokens:
                raise
            self.reset()  # recurrent layers had gone on already
            raise EdgeKVError(f"{error.args[0].split(';')[0]}; the conversation is lost") from None
        self._kv_accept(tokens, n_logits=len(tokens) if self._logits_all else 1)

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

    # ---- text

    def create_chat_completion(
        self, messages: list[dict[str, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        """As the parent's. A message may be a list of text parts, as in OpenAI's API.

        With a compressed cache each part but the last of a message is compressed by itself: a
        document in the first part and a question in the second. Another question about the same
        document, or the same one asked anew, then reads only the question.
        """
        if self.template_error and not self._kv_has_format:
            raise BadInput(
                f"this model's chat template is broken ({self.template_error}): give a chat_format"
            )
        plain, cuts = parts.joined(messages)
        self._kv_parts = cuts if self._kv is not None else []
        return super().create_chat_completion(plain, *args, **kwargs)

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Iterator[int]:
        """As the parent's. A compressed conversation goes on where the text does, even if it comes
        in other tokens: see `edgekv.session.continued`.

        Raises Cancelled after `kv_cancel`, and EdgeKVError if another prompt was given meanwhile.
        """
        answer, inner, reply = object(), None, None
        try:
            with self._guard.use():
                self._guard.begin_answer()
                self._kv_answer = answer
                self._kv_stop_if_cancelled()
                tokens = self._kv_prepare(list(tokens), kwargs.get("reset", True))
                inner = super().generate(tokens, *args, **kwargs)
            while True:
                with self._guard.use():
                    if self._kv_answer is not answer:
                        raise EdgeKVError(
                            "another prompt was given to this model before this answer was complete"
                        )
                    self._guard.step()
                    try:
                        token = inner.send(reply)
                    except StopIteration:
                        return
                reply = yield token
        finally:
            if inner is not None:
                inner.close()
            if self._kv_answer is answer:
                self._kv_answer = None
                self._kv_free_sampler()
                self._kv_cuts = []
                self._kv_cancel.clear()
                self._guard.end_answer()

    def _kv_prepare(self, tokens: list[int], may_reset: bool) -> list[int]:
        """Where a compressed conversation goes on with a prompt, and where the prompt is cut.
        Returns its tokens.
        """
        cuts, self._kv_parts, self._kv_cuts = self._kv_parts, [], []
        if self._kv is None:
            return tokens
        have = self.input_ids[: self.n_tokens].tolist()
        if have and may_reset:
            tokens = continued(
                tokens,
                have,
                self._kv.store.memory().fixed,
                lambda some: self.detokenize(some, special=True),
                lambda text: self.tokenize(text, add_bos=False, special=True),
            )
            is_answered = have == tokens and not self._requires_eval
            # the last token of a prompt is always evaluated: the answer begins with its logits
            if (
                not is_answered
                and min(n_same(tokens, have), len(tokens) - 1) < self._kv.store.memory().fixed
            ):
                self._checkpoints.restore(self, tokens)
        self._checkpoints.begin_turn(
            n_same(tokens, self.input_ids[: self.n_tokens].tolist()), len(tokens)
        )
        self._kv_cuts = parts.positions(
            cuts, tokens, lambda token: self.detokenize([token], special=True)
        )
        return tokens

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if self._kv is not None and kwargs.get("echo") and kwargs.get("logprobs") is not None:
            raise BadInput(
                "logprobs of the prompt itself need an uncompressed cache: set kv_ratio to 1 or"
                " echo to False"
            )
        try:
            yield from super()._create_completion(*args, **kwargs)
        except ValueError as error:
            if "exceed context window" not in str(error):
                raise
            raise ContextFull(str(error), "use a larger n_ctx or a shorter prompt") from error

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """As the parent's."""
        with self._guard.use():
            return super().sample(*args, **kwargs)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As the parent's."""
        with self._guard.use():
            return super().embed(*args, **kwargs)

    def save_state(self) -> Any:
        """As the parent's; `kv_save` writes a file instead."""
        with self._guard.use():
            return super().save_state()

    def load_state(self, state: Any) -> None:
        """As the parent's."""
        with self._guard.use():
            try:
                super().load_state(state)
                fits = self._kv is not None or is_finite(self)
            except RuntimeError:
                fits = False
            if not fits:
                self._ctx.kv_cache_clear()
                self.reset()
                raise BadInput(
                    "this state is damaged or of another model; the conversation begins anew"
                )
            if self._kv is not None:
                self._kv.forget()

    # ---- the cache

    def kv_cancel(self, cancel: bool = True) -> None:
        """Stop the call that is under way, or else the next one, with Cancelled.

        A prompt that is read leaves the conversation as it was before the turn. May be called from
        any thread and from a signal handler. cancel: False takes an earlier wish back.
        """
        if cancel:
            self._kv_cancel.set()
        else:
            self._kv_cancel.clear()

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
        with self._guard.use():
            wishes = {
                "ratio": ratio,
                "budget": budget,
                "method": method,
                "budget_mb": budget_mb,
                "memory": memory,
            }
            given = {name: value for name, value in wishes.items() if value is not None}
            if (
                ratio is not None
            ):  # takes the place of an earlier budget, but a limit for the cache stands
                given = {"budget": None, "budget_mb": None, **given}
            config = replace(self._kv_config, **given)
            fresh = resolve(config, self.model_path)
            if fresh.compresses and self.context_params.embeddings:
                raise BadInput(EMBEDDINGS)
            self._kv_check_memory(fresh)
            self._kv_config, self._kv_settings = config, fresh
            if self._kv is not None:
                self._kv.settings = self._kv_settings
            elif self._kv_settings.compresses and not self._kv_note:
                self._kv_new_context()

    def kv_stats(self) -> KVStats:
        """What the cache holds and costs; see KVStats."""
        with self._guard.use():
            s = self._kv_settings
            if self._kv is None:
                return session.stats_uncompressed(self, self._kv_note, self._kv_prefill_ms)
            kv, layers, info = self._kv, self._kv.store.layers, self._kv.store.memory()
            kept = kv.kept()
            full = kv.full_layers or range(len(kept))
            type_k, type_v = session.type_names(self)
            rows, heads = (
                sum(int(kept[il].sum()) for il in full),
                sum(layers[il].n_head_kv for il in full),
            )
            return KVStats(
                method=s.preset.name,
                profile=s.preset.profile,
                why=s.preset.why,
                ratio=s.ratio if s.memory is None else kv.memory.ratio,
                n_seen=info.n_past,
                n_kept=rows / heads,
                kept=kept,
                n_bytes=info.bytes_now,
                n_bytes_peak=info.bytes_peak,
                n_bytes_full=kv.bytes_full(info.n_past),
                prefill_ms=self._kv_prefill_ms,
                type_k=type_k,
                type_v=type_v,
                per_f16=float(kv.per_f16),
                compress_ms=sum(self._kv_stage_ms.values()),
                stage_ms=self._kv_stage_ms,
                mode="layers" if kv.by_layer else "full then compress",
                n_bytes_used=sum(int(kept[il].sum()) * x.bytes_row for il, x in enumerate(layers)),
                n_ctx=self.n_ctx(),
                n_bytes_reserved=0 if s.memory is None else reserve(layers, s.tail, s.window),
                n_bytes_limit=s.memory,
                n_bytes_recurrent=info.bytes_recurrent + info.bytes_mark,
                n_bytes_checkpoints=self._checkpoints.n_bytes,
                note=(
                    ""
                    if kv.by_layer
                    else (
                        "this architecture cannot be cut into layers: prompts are read in full,"
                        " then compressed"
                    )
                ),
            )

    def kv_save(self, path: str, note: Any = None) -> None:
        """Save the conversation (tokens, cache, what its next compression needs) to a file.

        note: any JSON value that belongs to it, such as its messages; `kv_load` returns it.
        Raises BadInput if something stands at `path` that is no saved conversation, or if it cannot
        be written; the file is then as before.
        """
        with self._guard.use():
            session.save(self, path, note)

    def kv_load(self, path: str, check: Callable[[Any], object] | None = None) -> Any:
        """Load a conversation saved by `kv_save` with the same model and cache types.

        Returns its note. check: called with the note before anything changes; an EdgeKVError that
        it raises refuses the file. Raises BadInput for any other file; the conversation is then as
        before.
        """
        with self._guard.use():
            note = session.load(self, path, check)
            self._checkpoints.clear()
            return note

    # ---- inside

    @property
    def context_params(self) -> Any:
        """The parent's, which makes them while it is created and has no argument for what is
        changed here.
        """
        return self._kv_context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        self._kv_context_params = params
        params.n_outputs_max = (
            native.OUTPUTS if self._kv_few_outputs else 0
        )  # a logit for every token of a ubatch is a fifth of a GiB

    @property
    def metadata(self) -> dict[str, str]:
        """The model file's, as text, without a chat template that cannot be parsed."""
        return self._kv_metadata

    @metadata.setter
    def metadata(self, values: dict[str, str]) -> None:
        self.template_error = ""
        """Why the model's chat template cannot be used, one line; empty if it can, or there is
        none.
        """
        self._kv_metadata = {}
        for name, value in values.items():
            error = templates.error(value) if name.startswith("tokenizer.chat_template") else ""
            if not error:
                self._kv_metadata[name] = value
            elif name == "tokenizer.chat_template":
                self.template_error = error

    def _kv_pick_types(self, path: str) -> bool:
        """Whether a cache with these settings gets the type that `auto` stores; see
        `edgekv.memory.dense`.
        """
        return picks(path, self._kv_config.method, self._kv_settings, *self._kv_types)

    def _kv_check_kind(self, embedding: bool) -> None:
        """Raise BadInput for a model that cannot write text; llama.cpp would end the process, or
        give no logits.
        """
        model, kind = self._model.model, self.metadata.get("general.architecture")
        if llama_cpp.llama_model_has_encoder(model) and llama_cpp.llama_model_has_decoder(model):
            raise BadInput(
                f"{self.model_path}: a model with an encoder before its decoder ({kind}) cannot be"
                " run here"
            )
        if not embedding and (kind in EMBEDDERS or not llama_cpp.llama_get_memory(self._ctx.ctx)):
            raise BadInput(
                f"{self.model_path} ({kind}) gives embeddings and writes no text: take another"
                " model, or embedding=True in Python"
            )

    def _kv_attach(self, wanted: bool) -> None:
        """The engine for this context's store; a note if there is none although one was wanted."""
        if native.Store.of(self._ctx.ctx) is None:
            if wanted:
                why = (
                    native.why_unsupported(self._model.model)
                    or "its cache is of a kind that edgekv does not know"
                )
                self._kv_note = f"runs uncompressed: {why}"
            return
        model = (
            self._model
        )  # the engine must not hold this object: both would live until Python looks for circles
        self._kv = Engine(
            self._ctx.ctx,
            self._kv_settings,
            lambda text: model.tokenize(text.encode(), add_bos=False, special=False),
        )
        self._kv.offloaded = facts.is_offloaded(self.model_params.n_gpu_layers)

    def _kv_check_memory(self, settings: Settings) -> None:
        """Raises BadInput if the cache cannot stay within `kv_memory`, whatever the prompt."""
        if settings.memory is None:
            return
        if self._kv is not None:
            rows_within(
                self._kv.store.layers,
                settings.memory,
                settings.tail,
                settings.window,
                settings.sink,
            )
            return
        if settings.compresses and not self._kv_note:
            return  # the next prompt gets a context with a store
        n_bytes = session.stats_uncompressed(self, "", 0).n_bytes
        if n_bytes > settings.memory:
            raise BadInput(
                f"kv_memory {size_text(settings.memory)} is less than this model's whole cache of"
                f" {size_text(n_bytes)}, which cannot be compressed"
                f" ({self._kv_note or 'method full'}): give a smaller -c or smaller cache types"
                " (-ctk, -ctv)"
            )

    def _kv_report(self, done: float, total: int) -> None:
        if self.kv_progress is not None:
            with self._guard.calling_back():
                self.kv_progress(min(int(done), total), total)
        self._kv_stop_if_cancelled()

    def _kv_stop_if_cancelled(self) -> None:
        if self._kv_cancel.is_set():
            self._kv_cancel.clear()
            raise Cancelled(CANCELLED)

    def _kv_free_sampler(self) -> None:
        """Free the sampler of an answer. It holds itself, and functions that may hold this
        object.
        """
        if self._sampler is not None:
            customs = [custom for _, custom in self._sampler.custom_samplers]
            self._sampler.close()
            for custom in customs:
                vars(custom).clear()
            self._sampler = None

    def _kv_new_context(self) -> None:
        """This model in a context with a store, instead of the present one."""
        if self._kv_pick_types(self.model_path):
            self.context_params.type_k = self.context_params.type_v = facts.cache_types[DENSE][0]
        self.context_params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context_params.n_outputs_max = 0 if self._logits_all else native.OUTPUTS
        native.next_context(True)
        try:
            fresh = internals.LlamaContext(
                model=self._model, params=self.context_params, verbose=self.verbose
            )
        except ValueError as error:
            raise EdgeKVError(f"no compressed cache could be made: {error}") from error
        finally:
            native.next_context(False)
        self._ctx.close()
        self._ctx = self._stack.enter_context(closing(fresh))
        self.n_tokens = 0
        self._requires_eval = True
        self._kv_attach(True)


@contextmanager
def _told_why() -> Iterator[None]:
    """A `with` block that decodes: a failure becomes an EdgeKVError that says why."""
    try:
        yield
    except RuntimeError as error:
        raise EdgeKVError(
            f"{native.context_error() or error}; the conversation is as before"
        ) from error


def _check_names(arguments: dict[str, Any]) -> None:
    """Raises UnknownArgument for a name that neither `Llama` nor its parent has: the parent would
    ignore it.
    """
    known = [
        name
        for kind in (Llama, llama_cpp.Llama)
        for name in inspect.signature(kind.__init__).parameters
        if name not in ("self", "kwargs")
    ]
    known += KVConfig.names()
    for name in arguments:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean '{near[0]}'?" if near else "see help(edgekv.Llama)"
            raise UnknownArgument(f"Llama has no argument '{name}'; {hint}")


def _cut(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    """`tokens` in parts that end at `cuts`, those that lie within."""
    ends = [*(n for n in cuts if 0 < n < len(tokens)), len(tokens)]
    return [tokens[begin:end] for begin, end in zip([0, *ends], ends)]
