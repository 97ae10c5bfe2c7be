"""What the server has done since it started."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from edgekv.serve.events import Done


@dataclass
class Totals:
    """Sums over all answers that were written to their end."""

    n_prompt: int = 0
    n_cached: int = 0
    n_written: int = 0
    n_answers: int = 0
    n_decodes: int = 0
    """Calls of llama.cpp."""
    n_drafts: int = 0
    n_drafted: int = 0
    n_right: int = 0
    n_most: int = 0
    """Tokens of the longest conversation."""
    read_s: float = 0.0
    write_s: float = 0.0
    last: Done | None = None
    """The last answer."""
    _lock: Any = field(default_factory=threading.Lock)

    def add(self, done: Done) -> None:
        now = done.progress
        with self._lock:
            self.n_answers, self.last = self.n_answers + 1, done
            self.n_most = max(self.n_most, now.n_prompt + now.n_written)
            self.n_prompt += now.n_prompt - now.n_cached
            self.n_cached += now.n_cached
            self.n_written += now.n_written
            self.n_decodes += done.n_decodes
            self.n_drafts += now.n_drafts
            self.n_drafted += now.n_drafted
            self.n_right += now.n_right
            self.read_s += now.read_ms / 1e3
            self.write_s += now.write_ms / 1e3
