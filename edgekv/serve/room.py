"""Whether a text can fit into the context at all, told from its length before it is cut up."""

from __future__ import annotations

from functools import cached_property

from edgekv.llama.llama import Llama
from edgekv.native import llama_cpp as native
from edgekv.serve.errors import prompt_too_long
from edgekv.serve.wanted import check_wanted


class Room:
    """Refuses prompts that one model's context has no room for."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self._n_ctx = llm.n_ctx()  # the worker may change contexts meanwhile

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token; 0 for a vocabulary whose unknown words are one token."""
        vocab = native.llama_model_get_vocab(self._llm.model)
        if native.llama_vocab_type(vocab) not in (
            native.LLAMA_VOCAB_TYPE_SPM,
            native.LLAMA_VOCAB_TYPE_BPE,
        ):
            return 0
        # what stands for bytes or blanks there takes no fewer bytes than they do
        return max(len(native.llama_vocab_get_text(vocab, i)) for i in range(self._llm.n_vocab()))

    def check(self, data: bytes) -> None:
        """Raises ApiError for a text that has too many tokens however it is cut, and in a thread
        that prepares a request whose client is gone.
        """
        check_wanted()
        if len(data) < self._n_ctx or not self._longest:
            return
        least = len(data) // self._longest
        if least >= self._n_ctx:
            raise prompt_too_long(least, self._n_ctx, has_more=True)
