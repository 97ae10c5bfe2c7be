"""A model at the public seam: `edgekv.Llama` as the commands see it, without a library. A word is a
token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgekv.base.files import begins_with, opened, replaced
from edgekv.base.stats import KVStats
from edgekv.chat import parts
from edgekv.choice.config import KVConfig
from edgekv.errors import BadInput, Cancelled, ContextFull
from edgekv.methods.budget import rows_for

ROW_BYTES = 1000  # of one token over all layers and heads
N_STEPS = 10  # of a prefill
TEMPLATE = "{{ messages }}"


class FakeLlama:
    """Answers with the last message's words in capitals. `step_s`: seconds of each step, for tests
    of Ctrl-C.
    """

    def __init__(
        self, n_ctx: int = 1000, ratio: float = 1.0, method: str = "snapkv", step_s: float = 0.0
    ) -> None:
        self._n_ctx, self._ratio, self._method, self.step_s = n_ctx, ratio, method, step_s
        self.kv_progress: Callable[[int, int], None] | None = None
        self.seen: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.mode, self.note = "layers", ""
        self.n_evaluated = 0
        self.metadata = {
            "general.architecture": "fake",
            "fake.context_length": "1000",
            "tokenizer.chat_template": TEMPLATE,
        }
        self.template_error = ""
        self.chat_template = SimpleNamespace(is_fallback=False)
        self.model_path = "fake.gguf"
        self.n_bytes_checkpoints = self.n_bytes_reserved = 0
        self.n_bytes_limit: int | None = None
        self.learned: list[float] = []
        self._cancelled = False

    def n_ctx(self) -> int:
        return self._n_ctx

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        return [0] * len(text.split())

    def reset(self) -> None:
        self.seen = []

    def kv_set(
        self, ratio: float | None = None, budget: int | None = None, method: str | None = None
    ) -> None:
        self._ratio = self._ratio if ratio is None else ratio

    def set_n_threads(self, n_threads: int) -> None:
        pass

    def kv_cancel(self, cancel: bool = True) -> None:
        self._cancelled = cancel

    def kv_stats(self) -> KVStats:
        n = len(self.seen)
        kept = rows_for(n, self._ratio, min_tokens=0)
        return KVStats(
            method=self._method,
            ratio=self._ratio,
            n_seen=n,
            n_kept=float(kept),
            kept=np.full((2, 3), kept, np.int32),
            n_bytes=kept * ROW_BYTES,
            n_bytes_peak=n * ROW_BYTES,
            n_bytes_full=n * ROW_BYTES,
            prefill_ms=20.0,
            compress_ms=1.0,
            mode=self.mode,
            note=self.note,
            n_bytes_checkpoints=self.n_bytes_checkpoints,
            n_bytes_limit=self.n_bytes_limit,
            n_bytes_reserved=self.n_bytes_reserved,
        )

    def kv_save(self, path: str, note: Any = None) -> None:
        with replaced(path, begins_with(b"fake"), "saved conversation") as f:
            f.write(b"fake" + json.dumps([self.seen, note]).encode())

    def kv_config(self) -> KVConfig:
        return KVConfig(ratio=self._ratio)

    def kv_load(
        self,
        path: str,
        check: Callable[[Any], object] | None = None,
        taken_over: Callable[[Any], KVConfig] | None = None,
    ) -> Any:
        with opened(path) as f:
            data = f.read()
        if not data.startswith(b"fake"):
            raise BadInput(f"'{path}' is no saved conversation")
        seen, note = json.loads(data[4:])
        if check is not None:
            check(note)
        self._ratio = taken_over(note).ratio if taken_over else self._ratio
        self.seen = seen
        return note

    def create_chat_completion(
        self, messages: list[dict[str, str]], stream: bool = False, **arguments: Any
    ) -> Any:
        if [m["role"] for m in messages[-2:]] == ["user", "user"]:
            raise ValueError("Conversation roles must alternate")
        self.calls.append({"messages": messages, **arguments})
        plain, _ = parts.joined(messages)
        prompt = [f"<{m['role']}>{w}" for m in plain for w in m["content"].split()]
        words = plain[-1]["content"].split()[-5:]
        pieces = self._generate(prompt, words, arguments.get("max_tokens"))
        if not stream:
            return _whole(list(pieces), len(prompt), lambda text: {"message": {"content": text}})
        return self._chat_chunks(pieces)

    def create_completion(self, prompt: str, stream: bool = False, **arguments: Any) -> Any:
        self.calls.append({"prompt": prompt, **arguments})
        pieces = self._generate(prompt.split(), prompt.split()[-5:], arguments.get("max_tokens"))
        if not stream:
            return _whole(list(pieces), len(prompt.split()), lambda text: {"text": text})
        return ({"choices": [{"text": piece, "finish_reason": reason}]} for piece, reason in pieces)

    @staticmethod
    def _chat_chunks(pieces: Iterator[tuple[str, str | None]]) -> Iterator[dict[str, Any]]:
        for i, (piece, reason) in enumerate(pieces):
            if (
                i == 0
            ):  # as in the parent: a chunk with the role comes first, once the prompt has been read
                yield {"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]}
            yield {
                "choices": [{"delta": {"content": piece} if piece else {}, "finish_reason": reason}]
            }

    def _generate(
        self, prompt: list[str], words: list[str], limit: int | None
    ) -> Iterator[tuple[str, str | None]]:
        """(piece, finish reason) for each word and for the end."""
        self.eval(prompt)
        for i, word in enumerate(words):
            time.sleep(self.step_s)
            if limit and i == limit:
                yield "", "length"
                return
            yield (" " if i else "") + word.upper(), None
            self.seen.append(f"<assistant>{word.upper()}")
            self.n_evaluated += 1
        yield "", "stop"

    def eval(self, prompt: list[str]) -> None:
        """Reads a prompt (the parent's takes token numbers)."""
        if len(prompt) > self._n_ctx:
            raise ContextFull(
                f"the prompt has {len(prompt)} tokens, the context {self._n_ctx}",
                "use a larger n_ctx",
            )
        for step in range(N_STEPS + 1):
            if self.kv_progress:
                self.kv_progress(step, N_STEPS)
            time.sleep(self.step_s)
            if self._cancelled:
                self._cancelled = False
                raise Cancelled("stopped")
        self.seen = list(prompt)
        self.n_evaluated += len(prompt)


def _whole(
    pieces: list[tuple[str, str | None]], n_prompt: int, content: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    text = "".join(piece for piece, _ in pieces)
    usage = {"prompt_tokens": n_prompt, "completion_tokens": len(pieces) - 1}
    return {"choices": [{**content(text), "finish_reason": pieces[-1][1]}], "usage": usage}
