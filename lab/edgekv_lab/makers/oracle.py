"""Oracle importance: how much each row of a text contributes to answers that the model gave about
it.

Source: LU-KV, section 4.1 and appendix E: I_j = max over the answer's steps of A[step, j] * ||v_j
W_O||, normalised within a layer. Answers are known, or decoded with the full cache; then the text
is read once more with every question and its answer as a piece behind it, whose tokens' attention
is the decoding steps'. Different from the paper, one row serves the query heads of its KV head: the
largest attention of any of them, times the mean of their norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import Unsupported
from edgekv.llama_cpp.llama_chat_format import Jinja2ChatFormatter
from edgekv.model import words
from edgekv.native import llama_cpp

if TYPE_CHECKING:
    from edgekv.llama.llama import Llama

MAX_ANSWER = 32
"""Tokens of an answer (K_max)."""


QUESTION, ANSWER = "\n\nQuestion: ", "\nAnswer:"
"""Around a question for a model without a chat template."""


def frame(llm: Llama) -> tuple[str, str, str]:
    """What the model's chat template puts before a text, between text and question, and behind the
    question.
    """
    from jinja2 import TemplateError

    template = (llm.metadata or {}).get("tokenizer.chat_template")
    if template:
        eos, bos = (
            words.name(llm.model, token) if token >= 0 else ""
            for token in (llm.token_eos(), llm.token_bos())
        )
        try:
            prompt = Jinja2ChatFormatter(template=template, eos_token=eos, bos_token=bos)(
                messages=[{"role": "user", "content": _MARK}]
            ).prompt
        except TemplateError:
            prompt = ""
        if prompt.count(_MARK) == 1:
            before, after = prompt.split(_MARK)
            return before, "\n\n", after
    return "", QUESTION, ANSWER


_MARK = "here-goes-the-text"


def decode(llm: Llama, n_context: int, question: Sequence[int]) -> list[int]:
    """The greedy answer to a question behind the first n_context tokens of the conversation, which
    stays.
    """
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    llm.n_tokens = n_context
    llm.eval(question)
    found: list[int] = []
    while len(found) < MAX_ANSWER:
        token = int(llm.logits().argmax())
        if found and llama_cpp.llama_vocab_is_eog(vocab, token):
            break
        found.append(token)
        llm.eval([token])
    return found


class OutputWeights:
    """W_O of every layer, read from the model's file and dequantised one at a time."""

    def __init__(self, path: str) -> None:
        import gguf

        self._tensors = {
            t.name: t
            for t in gguf.GGUFReader(path).tensors
            if t.name.endswith(".attn_output.weight")
        }
        self._last: tuple[int, NDArray[np.float32]] | None = None

    def norms(
        self, il: int, n_head: int, values: NDArray[np.float32], head: int, n_head_kv: int
    ) -> NDArray[np.float32]:
        """float32 [n_rows]: ||v W_O||, the mean over the query heads of KV head `head`. values:
        float32 [n_rows, d_v].

        Raises Unsupported if the model has no such weights.
        """
        group = n_head // n_head_kv
        grams = [
            _gram(w)
            for w in np.split(self._weights(il, n_head * values.shape[1]), n_head, axis=1)[
                head * group : (head + 1) * group
            ]
        ]
        squares = [((values @ gram) * values).sum(axis=1) for gram in grams]
        return np.mean([np.sqrt(np.maximum(s, 0)) for s in squares], axis=0, dtype=np.float32)

    def _weights(self, il: int, n_in: int) -> NDArray[np.float32]:
        from gguf.quants import dequantize

        if self._last is not None and self._last[0] == il:
            return self._last[1]
        tensor: Any = self._tensors.get(f"blk.{il}.attn_output.weight")
        if tensor is None or int(tensor.shape[0]) != n_in:
            raise Unsupported(
                f"layer {il} has no output projection that LU-KV knows: make the profile with"
                " 'edgekv profile probe'"
            )
        self._last = il, dequantize(tensor.data, tensor.tensor_type)
        return self._last[1]


def _gram(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    return weights.T @ weights
