"""What to run: llama-bench's lists and ranges, its tests, and the rows that stand beside each
other.

Source: tools/llama-bench in llama.cpp 0c1e57098 (flags, order of the rows, names of the tests).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from edgekv.base.defaults import N_UBATCH
from edgekv.chat.drafts import MODEL
from edgekv.errors import BadInput
from edgekv.model.loading import Loading

FULL = "full"
FILL_FIRST = 512
"""Tokens that are really read where a depth is filled."""
_RANGE = re.compile(r"(-?\d{1,18})(?:-(\d{1,18})(?:([+*])(\d{1,18}))?)?")
MOST = 10_000
"""Values of a list."""


def parse_ints(text: str, what: str = "list") -> list[int]:
    """Numbers from '512', '1,2,4', '512-4096*2' or '1-9+2', each list or range after the other.

    Raises BadInput for anything else, for a range that does not grow, and for one of more than MOST
    values.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if not match:
            raise BadInput(
                f"{what} '{text}' is no list of numbers; write 512 or 1,2,4 or 512-4096*2 or 1-9+2"
            )
        first, last, sign, step = match.groups()
        value, end, by = int(first), int(last or first), int(step or 1)
        while value <= end:
            found.append(value)
            if len(found) > MOST:
                raise BadInput(
                    f"{what} '{text}' has more than {MOST:,} values; write a wider step, as in "
                    "512-4096*2"
                )
            following = value * by if sign == "*" else value + by
            if following <= value:
                raise BadInput(
                    f"{what} '{text}' has a range that does not grow; write 512-4096*2 or 1-9+2"
                )
            value = following
    return found


def test_name(
    n_prompt: int, n_gen: int, n_depth: int, n_parallel: int = 1, spec_type: str = ""
) -> str:
    """llama-bench's name: pp512, tg128, pp512+tg128, each with @ d4096; of several conversations
    with their number, of answers with the drafts."""
    parts = [f"pp{n_prompt}"] * (n_prompt > 0) + [f"tg{n_gen}"] * (n_gen > 0)
    several = f" np{n_parallel}" * (n_parallel > 1) + f" {spec_type}" * bool(spec_type)
    return "+".join(parts) + several + (f" @ d{n_depth}" if n_depth else "")


@dataclass(frozen=True)
class Case:
    """One row: a test (n_prompt, n_gen, n_depth) under one setting. kv_ratio 1 is llama.cpp's own
    cache."""

    model: str
    n_prompt: int
    n_gen: int
    n_depth: int
    type_k: str = "f16"
    type_v: str = "f16"
    kv_method: str = FULL
    kv_ratio: float = 1.0
    kv_hidden: str = "auto"
    n_batch: int = 2048
    n_ubatch: int = N_UBATCH
    n_threads: int = 1
    n_gpu_layers: int = -1
    flash_attn: str = "auto"
    fill: str = "read"
    """How the cache gets its depth: `read`, or `repeat` the rows of the first 512 tokens; see
    `edgekv_lab.bench.fill`."""
    loading: Loading = Loading()
    n_parallel: int = 1
    """Conversations, each of n_depth tokens and more, that are written together."""
    spec_type: str = ""
    """Drafts of the answer that is written behind a text; empty: random tokens are written."""
    draft_model: str | None = None
    kv_recall: float = 0.0
    """Share of the tokens that each new one looks up in an archive."""

    @classmethod
    def of(cls, request: dict[str, Any]) -> Case:
        """The row that `dataclasses.asdict` and JSON made plain values of."""
        return cls(**{**request, "loading": Loading.of(request["loading"])})

    @property
    def is_filled(self) -> bool:
        """Whether most of the depth is not read."""
        return self.fill == "repeat" and self.n_depth > FILL_FIRST

    @property
    def test(self) -> str:
        return test_name(self.n_prompt, self.n_gen, self.n_depth, self.n_parallel, self.spec_type)

    @property
    def only_writes(self) -> bool:
        """Whether tokens are written and no prompt is read while it is timed."""
        return self.n_gen > 0 and not self.n_prompt

    @property
    def is_full(self) -> bool:
        return self.kv_ratio >= 1 or self.kv_method == FULL

    @property
    def types(self) -> str:
        """Of K and V."""
        return self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"

    @property
    def setting(self) -> str:
        """The cache of this row in a few words."""
        return (
            f"{self.types} full"
            if self.is_full
            else f"{self.types} x {self.kv_ratio:g} {self.kv_method}{self._recall}"
        )

    @property
    def _recall(self) -> str:
        return f", recall {self.kv_recall:g}" * (self.kv_recall > 0)

    @property
    def label(self) -> str:
        """The cache of this row as a plot's legend says it."""
        return (
            f"full {self.types}"
            if self.is_full
            else f"{self.kv_method} at {self.kv_ratio:g}, {self.types}{self._recall}"
        )

    def full(self, kind: str) -> Case:
        """The same test with llama.cpp's whole cache of one type."""
        whole: dict[str, Any] = dict(kv_method=FULL, kv_ratio=1.0, kv_hidden="auto", kv_recall=0.0)
        return replace(self, type_k=kind, type_v=kind, **whole)

    def same_test(self, other: Case) -> bool:
        """Whether two rows differ in nothing but their cache."""
        return self.full("f16") == other.full("f16")


