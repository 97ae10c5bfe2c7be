"""A model file in memory with the context that its conversation lives in."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from ctypes import addressof, c_bool
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from typing_extensions import Unpack

import edgekv.llama_cpp as llama_cpp
from edgekv import native
from edgekv.base.defaults import whole_ctx
from edgekv.base.sizes import size_text
from edgekv.chat.drafts import MTP, Costs, Drafting
from edgekv.choice import recall
from edgekv.choice.config import AUTO, KVConfig
from edgekv.choice.settings import Settings, resolve
from edgekv.choice.stored import picked
from edgekv.conversation import statistics
from edgekv.conversation.checkpoints import Checkpoints
from edgekv.conversation.guard import Guard
from edgekv.conversation.state import has_recurrent_layers
from edgekv.conversation.turn import Turn
from edgekv.engine.engine import Engine
from edgekv.errors import BadInput, Cancelled, EdgeKVError, UnknownArgument, Unsupported
from edgekv.library import logged_error
from edgekv.llama.arguments import Arguments, signature
from edgekv.llama.draft_model import DraftModel, cache_of, check_vocabulary
from edgekv.llama.face import Face
from edgekv.llama.mtp import MtpHeads
from edgekv.llama_cpp import _internals as internals
from edgekv.llama_cpp.llama_chat_format import Jinja2ChatFormatter
from edgekv.llama_cpp.llama_speculative import LlamaDraftModel
from edgekv.memory.limit import rows_within
from edgekv.memory.room import check_whole_cache, fits_twice
from edgekv.methods import Preset
from edgekv.model import adapters, facts, kind, metadata, mtp, placement, rpc
from edgekv.model.words import Tokenizer
from edgekv.native.mtp import keep_hidden, why_no_mtp

log = logging.getLogger("edgekv")

CANCELLED = "cancelled: the conversation is as before this turn"
VOCAB_ONLY = "this model was loaded with vocab_only=True: it has words, and no weights"
EMBEDDINGS = (
    "embeddings come from the whole prompt at once: leave kv_ratio at 1, and kv_fast_prefill out,"
    " for them"
)
OF_DRAFTS = """
    n_batch n_ubatch n_threads n_threads_batch n_gpu_layers main_gpu split_mode tensor_split
    use_mmap use_mlock numa verbose
