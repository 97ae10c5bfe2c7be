"""The page of `edgekv look`: one HTML file that loads nothing and runs nothing."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from html import escape

MARK = b'<meta name="generator" content="edgekv look">'
"""Stands at the beginning of each page."""
KIND = "page of 'edgekv look'"
LEVELS = 20
"""Colours besides that of a token that no head kept."""
DARK = 16
"""Above this one letters are dark, on a dark page too."""

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.7 system-ui, sans-serif; max-width: 52em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.3em; margin: 0; }
main { white-space: pre-wrap; overflow-wrap: anywhere; margin-top: 1.5em; }
b { font-weight: inherit; }
"""


def colours() -> str:
    """The style of classes k0 to k20, one for each level: letters stay readable on all of them."""
    marks = [f"background: rgb(235 130 0 / {100 * i // LEVELS}%)" for i in range(1, LEVELS + 1)]
    marks[DARK:] = (f"{mark}; color: #1d1f23" for mark in marks[DARK:])
    rules = ("opacity: .45", *marks)
    return "\n".join(f".k{i} {{ {rule}; }}" for i, rule in enumerate(rules))


def page(
    title: str, about: str, pieces: Sequence[bytes], counts: Sequence[int], n_heads: int
) -> str:
    """The page's text. pieces: the bytes of each token; counts: heads that kept it, of n_heads."""
    legend = "".join(f'<b class="k{i}">&ensp;</b>' for i in range(LEVELS + 1))
    marked = "".join(
        f'<b class="k{level(n, n_heads)}" title="{n} of {n_heads} heads">{escape(text)}</b>'
        for text, n in texts(pieces, counts)
    )
    return f"""<!doctype html>
<html lang="en">
{MARK.decode()}
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{STYLE}{colours()}
</style>
<h1>{escape(title)}</h1>
<p>{escape(about)}</p>
<p>kept by no head {legend} by all {n_heads} heads</p>
<main>{marked}</main>
</html>
"""


def level(n: int, n_heads: int) -> int:
    """The colour of a token that n heads kept: 0 for none, LEVELS for all."""
    return -(-int(n) * LEVELS // max(n_heads, 1))


def texts(pieces: Sequence[bytes], counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """(text, count) of each token. Tokens that share a character are one: the largest count."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    most = 0
    for piece, count in zip(pieces, counts):
        most = max(most, int(count))
        if text := decoder.decode(piece):
            yield text, most
            most = 0
    if rest := decoder.decode(b"", final=True):
        yield rest, most