@dataclass(frozen=True)
class Lists:
    """The user's lists; every combination is a row.

    types: pairs (K, V); none: `stored(model, method, ratio)` says what a chat would store.
    """

    models: Sequence[str]
    n_prompt: Sequence[int]
    n_gen: Sequence[int]
    pairs: Sequence[tuple[int, int]]
    """(n_prompt, n_gen) that are timed together."""
    n_depth: Sequence[int]
    n_batch: Sequence[int]
    n_ubatch: Sequence[int]
    types: Sequence[tuple[str, str]]
    n_threads: Sequence[int]
    n_gpu_layers: Sequence[int]
    flash_attn: Sequence[str]
    kv_method: Sequence[str]
    kv_ratio: Sequence[float]
    kv_hidden: str = "auto"
    full: Sequence[str] = ()
    """Cache types of the full-cache rows that stand beside every compressed one."""
    fill: str = "read"
    stored: Callable[[str, str, float], str] = lambda model, method, ratio: "f16"
    loading: Loading = Loading()
    n_parallel: Sequence[int] = (1,)
    spec_type: Sequence[str] = ("",)
    draft_model: str | None = None
    kv_recall: Sequence[float] = (0.0,)

    def tests(self) -> list[tuple[int, int]]:
        return [
            *((p, 0) for p in self.n_prompt if p),
            *((0, n) for n in self.n_gen if n),
            *(pair for pair in self.pairs if any(pair)),
        ]

    def cases(self) -> list[Case]:
        """All rows, those of a test behind one another, its full caches first."""
        found = []
        for model, ngl, batch, ubatch, fa, threads, depth, n_parallel, (p, n), spec in product(
            self.models,
            self.n_gpu_layers,
            self.n_batch,
            self.n_ubatch,
            self.flash_attn,
            self.n_threads,
            self.n_depth,
            self.n_parallel,
            self.tests(),
            self.spec_type,
        ):
            test = Case(
                model,
                p,
                n,
                depth,
                n_batch=batch,
                n_ubatch=ubatch,
                n_threads=threads,
                n_gpu_layers=ngl,
                flash_attn=fa,
                fill=self.fill,
                loading=self.loading,
                n_parallel=n_parallel,
                spec_type=spec,
                draft_model=self.draft_model if MODEL in spec else None,
            )
            rows = [replace(test, **x) for x in self._settings(model)]
            beside = (
                [test.full(kind) for kind in self.full]
                if any(not row.is_full for row in rows)
                else []
            )
            found += list(dict.fromkeys([*beside, *(row for row in rows if row.is_full), *rows]))
        return found

    def _settings(self, model: str) -> Iterator[dict[str, Any]]:
        pairs: Sequence[tuple[str, str] | None] = self.types or [None]
        settings = product(pairs, self.kv_method, self.kv_ratio, self.kv_recall)
        for pair, method, ratio, recall in settings:
            is_full = ratio >= 1 or method == FULL
            kind = "f16" if is_full or pair else self.stored(model, method, ratio)
            k, v = pair or pair_of(kind)
            if is_full:
                yield dict(type_k=k, type_v=v)
            else:
                found = dict(type_k=k, type_v=v, kv_method=method, kv_ratio=ratio)
                yield found | dict(kv_hidden=self.kv_hidden, kv_recall=recall)


def pair_of(kind: str) -> tuple[str, str]:
    """Types of K and V from a word as in q8_0, or q8_0/q5_1."""
    k, _, v = kind.partition("/")
    return k, v or k


def equal_bytes(
    cases: Sequence[Case], method: str, hidden: str, bits: dict[str, float]
) -> list[Case]:
    """For every test: full quantised caches, each followed by the larger types at the ratio that
    takes the same bytes.

    bits: bits per value of each cache type. A ratio is rounded down to four digits, so that it
    never takes more.
    """
    found: list[Case] = []
    for case in cases:
        for small in ("q8_0", "q4_0"):
            group = [case.full(small)]
            for large in ("q8_0", "f16"):
                if bits[large] > bits[small]:
                    ratio = int(1e4 * bits[small] / bits["f16"]) / 1e4
                    group.append(
                        replace(
                            case.full(large), kv_method=method, kv_ratio=ratio, kv_hidden=hidden
                        )
                    )
            found += group
    return list(dict.fromkeys(found))
