"""The text of tokens."""

from __future__ import annotations

import pytest

from edgekv import Llama
from tests.engine import load


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", ["=" * 64, "-" * 40, " " * 40 + "x", "a\n\n\n\tb"])
def test_tokens_of_many_bytes_have_their_text(demo_model, text, special):
    llm = Llama(str(demo_model), vocab_only=True, verbose=False)
    tokens = llm.tokenize(text.encode(), False, special)
    assert llm.detokenize(tokens, None, special).decode() == text
    llm.close()


def test_a_tokenizer_of_the_callers_own_is_used(tiny):
    class Own:
        def tokenize(self, text, add_bos=True, special=True):
            return [7, 8]

        def detokenize(self, tokens, prev_tokens=None, special=False):
            return b"own"

    llm = load(tiny("llama-gqa"), tokenizer=Own())
    assert (llm.tokenize(b"x"), llm.detokenize([7])) == ([7, 8], b"own")
    llm.close()
