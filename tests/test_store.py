"""The store in a conversation: random sequences of everything that can happen to it; what is
reported is what is there.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from edgekv.errors import BadInput
from edgekv.memory.entries import f16_bytes
from edgekv.memory.limit import RECENT
from tests import models
from tests.engine import load, logits, per_f16, positions

N_CTX, TAIL, SLACK = 1024, 96, 64
PROBE = 77  # a token whose logits show what the conversation is
GROWTH = 64 + 32  # rows that a tail is allocated ahead, and a window that is read again
RATIOS = (0.2, 0.5, 0.9)


@dataclass(frozen=True)
class Expected:
    """What the conversation must be: tokens, positions of each head's rows, and the bounds of their
    number.
    """

    tokens: tuple[int, ...] = ()
    rows: tuple[tuple[tuple[int, ...], ...], ...] = ()
    ratio: float = 0.0  # highest ratio that compressed it
    spare: int = 0  # rows taken back whose room may still be there


class Conversation(RuleBasedStateMachine):
    """One conversation. `llm` is set by the test: every example starts with its reset."""

    llm = None

    def __init__(self) -> None:
        super().__init__()
        self.llm.reset()
        self.llm.kv_set(ratio=RATIOS[0])
        self.store = self.llm.engine.store
        self.ratio = RATIOS[0]
        self.saved: tuple[Path, Expected, np.ndarray | None] | None = None
        self.folder = tempfile.TemporaryDirectory()
        self.now = Expected(rows=self.rows())

    def teardown(self) -> None:
        self.folder.cleanup()

    def rows(self) -> tuple:
        return tuple(tuple(tuple(head.tolist()) for head in heads) for heads in positions(self.llm))

    def is_window(self, il: int) -> bool:
        return self.store.layers[il].n_swa > 0

    # ---- what happens

    @rule(n=st.integers(1, 20), seed=st.integers(0, 999))
    def append(self, n: int, seed: int) -> None:
        self.eval(n, seed)

    @rule(n=st.integers(65, 400), seed=st.integers(0, 999))
    def take_long_turn(self, n: int, seed: int) -> None:
        self.eval(n, seed)

    def eval(self, n: int, seed: int) -> None:
        tokens = tuple(
            np.random.default_rng(seed).integers(models.N_SPECIAL, models.N_VOCAB, n).tolist()
        )
        before = self.now
        if len(before.tokens) + n > N_CTX:
            with pytest.raises(BadInput):
                self.llm.eval(tokens)
            return
        compressed = self.llm.engine.turn.past.compressed_at
        self.llm.eval(tokens)
        chosen = n > 64 or self.llm.engine.turn.past.compressed_at != compressed
        self.now = replace(before, tokens=before.tokens + tokens, rows=self.rows())
        if chosen:
            self.now = replace(self.now, ratio=max(before.ratio, self.ratio), spare=0)
        self.check_rows_came_from(before, chosen)
        assert np.isfinite(logits(self.llm)).all()

    def check_rows_came_from(self, before: Expected, chosen: bool) -> None:
        """Of earlier rows and new tokens: all, in order, or a choice."""
        new = tuple(range(len(before.tokens), len(self.now.tokens)))
        for il, heads in enumerate(self.now.rows):
            for head, old in zip(heads, before.rows[il]):
                if self.is_window(il):
                    continue  # see the invariant
                assert set(head) <= set(old + new) if chosen else head == old + new

    @rule(data=st.data(), seed=st.integers(0, 999))
    def evict(self, data: st.DataObject, seed: int) -> None:
        il = data.draw(st.sampled_from(self.llm.engine.full_layers))
        rng = np.random.default_rng(seed)
        heads = self.now.rows[il]
        keep = [
            rng.permutation(len(head))[: rng.integers(0, len(head) + 1)].astype(np.int32)
            for head in heads
        ]
        self.store.evict(il, keep)
        left = tuple(tuple(head[r] for r in rows) for head, rows in zip(heads, keep))
        self.now = replace(self.now, rows=self.now.rows[:il] + (left,) + self.now.rows[il + 1 :])

    @rule(n=st.integers(1, 150))
    def trim(self, n: int) -> None:
        first = max(len(self.now.tokens) - n, 0)
        done = self.llm._ctx.kv_cache_seq_rm(-1, first, -1)
        if first and first < self.store.memory().boundary:
            assert not done
        if not done:
            return
        self.llm.n_tokens = first
        left = tuple(
            tuple(tuple(p for p in head if p < first) for head in heads) for heads in self.now.rows
        )
        self.now = replace(
            self.now, tokens=self.now.tokens[:first], rows=left, spare=self.now.spare + n
        )

    @precondition(lambda self: len(self.now.tokens) < N_CTX)
    @rule()
    def save(self) -> None:
        path = Path(self.folder.name) / "chat"
        self.llm.kv_save(str(path))
        expected = self.now
        chosen = self.probe()
        self.saved = path, expected, None if chosen else logits(self.llm)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self) -> None:
        path, expected, logits_then = self.saved
        self.llm.kv_load(str(path))
        self.now = replace(expected, spare=0)
        self.check_all()
        if (
            not self.probe() and logits_then is not None
        ):  # a tail that was just compressed says something else, rightly
            self.check_logits(logits_then)

    def check_logits(self, expected: np.ndarray) -> None:
        """The same bits; where windows are, the same up to rounding: rows that nobody sees may be
        gone, and sums are cut elsewhere.
        """
        if len(self.llm.engine.full_layers) == len(self.store.layers):
            assert np.array_equal(logits(self.llm), expected)
        else:
            assert ((logits(self.llm) - expected) ** 2).sum() < 1e-6 * (expected**2).sum()

    def probe(self) -> bool:
        """One token more, whose logits the caller looks at; true if it made the tail too long, so
        that it was compressed.
        """
        before, compressed = self.now, self.llm.engine.turn.past.compressed_at
        self.llm.eval([PROBE])
        chosen = self.llm.engine.turn.past.compressed_at != compressed
        self.now = replace(
            before,
            tokens=(*before.tokens, PROBE),
            rows=self.rows(),
            ratio=max(before.ratio, self.ratio * chosen),
        )
        self.check_rows_came_from(before, chosen)
        return chosen

    @rule()
    def reset(self) -> None:
        self.llm.reset()
        self.now = Expected(rows=tuple(tuple(() for _ in heads) for heads in self.now.rows))

    @rule(ratio=st.sampled_from(RATIOS))
    def change_ratio(self, ratio: float) -> None:
        self.llm.kv_set(ratio=ratio)
        self.ratio = ratio

    @rule()
    def give_room_back(self) -> None:
        self.store.trim_capacity()
        self.now = replace(self.now, spare=0)

    # ---- what must hold after each step

    @invariant()
    def check_all(self) -> None:
        n_seen, stats, memory = len(self.now.tokens), self.llm.kv_stats(), self.store.memory()
        assert stats.n_seen == memory.n_past == self.llm.n_tokens == n_seen
        assert self.llm.input_ids[:n_seen].tolist() == list(self.now.tokens)
        used = spare = 0
        for il, (info, heads) in enumerate(zip(self.store.layers, positions(self.llm))):
            for k, head in enumerate(heads):
                self.check_head(il, k, head.tolist())
                assert stats.kept[il, k] == len(head)
                assert sum(map(len, self.store.row_bytes(il, k))) == len(head) * info.bytes_row
                used += len(head) * info.bytes_row
                spare += (GROWTH + self.now.spare + (SLACK if info.n_swa else 0)) * info.bytes_row
                spare += RECENT * f16_bytes(info) * info.waits
        assert used <= stats.n_bytes <= used + spare + 1024
        assert stats.n_bytes == memory.bytes_now <= stats.n_bytes_peak

    def check_head(self, il: int, k: int, head: list[int]) -> None:
        n_seen, n_swa = len(self.now.tokens), self.store.layers[il].n_swa
        assert len(set(head)) == len(head) and all(0 <= p < n_seen for p in head)
        if n_swa:
            assert head == list(range(n_seen - len(head), n_seen)) and len(head) >= min(
                n_seen, n_swa - 1
            )
            assert len(head) <= n_swa + SLACK + TAIL + GROWTH
        else:
            assert tuple(head) == self.now.rows[il][k]
            assert len(head) <= self.now.ratio * per_f16("q8_0") * n_seen + TAIL + GROWTH


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_nothing_is_lost_or_duplicated(tiny, name):
    llm = load(
        tiny(name),
        "q8_0",
        kv_ratio=RATIOS[0],
        kv_tail=TAIL,
        kv_window=16,
        n_ctx=N_CTX,
        n_ubatch=128,
    )
    machine = type("Conversation", (Conversation,), {"llm": llm})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=30, stateful_step_count=25, deadline=None, derandomize=True),
    )


def test_the_tail_of_a_loaded_conversation_is_bounded_too(tiny, text, tmp_path):
    llm = load(tiny("llama-gqa"), kv_ratio=0.2, kv_tail=TAIL, n_ctx=N_CTX)
    llm.eval(list(text(60)))
    llm.kv_save(str(tmp_path / "chat"))
    llm.eval(list(text(900)))
    llm.kv_load(str(tmp_path / "chat"))
    for seed in range(40):
        llm.eval(list(text(10, seed)))
    assert llm.kv_stats().kept.max() <= 0.2 * 460 + TAIL + GROWTH
