"""merge on the engine: rows that receive something have the reference's values, all others keep
their bytes.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgekv.native import Prefill
from tests.engine import feed, load, share
from tests.reference.merge import merge as reference

N_PROMPT = 400


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("model", ["llama-mha", "llama-gqa"])
def test_merged_rows_equal_the_reference_and_others_keep_their_bytes(
    tiny, text, nmse, monkeypatch, model, kind
):
    """Rows are merged before they are rounded."""
    whole: list[list] = []  # of each layer's heads all rows

    def seen_keep(self, rows):
        whole.append([self.rows(head) for head in range(len(rows))])
        keep(self, rows)

    keep = Prefill.keep
    monkeypatch.setattr(Prefill, "keep", seen_keep)
    full = load(tiny(model), kind, kv_budget=10 * N_PROMPT, after=text(N_PROMPT))
    monkeypatch.setattr(Prefill, "keep", keep)
    plain = load(tiny(model), kind, kv_ratio=share(0.3, kind), kv_method="h2o")
    merging = load(
        tiny(model), kind, kv_ratio=share(0.3, kind), kv_method="score=h2o,budget=uniform,merge=d2o"
    )
    for llm in (plain, merging):
        llm.eval(list(text(N_PROMPT)))
    touched = 0
    for il, info in enumerate(full.engine.store.layers):
        for head in range(info.n_head_kv):
            stores = [llm.engine.store for llm in (full, plain, merging)]
            kept = stores[1].positions(il, head)
            assert np.array_equal(kept, stores[2].positions(il, head))
            keys, values = whole[il][head]
            gone = np.setdiff1d(np.arange(N_PROMPT), kept)
            expected_k, expected_v, changed = expected(keys, values, gone, kept)
            got_k, got_v = stores[2].rows(il, head)
            limit = {"f16": 1e-6, "q8_0": 1e-3, "q4_0": 3e-2}[kind]
            assert nmse(got_k[changed], expected_k[changed]) < limit
            assert nmse(got_v[changed], expected_v[changed]) < limit
            same = np.setdiff1d(np.arange(len(kept)), np.flatnonzero(changed))
            for ours, before in zip(
                stores[2].row_bytes(il, head), stores[1].row_bytes(il, head), strict=True
            ):
                size = len(ours) // len(kept)
                assert all(
                    ours[r * size : (r + 1) * size] == before[r * size : (r + 1) * size]
                    for r in same
                )
            touched += changed.sum()
    assert touched > 0
    assert np.isfinite(feed(merging, text(4, seed=1))).all()


def test_what_a_finished_layer_loses_later_is_merged_too(tiny, text, nmse, monkeypatch):
    """d2o's budgets fall while later layers are read; each cut folds the rows it takes by a
    threshold that moves on.
    """
    cuts: dict[int, list] = {}
    keep, shrink = Prefill.keep, Prefill.shrink

    def seen_keep(self, rows):
        cuts[self.il] = [[np.array(r) for r in rows]]
        keep(self, rows)

    def seen_shrink(self, il, counts):
        cuts[il].append([int(n) for n in counts])
        shrink(self, il, counts)

    full = load(tiny("llama-gqa"), kv_budget=10 * N_PROMPT, after=text(N_PROMPT))
    monkeypatch.setattr(Prefill, "keep", seen_keep)
    monkeypatch.setattr(Prefill, "shrink", seen_shrink)
    merging = load(tiny("llama-gqa"), kv_ratio=0.3, kv_method="d2o", after=text(N_PROMPT))
    assert any(len(history) > 2 for history in cuts.values())
    for il, (first, *later) in cuts.items():
        for head, rows in enumerate(first):
            keys, values = full.engine.store.rows(il, head)
            gone = np.setdiff1d(np.arange(N_PROMPT), rows)
            k, v, threshold = reference(
                (keys[gone], values[gone]), (keys[rows], values[rows]), None
            )
            for n in (counts[head] for counts in later):
                k, v = (x.astype(np.float16).astype(np.float32) for x in (k, v))
                if n < len(k):
                    k, v, threshold = reference((k[n:], v[n:]), (k[:n], v[:n]), threshold)
            got_k, got_v = merging.engine.store.rows(il, head)
            assert got_k.shape == k.shape and nmse(got_k, k) < 1e-6 and nmse(got_v, v) < 1e-6, (
                il,
                head,
            )


def expected(keys, values, gone, kept):
    """The kept rows after the reference's merge, and which of them changed."""
    merged_k, merged_v, _ = reference((keys[gone], values[gone]), (keys[kept], values[kept]), None)
    return merged_k, merged_v, (np.abs(merged_k - keys[kept]) > 1e-6).any(axis=1)
