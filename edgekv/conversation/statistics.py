"""What a conversation's cache holds and costs, read from it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgekv import native
from edgekv.base.sizes import size_text
from edgekv.base.stats import KVStats
from edgekv.choice.settings import Settings
from edgekv.conversation.holder import Holder
from edgekv.conversation.state import has_recurrent_layers
from edgekv.engine.engine import Engine
from edgekv.memory.footprint import row_bytes
from edgekv.memory.limit import reserve
from edgekv.model import facts

UNCUT = "this architecture cannot be cut into layers: prompts are read in full, then compressed"


def type_names(llm: Holder) -> tuple[str, str]:
    """Types of the cache's K and V."""
    names = {kind: name for name, (kind, _, _) in facts.cache_types.items()} | {0: "f32"}
    return names[int(llm.context_params.type_k)], names[int(llm.context_params.type_v)]


def uncompressed(llm: Holder, note: str, prefill_ms: float) -> KVStats:
    """Statistics of llama.cpp's own cache: every row of every token, allocated for the whole
    context at the start. What is allocated is asked of llama.cpp; its parts are in proportion to
    tokens.
    """
    (type_k, type_v), info = type_names(llm), facts.model_shape(llm.model)
    kinds = int(llm.context_params.type_k), int(llm.context_params.type_v)
    d_k, d_v = info["d_head_k"], 0 if info["v_in_k"] else info["d_head_v"]
    per_token = sum(info["n_head_kv"]) * (row_bytes(kinds[0], d_k) + row_bytes(kinds[1], d_v))
    cache, computed = native.context_bytes(llm.ctx)[0], per_token * llm.n_ctx()
    recurrent = max(cache - computed, 0) if has_recurrent_layers(llm) else 0
    allocated = cache - recurrent  # less or more than computed if heads have several sizes
    used, in_f16 = (
        n * llm.n_tokens * allocated // max(computed, 1)
        for n in (per_token, 2 * sum(info["n_head_kv"]) * (d_k + d_v))
    )
    kept = np.full((info["n_layer"], max(info["n_head_kv"])), llm.n_tokens, np.int32)
    return KVStats(
        method="full",
        ratio=1.0,
        n_seen=llm.n_tokens,
        n_kept=float(llm.n_tokens),
        kept=kept,
        n_bytes=allocated,
        type_k=type_k,
        type_v=type_v,
        n_bytes_peak=allocated,
        n_bytes_full=in_f16,
        n_bytes_used=used,
        n_bytes_recurrent=recurrent,
        n_ctx=llm.n_ctx(),
        prefill_ms=prefill_ms,
        compress_ms=0.0,
        mode="uncompressed",
        note=note,
    )


def compressed(
    llm: Holder,
    kv: Engine,
    settings: Settings,
    prefill_ms: float,
    stage_ms: Mapping[str, float],
    n_bytes_checkpoints: int,
) -> KVStats:
    """Statistics of a store. settings: those of the conversation, which the engine may have left
    for a while; stage_ms: see `KVStats`; n_bytes_checkpoints: bytes of saved states.
    """
    s, layers, info = settings, kv.store.layers, kv.store.memory()
    kept = kv.kept()
    full = kv.full_layers or range(len(kept))
    type_k, type_v = type_names(llm)
    is_measured = s.preset.types == (type_k, type_v)
    # nothing but a wish is missing, as far as is known
    can_recall = is_measured and not (kv.offloaded or s.why_no_recall)
    rows = sum(int(kept[il].sum()) for il in full)
    heads = sum(layers[il].n_head_kv for il in full)
    return KVStats(
        method=s.preset.name,
        profile=s.preset.profile,
        why=s.preset.why,
        measured=s.preset.measured if is_measured else "",
        ratio=s.ratio if s.memory is None else kv.turn.past.ratio,
        n_seen=info.n_past,
        n_kept=rows / heads,
        kept=kept,
        n_bytes=info.bytes_now,
        n_bytes_peak=info.bytes_peak + kv.turn.working,
        n_bytes_full=kv.bytes_full(info.n_past),
        prefill_ms=prefill_ms,
        type_k=type_k,
        type_v=type_v,
        per_f16=float(kv.per_f16),
        compress_ms=sum(stage_ms.values()),
        stage_ms=stage_ms,
        mode="layers" if kv.by_layer else "full then compress",
        hidden=kv.turn.hidden,
        n_bytes_used=sum(int(kept[il].sum()) * x.bytes_row for il, x in enumerate(layers))
        + info.bytes_index,
        n_bytes_archive=info.bytes_archive,
        n_bytes_index=info.bytes_index,
        n_bytes_recalled=info.bytes_recalled,
        recall=s.recall,
        recall_gain=s.preset.recall_gain if can_recall else None,
        n_ctx=llm.n_ctx(),
        n_bytes_reserved=0 if s.memory is None else reserve(layers, s.tail, s.window),
        n_bytes_limit=s.memory,
        n_bytes_recurrent=info.bytes_recurrent + info.bytes_mark,
        n_bytes_checkpoints=n_bytes_checkpoints,
        note="" if kv.can_cut else UNCUT,
        peak_note=_peak_note(kv),
    )


def _peak_note(kv: Engine) -> str:
    """See `KVStats`."""
    if not kv.turn.excess:
        return ""
    peak, full = map(size_text, kv.turn.excess)
    less = "; --kv-hidden disk takes less" * (kv.can_cut and kv.turn.hidden != "disk")
    return f"reading the last prompt took {peak}, and a full f16 cache of it {full}{less}"
