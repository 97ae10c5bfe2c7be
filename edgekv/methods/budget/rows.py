"""How many rows a prompt may leave, by the user's wish: a share, tokens, or bytes."""

from __future__ import annotations

from fractions import Fraction

from edgekv.base.defaults import MIN_TOKENS
from edgekv.errors import BadInput


def check_ratio(value: float | str) -> float:
    """`value` as a share of bytes to keep, 0 < share <= 1.

    Raises BadInput for anything else, with what to write instead.
    """
    try:
        ratio = float(value)
    except (TypeError, ValueError):
        raise BadInput(
            f"'{value}' is no ratio; give the share of the cache to keep, such as 0.2 for 20 %"
        ) from None
    if 1 < ratio <= 100:
        raise BadInput(
            f"ratio {ratio:g} is above 1; it is the share of the cache to keep, so write"
            f" {ratio / 100:g} to keep {ratio:g} %"
        )
    if not 0 < ratio <= 1:
        raise BadInput(
            f"ratio {ratio:g} keeps nothing that makes sense; give a share above 0 and at most 1,"
            " such as 0.2 to keep 20 %"
        )
    return ratio


def rows_for(
    n_tokens: int,
    ratio: float | None = None,
    tokens: int | None = None,
    n_bytes: int | None = None,
    *,
    per_f16: Fraction = Fraction(1),
    bytes_per_row_head: float | None = None,
    n_heads: int | None = None,
    min_tokens: int = MIN_TOKENS,
) -> int:
    """Rows per head (the mean over all layers and KV heads) that stay of `n_tokens` tokens.

    Of several limits the smallest counts. `ratio` rounds down, but a short prompt keeps
    `min_tokens`; `tokens` and `n_bytes` are taken at their word. Never more than `n_tokens`.

    ratio: share of the bytes that all tokens take in f16, 0 < ratio <= 1.
    per_f16: KV entries that take the bytes of one in f16.
    tokens: rows per head.
    n_bytes: bytes of all K and V rows; needs `bytes_per_row_head` (one K row and one V row of one
    head) and `n_heads`
        (n_layer * n_head_kv).

    Raises BadInput for a ratio that is no share and for a budget too small for one row per head.
    """
    assert n_tokens >= 0 and min_tokens >= 0
    limits = [n_tokens]
    if ratio is not None:
        # the decimal number the user wrote: 0.29 of 100 is 29, not 28
        exact = Fraction(repr(check_ratio(ratio)))
        limits.append(max(int(exact * per_f16 * n_tokens), min_tokens))
    if tokens is not None:
        limits.append(_at_least_one(int(tokens), f"a budget of {tokens} tokens"))
    if n_bytes is not None:
        assert bytes_per_row_head and n_heads, "bytes become rows through the size of a row"
        need = bytes_per_row_head * n_heads
        limits.append(
            _at_least_one(
                int(n_bytes // need), f"a budget of {n_bytes} bytes ({need:g} are one token's)"
            )
        )
    return min(limits)


def _at_least_one(n_rows: int, what: str) -> int:
    if n_rows < 1:
        raise BadInput(f"{what} keeps no token; give a larger one")
    return n_rows
