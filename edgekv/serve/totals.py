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
        counts = done.counts
        with self._lock:
            self.n_answers, self.last = self.n_answers + 1, done
            self.n_most = max(self.n_most, counts.n_prompt + counts.n_written)
            self.n_prompt += counts.n_prompt - counts.n_cached
            self.n_cached += counts.n_cached
            self.n_written += counts.n_written
            self.n_decodes += done.n_decodes
            self.n_drafts += counts.n_drafts
            self.n_drafted += counts.n_drafted
            self.n_right += counts.n_right
            self.read_s += counts.read_ms / 1e3
            self.write_s += counts.write_ms / 1e3
