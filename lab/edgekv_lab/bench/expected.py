"""What a row should take: buffers and cache from their shapes, beside a process that has loaded its
weights."""

from __future__ import annotations

from typing import Any

from edgekv.base.defaults import WINDOW, whole_ctx
from edgekv.choice.choose import choose
from edgekv.memory.entries import entries_per_f16
from edgekv.memory.footprint import Surroundings, extent, kept_bytes, tensor_bytes
from edgekv.memory.hidden import planned
from edgekv.memory.limit import APPEND_MAX
from edgekv.methods.budget import rows_for
from edgekv.model.blueprint import Blueprint, Context
from edgekv.model.facts import cache_types
from edgekv_lab.bench.measure import MIN_TOKENS, WARM_UP_TOKENS
from edgekv_lab.bench.spec import Case


class ExpectedBytes:
    """One model file at one physical batch size. Use as a context manager."""

    def __init__(self, path: str, n_ubatch: int) -> None:
        self._blueprint, self._n_ubatch = Blueprint(path, n_ubatch), n_ubatch

    def __enter__(self) -> ExpectedBytes:
        return self

    def __exit__(self, *details: object) -> None:
        self._blueprint.__exit__(*details)

    def host(self, case: Case, sample: dict[str, Any]) -> int:
        """Bytes of main memory at the peak. sample: a measured one, for what the process had when
        it was loaded.

        Loading may have been the peak.
        """
        kinds = cache_types[case.type_k][0], cache_types[case.type_v][0]
        n_ctx = whole_ctx(max(case.n_prompt + case.n_gen + case.n_depth, WARM_UP_TOKENS))
        compressed = not case.is_full and sample["mode"] != "uncompressed"
        context = self._blueprint.context(compressed, n_ctx, *kinds)
        # llama.cpp's own is there when the model is loaded
        cache = self._cache(case, context) if compressed else 0
        return max(sample["peak_loaded"], sample["rss_loaded"] + context.compute + cache)

    def _cache(self, case: Case, context: Context) -> int:
        """K and V with what stands beside them while prompts are read: what lies before the test,
        the test's own, then new tokens."""
        preset = choose(case.kv_method, case.model)
        per_f16 = entries_per_f16([x for x in context.layers if x.selects])
        even, peak, seen, old = preset.budget.name == "uniform", 0, 0, 0
        for n in filter(None, (case.n_depth, case.n_prompt)):
            rows = rows_for(seen + n, case.kv_ratio, per_f16=per_f16, min_tokens=MIN_TOKENS)
            before = kept_bytes(context.layers, seen, old) if seen else 0
            read = planned(
                case.kv_hidden,
                context.layers,
                extent(preset, n, WINDOW, self._n_ubatch),
                rows,
                Surroundings(self._blueprint.n_embd, self._n_ubatch, old, before, even),
                seen + n,
                self._blueprint.product_bytes(n, self._n_ubatch),
            )
            peak, seen, old = max(peak, read.peak), seen + n, rows
        if case.n_gen:
            steps = -(-case.n_gen // APPEND_MAX) * APPEND_MAX
            peak = max(
                peak, sum(tensor_bytes(x, x.n_head_kv * (old + steps)) for x in context.layers)
            )
        return peak
