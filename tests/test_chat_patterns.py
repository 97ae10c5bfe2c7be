"""Patterns as grammars over JSON: what a grammar lets through is what the pattern finds."""

from __future__ import annotations

import json
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv.grammars.schemas import finished, prepared
from edgekv.native import chat
from tests.gbnf import Grammar


def grammar_of(schema) -> Grammar:
    made = prepared(schema)
    assert made.lost == []
    grammar = finished(chat.grammar_of(made.schema), made.rules)
    chat.check_grammar(None, grammar)
    return Grammar(grammar)


def is_found(pattern: str, *texts: str) -> list[bool]:
    grammar = grammar_of({"type": "string", "pattern": pattern})
    return [grammar.fits(json.dumps(text, ensure_ascii=False)) for text in texts]


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
SHORT_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"
CASES = [
    ("b", ["b", "abc", '"b\\'], ["", "a"]),
    ("^b", ["b", "bc"], ["ab"]),
    ("b$", ["b", "ab"], ["ba", "b\n"]),
    ("^$", [""], ["a"]),
    ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
    ("^(a|b$)", ["ax", "b"], ["bx", "xa"]),
    ("^(?:a|^b)?c", ["c", "bc", "ac"], ["bbc", ""]),
    (r"^\d+\s\w\S\W\D$", ["1 a-.-", "22\n_x\u00a0x"], ["1 a-a1", "a ab.."]),
    (r"^\s$", [" ", "\t", "\u00a0", "\ufeff", "\u2003"], ["a", "\u200b"]),
    (r"^.$", ["a", '"', "\\", "\t", "\x00", "😀"], ["\n", "\r", "\u2028", "aa", ""]),
    (r"^[^x]$", ["a", '"', "\\", "\n", "\x1f", "\x7f", "😀"], ["x", ""]),
    (r"^[\]\-\\\"^]+$", ['-]\\"^'], ["a"]),
    (r"^[\d_\n-]+$", ["1_\n-"], ["a", "\\n"]),
    (r"^a\/b\.c$", ["a/b.c"], ["a/bxc"]),
    (r"^\u00e9\u{1F600}\ud83d\ude00\x41\cJ\0$", ["é😀😀A\n\x00"], ["é😀A\n\x00"]),
    (r"^[\u0000-\u001f]+$", ["\x00\x01\n\x1f"], [" ", '"']),
    (r"^(?<year>\d{4})-(?:0[1-9]|1[0-2])$", ["2024-01", "0000-12"], ["2024-13", "24-01"]),
    ("^[^]$", ["a", "\n"], ["", "ab"]),
    ("^a{2}b{1,}c{0,2}?$", ["aab", "aabbcc"], ["ab", "aabccc"]),
    (r"^(a?a?a?a?){50}$", ["", "a" * 200], ["a" * 201, "b"]),
    (r"^((a*)*|(b|bc)*)*$", ["", "aabcba"], ["c", "acb"]),
    (r"^(([a-z]{1,63})\.){1,10}[a-z]+$", ["a.b", "ab." * 10 + "c"], ["a", "a..b", "a." * 11 + "b"]),
    (r"^(\w+\s?)*$", ["a b c", "abc "], ["a  b", " "]),
    ("^(?!foo$)", ["", "fo", "fooo"], ["foo"]),
    (r"^(?=.*\d)(?=.*[a-z]).{4,8}$", ["abc1", "1_____a"], ["abcd", "1234", "a1", "a1" * 5]),
    (DECIMAL, ["1", "-0.5", "+1.", ".5"], ["", "-", ".", "1.2.3", "a"]),
    (SHORT_DECIMAL, ["1", "123.45", "001.500"], ["-", "", "+."]),
    (r"^[[&|~]+$", ["[&|~"], ["a"]),
    (r"^[a\]b[]+$", ["a]b["], ["c"]),
    (r"a]b}", ["a]b}"], ["ab"]),
]


@pytest.mark.parametrize(("pattern", "good", "bad"), CASES)
def test_a_string_is_what_a_pattern_finds(pattern, good, bad):
    assert is_found(pattern, *good, *bad) == [True] * len(good) + [False] * len(bad)


REFUSED = [r"(a)\1", r"\bx", "(?<=a)b", "(?i)a", r"\p{L}", "a{3000000}", "(", "[z-a]", "a**", "[]"]
REFUSED += ["(?=a)*b", "a^b", "(?:a$|b)?c", "(^a)*b", "(" * 5000, "a" * 9000, "a{99999999999}"]
REFUSED += ["^(a|ab|ba){0,1500}$"]


