"""Characters of a JSON string, as GBNF has them."""

from __future__ import annotations

import json
from collections.abc import Iterable

Ranges = list[tuple[int, int]]
"""Code points, first and last, in order and apart."""

LAST = 0x10FFFF
ALL: Ranges = [(0, LAST)]
HALVES = (0xD800, 0xDFFF)
"""Halves of surrogate pairs, which no text has."""
SHORT = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
"""What stands behind a backslash in JSON's short forms."""
BARE: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, LAST)]
"""What a JSON string may have as it is."""
ESCAPED: Ranges = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]

ANY = (
    r'[^"\\\x00-\x1F] | "\\" ( ["\\bfnrt] | "u" ( [0-9a-cA-CefEF] [0-9a-fA-F]{3} | [dD] [0-7] '
    r'[0-9a-fA-F]{2} | [dD] [89abAB] [0-9a-fA-F]{2} "\\u" [dD] [c-fC-F] [0-9a-fA-F]{2} ) )'
)
"""Any character. Halves of a surrogate pair come together: alone they are no text."""
ESCAPE = r'"\\" ["\\bfnrt] | "\\u00" [01] [0-9a-fA-F]'
"""Any character that has to be escaped."""


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same code points, in order and apart."""
    out: Ranges = []
    for first, last in sorted(ranges):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], last))
        else:
            out.append((first, last))
    return out


def without(ranges: Ranges, taken: Ranges) -> Ranges:
    """The code points of `ranges` that are not in `taken`; both are in order and apart."""
    out: Ranges = []
    for first, last in ranges:
        for low, high in taken:
            if high < first or low > last:
                continue
            if first < low:
                out.append((first, low - 1))
            first = high + 1
        if first <= last:
            out.append((first, last))
    return out


def literal(text: str) -> str:
    """The GBNF of a text inside a JSON string."""
    inner = json.dumps(text, ensure_ascii=False)[1:-1]
    inner = "".join(rf"\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in inner)
    return quoted(inner)


def quoted(text: str) -> str:
    """A text in GBNF, as it is. It has no line breaks."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def one_of(ranges: Ranges) -> str | None:
    """GBNF for one character of a set; None if a JSON string has none of them."""
    bare, escaped = within(ranges, BARE), within(ranges, ESCAPED)
    if escaped == ESCAPED:
        return f"( {_class(bare)} | ours-escape )" if bare else "ours-escape"
    parts = [_class(bare)] if bare else []
    codes = [code for first, last in escaped for code in range(first, last + 1)]
    if short := [ord(SHORT[code]) for code in codes if code in SHORT]:
        parts.append(rf'"\\" {_class([(code, code) for code in short])}')
    if long := [code for code in codes if code not in SHORT]:
        parts.append(_long(long))
    if not parts:
        return None
    return parts[0] if parts[0][0] == "[" and len(parts) == 1 else f"( {' | '.join(parts)} )"


def within(ranges: Ranges, others: Ranges) -> Ranges:
    """The code points that are in both."""
    return without(ranges, without(ALL, others))


def _long(codes: list[int]) -> str:
    """Control characters without a short form."""
    ends = []
    for high in (0, 1):
        digits = {f"{code % 16:x}" for code in codes if code // 16 == high}
        if digits:
            both = digits | {digit.upper() for digit in digits}
            ends.append(f'"{high}" {_class([(ord(digit), ord(digit)) for digit in both])}')
    return rf'"\\u00" ( {" | ".join(ends)} )'


def _class(ranges: Iterable[tuple[int, int]]) -> str:
    """A class of characters, written as what it has or as what it has not."""
    has = merged(ranges)
    wide = merged([*has, HALVES]) if has[-1][1] == LAST else has
    texts = ["".join(map(_range, some)) for some in (has, without(ALL, wide))]
    return f"[^{texts[1]}]" if 0 < len(texts[1]) < len(texts[0]) else f"[{texts[0]}]"


def _range(ends: tuple[int, int]) -> str:
    first, last = ends
    return _code(first) if first == last else f"{_code(first)}-{_code(last)}"


def _code(code: int) -> str:
    if chr(code).isascii():
        return chr(code) if chr(code).isalnum() else f"\\x{code:02X}"
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"


def other_than(names: list[str]) -> str:
    """GBNF for a JSON string that is none of the names."""
    trie: dict[str, dict] = {}
    for name in names:
        node = trie
        for character in name:
            node = node.setdefault(character, {})
        node[""] = {}
    return f'"\\"" {_other(trie)} "\\""'


def _other(node: dict[str, dict]) -> str:
    """What goes on from a node of the trie without ending in a name."""
    following = {c: child for c, child in node.items() if c}
    taken = merged((ord(c), ord(c)) for c in following)
    parts = [f"{literal(c)} {_other(child)}" for c, child in following.items()]
    if other := one_of(without(ALL, taken)):
        parts.append(f"{other} ours-char*")
    return f"( {' | '.join(parts)} )" + ("" if "" in node else "?")
