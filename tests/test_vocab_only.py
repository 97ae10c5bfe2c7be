"""Models of which only the vocabulary is loaded: they tokenize, as in llama-cpp-python."""

from __future__ import annotations

import pytest

import edgekv
from edgekv.errors import BadInput
from edgekv.llama_cpp import Llama as Parent
from tests import models

TEXT = b"the rain in the hills"


def vocabulary(path, folder):
    """A file with a model's metadata and none of its tensors."""
    import gguf

    reader, writer = gguf.GGUFReader(str(path)), gguf.GGUFWriter(str(folder / "v.gguf"), "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, *inner[:1])
    models.finish(writer)
    return folder / "v.gguf"


@pytest.mark.parametrize("options", [{}, {"kv_ratio": 0.2}, {"embedding": True}])
@pytest.mark.parametrize("whole", [True, False])
def test_a_vocabulary_tokenizes(tiny, tmp_path, whole, options):
    path = tiny("llama-gqa") if whole else vocabulary(tiny("llama-gqa"), tmp_path)
    theirs = Parent(str(path), vocab_only=True, verbose=False)
    with edgekv.Llama(str(path), vocab_only=True, verbose=False, **options) as llm:
        tokens = llm.tokenize(TEXT)
        assert tokens == theirs.tokenize(TEXT)
        assert llm.detokenize(tokens) == theirs.detokenize(tokens)
        assert (llm.n_vocab(), llm.token_eos()) == (theirs.n_vocab(), theirs.token_eos())
        for use in (
            lambda: llm.eval(tokens),
            lambda: llm.create_completion("a", max_tokens=1),
            lambda: llm.kv_set(ratio=0.5),
            lambda: llm.kv_save(str(tmp_path / "saved")),
            lambda: llm.embed("a"),
            llm.kv_stats,  # llama.cpp would end the process
        ):
            with pytest.raises(BadInput, match="vocab_only"):
                use()


def test_without_the_option_a_vocabulary_is_refused(tiny, tmp_path):
    with pytest.raises(BadInput, match="vocabulary"):
        edgekv.Llama(str(vocabulary(tiny("llama-gqa"), tmp_path)), verbose=False)