""".split()
"""Arguments that a draft model has in common with its model."""
EMBEDDERS = ("llama-embed", "t5encoder")
"""Architectures that give no logits although they have a cache."""


class LoadedModel(Face):
    """`edgekv.Llama` before it reads a token: arguments, weights, a context, maybe an engine."""

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
        override_tensor: str | Sequence[str] | None = None,
        cpu_moe: bool = False,
        n_cpu_moe: int = 0,
        repack: bool | None = None,
        rpc_servers: str | Sequence[str] | None = None,
        lora_path: str | Sequence[str] | None = None,
        lora_scale: float | Sequence[float] = 1.0,
        kv_overrides: Mapping[str, bool | int | float | str] | None = None,
        spec_type: str = Drafting.type,
        spec_ngram_size_n: int = Drafting.ngram_size_n,
        spec_ngram_size_m: int = Drafting.ngram_size_m,
        spec_draft_model: str | None = None,
        spec_draft_n_max: int = Drafting.draft_n_max,
        spec_draft_n_min: int = Drafting.draft_n_min,
        spec_draft_p_min: float = Drafting.draft_p_min,
        n_seq_max: int = 1,
        **given: Unpack[Arguments],
    ) -> None:
        self._kv_start(kv_progress)
        path, kwargs = str(model_path), dict[str, Any](given)
        _check_names(kwargs)
        # not the parent's business: it would keep the logits of all tokens for one
        self.draft_model = given_drafts = kwargs.pop("draft_model", None)
        self._kv_drafting = Drafting(
            spec_type,
            spec_ngram_size_n,
            spec_ngram_size_m,
            None if spec_draft_model is None else str(spec_draft_model),
            spec_draft_n_max,
            spec_draft_n_min,
            spec_draft_p_min,
        )
        self._kv_n_seq_max = n_seq_max
        self._kv_vocab_only = bool(kwargs.get("vocab_only"))
        facts.check_gguf(path, self._kv_vocab_only)
        if not self._kv_vocab_only:
            kind.check(path, writes=not kwargs.get("embedding"))
        if self.has_mtp:
            mtp.check(path)
        self._kv_places: dict[str, Any] = dict(
            override_tensor=override_tensor, cpu_moe=cpu_moe, n_cpu_moe=n_cpu_moe
        )
        self._kv_tensor_overrides = placement.as_array(placement.placements(**self._kv_places))
        self._kv_places["repack"] = repack
        if repack is None:
            repack = fits_twice(path, kwargs.get("n_gpu_layers") or 0)
        self._kv_repack = repack
        self._kv_servers = rpc.endpoints(rpc_servers)
        overrides = metadata.check(kv_overrides, path) or None
        self.adapters = adapters.Adapters(adapters.chosen(lora_path, lora_scale))
        for file in self.adapters.files:
            adapters.check(file.path, path)
        self._kv_configure(path, kv or KVConfig(), kwargs)
        stores = self.settings.stores
        kwargs["flash_attn"] = _flash_attn(flash_attn, stores, kwargs)
        if kwargs.get("n_ctx"):  # llama.cpp pads the context, the parent's arrays must be as long
            kwargs["n_ctx"] = whole_ctx(kwargs["n_ctx"])
        if not (self._kv_servers or self._kv_vocab_only):  # servers have memory of their own
            check_whole_cache(
                path,
                kwargs.get("n_ctx", 512) or metadata.n_ctx_train(overrides),
                kwargs.get("type_k"),
                kwargs.get("type_v"),
                stores,
                kwargs.get("n_gpu_layers") or 0,
            )
        logged_error()  # an older one explains nothing
        with native.next_context(stores):  # which forgets its error at its end
            try:
                super().__init__(path, kv_overrides=overrides, **kwargs)
            except ValueError as error:
                why = native.context_error() or logged_error() or error
                raise BadInput(f"{path}: {why}") from error
        self.costs = Costs(has_recurrent_layers(self))
        self.tokenizer_ = kwargs.get("tokenizer") or Tokenizer(self)
        self.lora_path, self.lora_scale = lora_path, lora_scale
        self.draft_model = given_drafts
        self._kv_finish(bool(kwargs.get("embedding")))
        if self._kv_drafting.draft_model and not self._kv_vocab_only:
            self._kv_load_draft(self._kv_drafting.draft_model, kwargs)
        if self.has_mtp:
            self._kv_load_heads()

    def _kv_load_draft(self, path: str, kwargs: dict[str, Any]) -> None:
        """Load the draft model, with the arguments that are the context's or the machine's. Raises
        BadInput, and closes this one, if it cannot draft for it.
        """
        try:
            shared = {name: kwargs[name] for name in OF_DRAFTS if name in kwargs}
            config = cache_of(self._kv_config, path)
            draft: Any = type(self)(path, kv=config, **{**shared, "n_ctx": self.n_ctx()})
            self._stack.callback(draft.close)
            check_vocabulary(draft, self)
            draft.stop_with(self)
            if has_recurrent_layers(draft):
                raise BadInput(
                    f"{path} has recurrent layers and cannot take guesses back: take another model"
                )
        except BadInput:
            self.close()
            raise
        self.draft = DraftModel(draft, self.n_vocab(), self.costs)

    def _kv_load_heads(self) -> None:
        """A context for the model's own heads. Raises BadInput, and closes this one."""
        try:
            why = why_no_mtp(self.model)
            if why:
                raise mtp.none(self.model_path, why)
            keep_hidden(self.ctx)
            self.draft = MtpHeads(self, self.costs, self.stop_flag)
            self._stack.callback(self.draft.close)
        except EdgeKVError:
            self.close()
            raise

    def _kv_start(self, progress: Callable[[int, int], None] | None) -> None:
        """The state of an object that has read nothing."""
        self._stack = ExitStack()  # the parent's, which it closes even if it never began
        self.guard = Guard()
        self.engine = None
        self._kv_note = ""
        # set by signal handlers, which must not wait for a lock that they have interrupted;
        # llama.cpp looks at it within a step
        self._kv_stop = c_bool(False)
        # called with a prompt's tokens and its cuts, before it is decided where to go on
        self._kv_on_prompt: Callable[[list[int], list[int]], object] | None = None
        self.pool = None
        self.turn = Turn(Checkpoints(False))
        self.n_evaluated = 0
        """Tokens that went through the model since it was loaded, of prompts and of replies."""
        self.draft = None
        self._kv_given_drafts: LlamaDraftModel | None = None
        self._kv_is_check = False
        """The next tokens to be evaluated are a written one and a draft."""
        self.kv_progress = progress

    def _kv_configure(self, path: str, config: KVConfig, arguments: dict[str, Any]) -> None:
        """Take the kv_ options out of the parent's arguments, and put the cache types that follow
        from them in. Raises BadInput if the two contradict each other.
        """
        own = {name: arguments.pop(name) for name in KVConfig.names() if name in arguments}
        self._kv_has_format = bool(arguments.get("chat_format") or arguments.get("chat_handler"))
        config = replace(config, **{n.removeprefix("kv_"): own[n] for n in own})
        self._kv_config = KVConfig() if self._kv_vocab_only else config
        self._kv_types = arguments.get("type_k"), arguments.get("type_v")
        self.settings = self._kv_resolve(self._kv_config, path)
        self._kv_check_remote(self.settings)
        self._kv_devices = rpc.as_array(self._kv_servers)
        self.turn.checkpoints.are_on = self._kv_config.checkpoints
        picks = self._kv_pick_types(path, arguments.get("n_gpu_layers") or 0)
        if picks:
            arguments["type_k"], arguments["type_v"] = picks
        stores = self.settings.stores
        if stores and arguments.get("embedding"):
            raise BadInput(EMBEDDINGS)
        self._kv_few_outputs = stores and not arguments.get("logits_all")

    def _kv_finish(self, embedding: bool) -> None:
        """Adapters and the engine for what is loaded. Raises BadInput, and closes this one."""
        try:
            self.adapters.load(self._model.model)
            self._stack.callback(self.adapters.close)
            self.adapters.attach(self._ctx.ctx)
            if self._kv_vocab_only:
                self.guard.why_not = VOCAB_ONLY
                return
            self._kv_check_kind(embedding)
            self._kv_attach(self.settings.stores)
            self._kv_check_drafts(self.settings)
            self._kv_check_memory(self.settings)
            if self.settings.why_no_recall:
                log.warning("edgekv: --kv-recall auto is off: %s", self.settings.why_no_recall)
        except BadInput:
            self.close()
            raise

    def stop_with(self, other: LoadedModel) -> None:
        """`kv_cancel` of another model stops this one, too."""
        self._kv_stop = other._kv_stop
        if self.engine is None:
            native.stop_if_set(self._ctx.ctx, self._kv_stop)

    @property
    def is_drafting(self) -> bool:
        """Whether answers are written with drafts."""
        return self._kv_asks_for_drafts or (self._kv_drafting.is_auto and self._kv_may_guess())

    @property
    def _kv_asks_for_drafts(self) -> bool:
        return self._kv_drafting.is_on or self._kv_given_drafts is not None

    @property
    def drafts_in_turns(self) -> bool:
        """Whether an answer with drafts is written alone: what guesses follows each token."""
        return self._kv_given_drafts is not None or self.draft is not None

    def _kv_may_guess(self) -> bool:
        """Whether n-grams leave the bits of an answer as they are."""
        if self.engine is None or self.settings.archive_folder is not None:
            return False
        return self._kv_is_alike

    @cached_property
    def _kv_is_alike(self) -> bool:
        return native.rows_alike(self.model) and not has_recurrent_layers(self)

    @property
    def has_mtp(self) -> bool:
        """Whether drafts are those of the model's own heads."""
        return MTP in self._kv_drafting.types and not self._kv_vocab_only

    @property
    def _sampler(self) -> Any:
        """The parent's, of one answer."""
        return self.turn.sampler

    @_sampler.setter
    def _sampler(self, sampler: Any) -> None:
        self.turn.sampler = sampler

    @property
    def model_params(self) -> Any:
        """The parent's, with the tensors' places, the devices, and whether weights are repacked."""
        return self._kv_model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        self._kv_model_params = params
        params.use_extra_bufts, params.load_mtp = self._kv_repack, self.has_mtp
        if self._kv_tensor_overrides is not None:
            params.tensor_buft_overrides = addressof(self._kv_tensor_overrides)
        if self._kv_devices is not None:
            params.devices = addressof(self._kv_devices)

    @property
    def context_params(self) -> Any:
        """The parent's, made while it is created; it has no argument for what is changed here."""
        return self._kv_context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        self._kv_context_params = params
        # a logit for every token of a ubatch is a fifth of a GiB
        params.n_outputs_max = native.OUTPUTS if self._kv_few_outputs else 0
        params.n_seq_max = self._kv_n_seq_max
        params.kv_unified = self._kv_n_seq_max > 1 and self.settings.stores

    @property
    def metadata(self) -> dict[str, str]:
        """The model file's, as text, without a chat template that jinja2 cannot parse."""
        return self._kv_metadata

    @metadata.setter
    def metadata(self, values: dict[str, str]) -> None:
        """The parent's, which has none at all where one byte of them is no UTF-8."""
        self._kv_metadata = {
            name: value
            for name, value in metadata.of_model(self._model.model).items()
            if not name.startswith("tokenizer.chat_template") or _can_be_parsed(value)
        }

    def _kv_resolve(self, config: KVConfig, path: str, anew: bool = False) -> Settings:
        """What a configuration means for the model at `path` and the cache types that were named;
        of one that was not, llama.cpp takes f16. anew: for another context, which may recall.
        """
        types, why_not = None, self._kv_why_no_recall(anew)
        if self._kv_types != (None, None):
            type_k, type_v = (facts.type_name(1 if x is None else x) for x in self._kv_types)
            types = type_k, type_v
        return resolve(config, path, types, why_not)

    def _kv_why_no_recall(self, anew: bool) -> Callable[[Preset, bool], str]:
        """See `resolve`. A context recalls as it was made to, whatever the ratio is later."""
        if self._kv_asks_for_drafts:
            return lambda *_: "drafts are asked for"
        if anew or self.engine is None:
            return recall.why_not
        if self.engine.archives[1]:
            return recall.nothing_evicted
        why = self.settings.why_no_recall
        return lambda *_: why or "the conversation began without it"

    def _kv_pick_types(self, path: str, n_gpu_layers: int) -> tuple[int, int] | None:
        """The types of a cache that was given none, as ggml's numbers (`edgekv.memory.dense`)."""
        kv, on_device = self.settings, facts.is_offloaded(n_gpu_layers)
        types = picked(path, self._kv_config.method, kv, *self._kv_types, on_device)
        return (facts.cache_types[types[0]][0], facts.cache_types[types[1]][0]) if types else None

    def _kv_check_kind(self, embedding: bool) -> None:
        """Raise BadInput for a model that writes no text, where llama.cpp would end the process."""
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
            native.stop_if_set(self._ctx.ctx, self._kv_stop)
            if wanted:
                why = (
                    native.why_unsupported(self._model.model)
                    or "its cache is of a kind that edgekv does not know"
                )
                self._kv_note = f"runs uncompressed: {why}"
            return
        is_auto = self._kv_config.recall == AUTO and self.settings.recall > 0
        try:
            if is_auto and facts.is_offloaded(self.model_params.n_gpu_layers):
                raise Unsupported(recall.ON_GPU)
            self.engine = self._kv_make_engine()
        except EdgeKVError as error:
            if not is_auto:
                raise
            why = str(error)  # this model, device or folder cannot
            config = replace(self._kv_config, recall=0.0)
            self.settings = replace(self._kv_resolve(config, self.model_path), why_no_recall=why)
            self.engine = self._kv_make_engine()

    def _kv_make_engine(self) -> Engine:
        """Raises EdgeKVError where there is to be an archive and cannot be."""
        # the engine must not hold this object: both would live until Python looks for circles
        model = self._model
        engine = Engine(
            self._ctx.ctx,
            self.settings,
            lambda text: model.tokenize(text.encode(), add_bos=False, special=False),
        )
        engine.offloaded = facts.is_offloaded(self.model_params.n_gpu_layers)
        return engine

    def _kv_check_wish(self, settings: Settings) -> None:
        """Raises BadInput if a loaded model cannot have these settings."""
        if settings.stores and self.context_params.embeddings:
            raise BadInput(EMBEDDINGS)
        self._kv_check_drafts(settings)
        self._kv_check_remote(settings)

    def _kv_check_remote(self, settings: Settings) -> None:
        """Raises BadInput if layers on other machines would be compressed."""
        if settings.stores and self._kv_servers:
            raise BadInput(rpc.UNCOMPRESSED)

    def _kv_check_drafts(self, settings: Settings) -> None:
        """Raises BadInput if drafts could not be taken back."""
        if self._kv_asks_for_drafts and settings.archive_folder is not None:
            raise BadInput(
                "with an archive tokens are written one by one: leave drafts (spec_type,"
                " draft_model) out, or kv_archive and kv_recall"
            )

    def _kv_check_memory(self, settings: Settings) -> None:
        """Raises BadInput if the cache cannot stay within `kv_memory`, whatever the prompt."""
        s = settings
        if s.memory is None:
            return
        if self.engine is not None:
            rows_within(self.engine.store.layers, s.memory, s.tail, s.window, s.sink)
            return
        if s.compresses and not self._kv_note:
            return  # the next prompt gets a context with a store
        n_bytes = statistics.uncompressed(self, "", 0).n_bytes
        if n_bytes > s.memory:
            raise BadInput(
                f"kv_memory {size_text(s.memory)} is less than this model's whole cache of"
                f" {size_text(n_bytes)}, which cannot be compressed"
                f" ({self._kv_note or 'method full'}): give a smaller -c or smaller cache types"
                " (-ctk, -ctv)"
            )

    def _kv_report(self, done: float, total: int) -> None:
        if self.kv_progress is not None:
            with self.guard.calling_back():
                self.kv_progress(min(int(done), total), total)
        self._kv_stop_if_cancelled()

    def _kv_stop_if_cancelled(self) -> None:
        if self._kv_stop.value:
            self._kv_stop.value = False
            raise Cancelled(CANCELLED)

    def _kv_free_sampler(self) -> None:
        """Free the sampler of an answer."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def renew_context(self) -> None:
        """This model in a context with a store, instead of the present one."""
        picks = self._kv_pick_types(self.model_path, self.model_params.n_gpu_layers)
        if picks:
            self.context_params.type_k, self.context_params.type_v = picks
        self.context_params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._kv_replace_context()

    def _kv_replace_context(self) -> None:
        """An empty conversation in another context with a store."""
        fresh = self._kv_make_context(stores=True)
        self._ctx.close()
        self._kv_enter(fresh, stores=True)
        self._stack.enter_context(closing(fresh))

    def write_together(self, n: int, always: bool | None = True) -> None:
        """Up to n conversations of a pool may write in one pass over the weights from now on, where
        their cache is compressed and in main memory. The present conversation ends.

        always: None, only where answers are those of each alone, bit for bit. Raises EdgeKVError.
        """
        alike = native.rows_alike(self.model) if always is None else always
        self._kv_n_seq_max = n + 1 if alike and n > 1 else 1
        if self._kv_n_seq_max > 1 and self.engine is not None and not self.engine.offloaded:
            self._kv_replace_context()

    def _kv_make_context(self, stores: bool) -> Any:
        """Another context of this model, by `context_params`. Raises EdgeKVError."""
        params, few = self.context_params, stores and not self._logits_all
        params.n_outputs_max = native.OUTPUTS if few else 0
        params.n_seq_max = min(self._kv_n_seq_max, native.OUTPUTS + 1) if few else 1
        params.kv_unified = params.n_seq_max > 1
        with native.next_context(stores):
            try:
                fresh = internals.LlamaContext(
                    model=self._model, params=self.context_params, verbose=self.verbose
                )
            except ValueError as error:
                kind = "compressed" if stores else "uncompressed"
                why = native.context_error() or error
                raise EdgeKVError(f"no {kind} cache could be made: {why}") from error
        self.adapters.attach(fresh.ctx)
        if self.has_mtp:
            keep_hidden(fresh.ctx)
        return fresh

    def _kv_enter(self, context: Any, stores: bool) -> None:
        """An empty conversation in another context."""
        self._ctx, self.engine, self._kv_note = context, None, ""
        self.n_tokens, self._requires_eval = 0, True
        self._kv_attach(stores)


# so that help() and notebooks know all arguments
vars(LoadedModel)["__init__"].__signature__ = signature(
    LoadedModel.__init__, llama_cpp.Llama.__init__
)


def _check_names(arguments: dict[str, Any]) -> None:
    """Raises UnknownArgument for a name that nobody has: the parent would ignore it."""
    known = [*inspect.signature(LoadedModel).parameters]
    for name in arguments:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean '{near[0]}'?" if near else "see help(edgekv.Llama)"
            raise UnknownArgument(f"Llama has no argument '{name}'; {hint}")


def _flash_attn(wanted: bool | None, compress: bool, arguments: dict[str, Any]) -> bool:
    """Whether attention is flash attention, which a compressed cache and quantised V need. Raises
    BadInput if they do and it is not wanted.
    """
    plain = (None, 0, *(facts.cache_types[t][0] for t in ("f16", "bf16")))
    quantised = arguments.get("type_v") not in plain
    if wanted is False and (compress or quantised):
        raise BadInput(
            f"a {'compressed' if compress else 'quantised V'} cache needs flash attention:"
            " leave flash_attn out"
        )
    return compress or quantised if wanted is None else wanted


def _can_be_parsed(text: str) -> bool:
    """Whether the parent, which keeps a formatter of each chat template, can make one of it."""
    try:
        Jinja2ChatFormatter(text, eos_token="", bos_token="")
    except Exception:  # of jinja's, or of Python's where it nests too deeply
        return False
    return True
