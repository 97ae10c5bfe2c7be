"""The repeat probe: the prompt asked for again, in pieces, behind itself.

Source: KVzip (Kim et al., arXiv 2505.23416): a row is worth the most attention that any query pays
to it while the model repeats the context. Each piece is an instruction and up to PIECE tokens of
the prompt; it is read behind the prompt, sees the prompt and itself, and none of its rows is
stored. Different from the authors, the instruction is not wrapped in the model's chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

PIECE = 2000
"""Of the prompt in one piece; with its instruction it is below EDGEKV_PROBE_MAX."""
FIRST = "\n\nRepeat the previous context:"
LATER = "\n\nRepeat the part of the previous context starting with"
LEAD = 8
"""Tokens before a later piece that say where it starts."""


def pieces(tokens: Sequence[int], tokenize: Callable[[str], list[int]] | None) -> list[list[int]]:
    """Token lists of the pieces that together repeat `tokens`."""
    assert tokenize is not None, "the probe has words: it needs the model's tokenizer"
    tokens = list(tokens)
    found = [tokenize(FIRST) + tokens[:PIECE]]
    for begin in range(PIECE, len(tokens), PIECE):
        found.append(tokenize(LATER) + tokens[begin - LEAD : begin] + tokens[begin : begin + PIECE])
    return found
