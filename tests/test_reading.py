"""One reading for many methods: what it evicts is what compressing while reading keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgekv import methods
from tests.engine import feed as decode
from tests.engine import load, logits, positions

N_PROMPT = 500
NAMES = """
    random streaming snapkv pyramidkv adakv cake dynamickv d2o score=h2o,budget=d2o kvzip h2o tova
    knorm keydiff expected score=keydiff,merge=summary score=kvzip,budget=pooled,merge=summary
    score=cake,budget=cake,merge=summary snapkv:queries=probe snapkv:queries=all
    score=kvzip,budget=cake
""".split()


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("model", ["llama-gqa", "llama-mha", "gemma3"])
def test_a_reading_keeps_what_the_engine_keeps(tiny, text, nmse, model, kind):
    from edgekv.reading import Reading

    llm = load(tiny(model), kind, kv_ratio=0.3)
    tokens = list(text(N_PROMPT))
    reading = Reading(llm, tokens, [methods.get(name) for name in NAMES])
    for name in NAMES:
        one = load(tiny(model), kind, kv_ratio=0.3, kv_method=name, after=tokens)
        assert nmse(reading.logits, logits(one)) < 1e-12
        reading.compress(methods.get(name), replace(llm._kv_settings, preset=methods.get(name)))
        same = [
            [np.array_equal(np.sort(a), np.sort(b)) for a, b in zip(x, y, strict=True)]
            for x, y in zip(positions(llm), positions(one), strict=True)
        ]
        assert all(map(all, same)), name
        # a summary's value on the edge between two steps of q8_0 may fall on either side
        most = 1e-7 if kind == "q8_0" and "summary" in name else 1e-9
        assert nmse(decode(llm, text(3, seed=1)), decode(one, text(3, seed=1))) < most
