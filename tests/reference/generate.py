"""Greedy answers of the reference, with its full cache or after SnapKV with a uniform budget."""

from __future__ import annotations

from collections.abc import Sequence

from .model import Pass, Reference
from .scores import keep_best, snapkv


def compress(
    reference: Reference,
    prompt: Pass,
    ratio: float,
    sink: int = 4,
    window: int = 32,
    min_tokens: int = 128,
) -> int:
    """Evict by SnapKV, the same number of rows in every head; returns that number. prompt: what
    `prefill` gave.
    """
    n_tokens = len(reference.layers[0].pos)
    count = min(n_tokens, max(min_tokens, int(ratio * n_tokens)))
    reference.keep(
        [keep_best(snapkv(layer.attention), count, sink, window) for layer in prompt.layers]
    )
    return count


def generate(reference: Reference, prompt: Pass, n_tokens: int, stop: Sequence[int]) -> list[int]:
    """At most n_tokens greedy tokens after the prompt, without the stop token."""
    tokens = [int(prompt.logits[-1].argmax())]
    while tokens[-1] not in stop and len(tokens) < n_tokens:
        tokens.append(int(reference.decode(tokens[-1:])[-1].argmax()))
    return tokens[:-1] if tokens[-1] in stop else tokens