@pytest.mark.parametrize("pattern", REFUSED, ids=range(len(REFUSED)))
def test_a_pattern_that_no_grammar_expresses_is_named(pattern):
    schema = {"type": "string", "pattern": pattern, "minLength": 1}
    ((path, keyword, why),) = prepared(schema).lost
    assert (path, keyword) == ("", "pattern") and why and "\n" not in why
    assert prepared(schema).schema == {"type": "string", "minLength": 1}


@pytest.mark.parametrize(
    ("pattern", "least", "most", "good", "bad"),
    [
        ("^[a-z]+$", 2, 3, ["ab", "abc"], ["a", "abcd"]),
        ("^[a-z_][a-z0-9_]*$", 0, 3, ["a", "_12"], ["", "a123"]),
        ("^a", 1, 3, ["a", "abc"], ["abcd", "b"]),
        ("b+a*", 2, 3, ["xb", "bba"], ["b", "xbaa", "ac"]),
        (r"^\S+@\S+$", 5, 6, ["ab@cd", "a@b@cd"], ["a@bc", "abcd@ef"]),
        (r"^\d{4}$", 2, 9, ["1234"], ["12"]),
    ],
)
def test_lengths_hold_beside_a_pattern(pattern, least, most, good, bad):
    grammar = grammar_of({"pattern": pattern, "minLength": least, "maxLength": most})
    assert all(grammar.fits(json.dumps(text)) for text in good)
    assert not any(grammar.fits(json.dumps(text)) for text in bad)


def test_all_of_many_patterns_hold():
    schema = {"allOf": [{"pattern": "a"}, {"pattern": "b"}, {"pattern": "^.{2,3}$"}]}
    grammar = grammar_of({"type": "string", **schema})
    assert [grammar.fits(f'"{text}"') for text in ("ab", "bxa", "aa", "xbxa")] == [1, 1, 0, 0]


ATOMS = ["a", "b", "1", "_", '"', r"\\", r"\n", "é", "😀", ".", r"\d", r"\w", r"\s", r"\S", r"\W"]
ATOMS += ["[ab]", '[^a"]', r"[^\\\n]", r"[\d_-]", "[a-c1-9]", r"[^\w]", r"\u0007", " "]
COUNTS = ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?"]
EXPRESSIONS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda ways: f"(?:{'|'.join(ways)})"),
        st.builds(lambda one, count: f"(?:{one}){count}", inner, st.sampled_from(COUNTS)),
    ),
    max_leaves=8,
)
PATTERNS = st.builds(
    lambda start, one, end, look: f"{start}{look}{one}{end}",
    st.sampled_from(["^", ""]),
    EXPRESSIONS,
    st.sampled_from(["$", ""]),
    st.one_of(st.just(""), st.just(""), EXPRESSIONS.map(lambda one: f"(?!{one})")),
)
OURS = set("\r\u2028\u2029\ufeff\u00a0\u1680\u202f\u205f\u3000") | set(
    map(chr, range(0x2000, 0x200B))
)
"""Spaces and line breaks of ECMA-262's."""
TEXTS = st.text(st.sampled_from('ab1_"\\\né😀 -\x07'), max_size=6)


@settings(max_examples=300)
@given(PATTERNS, st.lists(TEXTS, min_size=5, max_size=15), st.integers(0, 2**32))
def test_a_grammar_finds_what_python_finds(pattern, texts, seed):
    if pattern.startswith("(?!"):
        pattern = f"^{pattern}"
    made = prepared({"type": "string", "pattern": pattern})
    if made.lost:
        assert made.lost[0][2] in ("it has too many states", "nothing matches it")
        return
    grammar = grammar_of({"type": "string", "pattern": pattern})
    # Python's $ is also before the last line break
    found = re.compile(pattern.removesuffix("$") + r"\Z" * pattern.endswith("$"), re.ASCII)
    for text in texts:
        fits = grammar.fits(json.dumps(text, ensure_ascii=False))
        assert fits == bool(found.search(text)), text
    draw = random.Random(seed)
    for _ in range(5):
        text = json.loads(grammar.drawn(draw))
        if not OURS & set(text):
            assert found.search(text), text


@settings(max_examples=300)
@given(st.text(st.sampled_from('ab\\[](){}^$*+?.|-,0123:=!<>pudw\n"é'), max_size=25))
def test_any_text_may_stand_for_a_pattern(pattern):
    start = time.perf_counter()
    made = prepared({"type": "string", "pattern": pattern})
    chat.check_grammar(None, finished(chat.grammar_of(made.schema), made.rules))
    assert time.perf_counter() - start < 2
